"""What a loss divides by. A reducer turns terms [A] into a scalar; every loss takes one as `reduce=`.

All of them are a weighted sum, so the sum over micro-batches, or ranks, of a reducer's results is its result over the
whole step, whatever the cut, once `with_counts` has told each batch what the whole step divides by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from rollstore.batch import Counts, TokenBatch
from rollstore.errors import UnsupportedRecordError
from rollstore.losses.arguments import finite, word
from rollstore.losses.units import UNITS, Unit, measure

Empty = Literal["leave", "count"]
EMPTIES: tuple[str, ...] = get_args(Empty)
"""Whether a sequence in which nothing has weight is left out of the number of sequences, or counts in it."""


class Reducer(Protocol):
    """terms [A], batch, weights [A] (0: left out of both sides) -> []. counts: instead of the batch's own."""

    def __call__(
        self, terms: Tensor, batch: TokenBatch, weights: Tensor, *, counts: Counts | None = None
    ) -> Tensor: ...


def reduced(reduce: Reducer, terms: Tensor, batch: TokenBatch, weights: Tensor) -> Tensor:
    """What a loss makes of its terms [A]. Raises `TypeError` for a `reduce` that is no reducer."""
    _reducible(reduce)
    return reduce(terms, batch, weights)


def _reducible(reduce: Any) -> None:
    if not callable(reduce) or reduce in (fixed_length, signal_groups):
        raise TypeError(f"reduce: wanted a reducer, as token_mean or fixed_length(512), got {reduce!r}")


def token_mean(terms: Tensor, batch: TokenBatch, weights: Tensor, *, counts: Counts | None = None) -> Tensor:
    """sum_a w_a l_a / sum_a w_a: every action of the step weighs the same (DAPO, arXiv 2503.14476)."""
    counts = _counts(batch, weights, counts)
    return _divide(_sum(terms, weights), counts.tokens, counts)


def token_sum(terms: Tensor, batch: TokenBatch, weights: Tensor, *, counts: Counts | None = None) -> Tensor:
    """sum_a w_a l_a: for a caller that divides."""
    counts = _counts(batch, weights, counts)
    return _sum(terms, weights) * counts.scale.to(terms.dtype)


def sequence_mean(
    terms: Tensor,
    batch: TokenBatch,
    weights: Tensor,
    *,
    unit: Unit = "rollout",
    empty: Empty = "leave",
    counts: Counts | None = None,
) -> Tensor:
    """(1/S) sum_i (1/T_i) sum_t l_it: every sequence weighs the same (GRPO, arXiv 2402.03300)."""
    counts = _counts(batch, weights, counts)
    total = _sum(terms, weights / _length(counts, unit)[batch.sequence].to(terms.dtype))
    return _divide(total, _number(counts, unit, empty), counts)


def sequence_sum_mean(
    terms: Tensor,
    batch: TokenBatch,
    weights: Tensor,
    *,
    unit: Unit = "rollout",
    empty: Empty = "leave",
    counts: Counts | None = None,
) -> Tensor:
    """(1/S) sum_i sum_t l_it: the mean over sequences of token sums."""
    counts = _counts(batch, weights, counts)
    return _divide(_sum(terms, weights), _number(counts, unit, empty), counts)


def fixed_length(length: float, *, unit: Unit = "rollout", empty: Empty = "leave") -> Reducer:
    """(1/(S L)) sum_i sum_t l_it with a constant L, never the padded width (Dr. GRPO, arXiv 2503.20783)."""
    finite("length", length, above=True)
    word("unit", unit, UNITS)
    word("empty", empty, EMPTIES)

    def reduce(terms: Tensor, batch: TokenBatch, weights: Tensor, *, counts: Counts | None = None) -> Tensor:
        return sequence_sum_mean(terms, batch, weights, unit=unit, empty=empty, counts=counts) / length

    return reduce


def prompt_mean(
    terms: Tensor, batch: TokenBatch, weights: Tensor, *, empty: Empty = "leave", counts: Counts | None = None
) -> Tensor:
    """(1/P) sum_g (1/T_g) sum_{a in g} l_a: every prompt group weighs the same, whatever the length of its answers."""
    word("empty", empty, EMPTIES)
    counts = _counts(batch, weights, counts)
    lengths = torch.where(counts.prompt_tokens > 0, counts.prompt_tokens, 1)
    total = _sum(terms, weights / lengths[batch.sequence].to(terms.dtype))
    return _divide(total, counts.prompts if empty == "leave" else counts.all_prompts, counts)


@dataclass(frozen=True)
class SignalGroups:
    """`base` with a denominator that counts only groups with signal; made by `signal_groups`."""

    base: Reducer

    def __call__(self, terms: Tensor, batch: TokenBatch, weights: Tensor, *, counts: Counts | None = None) -> Tensor:
        if batch.signal is None:
            raise UnsupportedRecordError("batch.signal is not set: compute the advantages over whole groups first")
        if batch.counts is not None and batch.signal_counts is None:
            raise UnsupportedRecordError(
                "batch.counts is older than batch.signal: call with_counts after the advantages"
            )
        weights = signal_weights(batch, weights)
        return self.base(terms, batch, weights, counts=counts or batch.signal_counts or measure(batch, weights))


def signal_groups(reduce: Reducer) -> SignalGroups:
    """`reduce` with a denominator that counts only groups whose advantages are not all zero.

    For the policy term only: a regulariser acts on every token and keeps its own reducer. 64 groups of which 13 are
    empty divide by 51. The step grows by `step_scale` of the group report. No signal at all gives 0. Needs
    `batch.signal`, which the advantage functions decide over whole groups.
    """
    _reducible(reduce)
    return SignalGroups(reduce)


def base(reduce: Reducer) -> Reducer:
    """The reducer of a regulariser that stands beside a policy term reduced by `reduce`."""
    return base(reduce.base) if isinstance(reduce, SignalGroups) else reduce


def signal_weights(batch: TokenBatch, weights: Tensor) -> Tensor:
    """`weights` [A], 0 where the action's group carries no signal."""
    if batch.signal is None:
        return weights
    return torch.where(batch.signal[batch.sequence], weights, 0)


def _counts(batch: TokenBatch, weights: Tensor, counts: Counts | None) -> Counts:
    return counts or batch.counts or measure(batch, weights)


def _sum(terms: Tensor, weights: Tensor) -> Tensor:
    if terms.shape != weights.shape:
        raise ValueError(f"terms: wanted one value an action {tuple(weights.shape)}, got {tuple(terms.shape)}")
    weights = weights.to(terms.dtype)
    return (torch.where(weights != 0, terms, 0) * weights).sum()  # select: 0 x NaN is NaN


def _divide(total: Tensor, number: Tensor, counts: Counts) -> Tensor:
    """total / number, and 0 with a gradient of 0 where there is nothing to divide by."""
    number = number.to(total.dtype)
    return total * torch.where(number > 0, counts.scale.to(total.dtype) / torch.where(number > 0, number, 1), 0)


def _length(counts: Counts, unit: Unit) -> Tensor:
    word("unit", unit, UNITS)
    lengths = {"rollout": counts.rollout_tokens, "segment": counts.segment_tokens}[unit]
    return torch.where(lengths > 0, lengths, 1)


def _number(counts: Counts, unit: Unit, empty: Empty) -> Tensor:
    word("unit", unit, UNITS)
    word("empty", empty, EMPTIES)
    numbers = {
        ("rollout", "leave"): counts.rollouts,
        ("segment", "leave"): counts.segments,
        ("rollout", "count"): counts.all_rollouts,
        ("segment", "count"): counts.all_segments,
    }
    return numbers[unit, empty]
