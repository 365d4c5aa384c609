"""Rollouts that were cut off: masked, penalised, or kept, by name. Keeping them is doing nothing."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rollstore.batch import TokenBatch
from rollstore.batch.token_batch import Ending
from rollstore.losses.arguments import before_counts, columns, finite, number
from rollstore.losses.units import sum_by, unit_of_row


def truncated(batch: TokenBatch) -> Tensor:
    """bool [B]: some segment of the row's rollout was truncated: collection stopped and the task could go on."""
    rollout = unit_of_row(batch, "rollout")
    return (sum_by((batch.ending == Ending.truncated).to(torch.int64), rollout, batch.rows) > 0)[rollout]


def mask_truncated(batch: TokenBatch) -> TokenBatch:
    """Weight 0 on every action of a truncated rollout (overlong filtering, DAPO, arXiv 2503.14476).

    Its reward still counts in its group; set it to NaN to take it out of the group's statistics too. Before
    `with_counts`: what that counted would not know of it.
    """
    columns(batch)
    before_counts(batch, "mask_truncated")
    return replace(batch, weights=torch.where(truncated(batch)[batch.sequence], 0, batch.weights))


def penalise_overlong(batch: TokenBatch, *, limit: int, buffer: int) -> TokenBatch:
    """Add to the reward 0 up to limit - buffer actions, then linearly to -1 at the limit (DAPO's soft punishment).

    Lengths count all actions of a rollout, with weight or not. Call it before the advantages. 0 < buffer <= limit.
    """
    columns(batch)
    finite("limit", limit, above=True)
    number("buffer", buffer, high=limit, above=True)
    rollout = unit_of_row(batch, "rollout")
    per_row = torch.bincount(batch.sequence, minlength=batch.rows)
    length = sum_by(per_row, rollout, batch.rows)[rollout]
    penalty = ((limit - buffer - length) / buffer).clamp(-1.0, 0.0)
    return replace(batch, rewards=batch.rewards + penalty.to(batch.rewards.dtype))
