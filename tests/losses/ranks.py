"""What each of two processes computes; apart from the tests, so that a process starts without pytest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from rollstore.batch import select
from rollstore.losses import (
    cispo,
    fixed_length,
    gspo,
    ppo_clip,
    prompt_mean,
    reference_kl,
    reinforce,
    reinforce_zero,
    sampler_kl,
    sao,
    score_centering,
    sequence_mean,
    signal_groups,
    tis,
    token_mean,
    value_clip,
    with_counts,
)
from tests.losses.padded import HEAD, problem, variable

SPLITS = {"even": [[0, 3], [1, 2, 4]], "one has nothing": [[0, 1, 2, 3, 4], []], "one is masked": [[0, 2, 3, 4], [1]]}
CALLS: dict[str, Any] = {
    **{
        f"ppo {label}": lambda b, x, h, reduce=reduce: ppo_clip(b, x, correction=tis(2.0), reduce=reduce)
        for label, reduce in {
            "token": token_mean,
            "sequence": sequence_mean,
            "prompt": prompt_mean,
            "fixed": fixed_length(5),
            "signal": signal_groups(token_mean),
        }.items()
    },
    "reinforce": lambda b, x, h: reinforce(b, x, correction=tis(1.1, level="sequence")),
    "gspo": lambda b, x, h: gspo(b, x, clip=(0.2, 0.3)),
    "cispo": lambda b, x, h: cispo(b, x),
    "sao": lambda b, x, h: sao(b, x, clip=(0.3, 0.3)),
    "reinforce_zero": lambda b, x, h: reinforce_zero(b, x),
    "score_centering": lambda b, x, h: score_centering(b, x, h, weight=tis(1.2), sampler_kl=0.1),
    "reference_kl": lambda b, x, h: reference_kl(b, x, beta=0.1, reduce=signal_groups(token_mean)),
    "sampler_kl": lambda b, x, h: sampler_kl(b, h, beta=0.1),
    "value_clip": lambda b, x, h: value_clip(b, x, reduce=sequence_mean),
}


def step(masked: bool = False) -> tuple[Any, Tensor, Tensor]:
    """The whole step, and the trainer's log-probs at its actions [A] and at its head ids [H]."""
    batch, logprobs, at_head = problem()
    batch = replace(batch, signal=torch.tensor([True, True, False, False, False]))
    if masked:
        batch = replace(batch, weights=torch.where(batch.sequence == 1, 0, batch.weights))
    return batch, logprobs, at_head


def rank_main(rank: int, place: str) -> None:
    """One rank: for each split and loss, this rank's loss and gradient, averaged over ranks as DDP does."""
    distributed.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
    answers: dict[str, Any] = {}
    for name, split in SPLITS.items():
        batch, *given = step(masked=name == "one is masked")
        at = [torch.nonzero(batch.sequence == row).squeeze(-1) for row in split[rank]]
        index = torch.cat([*at, torch.zeros(0, dtype=torch.int64)])
        entries = (index[:, None] * HEAD + torch.arange(HEAD)).reshape(-1)
        [mine] = with_counts([select(batch, split[rank])], process_group=distributed.group.WORLD, averaged_over=2)
        for label, call in CALLS.items():
            x, h = (variable(one) for one in given)
            loss, _ = call(mine, x[index], h[entries])
            (loss + 0 * (x.sum() + h.sum())).backward()
            found = [loss.detach().clone(), x.grad, h.grad]
            for one in found:
                distributed.all_reduce(one)
            answers[f"{name} {label}"] = [one / 2 for one in found]
    torch.save(answers, Path(place) / f"{rank}.pt")
    distributed.destroy_process_group()
