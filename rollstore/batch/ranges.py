"""Lists that lie one after another in a flat array: where the items of some of them are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Part(NamedTuple):
    """Some of the lists, packed: `places` int64 [items] in the flat array, `lengths` int64 [lists], `offsets` int64
    [lists + 1] of the lists among those items."""

    places: Ints
    lengths: Ints
    offsets: Ints


class Ranges:
    """offsets: int64 [lists + 1], from 0 to the number of items; lengths: int64 [lists]."""

    def __init__(self, offsets: Ints) -> None:
        self.offsets = offsets
        self.lengths = np.diff(offsets)

    def of(self, lists: Ints) -> Part:
        """The items of the given lists, in that order."""
        lengths = self.lengths[lists]
        offsets = np.zeros(len(lists) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        places = np.arange(offsets[-1])
        places += np.repeat(self.offsets[lists] - offsets[:-1], lengths)
        return Part(places, lengths, offsets)
