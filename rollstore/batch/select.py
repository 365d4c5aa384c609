"""Some rows of a batch as a batch: how a step is cut into micro-batches, or reordered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rollstore.batch.arguments import check_batch
from rollstore.batch.token_batch import Counts, Heads, Routing, Support, TokenBatch


def _ranges(lengths: Tensor, chosen: Tensor) -> Tensor:
    """Flat indices of the items of the `chosen` lists, in that order. lengths [N], chosen [M] -> int64 [items]."""
    starts = (torch.cumsum(lengths, 0) - lengths)[chosen]
    wanted = lengths[chosen]
    total = torch.cumsum(wanted, 0)
    shift = torch.repeat_interleave(starts - (total - wanted), wanted)
    return torch.arange(shift.shape[0], device=lengths.device) + shift


def select(batch: TokenBatch, rows: Sequence[int] | Tensor) -> TokenBatch:
    """The given rows, in the given order. rows: indices into the batch, each at most once; of a mask take its nonzero.

    Raises `TypeError` for what are no indices, `ValueError` for one that is not there or stands twice,
    `UnsupportedRecordError` for a prefix-shared pack.
    What was decided over the whole step (advantages, signal, counts) goes along, so a step is cut after it is decided.
    Takes batches in which each row's tokens stand by themselves: one from `collate`, not a prefix-shared pack.
    """
    check_batch(batch)
    batch.unshared("select")
    device = batch.tokens.device
    chosen = _indices(batch, rows).to(device)
    lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).to(torch.int64)
    per_row = torch.bincount(batch.sequence, minlength=batch.rows)
    tokens, actions = _ranges(lengths, chosen), _ranges(per_row, chosen)
    new_lengths = lengths[chosen]
    starts = torch.cumsum(new_lengths, 0) - new_lengths
    sequence = torch.repeat_interleave(torch.arange(len(chosen), device=device), per_row[chosen])
    moved = starts[sequence] - batch.cu_seqlens[:-1].to(torch.int64)[chosen][sequence]

    def per_action(column: Tensor | None) -> Tensor | None:
        return None if column is None else column[actions]

    def of_row(column: Tensor | None) -> Tensor | None:
        return None if column is None else column[chosen]

    columns = {
        name: getattr(batch, name)[actions]
        for name in (
            "behavior_logprobs", "valid", "behavior_kind", "head_kind", "transformed", "temperature", "top_k", "top_p",
            "min_p", "penalties", "weight_versions", "version_known", "weights",
        )
    }  # fmt: skip
    return replace(
        batch,
        rollout_ids=[batch.rollout_ids[row] for row in chosen.tolist()],
        tokens=batch.tokens[tokens],
        cu_seqlens=torch.nn.functional.pad(torch.cumsum(new_lengths, 0), (1, 0)).to(torch.int32),
        position_ids=batch.position_ids[tokens],
        action_index=batch.action_index[actions] + moved,
        logit_index=batch.logit_index[actions] + moved,
        sequence=sequence,
        rollout=torch.unique(batch.rollout[chosen], return_inverse=True)[1],
        segment=batch.segment[chosen],
        group=batch.group[chosen],
        group_size=batch.group_size[chosen],
        rewards=batch.rewards[chosen],
        bootstrap=batch.bootstrap[chosen],
        ending=batch.ending[chosen],
        media=None if batch.media is None else batch.media[tokens],
        anchor_logprobs=per_action(batch.anchor_logprobs),
        reference_logprobs=per_action(batch.reference_logprobs),
        values=per_action(batch.values),
        final_values=of_row(batch.final_values),
        heads=_heads(batch.heads, actions),
        support=_support(batch.support, actions),
        routed_experts=_routing(batch.routed_experts, chosen),
        action_rewards=per_action(batch.action_rewards),
        advantages=per_action(batch.advantages),
        returns=per_action(batch.returns),
        signal=of_row(batch.signal),
        counts=_counts(batch.counts, chosen, batch.rollout),
        signal_counts=_counts(batch.signal_counts, chosen, batch.rollout),
        **columns,
    )


def _heads(heads: Heads | None, actions: Tensor) -> Heads | None:
    if heads is None:
        return None
    at = _ranges(heads.counts, actions)
    return Heads(heads.tokens[at], heads.logprobs[at], heads.counts[actions])


def _support(support: Support | None, actions: Tensor) -> Support | None:
    if support is None:
        return None
    return Support(support.tokens[_ranges(support.counts, actions)], support.counts[actions])


def _routing(routing: Routing | None, rows: Tensor) -> Routing | None:
    if routing is None:
        return None
    at = _ranges(routing.rows * routing.layers * routing.k, rows)
    return Routing(
        routing.experts[at], *(part[rows] for part in (routing.start, routing.rows, routing.layers, routing.k))
    )


def _indices(batch: TokenBatch, rows: Sequence[int] | Tensor) -> Tensor:
    """int64 [rows], checked."""
    try:
        given = torch.as_tensor(rows) if len(rows) else torch.zeros(0, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"rows: wanted integer indices [n], got {rows!r}") from None
    if given.dim() != 1 or given.dtype == torch.bool or given.is_floating_point():
        raise TypeError(f"rows: wanted integer indices [n], got {given.dtype} {tuple(given.shape)}")
    numbers: list[int] = given.tolist()
    if wrong := [row for row in numbers if not 0 <= row < batch.rows]:
        raise ValueError(f"rows: wanted indices from 0 to {batch.rows - 1}, got {wrong[0]}")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"rows: wanted each at most once, got {max(numbers, key=numbers.count)} twice")
    return given.to(torch.int64)


def is_cut(counts: Counts, rollout: Tensor) -> bool:
    """Whether a rollout among these rows (`rollout` [B], any ids) has weight in another batch of the step, too."""
    _, index = torch.unique(rollout, return_inverse=True)
    here = torch.zeros_like(counts.segment_tokens).index_add(0, index, counts.segment_tokens)[index]
    return bool((counts.rollout_tokens - here > 1e-9 * counts.rollout_tokens).any())


def _counts(counts: Counts | None, rows: Tensor, rollout: Tensor) -> Counts | None:
    """The step's totals stay; the units of the rows that are left are looked up."""
    if counts is None:
        return None
    found = counts._replace(
        segment_tokens=counts.segment_tokens[rows],
        rollout_tokens=counts.rollout_tokens[rows],
        prompt_tokens=counts.prompt_tokens[rows],
    )
    return found._replace(cut=is_cut(found, rollout[rows]))
