"""What is left of an epoch: its units in order, their cut into steps, and who takes what of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollstore.readers import order
from rollstore.readers.order import Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The same on every rank. Units are numbered as in the selection.

    `units` int64 [n] still to come; `after` int64 [n]: the position of the epoch once each is given; `tokens` int64
    [n]; `windows` int64 [n]: the window each is read with; `cuts` int64 [batches + 1]: where batches begin among them.
    """

    units: Ints
    after: Ints
    tokens: Ints
    windows: Ints
    cuts: Ints
    position: int
    world_size: int

    @property
    def steps(self) -> int:
        """Steps that every rank makes."""
        return order.steps(len(self.cuts) - 1, self.world_size)

    def position_after(self, steps: int) -> int:
        """The position once so many steps are given."""
        batches = min(steps * self.world_size, len(self.cuts) - 1)
        return int(self.after[self.cuts[batches] - 1]) if batches else self.position

    def share(self, step: int, rank: int) -> Ints:
        """Places in `units` of what a rank takes of a step; empty for a rank that only keeps step."""
        first = step * self.world_size
        bounds = self.cuts[first : first + self.world_size + 1]
        begin, end = int(bounds[0]), int(bounds[-1])
        if self.world_size == 1:
            return np.arange(begin, end)
        return begin + order.share(self.tokens[begin:end], bounds - begin, rank=rank, world_size=self.world_size)


def plan(
    tokens: Ints,
    fits: npt.NDArray[np.bool_],
    *,
    seed: int,
    epoch: int,
    position: int,
    window: int,
    world_size: int,
    budget: int | None,
    most: int | None,
) -> Plan:
    """Plan the rest of an epoch. tokens int64, fits bool [units]: size of each unit, and whether it is loaded."""
    whole, starts = order.epoch_order(tokens, seed=seed, epoch=epoch, window=window)
    window_of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    places = position + np.flatnonzero(fits[whole[position:]])
    units = whole[places]
    return Plan(
        units=units,
        after=places + 1,
        tokens=tokens[units],
        windows=window_of[places],
        cuts=order.cuts(tokens[units], budget=budget, most=most),
        position=position,
        world_size=world_size,
    )
