"""Rollouts with ids that the trainer's model has no row for: left out whole, never clamped, mapped or cut."""

from __future__ import annotations

import torch

from rollstore.batch.arguments import check_batch, check_whole
from rollstore.batch.select import select
from rollstore.batch.token_batch import TokenBatch


def within_vocabulary(batch: TokenBatch, size: int) -> tuple[TokenBatch, int]:
    """(the rollouts whose ids, of prompts and draws alike, are all below `size`; how many were left out).

    An engine's output layer is often wider than its tokenizer, and a rare draw lies in the padding. All segments of
    such a rollout that are in the batch go. Raises ValueError where size is below 1.
    """
    check_batch(batch)
    check_whole("size", size, 1)
    batch.unshared("within_vocabulary")
    lengths = batch.cu_seqlens.long().diff()
    row = torch.repeat_interleave(torch.arange(batch.rows, device=lengths.device), lengths)
    strange = torch.zeros(batch.rows, dtype=torch.bool, device=lengths.device)
    strange[row[batch.tokens >= size]] = True
    left_out = torch.unique(batch.rollout[strange])
    if not len(left_out):
        return batch, 0
    kept = ~torch.isin(batch.rollout, left_out)
    return select(batch, torch.nonzero(kept).squeeze(1)), len(left_out)
