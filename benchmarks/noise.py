"""Keyed Gumbel noise for whole rows of a vocabulary, beside the draw that an engine makes without a key.

The peer is `torch.empty(...).exponential_()` with a generator. Ours is
numpy; eager torch stands beside it for one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.contest import OURS, Contestant, Mark, Result, interleaved
from benchmarks.settings import Settings, installed

VOCABULARIES = (49_152, 151_936)
ROWS = (1, 4, 16)
PEER = "torch exponential_"


def results(settings: Settings) -> Iterator[Result]:
    if not installed("torch"):
        return
    for width in VOCABULARIES:
        for rows in ROWS:
            yield at(rows, width, settings.runs)


def at(rows: int, width: int, runs: int) -> Result:
    import torch

    from rollstore.replay import noise

    generator = torch.Generator().manual_seed(0)
    out = torch.empty(rows, width)
    positions = np.arange(rows)

    def peer(_: Path) -> None:
        out.exponential_(generator=generator)

    def ours(_: Path) -> None:
        noise.gumbel(key=1, sample=0, positions=positions, vocab_size=width)

    def eager(_: Path) -> None:
        noise.gumbel_torch(key=1, sample=0, positions=positions, vocab_size=width)

    contestants: dict[str, Contestant] = {OURS: ours, PEER: peer}
    if rows == 1:
        contestants["rollstore, eager torch"] = eager
    times, cpu = interleaved(contestants, 4 * runs)
    return Result(
        case="noise, numpy",
        size=f"[{rows}, {width:,}]",
        unit="s",
        runs=times,
        marks=[Mark(limit=1.0, against=(PEER,))],
        details={"cpu": cpu},
    )
