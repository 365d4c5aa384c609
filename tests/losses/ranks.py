"""What each of two processes computes; apart from the tests, so that a process starts without pytest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from rollstore.batch import select
from rollstore.losses import ppo_clip, sequence_mean, signal_groups, tis, token_mean, with_counts
from tests.losses.padded import problem, variable

SPLITS = {"even": [[0, 3], [1, 2, 4]], "one has nothing": [[0, 1, 2, 3, 4], []], "one is masked": [[0, 2, 3, 4], [1]]}
REDUCERS: dict[str, Any] = {
    "token": token_mean,
    "sequence": sequence_mean,
    "signal": signal_groups(token_mean),
}


def step(masked: bool = False) -> tuple[Any, Tensor]:
    batch, logprobs, _ = problem()
    batch = replace(batch, heads=None, signal=torch.tensor([True, True, False, False, False]))
    if masked:
        batch = replace(batch, weights=torch.where(batch.sequence == 1, 0, batch.weights))
    return batch, logprobs


def rank_main(rank: int, place: str) -> None:
    """One rank: for each split and reducer, this rank's loss and gradient, averaged over ranks as DDP does."""
    distributed.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
    answers: dict[str, Any] = {}
    for name, split in SPLITS.items():
        batch, logprobs = step(masked=name == "one is masked")
        at = [torch.nonzero(batch.sequence == row).squeeze(-1) for row in split[rank]]
        index = torch.cat([*at, torch.zeros(0, dtype=torch.int64)])
        [mine] = with_counts([select(batch, split[rank])], process_group=distributed.group.WORLD, averaged_over=2)
        for label, reduce in REDUCERS.items():
            parameter = variable(logprobs)
            loss, _ = ppo_clip(mine, parameter[index], correction=tis(2.0), reduce=reduce)
            loss.backward()
            value, gradient = loss.detach().clone(), parameter.grad
            distributed.all_reduce(value)
            distributed.all_reduce(gradient)
            answers[f"{name} {label}"] = (value / 2, gradient / 2)
    torch.save(answers, Path(place) / f"{rank}.pt")
    distributed.destroy_process_group()
