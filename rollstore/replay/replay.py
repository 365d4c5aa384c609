"""One rollout again: regenerated from (checkpoint, sample, key) under its recorded samplers, and compared to the token.

What the rollout observed (prompts, tool output) is fed back as recorded; only what it drew is drawn again. A rollout
without a key cannot be drawn again: its tokens are scored instead, teacher-forced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec.structs import replace as with_fields
from numpy.typing import NDArray

from rollstore.errors import NotFoundError, UnsupportedRecordError
from rollstore.replay import noise
from rollstore.replay.compare import Comparison, Odds, compare, first_difference, judge, plain, shared_noise_gap
from rollstore.replay.conditions import conditions, explanations, noise_at, sampler_at
from rollstore.schema import Engine, Heads, Known, Numerics, Rollout, Span

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollstore.replay.samplers.transformers import Turn


class Gets(Protocol):
    """What a replay needs of a store."""

    def get(self, rollout_id: str) -> list[Rollout]: ...


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A rollout without a key, scored teacher-forced under its recorded samplers."""

    rollout_id: str
    segment: int
    actions: int
    outside: int
    """Actions that the model's own filters would not have kept."""
    max_difference: float | None
    """Largest |log-prob now - recorded|, in nats; None without recorded log-probs."""
    mean_difference: float | None
    k3: float | None
    """Mean of r - 1 - ln r over r = now / recorded: an estimate of KL(recorded || now)."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came of replaying a rollout."""

    rollout_id: str
    keyed: bool
    identical: bool
    """Every drawn token came out the same. False for a rollout without a key: see `checked`."""
    draws: int
    """Tokens drawn again."""
    segments: tuple[Comparison, ...]
    """Recorded run against replay, up to the first segment that differs."""
    checked: tuple[Checked, ...]
    """Segments without a key."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        return {
            "rollout_id": self.rollout_id,
            "keyed": self.keyed,
            "identical": self.identical,
            "draws": self.draws,
            "segments": [segment.to_dict() for segment in self.segments],
            "checked": [plain({name: getattr(one, name) for name in one.__dataclass_fields__}) for one in self.checked],
        }

    def lines(self) -> list[str]:
        """The report for a person; a is the recorded run, b the replay."""
        if self.identical:
            return [f"{self.rollout_id}: identical: {self.draws} tokens drawn again, every one the same"]
        out = [line for segment in self.segments if segment.first is not None for line in segment.lines()]
        for one in self.checked:
            outside = f", {one.outside} outside the model's support" if one.outside else ""
            out.append(f"{one.rollout_id} segment {one.segment}: not keyed, scored instead: {one.actions} actions{outside}")
            if one.max_difference is not None:
                out.append(
                    f"  |log-prob - recorded| at most {one.max_difference:.3g}, mean {one.mean_difference:.3g}, k3 {one.k3:.3g}"
                )
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines())


def replay(
    store: Gets,
    rollout_id: str,
    model: PreTrainedModel,
    *,
    segment: int | None = None,
    reference: PreTrainedModel | None = None,
    weight_version: int | None = None,
    rows: int | None = None,
    tolerance: float | None = None,
) -> Replayed:
    """Regenerates a stored rollout with `model` and says where it comes apart from the record, if it does.

    `reference` is a model with the recorded weights: it gives the margins of the recorded run where its head does not hold
    both candidates. `weight_version` is that of `model`, None = unknown. `rows` pads each forward pass to that many rows, to
    repeat a recorded batch shape. `tolerance`: see `compare`.

    Raises NotFoundError for an unknown id or segment, UnsupportedRecordError where a sampler cannot be honoured or a noise
    recipe is not the one known here.
    """
    recorded = store.get(rollout_id)
    if segment is not None:
        recorded = [one for one in recorded if one.segment == segment]
        if not recorded:
            raise NotFoundError(f"rollout {rollout_id!r}: wanted segment {segment}, the store has no such segment")
    found: list[Comparison] = []
    checked: list[Checked] = []
    draws = 0
    for one in recorded:
        if not one.action_mask.any():
            continue
        if not is_keyed(one):
            checked.append(_check(one, model))
            continue
        again = regenerate(one, model, weight_version=weight_version, rows=rows)
        draws += int(again.action_mask.sum())
        comparison = compare(_cut(one, len(again.tokens)), again, tolerance=tolerance)
        if comparison.first is not None:
            comparison = _weigh(comparison, one, again, model, reference)
        found.append(comparison)
        if comparison.first is not None:
            break
    return Replayed(
        rollout_id=rollout_id,
        keyed=bool(found) and not checked,
        identical=not checked and all(one.first is None for one in found),
        draws=draws,
        segments=tuple(found),
        checked=tuple(checked),
    )


def is_keyed(rollout: Rollout) -> bool:
    """Whether every draw of the segment has a key. Raises UnsupportedRecordError for a recipe that is not known here."""
    keyed = all(noise_at(rollout, start) is not None for start, _ in drawn_runs(rollout))
    if keyed and rollout.noise != noise.RECIPE:
        raise UnsupportedRecordError(
            f"rollout {rollout.rollout_id!r}: noise: wanted {noise.RECIPE}, got {rollout.noise or 'none'}"
        )
    return keyed


def drawn_runs(rollout: Rollout) -> Iterator[tuple[int, int]]:
    """(start, length) of the stretches drawn in one go: action spans, or runs of the action mask without spans.

    Neighbouring spans of one sampler and key are one stretch: a split by weight version ends no request.
    """
    if rollout.spans is None:
        edges = np.flatnonzero(np.diff(np.concatenate(([0], rollout.action_mask.astype(np.int8), [0]))))
        yield from ((int(start), int(end - start)) for start, end in edges.reshape(-1, 2))
        return
    held: Span | None = None
    start = length = 0
    for span in rollout.spans:
        if not span.is_action or not span.length:
            continue
        if held is not None and start + length == span.start and _draws_alike(held, span):
            length += span.length
            continue
        if held is not None:
            yield start, length
        held, start, length = span, span.start, span.length
    if held is not None:
        yield start, length


def regenerate(
    rollout: Rollout, model: PreTrainedModel, *, weight_version: int | None = None, rows: int | None = None
) -> Rollout:
    """Draws the actions of a keyed segment again, stretch by stretch, until one differs; returns the new run's record.

    The record ends with the last stretch that was drawn (or, when none differs, with the segment), observations as recorded.
    """
    import transformers

    from rollstore.replay.samplers.transformers import generate

    turns: list[Turn] = []
    tokens = np.array(rollout.tokens[:0], dtype=np.int32)
    for start, length in drawn_runs(rollout):
        keyed, sampler = noise_at(rollout, start), sampler_at(rollout, start)
        if keyed is None or sampler is None:
            missing = "key" if keyed is None else "sampler"
            raise UnsupportedRecordError(f"rollout {rollout.rollout_id!r}: token {start}: wanted a recorded {missing}, got none")
        turn = generate(
            model,
            [rollout.tokens[:start]],
            keys=[keyed[0]],
            samples=[keyed[1]],
            segments=rollout.segment,
            sampler=sampler,
            max_new_tokens=length,
            head_size=rollout.heads.size or 0 if rollout.heads is not None else 0,
            rows=rows,
        )[0]
        turns.append(turn)
        tokens = np.concatenate([rollout.tokens[:start].astype(np.int32), turn.tokens])
        if first_difference(rollout.tokens[: start + length], tokens) is not None:
            break
    else:
        tokens = np.concatenate([tokens, rollout.tokens[len(tokens) :].astype(np.int32)])
    engine = Engine(
        name="transformers",
        version=transformers.__version__,
        numerics=Numerics(weights=str(model.dtype).removeprefix("torch."), activations=str(model.dtype).removeprefix("torch.")),
    )
    return _record(rollout, tokens, turns, engine, weight_version)


def _record(
    rollout: Rollout, tokens: NDArray[np.int32], turns: Sequence[Turn], engine: Engine, weight_version: int | None
) -> Rollout:
    actions = int(rollout.action_mask[: len(tokens)].sum())
    versions = None
    if weight_version is not None:
        versions = Known(np.full(actions, weight_version, dtype=np.int64), np.ones(actions, dtype=bool))
    heads = [turn.heads for turn in turns if turn.heads is not None]
    return Rollout(
        rollout_id=rollout.rollout_id,
        segment=rollout.segment,
        tokenizer=rollout.tokenizer,
        engine=engine,
        tokens=tokens,
        action_mask=rollout.action_mask[: len(tokens)],
        logprobs=_joined(turns, "logprobs"),
        logprob_kind="behavior",
        head_kind="behavior",
        weight_versions=versions,
        heads=_heads(heads) if heads else None,
        entropies=_joined(turns, "entropies"),
        batch_rows=_joined(turns, "batch_rows"),
        # Every stretch was prefilled from its tokens by the weights that drew it.
        spans=tuple(
            with_fields(
                span, engine=None, cache_state="fresh", cached_tokens=0, preemptions=0, logprob_kind=None, head_kind=None
            )
            for span in _cut(rollout, len(tokens)).spans or ()
        )
        or None,
        samplers=rollout.samplers,
        replay_key=rollout.replay_key,
        replay_sample=rollout.replay_sample,
        noise=noise.RECIPE,
    )


def _weigh(
    comparison: Comparison, recorded: Rollout, again: Rollout, model: PreTrainedModel, reference: PreTrainedModel | None
) -> Comparison:
    """The first difference with both candidates' log-probs from forward passes over the tokens before it."""
    first = comparison.first
    if first is None or first.action is None or first.token_a is None or first.token_b is None:
        return comparison
    candidates = (first.token_a, first.token_b)
    before = first.a if reference is None else _odds(reference, recorded, first.position, candidates)
    weighed = judge(
        segment=first.segment,
        position=first.position,
        action=first.action,
        token_a=first.token_a,
        token_b=first.token_b,
        a=before,
        b=_odds(model, recorded, first.position, candidates),
        noise_gap=shared_noise_gap(recorded, again, first.position, *candidates),
        tolerance=first.tolerance,
    )
    found = conditions(recorded, again, first.position, first.action)
    return replace(
        comparison,
        verdict=weighed.verdict,
        first=weighed,
        explanations=explanations(found, weighed.verdict, contradicted=weighed.contradicted),
    )


def _odds(model: PreTrainedModel, rollout: Rollout, position: int, candidates: tuple[int, int]) -> Odds:
    from rollstore.replay.score import next_logprobs

    logprobs = next_logprobs(model, rollout.tokens[:position], sampler_at(rollout, position))
    return Odds(logprob_a=float(logprobs[candidates[0]]), logprob_b=float(logprobs[candidates[1]]), source="model")


def _check(rollout: Rollout, model: PreTrainedModel) -> Checked:
    from rollstore.replay.score import score_rollouts

    now = score_rollouts(model, [rollout])[0][0].astype(np.float64)
    finite = np.isfinite(now)
    outside = int((~finite).sum())
    differences = ratios = np.zeros(0)
    if rollout.logprobs is not None:
        both = finite & rollout.logprobs.known & np.isfinite(rollout.logprobs.values)
        delta = now[both] - rollout.logprobs.values[both].astype(np.float64)
        differences, ratios = np.abs(delta), np.expm1(delta) - delta
    measured = len(differences) > 0
    return Checked(
        rollout_id=rollout.rollout_id,
        segment=rollout.segment,
        actions=len(now),
        outside=outside,
        max_difference=float(differences.max()) if measured else None,
        mean_difference=float(differences.mean()) if measured else None,
        k3=float(ratios.mean()) if measured else None,
    )


def _cut(rollout: Rollout, length: int) -> Rollout:
    """The first `length` tokens of a segment, as far as a comparison reads it."""
    if length >= len(rollout.tokens):
        return rollout
    spans = tuple(
        with_fields(span, length=min(span.length, length - span.start))
        for span in rollout.spans or ()
        if span.start < length
    )
    return with_fields(
        rollout, tokens=rollout.tokens[:length], action_mask=rollout.action_mask[:length], spans=spans or None
    )


def _draws_alike(one: Span, other: Span) -> bool:
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("sampler", "replay_key", "replay_sample", "request_id", "turn")
    )


def _joined(turns: Sequence[Turn], name: str) -> Known:
    values = np.concatenate([getattr(turn, name) for turn in turns])
    return Known(values, np.ones(len(values), dtype=bool))


def _heads(heads: Sequence[Heads]) -> Heads:
    def column(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(one, name) for one in heads])

    return Heads(size=heads[0].size, counts=column("counts"), tokens=column("tokens"), logprobs=column("logprobs"))
