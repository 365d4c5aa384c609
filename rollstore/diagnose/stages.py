"""How long the stages of a step take one after the other, and how long at least when they overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of one step, in seconds.

    `seconds`: of every stage. `barriers`: those during which nothing else runs, as the transfer of weights.
    """

    seconds: Mapping[str, float]
    barriers: tuple[str, ...] = ("sync",)

    @property
    def serial(self) -> float:
        """All stages, one after the other."""
        return sum(self.seconds.values())

    @property
    def overlapped(self) -> float:
        """The least a step can take where all stages but the barriers work side by side: the longest, and the barriers.

        A bound: data that wait for each other, or share a machine, take longer.
        """
        side_by_side = [time for name, time in self.seconds.items() if name not in self.barriers]
        return max(side_by_side, default=0.0) + sum(self.seconds.get(name, 0.0) for name in self.barriers)

    @property
    def speedup(self) -> float | None:
        """serial / overlapped; None where nothing takes time."""
        return self.serial / self.overlapped if self.overlapped > 0 else None
