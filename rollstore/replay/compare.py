"""Two runs of one rollout: the first token where they come apart, and whether rounding can explain it.

After the first difference the contexts differ, so nothing behind it is judged. A recorded log-prob that is missing
makes the comparison of log-probs not available; it never makes them equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstore.replay.conditions import Condition, Explanation, conditions, explanations
from rollstore.replay.difference import (
    Difference,
    Odds,
    difference_lines,
    judge,
    plain,
    recorded_odds,
    shared_noise_gap,
)
from rollstore.schema import Rollout

LEAST_TOLERANCE = 1e-3
MOST_TOLERANCE = 0.1

NARROW = {"bfloat16": (0.25, 0.5), "float16": (0.03, 0.1)}
"""The same two where an output layer is of a narrow dtype: logits between 16 and 32 are 1/8 and 1/64 apart there, and
both candidates' may move by one such step; by two, where what comes before moves too."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two runs of one segment have in common, and where they come apart."""

    rollout_id: str
    segment: int
    verdict: str
    """`identical`, or that of the first difference."""
    compared: int
    """Tokens of the common part."""
    actions: int
    """Positions of the common part that both drew."""
    first: Difference | None
    logprobs: str
    """`available`, or why the two runs' log-probs cannot be compared."""
    max_logprob_difference: float | None
    """Over the actions of the common part."""
    unstable: tuple[int, ...]
    """Positions in front of the first action whose scores differ by more than the tolerance."""
    conditions: tuple[Condition, ...]
    explanations: tuple[Explanation, ...]
    """Empty when nothing differs."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON; an infinite number becomes the string `inf` or `-inf`."""
        return plain(asdict(self))

    def lines(self) -> list[str]:
        """The report for a person."""
        return _lines(self)

    def __str__(self) -> str:
        return "\n".join(self.lines())


def compare(
    a: Rollout,
    b: Rollout,
    *,
    tolerance: float | None = None,
    token_logprobs: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Comparison:
    """Compares two records of one segment, a before b.

    `tolerance` [nats] is how far a margin may be moved by rounding; by default four times the largest log-prob
    difference over the common part, held within 0.001 and 0.1, or within 0.25 and 0.5 where an engine says that its
    output layer, or its weights, are bfloat16 (0.03 and 0.1: float16). `token_logprobs` are scores of all tokens [T] of
    both (position 0 has none: NaN), for judging the prompt. Raises ValueError when the two are different segments.
    """
    if a.segment != b.segment:
        raise ValueError(f"b: wanted segment {a.segment} as in a, got {b.segment}")
    position = first_difference(a.tokens, b.tokens)
    common = min(len(a.tokens), len(b.tokens)) if position is None else position
    drawn = (a.action_mask[:common] & b.action_mask[:common]).astype(bool)
    status, deltas = _logprob_differences(a, b, drawn)
    largest = float(deltas.max()) if len(deltas) else None
    if tolerance is None:
        least, most = _rounding(a, b)
        tolerance = min(max(4 * (largest or 0.0), least), most)
    first = None if position is None else _first(a, b, position, tolerance)
    at = position if position is not None else int(np.flatnonzero(drawn)[-1]) if drawn.any() else 0
    ended = first is not None and None in (first.token_a, first.token_b)
    found = conditions(a, b, at, _action(a, at), _action(b, at), ended=ended)
    verdict = "identical" if first is None else first.verdict
    return Comparison(
        rollout_id=a.rollout_id,
        segment=a.segment,
        verdict=verdict,
        compared=common,
        actions=int(drawn.sum()),
        first=first,
        logprobs=status,
        max_logprob_difference=largest,
        unstable=_unstable(a, token_logprobs, common, tolerance),
        conditions=found,
        explanations=()
        if first is None
        else explanations(found, verdict, contradicted=first.contradicted, ended=ended),
    )


def _rounding(*runs: Rollout) -> tuple[float, float]:
    """How far rounding moves a margin at least and at most, by the narrowest dtype that a run says it has."""
    found = [(LEAST_TOLERANCE, MOST_TOLERANCE)]
    for run in runs:
        numerics = None if run.engine is None else run.engine.numerics
        dtype = None if numerics is None else numerics.lm_head or numerics.weights
        found.append(NARROW.get((dtype or "").removeprefix("torch."), found[0]))
    return max(found)


def first_difference(a: NDArray[Any], b: NDArray[Any]) -> int | None:
    """The first index where two token streams differ, the end of the shorter one included; None when they are equal."""
    common = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:common]) != np.asarray(b[:common]))
    if len(differ):
        return int(differ[0])
    return None if len(a) == len(b) else common


def _first(a: Rollout, b: Rollout, position: int, tolerance: float) -> Difference:
    action_a, action_b = _action(a, position), _action(b, position)
    token_a, token_b = (int(run.tokens[position]) if position < len(run.tokens) else None for run in (a, b))
    action = action_b if action_a is None else action_a
    if token_a is None or token_b is None or action_a is None or action_b is None:
        nothing = Odds(logprob_a=None, logprob_b=None, source="recorded")
        return Difference(
            segment=a.segment,
            position=position,
            action=action,
            action_b=action_b,
            token_a=token_a,
            token_b=token_b,
            a=nothing,
            b=nothing,
            noise_gap=None,
            margin_a=None,
            margin_b=None,
            noised_margin_a=None,
            noised_margin_b=None,
            gap=None,
            tolerance=tolerance,
            # One run going on where the other ended is a question of limits, not of odds.
            verdict="different_input" if action is None else "unknown",
            contradicted=False,
        )
    return judge(
        segment=a.segment,
        position=position,
        action=action_a,
        action_b=action_b,
        token_a=token_a,
        token_b=token_b,
        a=recorded_odds(a, action_a, position, token_a, token_b),
        b=recorded_odds(b, action_b, position, token_a, token_b),
        noise_gap=shared_noise_gap(a, b, position, token_a, token_b),
        tolerance=tolerance,
    )


def _action(run: Rollout, position: int) -> int | None:
    """The index of a token among its run's actions; None where the run did not draw it."""
    if position >= len(run.tokens) or not run.action_mask[position]:
        return None
    return int(np.count_nonzero(run.action_mask[:position]))


def _logprob_differences(a: Rollout, b: Rollout, drawn: NDArray[np.bool_]) -> tuple[str, NDArray[np.float64]]:
    """(available or why not, |difference| where both runs know it), over the positions that both drew."""
    none = np.zeros(0)
    for name, run in (("a", a), ("b", b)):
        if run.logprobs is None:
            return f"not available: {name} has none", none
    if a.logprob_kind != b.logprob_kind:
        return f"not available: a has {a.logprob_kind or 'unnamed'} and b {b.logprob_kind or 'unnamed'} ones", none
    # Each run counts its own actions: one position may be another action in each.
    at = [drawn[np.flatnonzero(run.action_mask[: len(drawn)])] for run in (a, b)]
    columns = [column for column in (a.logprobs, b.logprobs) if column is not None]
    pairs = list(zip(columns, at, strict=True))
    known = np.logical_and(*(column.known[: len(own)][own] for column, own in pairs))
    values = [column.values[: len(own)][own][known].astype(np.float64) for column, own in pairs]
    if not known.any():
        return "not available: no action of the common part has both", none
    equal = values[0] == values[1]  # -inf in both is no difference
    return "available", np.where(equal, 0.0, np.abs(values[0] - np.where(equal, 0.0, values[1])))


def _unstable(
    a: Rollout, scores: tuple[Sequence[float], Sequence[float]] | None, common: int, tolerance: float
) -> tuple[int, ...]:
    if scores is None:
        return ()
    drawn = np.flatnonzero(a.action_mask)
    end = min(common, int(drawn[0]) if len(drawn) else common)
    before, after = (np.asarray(column, dtype=np.float64)[:end] for column in scores)
    return tuple(int(index) for index in np.flatnonzero(np.abs(before - after) > tolerance))


def _lines(found: Comparison) -> list[str]:
    largest = found.max_logprob_difference
    drawn = f"{found.compared} tokens agree ({found.actions} of them drawn)"
    out = [f"{found.rollout_id} segment {found.segment}: {found.verdict.replace('_', ' ')}: {drawn}"]
    first = found.first
    if first is not None:
        out.extend(difference_lines(first))
    out.extend(f"  {one.name}: {one.status.replace('_', ' ')} ({one.why})" for one in found.explanations)
    where = "" if first is None else " before it"
    out.append(f"  log-probs: {found.logprobs if largest is None else f'differ by at most {largest:.3g}{where}'}")
    if found.unstable:
        out.append(f"  prompt scores unstable at {', '.join(str(position) for position in found.unstable)}")
    return out
