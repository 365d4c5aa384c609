"""What every objective starts from: checked shapes, the wider dtype, and which actions count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rollstore.batch import TokenBatch, refuse_unusable
from rollstore.errors import UnsupportedRecordError
from rollstore.losses.ratios import Corrections, Metrics, Numerator, each
from rollstore.schema.rules.heads import STAND_IN


class Inputs(NamedTuple):
    """logprobs, advantages, weights [A], 0 where not active; active [A]: counts in the denominator; possible [A]:
    active and the trainer gives it a probability above 0."""

    logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    active: Tensor
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


def inputs(batch: TokenBatch, logprobs: Tensor, *, behavior: bool, needs: Sequence[str] = ("advantages",)) -> Inputs:
    """Check and select. logprobs [A]: the trainer's, any float dtype. behavior: the recorded ones are divided by.

    needs: columns without which an action cannot be used. Raises `UnsupportedRecordError` when the log-probs may not
    be divided by, or a column is not set; `ValueError` for a wrong shape. An action without weight, without a finite
    behavior log-prob where one is needed, or with NaN in a needed column is left out, the last two counted.
    """
    if logprobs.shape != (batch.actions,):
        raise ValueError(f"logprobs: wanted one value an action ({batch.actions},), got {tuple(logprobs.shape)}")
    weighted = active = batch.weights != 0
    metrics: Metrics = {}
    if behavior:
        refuse_unusable(batch)
        metrics["behavior/missing"] = (weighted & batch.behavior_logprobs.isnan()).sum()
        metrics["behavior/impossible"] = (weighted & (batch.behavior_logprobs <= STAND_IN)).sum()
        active = active & batch.valid
    for name in needs:
        missing = needed(batch, name).isnan()
        metrics[f"{name}/missing"] = (weighted & missing).sum()
        active = active & ~missing
    wide = torch.promote_types(logprobs.dtype, torch.float32)
    possible = active & (logprobs.detach() != -torch.inf)
    metrics |= {"actions": active.sum(), "trainer/impossible": (active & ~possible).sum()}
    advantages = torch.zeros_like(logprobs) if "advantages" not in needs else needed(batch, "advantages")
    return Inputs(
        logprobs=torch.where(possible, logprobs, 0).to(wide),
        advantages=torch.where(possible, advantages, 0).to(wide),
        weights=torch.where(active, batch.weights, 0).to(wide),
        active=active,
        possible=possible,
        metrics=metrics,
    )


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
    if anchor not in ("recorded", "behavior", None):
        raise ValueError(f"anchor: wanted 'recorded' or 'behavior', got {anchor!r}")
    if anchor == "behavior" and correction is not None:
        raise ValueError("correction: with anchor='behavior' w = pi0/q is 1, and there is nothing to correct")
    numerators = [part.numerator or default for part in each(correction)]
    if anchor == "recorded" or "anchor" in numerators:
        return ("advantages", "anchor_logprobs")
    return ("advantages",)


def trainable(batch: TokenBatch, *, behavior: bool = False, heads: bool = False, needs: Sequence[str] = ()) -> Tensor:
    """The weights [A] that an objective counts: 0 also where what it needs was not recorded. For `with_counts`.

    behavior: it forms a ratio to the recorded log-probs. heads: it needs a head at the action. needs: columns that may
    have gaps, as `("anchor_logprobs",)`.
    """
    active = batch.weights != 0
    for name in needs:
        active = active & ~needed(batch, name).isnan()
    if behavior:
        active = active & batch.valid
    if heads:
        if batch.heads is None:
            raise UnsupportedRecordError("no heads were recorded")
        active = active & (batch.heads.counts > 0)
    return torch.where(active, batch.weights, 0)


def log_behavior(batch: TokenBatch, given: Inputs) -> Tensor:
    """log q [A], 0 where not possible."""
    return torch.where(given.possible, batch.behavior_logprobs.to(given.logprobs.dtype), 0)


def log_anchor(batch: TokenBatch, given: Inputs, anchor: Literal["recorded", "behavior"]) -> Tensor:
    """log pi0 [A], or log q where the caller says that the behavior policy is the anchor; 0 where not possible."""
    if anchor == "behavior":
        return log_behavior(batch, given)
    return torch.where(given.possible, needed(batch, "anchor_logprobs").to(given.logprobs.dtype), 0)


def signal_metrics(batch: TokenBatch, weights: Tensor) -> Metrics:
    """How much of the batch the loss was taken over."""
    per_row = torch.zeros(batch.rows, dtype=weights.dtype, device=weights.device)
    per_row = per_row.index_add(0, batch.sequence, weights)
    metrics: Metrics = {"tokens": weights.sum(), "sequences": (per_row > 0).sum()}
    if batch.signal is not None:
        metrics["tokens/signal"] = torch.where(batch.signal[batch.sequence], weights, 0).sum()
    return metrics
