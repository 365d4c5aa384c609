"""Lists that lie one after another in a flat array: where the items of some of them are, and copies of those."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rollstore.schema.lazy import lazy

Ints = npt.NDArray[np.int64]


class Part:
    """Some of the lists, packed in the order asked.

    begins int64 [lists]: where each begins in the flat array; lengths int64 [lists]; offsets int64 [lists + 1]: where
    each begins among the items of all, `count` of them.
    """

    def __init__(self, begins: Ints, lengths: Ints) -> None:
        self.begins, self.lengths = begins, lengths
        self.offsets: Ints = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=self.offsets[1:])
        self.count = int(self.offsets[-1])

    @lazy
    def places(self) -> Ints:
        """int64 [items]: where each item stands in the flat array."""
        places = np.arange(self.count)
        places += np.repeat(self.begins - self.offsets[:-1], self.lengths)
        return places

    @lazy
    def positions(self) -> Ints:
        """int64 [items]: where each item stands in its list."""
        positions = np.arange(self.count)
        positions -= np.repeat(self.offsets[:-1], self.lengths)
        return positions

    def take(self, values: npt.NDArray[Any], dtype: Any = None) -> npt.NDArray[Any]:
        """[items]: their values among those of the flat array, as another type where one is given."""
        return values.take(self.places).astype(values.dtype if dtype is None else dtype, copy=False)


class Ranges:
    """offsets: int64 [lists + 1], from 0 to the number of items; lengths: int64 [lists]."""

    def __init__(self, offsets: Ints) -> None:
        self.offsets = offsets
        self.lengths = np.diff(offsets)

    def of(self, lists: Ints) -> Part:
        """The given lists."""
        return Part(self.offsets[lists], self.lengths[lists])

    def within(self, outer: Part) -> Part:
        """The items of some lists being lists themselves, these: the neighbours in each as one long list."""
        begins = self.offsets[outer.begins]
        return Part(begins, self.offsets[outer.begins + outer.lengths] - begins)


class Marks:
    """Marks of items, counted: how many there are before any place. Eight to a byte, with a running sum over bytes."""

    def __init__(self, marks: npt.NDArray[np.bool_]) -> None:
        self._items = len(marks)
        self._bytes = np.append(np.packbits(marks, bitorder="little"), np.uint8(0))
        self._before = np.zeros(len(self._bytes) + 1, np.int64)
        np.cumsum(_BITS.take(self._bytes), out=self._before[1:])
        self.count = int(self._before[-1])

    def before(self, places: Ints) -> Ints:
        """int64: how many marks stand before each of some places; none before the items begin, all past their end."""
        places = np.clip(places, 0, self._items)
        byte = places >> 3
        return self._before[byte] + _BITS[self._bytes[byte] & _FIRST[places & 7]]


_BITS = np.array([byte.bit_count() for byte in range(256)], np.uint8)
"""How many bits of a byte are set."""
_FIRST = np.array([(1 << bits) - 1 for bits in range(8)], np.uint8)
"""The first bits of a byte."""
