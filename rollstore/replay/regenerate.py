"""Draw the actions of a keyed segment again and record the new run, observations as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace as with_fields
from numpy.typing import NDArray

from rollstore.errors import UnsupportedRecordError
from rollstore.replay import noise
from rollstore.replay.arguments import require_vocabulary
from rollstore.replay.compare import first_difference
from rollstore.replay.conditions import noise_at, sampler_at
from rollstore.schema import Engine, Heads, Known, Numerics, Rollout, Span

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollstore.replay.samplers.transformers import Turn


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

    The record ends with the last stretch that was drawn (or, when none differs, with the segment), observations as
    recorded. Raises ValueError for a token that the model does not have.
    """
    import transformers

    from rollstore.replay.samplers.transformers import generate

    require_vocabulary(model, [rollout])
    turns: list[Turn] = []
    tokens = np.array(rollout.tokens[:0], dtype=np.int32)
    for start, length in drawn_runs(rollout):
        keyed, sampler = noise_at(rollout, start), sampler_at(rollout, start)
        if keyed is None or sampler is None:
            missing = "key" if keyed is None else "sampler"
            raise UnsupportedRecordError(
                f"rollout {rollout.rollout_id!r}: token {start}: wanted a recorded {missing}, got none"
            )
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
        numerics=Numerics(
            weights=str(model.dtype).removeprefix("torch."), activations=str(model.dtype).removeprefix("torch.")
        ),
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
        run_id=rollout.run_id,
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
                span,
                engine=None,
                cache_state="fresh",
                cached_tokens=0,
                preemptions=0,
                logprob_kind=None,
                head_kind=None,
            )
            for span in cut(rollout, len(tokens)).spans or ()
        )
        or None,
        samplers=rollout.samplers,
        replay_key=rollout.replay_key,
        replay_sample=rollout.replay_sample,
        noise=noise.RECIPE,
    )


def cut(rollout: Rollout, length: int) -> Rollout:
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
