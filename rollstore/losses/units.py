"""Tokens, segments, rollouts, prompts: what belongs together, and sums over it."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from rollstore.batch import Counts, TokenBatch
from rollstore.losses.arguments import word

Unit = Literal["rollout", "segment"]
UNITS: tuple[str, ...] = get_args(Unit)


def dense(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids of any integers [B] -> (index 0..n-1 [B], n []), without moving anything to the host."""
    ordered, order = torch.sort(ids)
    begins = torch.ones_like(ordered)
    begins[1:] = (ordered[1:] != ordered[:-1]).to(ordered.dtype)
    index = torch.empty_like(ids)
    index[order] = torch.cumsum(begins, 0) - 1
    return index, begins.sum()


def unit_of_row(batch: TokenBatch, unit: Unit) -> Tensor:
    """int64 [B], below B: which rollout (or segment) each row belongs to."""
    word("unit", unit, UNITS)
    if unit == "segment":
        return torch.arange(batch.rows, device=batch.sequence.device)
    return dense(batch.rollout)[0]


def sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum of `values` [N] at each `index` [N] -> [size]."""
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, index, values)


def measure(batch: TokenBatch, weights: Tensor) -> Counts:
    """Count this batch alone. weights [A]: 0 leaves an action out."""
    weights = weights.to(torch.float32)
    per_row = sum_by(weights, batch.sequence, batch.rows)
    rollout, all_rollouts = dense(batch.rollout)
    prompt, all_prompts = dense(batch.group)
    per_rollout = sum_by(per_row, rollout, batch.rows)
    per_prompt = sum_by(per_row, prompt, batch.rows)
    return Counts(
        tokens=weights.sum(),
        segments=(per_row > 0).sum(),
        rollouts=(per_rollout > 0).sum(),
        prompts=(per_prompt > 0).sum(),
        all_segments=torch.full_like(all_rollouts, batch.rows),
        all_rollouts=all_rollouts,
        all_prompts=all_prompts,
        segment_tokens=per_row,
        rollout_tokens=per_rollout[rollout],
        prompt_tokens=per_prompt[prompt],
        scale=torch.ones((), device=weights.device),
    )
