"""What every objective starts from: checked shapes, the wider dtype, and which actions count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rollstore.batch import TokenBatch, refuse_unusable
from rollstore.errors import UnsupportedRecordError
from rollstore.losses.arguments import columns, tensor, word
from rollstore.losses.heads import has_head
from rollstore.losses.ratios import Corrections, Metrics, Numerator, each
from rollstore.losses.units import sum_by
from rollstore.schema.rules.heads import STAND_IN


class Inputs(NamedTuple):
    """What an objective computes with, each [A].

    recorded bool: has weight, and a behavior log-prob to divide by (where the objective asks for that). known bool:
    recorded, and everything else that is needed is there. active bool: known, and what it is divided by is above 0;
    these count in the denominator. ratio bool: has weight, and what it is divided by is there and above 0, whatever
    else it lacks. possible bool: active, and the trainer gives it a probability above 0. logprobs, advantages: with
    gradient, 0 where not possible. weights: 0 where not active. live: the trainer's log-probs, detached, minus infinity
    and NaN as they are.
    """

    logprobs: Tensor
    live: Tensor
    advantages: Tensor
    weights: Tensor
    recorded: Tensor
    known: Tensor
    active: Tensor
    ratio: Tensor
    possible: Tensor
    metrics: Metrics


WHERE_FROM = {
    "advantages": "compute them first, as with group_mean(batch)",
    "anchor_logprobs": "set it, or say anchor='behavior' or numerator='live'",
    "reference_logprobs": "set it from an evaluation of the reference policy",
    "values": "set it from an evaluation of the critic",
    "returns": "compute them first, as with gae(batch)",
}
"""Columns [A] that an objective may need, and how a batch comes by them."""

LOGPROBS = ("anchor_logprobs", "reference_logprobs")
"""Those in which minus infinity is a value. Elsewhere an infinity is as good as nothing."""


def inputs(
    batch: TokenBatch,
    given: Tensor,
    *,
    behavior: bool,
    needs: Sequence[str] = ("advantages",),
    below: str | None = None,
    name: str = "logprobs",
) -> Inputs:
    """Check and select. given [A]: the trainer's log-probs, any float dtype; `name` says so, or what else it is.

    behavior: the recorded log-probs are divided by. needs: columns without which an action cannot be used; below: the
    one of them that is divided by. Raises `UnsupportedRecordError` when the recorded log-probs may not be divided by,
    or a column is not set; `ValueError` or `TypeError` for one that does not fit. An action without weight, or without
    what is needed, or with a probability of 0 below, is left out, the last two counted.
    """
    columns(batch)
    tensor(name, given, (batch.actions,))
    weighted = recorded = batch.weights != 0
    metrics: Metrics = {}
    if behavior:
        refuse_unusable(batch)
        metrics["behavior/missing"] = (weighted & ~(batch.behavior_logprobs < torch.inf)).sum()
        metrics["behavior/impossible"] = (weighted & (batch.behavior_logprobs <= STAND_IN)).sum()
        recorded = weighted & batch.recorded
    known = ratio = recorded
    for column in needs:
        missing = _missing(batch, column)
        metrics[f"{column}/missing"] = (weighted & missing).sum()
        known = known & ~missing
    active = known
    if below is not None:
        none = needed(batch, below) <= STAND_IN
        metrics[f"{below}/impossible"] = (weighted & none).sum()
        active = known & ~none
        ratio = weighted & ~_missing(batch, below) & ~none
    wide = torch.promote_types(given.dtype, torch.float32)
    live = given.detach().to(wide)
    possible = active
    if name == "logprobs":
        possible = active & ~(live <= STAND_IN)  # NaN stays: a trainer that gives NaN gets a loss of NaN
        metrics["trainer/impossible"] = (active & ~possible).sum()
        metrics["trainer/nan"] = (active & live.isnan()).sum()
    advantages = torch.zeros_like(live) if "advantages" not in needs else needed(batch, "advantages")
    return Inputs(
        logprobs=torch.where(possible, given, 0).to(wide),
        live=live,
        advantages=torch.where(possible, advantages, 0).to(wide),
        weights=torch.where(active, batch.weights, 0).to(wide),
        recorded=recorded,
        known=known,
        active=active,
        ratio=ratio,
        possible=possible,
        metrics={**metrics, "actions": active.sum()},
    )


def _missing(batch: TokenBatch, name: str) -> Tensor:
    """bool [A]: the column has no value there."""
    column = needed(batch, name)
    return ~(column < torch.inf) if name in LOGPROBS else ~column.isfinite()


def needed(batch: TokenBatch, name: str) -> Tensor:
    """The column [A], or `UnsupportedRecordError` saying how a batch comes by it."""
    column: Tensor | None = getattr(batch, name)
    if column is None:
        raise UnsupportedRecordError(f"batch.{name} is not set: {WHERE_FROM[name]}")
    return column


def policy_needs(
    anchor: Literal["recorded", "behavior"] | None, correction: Corrections | None, default: Numerator
) -> tuple[str, ...]:
    """Columns of a policy objective: advantages, and the anchor where it, or a correction's numerator, is one.

    Raises `ValueError` for a correction beside anchor="behavior", where w = pi0/q is 1.
    """
    if anchor is not None:
        word("anchor", anchor, ("recorded", "behavior"))
    if anchor == "behavior" and correction is not None:
        raise ValueError("correction: with anchor='behavior' w = pi0/q is 1, and there is nothing to correct")
    numerators = [part.numerator or default for part in each(correction)]
    if anchor == "recorded" or "anchor" in numerators:
        return ("advantages", "anchor_logprobs")
    return ("advantages",)


def trainable(batch: TokenBatch, *, behavior: bool = False, heads: bool = False, needs: Sequence[str] = ()) -> Tensor:
    """The weights [A] that an objective counts: 0 also where what it needs was not recorded. For `with_counts`.

    behavior: it forms a ratio to the recorded log-probs. heads: it needs a head at the action. needs: columns that may
    have gaps, as `("anchor_logprobs",)`; a probability of 0, which cannot be divided by, is one.
    """
    columns(batch)
    active = batch.weights != 0
    for name in needs:
        active = active & ~_missing(batch, name)
        if name in LOGPROBS:
            active = active & (needed(batch, name) > STAND_IN)
    if behavior:
        active = active & batch.recorded
    if heads:
        active = active & has_head(batch)
    return torch.where(active, batch.weights, 0)


class LogRatio(NamedTuple):
    """log of p over what is below it, each [A]. log: with gradient, 0 where not possible; seen: detached, minus
    infinity where the trainer gives 0, and 0 where there is no ratio."""

    log: Tensor
    seen: Tensor


def log_ratio(batch: TokenBatch, given: Inputs, below: str) -> LogRatio:
    """log p/q or log p/pi0. below: `behavior_logprobs`, or the column that `inputs` was told of."""
    under = torch.where(given.ratio, getattr(batch, below), 0).to(given.live.dtype)
    ratio = torch.where(given.possible, given.logprobs - under, 0)
    return LogRatio(ratio, torch.where(given.ratio, given.live - under, 0))


def signal_metrics(batch: TokenBatch, weights: Tensor) -> Metrics:
    """How much of the batch the loss was taken over, and whether what was decided of the step before still holds.

    signal/off: actions with an advantage in a group that `signal` says has none. counts/off: rows of which
    `with_counts` counted another weight.
    """
    metrics: Metrics = {"tokens": weights.sum(), "sequences": (_per_row(batch, weights) > 0).sum()}
    if batch.signal is not None:
        signal = batch.signal[batch.sequence]
        metrics["tokens/signal"] = torch.where(signal, weights, 0).sum()
        if batch.advantages is not None:
            metrics["signal/off"] = ((weights != 0) & ~signal & (batch.advantages.abs() > 0)).sum()
    return metrics | count_metrics(batch, weights)


def count_metrics(batch: TokenBatch, weights: Tensor) -> Metrics:
    """counts/off [], where the step was counted: rows of which another weight was. weights [A]: what the loss takes."""
    if batch.counts is None:
        return {}
    off = (_per_row(batch, weights) - batch.counts.segment_tokens).abs()
    # Both are sums in float64 of the same float32 weights: what is left of rounding is far below one action's weight.
    return {"counts/off": (off > 1e-9 * batch.counts.segment_tokens.clamp(min=1)).sum()}


def _per_row(batch: TokenBatch, weights: Tensor) -> Tensor:
    return sum_by(weights.to(torch.float64), batch.sequence, batch.rows)
