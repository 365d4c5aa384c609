"""The same forward in two processes that each hold half of every product: what a tensor-parallel layout rounds.

Each linear layer is split over its inner dimension, each process multiplies its half, and gloo adds the two halves up
(in float32), as a row-parallel layout does. Run as a module it is one of the two processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

WORLD = 2
PATIENCE = timedelta(minutes=2)
"""How long one process waits for the other to appear or to answer."""


def scores(checkpoint: str, sequences: Sequence[NDArray[Any]], *, dtype: str) -> list[NDArray[np.float32]]:
    """Raw log-probs [T - 1] of each sequence's tokens from a checkpoint's folder, computed by two processes.

    Raises RuntimeError, with the last line it said, where a process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "in.npz", *sequences)
        command = [sys.executable, "-m", "rollstore.replay.layout", checkpoint, folder, dtype]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, env=environment)
            for rank in range(WORLD)
        ]
        try:
            said = [process.communicate()[1] for process in started]
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        for process, text in zip(started, said, strict=True):
            if process.returncode:
                last = text.strip().splitlines()[-1] if text.strip() else "nothing"
                raise RuntimeError(f"layout: a process of two ended with status {process.returncode}, saying: {last}")
        with np.load(Path(folder) / "out.npz") as read:
            return [read[f"arr_{number}"] for number in range(len(sequences))]


class _Half(torch.nn.Module):
    """A linear layer of which this process multiplies its part of the inner dimension."""

    def __init__(self, whole: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        width = whole.in_features
        self.part = slice(rank * width // WORLD, (rank + 1) * width // WORLD)
        self.weight = whole.weight.detach()[:, self.part].contiguous()
        self.bias: torch.Tensor | None = whole.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.linear(inputs[..., self.part], self.weight)
        summed = out.float()
        torch.distributed.all_reduce(summed)
        summed = summed.to(out.dtype)
        return summed if self.bias is None else summed + self.bias


def _split(module: torch.nn.Module, rank: int) -> None:
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear):
            setattr(module, name, _Half(child, rank))
        else:
            _split(child, rank)


def _run(checkpoint: str, folder: str, dtype: str, rank: int) -> None:
    from transformers import AutoModelForCausalLM

    from rollstore.replay.score import token_logprobs

    where = (Path(folder) / "meet").absolute().as_uri()
    torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=WORLD, timeout=PATIENCE)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, local_files_only=True).eval()
    _split(model, rank)
    with np.load(Path(folder) / "in.npz") as read:
        found = [token_logprobs(model, [read[f"arr_{number}"]])[0] for number in range(len(read.files))]
    if rank == 0:
        np.savez(Path(folder) / "out.npz", *found)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _run(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
