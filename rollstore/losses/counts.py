"""What the whole step divides by, for batches that are only a part of it: micro-batches, and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch import distributed as dist

from rollstore.batch import Counts, TokenBatch
from rollstore.batch.select import is_cut
from rollstore.errors import DuplicateError
from rollstore.losses.arguments import columns, number, tensor
from rollstore.losses.arguments import weights as check_weights
from rollstore.losses.reducers import signal_weights
from rollstore.losses.units import sum_by


def with_counts(
    batches: Iterable[TokenBatch],
    *,
    weights: Iterable[Tensor] | None = None,
    process_group: dist.ProcessGroup | None = None,
    averaged_over: int = 1,
) -> list[TokenBatch]:
    """Tell every batch of a step what the step divides by, so that the sum of their losses is the loss of the step.

    batches: all the batches this rank takes in the step, before the first of them is used; may be empty of actions,
    and on some rank empty altogether. weights: what the objective counts in each [A]; `batch.weights` when left out,
    `trainable(batch, behavior=True)` where log-probs are missing. process_group: ranks to sum over; without one this
    process is alone. averaged_over: what the trainer divides by afterwards: the number of ranks when gradients are
    averaged (DDP), the number of micro-batches when the trainer divides each loss by it, or their product.

    Units are matched by id, so a rollout's segments, or a group's members, may lie in different batches and ranks.
    After the advantages, and after everything that changes weights: the counts of groups with signal are taken here
    too. Whether a rollout's segments were put into different batches is remembered, since a ratio over a rollout then
    cannot be formed. Raises `DuplicateError`, on every rank, where one rollout_id has two groups in the step: two
    rollouts, as of two runs, would be counted as one.
    """
    batches = _several("batches", batches)
    number("averaged_over", averaged_over, 1)
    weights = [batch.weights for batch in batches] if weights is None else _several("weights", weights)
    if len(weights) != len(batches):
        raise ValueError(f"weights: wanted one tensor a batch ({len(batches)}), got {len(weights)}")
    for at, (batch, part) in enumerate(zip(batches, weights, strict=True)):
        columns(batch)
        tensor(f"weights[{at}]", part, (batch.actions,))
        check_weights(f"weights[{at}]", part)
    _refuse_two_groups(batches, process_group)
    signal = [signal_weights(batch, part) for batch, part in zip(batches, weights, strict=True)]
    base = _counts(batches, weights, process_group, averaged_over)
    decided = all(batch.signal is not None for batch in batches)
    over_signal = _counts(batches, signal, process_group, averaged_over)
    return [
        replace(batch, counts=counts, signal_counts=signal_counts if decided else None)
        for batch, counts, signal_counts in zip(batches, base, over_signal, strict=True)
    ]


def _several(name: str, given: Any) -> list[Any]:
    """A list of what was given. Raises `TypeError` for one of them alone."""
    if isinstance(given, TokenBatch | Tensor) or not isinstance(given, Iterable):
        raise TypeError(f"{name}: wanted a list of them, got one {type(given).__name__}")
    return list(given)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _refuse_two_groups(batches: Sequence[TokenBatch], process_group: dist.ProcessGroup | None) -> None:
    """Raise where a rollout has another group in another batch, or on another rank."""
    device = batches[0].tokens.device if batches else torch.device("cpu")
    none = torch.zeros(0, dtype=torch.int64, device=device)
    keys = torch.cat([none, *(_rollout_keys(batch) for batch in batches)])
    own, found = keys, torch.cat([none, *(batch.group for batch in batches)])
    if process_group is not None:
        keys, found = _gathered(keys, found, process_group)
    order = keys.argsort()
    keys, found = keys[order], found[order]
    wrong = keys[1:][(keys[1:] == keys[:-1]) & (found[1:] != found[:-1])]
    if not len(wrong):
        return
    ids = [name for batch in batches for name in batch.rollout_ids]
    here = torch.nonzero(own == wrong[0]).squeeze(-1).tolist()
    where = f"rollout {ids[here[0]]!r}" if here else "a rollout on another rank"
    raise DuplicateError(
        f"{where}: wanted one group in the step, got two: a rollout_id stands for one rollout, whatever its run, and "
        "all its segments are collated from one table"
    )


def _counts(
    batches: Sequence[TokenBatch], weights: Sequence[Tensor], group: dist.ProcessGroup | None, averaged_over: int
) -> list[Counts]:
    device = batches[0].tokens.device if batches else torch.device("cpu")
    per_row = [
        sum_by(part.to(torch.float64), batch.sequence, batch.rows) for batch, part in zip(batches, weights, strict=True)
    ]
    rollouts = _Units([_rollout_keys(batch) for batch in batches], per_row, group, device)
    prompts = _Units([batch.group for batch in batches], per_row, group, device)
    rows = torch.cat(per_row) if per_row else torch.zeros(0, dtype=torch.float64, device=device)
    totals = torch.stack(
        [rows.sum(), (rows > 0).sum().double(), torch.tensor(float(len(rows)), device=device).double()]
    )
    if group is not None:
        dist.all_reduce(totals, group=group)
    tokens, segments, all_segments = totals.unbind()
    made = [
        Counts(
            tokens=tokens,
            segments=segments,
            rollouts=rollouts.with_weight,
            prompts=prompts.with_weight,
            all_segments=all_segments,
            all_rollouts=rollouts.number,
            all_prompts=prompts.number,
            segment_tokens=per_row[at],
            rollout_tokens=rollouts.of(_rollout_keys(batch)),
            prompt_tokens=prompts.of(batch.group),
            scale=torch.tensor(float(averaged_over), device=device),
        )
        for at, batch in enumerate(batches)
    ]
    return [counts._replace(cut=is_cut(counts, batch.rollout)) for counts, batch in zip(made, batches, strict=True)]


class _Units:
    """Summed weight by key over the whole step."""

    def __init__(
        self, keys: Sequence[Tensor], per_row: Sequence[Tensor], group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        own_keys = torch.cat(list(keys)) if keys else torch.zeros(0, dtype=torch.int64, device=device)
        own = torch.cat(list(per_row)) if per_row else torch.zeros(0, dtype=torch.float64, device=device)
        if group is not None:
            own_keys, own = _gathered(own_keys, own, group)
        self.keys, index = torch.unique(own_keys, return_inverse=True)
        self.sums = sum_by(own, index, len(self.keys))
        self.with_weight = (self.sums > 0).sum()
        self.number = torch.tensor(len(self.keys), device=device)

    def of(self, keys: Tensor) -> Tensor:
        """Sums [B] of the units with these keys [B]."""
        return self.sums[torch.searchsorted(self.keys, keys)]


def _gathered(keys: Tensor, sums: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The keys and sums of every rank, one after another. Ranks may hold different numbers, and none."""
    ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=keys.device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(keys)], device=keys.device), group=group)
    lengths = [int(size) for size in torch.cat(sizes).tolist()]
    widest = max(lengths)

    def gather(values: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(values, (0, widest - len(values)))
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    return gather(keys), gather(sums)


def _rollout_keys(batch: TokenBatch) -> Tensor:
    """A 64-bit id [B] of each row's rollout, the same on every rank. Rows without an id keep apart."""
    hashed = np.fromiter((xxhash.xxh3_64_intdigest(id.encode()) for id in batch.rollout_ids), np.uint64, batch.rows)
    return torch.from_numpy(hashed.view(np.int64)).to(batch.tokens.device)
