"""Keyed Gumbel noise for whole rows of a vocabulary, beside the draw that an engine makes without a key.

The peer is `torch.empty(...).exponential_()` with a generator. Ours are numpy and, where it is installed, numba;
eager torch stands beside them for one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.contest import OURS, Contestant, Mark, Result, interleaved
from benchmarks.settings import Settings, installed

VOCABULARIES = (49_152, 151_936)
ROWS = (1, 4, 16)
PEER = "torch exponential_"


def results(settings: Settings) -> Iterator[Result]:
    if not installed("torch"):
        return
    for library, limit in (("numpy", 1.0), ("numba", 0.3)):
        if installed(library):
            for width in VOCABULARIES:
                for rows in ROWS:
                    yield at(rows, width, settings.runs, library, limit)


def at(rows: int, width: int, runs: int, library: str, limit: float) -> Result:
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
    if rows == 1 and library == "numpy":
        contestants["rollstore, eager torch"] = eager
    chosen = library == "numba"
    with mock.patch.object(noise, "_numba_is_installed", lambda: chosen):  # noqa: PT008  # a mock's call takes 0.1 ms
        times, cpu = interleaved(contestants, 4 * runs)
    return Result(
        case=f"noise, {library}",
        size=f"[{rows}, {width:,}]",
        unit="s",
        runs=times,
        marks=[Mark(limit=limit, against=(PEER,))],
        details={"cpu": cpu},
    )
