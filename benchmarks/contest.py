"""Contestants, run in turn (A B A B ...) on the same rows, and the marks that they are held against.

Every figure is one where less is better: seconds, bytes, MiB. A mark is a limit on ours divided by a peer's, so that
what is missing to it is one number on any machine.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import place

OURS = "rollstore"


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Ours divided by the best of some contestants is at most `limit`; or ours alone, without contestants.

    name: how it is said where that is not "at most so much".
    """

    limit: float
    against: tuple[str, ...] = ()
    name: str = ""

    def __str__(self) -> str:
        return self.name or f"<= {self.limit:g}{'x' if self.against else ''}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Figures of one case at one size: `runs` by contestant, in `unit`. `notes` say what the figures do not."""

    case: str
    size: str
    unit: str
    runs: Mapping[str, Sequence[float]]
    marks: Sequence[Mark] = ()
    notes: Sequence[str] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def middle(self, name: str) -> float:
        return statistics.median(self.runs[name])

    def best(self, names: Iterable[str]) -> str | None:
        """The contestant with the least median among those that ran."""
        return min((name for name in names if self.runs.get(name)), key=self.middle, default=None)

    def off(self, mark: Mark) -> tuple[str, float] | None:
        """(whom ours was held against, ours / (theirs * limit)): met where that is at most 1. None where nobody ran."""
        if not mark.against:
            return "", self.middle(OURS) / mark.limit
        best = self.best(mark.against)
        return None if best is None else (best, self.middle(OURS) / self.middle(best) / mark.limit)


Contestant = Callable[[Path], float | None]


def interleaved(contestants: Mapping[str, Contestant], runs: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each run of each contestant, one after the other within a round, and the median seconds of CPU.

    Each run gets an empty folder, and may return its own figure where not all that it does is to be timed. The first
    round does not count. Garbage is collected before, not while, a run is timed.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    cpu: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(runs + 1):
        for name, run in contestants.items():
            folder = Path(tempfile.mkdtemp(dir=place.folder()))
            gc.collect()
            began, busy = time.perf_counter(), time.process_time()
            own = run(folder)
            taken, used = time.perf_counter() - began, time.process_time() - busy
            shutil.rmtree(folder, ignore_errors=True)
            if number == 0:
                gc.freeze()  # what is loaded by now: to look through it before each run takes longer than most runs
            else:
                times[name].append(taken if own is None else own)
                cpu[name].append(used)
    return times, {name: statistics.median(values) for name, values in cpu.items()}


def fastest(*names: str, times: float) -> Mark:
    """Ours is `times` as fast as the fastest of these, or faster."""
    return Mark(limit=1 / times, against=names, name=f">= {times:g}x as fast")
