"""What every objective starts from: checked shapes, the wider dtype, and which actions count."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rollstore.batch import TokenBatch, refuse_unusable
from rollstore.errors import UnsupportedRecordError
from rollstore.losses.ratios import Corrections, Metrics


class Inputs(NamedTuple):
    """logprobs, advantages, weights [A], 0 where not active; active [A]: counts in the denominator; possible [A]:
    active and the trainer gives it a probability above 0."""

    logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    active: Tensor
    possible: Tensor
    metrics: Metrics


def inputs(batch: TokenBatch, logprobs: Tensor, *, behavior: bool, advantages: bool = True) -> Inputs:
    """Check and select. logprobs [A]: the trainer's, any float dtype. behavior: the recorded ones are divided by.

    Raises `UnsupportedRecordError` when they may not be, or when the advantages are not set; `ValueError` for a wrong
    shape. An action without weight, or without a finite behavior log-prob where one is needed, is left out.
    """
    if logprobs.shape != (batch.actions,):
        raise ValueError(f"logprobs: wanted one value an action ({batch.actions},), got {tuple(logprobs.shape)}")
    active = batch.weights != 0
    metrics: Metrics = {}
    if behavior:
        refuse_unusable(batch)
        metrics["behavior/missing"] = (active & batch.behavior_logprobs.isnan()).sum()
        metrics["behavior/impossible"] = (active & (batch.behavior_logprobs == -torch.inf)).sum()
        active = active & batch.valid
    wide = torch.promote_types(logprobs.dtype, torch.float32)
    possible = active & (logprobs.detach() != -torch.inf)
    metrics |= {"actions": active.sum(), "trainer/impossible": (active & ~possible).sum()}
    if not advantages:
        given = torch.zeros_like(logprobs, dtype=wide)
    elif batch.advantages is None:
        raise UnsupportedRecordError("batch.advantages is not set: compute them first, as with group_mean(batch)")
    else:
        given = torch.where(possible, batch.advantages.to(wide), 0)
    return Inputs(
        logprobs=torch.where(possible, logprobs, 0).to(wide),
        advantages=given,
        weights=torch.where(active, batch.weights, 0).to(wide),
        active=active,
        possible=possible,
        metrics=metrics,
    )


def trainable(batch: TokenBatch, *, behavior: bool = False, heads: bool = False) -> Tensor:
    """The weights [A] that an objective counts: 0 also where what it divides by was not recorded.

    behavior: it forms a ratio to the recorded log-probs. heads: it needs a head at the action. For `with_counts`.
    """
    active = batch.weights != 0
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


def log_anchor(
    batch: TokenBatch, given: Inputs, anchor: Literal["recorded", "behavior"], correction: Corrections | None
) -> Tensor:
    """log pi0 [A], or log q where the caller says that the behavior policy is the anchor; 0 where not possible."""
    if anchor == "behavior":
        if correction is not None:
            raise ValueError("correction: with anchor='behavior' w = pi0/q is 1, and there is nothing to correct")
        return log_behavior(batch, given)
    if anchor != "recorded":
        raise ValueError(f"anchor: wanted 'recorded' or 'behavior', got {anchor!r}")
    if batch.anchor_logprobs is None:
        raise UnsupportedRecordError("batch.anchor_logprobs is not set: set it, or say anchor='behavior'")
    return torch.where(given.possible, batch.anchor_logprobs.to(given.logprobs.dtype), 0)


def signal_metrics(batch: TokenBatch, weights: Tensor) -> Metrics:
    """How much of the batch the loss was taken over."""
    per_row = torch.zeros(batch.rows, dtype=weights.dtype, device=weights.device)
    per_row = per_row.index_add(0, batch.sequence, weights)
    metrics: Metrics = {"tokens": weights.sum(), "sequences": (per_row > 0).sum()}
    if batch.signal is not None:
        metrics["tokens/signal"] = torch.where(batch.signal[batch.sequence], weights, 0).sum()
    return metrics
