"""Figures of one case: ours, and plain files measured in turn with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

OURS = "rollstore"


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What one contestant took: the figure of each run, and what most and nearly all of them stayed below."""

    runs: tuple[float, ...]
    p50: float = field(init=False)
    p99: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "p50", float(np.median(self.runs)))
        object.__setattr__(self, "p99", float(np.quantile(self.runs, 0.99)))


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One case: figures by contestant in `unit`, ours first. `what` says what a run was.

    rate: (what is counted, how many of them a run has), where a run has so many of something that a rate says more.
    """

    case: str
    what: str
    unit: str
    contestants: Mapping[str, Runs]
    rate: tuple[str, float] | None = None

    def ratio(self, name: str) -> float:
        """How many times ours the contestant takes, by medians: above 1 ours takes less."""
        ours = self.contestants[OURS].p50
        return self.contestants[name].p50 / ours if ours else float("inf")


def figure(
    case: str,
    what: str,
    taken: Mapping[str, Sequence[float]],
    *,
    unit: str = "ms",
    rate: tuple[str, float] | None = None,
) -> Figure:
    """A case from what each contestant took: seconds where the unit is ms, else in the unit."""
    scale = 1e3 if unit == "ms" else 1.0
    runs = {name: Runs(runs=tuple(scale * one for one in values)) for name, values in taken.items() if values}
    return Figure(case=case, what=what, unit=unit, contestants=runs, rate=rate)


def timed(action: Callable[[], object]) -> float:
    """Seconds that an action takes."""
    began = perf_counter()
    action()
    return perf_counter() - began
