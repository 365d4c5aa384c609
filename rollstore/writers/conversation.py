"""Replies to rollouts: one reply is one row; those of a conversation go on in one row as long as ids extend ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rollstore.schema import Flag, Known, Rollout, Sampler, Span
from rollstore.writers.heads import cut_heads, join_heads
from rollstore.writers.reply import Ints, Reply, Routing
from rollstore.writers.uuid7 import uuid7
from rollstore.writers.weights import unknown_weights

BY_ACTION = ("logprobs", "ranks", "entropies", "batch_rows")
"""Fields of a reply [A] of which single values may be unknown."""

ON_LAST = ("ending", "ending_reason", "bootstrap", "reward", "reward_status")
"""Columns that a caller sets for the whole rollout and that stand on its last segment."""


def rollout(reply: Reply, *, rollout_id: str | None = None, prompt_role: str = "prompt", **fields: Any) -> Rollout:
    """A reply as a rollout of one segment. `fields` are columns of the rollouts table, and win over the reply's."""
    return conversation([reply], rollout_id=rollout_id, prompt_role=prompt_role, **fields)[0]


def conversation(
    replies: Sequence[Reply],
    *,
    rollout_id: str | None = None,
    cause: str = "context_edit",
    prompt_role: str = "prompt",
    turn_role: str = "user",
    **fields: Any,
) -> list[Rollout]:
    """The replies of one conversation, in order, as its segments.

    A prompt that extends the tokens so far, id by id, goes on in the same segment; any other begins the next one, whose
    `segment_cause` is `cause`. What was drawn is an action once, where it was drawn. Spans before the first turn have
    the role `prompt_role`, those before later ones `turn_role`. The last segment ends as the last reply did. `fields`
    are columns of every segment, but those of `ON_LAST` stand on the last. Raises ValueError without a reply.
    """
    if not replies:
        raise ValueError("conversation: wanted at least one reply, got none")
    parts: list[list[Reply]] = []
    tokens = np.zeros(0, np.int64)
    for reply in replies:
        if not parts or not extends(reply.prompt, tokens):
            parts.append([])
        parts[-1].append(reply)
        tokens = after(reply)
    identity = uuid7() if rollout_id is None else rollout_id
    final = {name: fields.pop(name) for name in ON_LAST if name in fields}
    made: list[Rollout] = []
    for number, members in enumerate(parts):
        own = {**fields, "segment": number, "segment_cause": cause if number else None}
        if number == len(parts) - 1:
            own.update(final)
        else:
            own.update(ending="continued", ending_reason=None)
            if "reward" in final or "reward_status" in final:
                own["reward_status"] = "on_final_segment"
        made.append(segment(members, rollout_id=identity, prompt_role=prompt_role, turn_role=turn_role, **own))
    return made


def after(reply: Reply) -> Ints:
    """int64 [P + A]: the tokens that the next prompt would have to extend."""
    return np.concatenate([reply.prompt, reply.tokens])


def extends(prompt: Ints, tokens: Ints) -> bool:
    """Whether a prompt begins with the tokens so far, id by id."""
    return common(prompt, tokens) == len(tokens)


def common(one: Ints, other: Ints) -> int:
    """Length of the common prefix."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def act(recorder: Any, reply: Reply, **span: Any) -> None:
    """Record the drawn tokens of a reply as a turn of a `Recorder`, which has observed the prompt before.

    Raises ValueError when the recorder's tokens are not the reply's prompt.
    """
    same = common(recorder.tokens, reply.prompt)
    if not len(recorder.tokens) == len(reply.prompt) == same:
        raise ValueError(
            f"act: wanted the {len(reply.prompt)} tokens of the request's prompt observed, got {len(recorder.tokens)} "
            f"tokens that agree in the first {same}"
        )
    for first, last, fields in _stretches(reply):
        extra: dict[str, Any] = {name: _cut(getattr(reply, name), first, last) for name in BY_ACTION}
        if reply.support is not None:
            ends = np.concatenate([[0], np.cumsum(reply.support.counts)])
            extra["support_counts"] = reply.support.counts[first:last]
            extra["support_tokens"] = reply.support.tokens[int(ends[first]) : int(ends[last])]
        recorder.act(
            reply.tokens[first:last],
            flags=reply.flags if first == 0 else (),  # their indices count from the reply's first token
            weight_versions=None if reply.weights is None else _cut(reply.weights.versions, first, last),
            heads=cut_heads(reply.heads, first, last, len(reply.tokens)),
            sampler=reply.sampler,
            logprob_kind=reply.logprob_kind,
            head_kind=reply.head_kind,
            **extra,
            **fields,
            **span,
        )


def _cut(values: Known | None, first: int, last: int) -> Known | None:
    return None if values is None else Known(values.values[first:last], values.known[first:last])


def segment(
    replies: Sequence[Reply], *, rollout_id: str, prompt_role: str = "prompt", turn_role: str = "user", **fields: Any
) -> Rollout:
    """Replies that extend one another as one row. `fields` are columns of it, and win over what the replies say: with
    another ending than the engine's, its reason goes too."""
    last = replies[-1]
    tokens = after(last)
    mask = np.zeros(len(tokens), bool)
    samplers: list[Sampler] = []
    spans: list[Span] = []
    flags: list[Flag] = []
    kinds = {name: _first(replies, name) for name in ("logprob_kind", "head_kind")}
    done = drawn = 0
    for turn, reply in enumerate(replies):
        spans += _observed(reply, done, turn_role if turn else prompt_role, turn)
        spans += _acted(reply, turn, _index(samplers, reply.sampler), kinds)
        flags += [_moved(flag, drawn, replies[:turn]) for flag in reply.flags]
        done = len(reply.prompt) + len(reply.tokens)
        mask[len(reply.prompt) : done] = True
        drawn += len(reply.tokens)
    counts = [len(reply.tokens) for reply in replies]
    row: dict[str, Any] = {
        **{name: value for reply in replies for name, value in reply.row.items()},  # the last word of each
        **kinds,
        "ending": last.ending,
        "ending_reason": last.ending_reason if fields.get("ending", last.ending) == last.ending else None,
        **{name: _joined([getattr(reply, name) for reply in replies], counts) for name in BY_ACTION},
        **_weights(replies, counts),
        **_support(replies),
        **_routing(last.routing),
        "heads": join_heads([reply.heads for reply in replies], counts),
        "samplers": tuple(samplers) or None,
        "spans": tuple(spans),
        "flags": tuple(flags) or None,
        **fields,
    }
    return Rollout(rollout_id=rollout_id, tokens=tokens, action_mask=mask, **row)


def _first(replies: Sequence[Reply], name: str) -> Any:
    return next((value for reply in replies if (value := getattr(reply, name)) is not None), None)


def _index(samplers: list[Sampler], sampler: Sampler | None) -> int | None:
    """Where the sampler stands among those of the row; a new one is put there."""
    if sampler is None:
        return None
    if sampler not in samplers:
        samplers.append(sampler)
    return samplers.index(sampler)


def _observed(reply: Reply, start: int, role: str, turn: int) -> Iterator[Span]:
    """Spans over the prompt from `start`, one for each medium; none of no length."""
    label = None if reply.weights is None else reply.weights.prefill_label

    def span(at: int, end: int, media: Any = None) -> Span:
        return Span(
            start=at, length=end - at, role=role, is_action=False, origin="rendered", turn=turn, media=media,
            weight_label=label,
        )  # fmt: skip

    at = start
    for place in sorted(reply.media, key=lambda place: place.start):
        end = place.start + place.length
        if end <= start:
            continue  # a place in what an earlier turn brought
        if place.start < at or end > len(reply.prompt):
            size = len(reply.prompt)
            raise ValueError(f"media: wanted places apart within {size} tokens of prompt, got {place.start} to {end}")
        if place.start > at:
            yield span(at, place.start)
        yield span(place.start, end, (place.media,))
        at = end
    if at < len(reply.prompt):
        yield span(at, len(reply.prompt))


def _acted(reply: Reply, turn: int, sampler: int | None, kinds: dict[str, str | None]) -> Iterator[Span]:
    """Spans over the drawn tokens; a request that drew none has one of length 0."""
    own = {name: getattr(reply, name) for name, kind in kinds.items() if getattr(reply, name) not in (None, kind)}
    for first, last, fields in _stretches(reply):
        yield Span(
            start=len(reply.prompt) + first, length=last - first, role="assistant", is_action=True, origin="sampled",
            turn=turn, sampler=sampler, **fields, **own,
        )  # fmt: skip


def _stretches(reply: Reply) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(first, past the last, fields of its span) of each run of drawn tokens under one weight label."""
    for stretch in (reply.weights or unknown_weights(len(reply.tokens))).stretches:
        fields = {
            "request_id": reply.request_id,
            "weight_label": stretch.label,
            "cache_state": stretch.cache_state,
            "cached_tokens": _count(reply.cached_tokens),
            "preemptions": _count(reply.preemptions),
            "engine_finish": reply.engine_finish,
            "api_finish": reply.api_finish,
            "started_at": reply.started_at,
            "finished_at": reply.finished_at,
        }
        yield stretch.start, stretch.end, fields


def _count(value: int | None) -> int | None:
    """Engines say -1 where they have not counted."""
    return value if value is not None and 0 <= value < 1 << 31 else None


def _moved(flag: Flag, drawn: int, before: Sequence[Reply]) -> Flag:
    """A flag of one reply, its index counted over all replies of the row."""
    if flag.index is None:
        return flag
    heads = [reply.heads.tokens for reply in before if reply.heads is not None]
    entries = sum(len(tokens) for tokens in heads if tokens is not None)
    offset = entries if flag.column in ("head_tokens", "head_logprobs") else drawn
    return Flag(kind=flag.kind, column=flag.column, index=flag.index + offset)


def _joined(columns: Sequence[Known | None], counts: Sequence[int]) -> Known | None:
    """One column over all replies; one that did not report it contributes unknowns."""
    some = [column for column in columns if column is not None]
    if not some:
        return None
    kind = some[0].values.dtype
    parts = [(np.zeros(n, kind), np.zeros(n, bool)) if c is None else c for c, n in zip(columns, counts, strict=True)]
    return Known(np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))


def _weights(replies: Sequence[Reply], counts: Sequence[int]) -> dict[str, Any]:
    said = [reply.weights for reply in replies if reply.weights is not None and reply.weights.source is not None]
    if not said:
        return {}
    # Of several ways to know, the weakest says how far the row may be trusted.
    sources = {weights.source for weights in said}
    source = next(word for word in ("read_at_completion", "start_end", "per_span") if word in sources)
    late = source == "read_at_completion"
    all_said = len(said) == len(replies)
    oldest = [weights.oldest for weights in said]
    newest = [weights.newest for weights in said]
    versions = [None if reply.weights is None else reply.weights.versions for reply in replies]
    return {
        "weight_version_source": source,
        "weight_versions": None if late else _joined(versions, counts),
        "weight_version_min": _bound(min, oldest) if all_said and not late else None,
        "weight_version_max": _bound(max, newest) if all_said else None,
    }


def _bound(outermost: Callable[[list[int]], int], numbers: Sequence[int | None]) -> int | None:
    """The oldest or newest of the versions; one that is not known could lie beyond."""
    known = [number for number in numbers if number is not None]
    return outermost(known) if len(known) == len(numbers) else None


def _support(replies: Sequence[Reply]) -> dict[str, Any]:
    if all(reply.support is None for reply in replies):
        return {}
    none = np.zeros(0, np.int64)
    counts = [np.zeros(len(r.tokens), np.int64) if r.support is None else r.support.counts for r in replies]
    tokens = [none if r.support is None else r.support.tokens for r in replies]
    return {"support_counts": np.concatenate(counts), "support_tokens": np.concatenate(tokens)}


def _routing(routing: Routing | None) -> dict[str, Any]:
    if routing is None:
        return {}
    names = ("routed_experts", "routed_start", "routed_count", "routed_layers", "routed_k")
    return dict(zip(names, routing, strict=True))
