"""List columns as numpy sees them: offsets from 0 and values, with slices and nulls taken care of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollstore.schema.lazy import lazy

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def plain(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """One array, whatever the chunks. Raises ArrowInvalid where the whole is too large for one."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):
        raise pa.ArrowInvalid("more bytes than one array of this type can hold")
    return whole


def is_known(array: pa.Array) -> Bools:
    """bool [n]: false where the value is null."""
    if not array.null_count:
        return np.ones(len(array), bool)
    return bits(array.is_valid())


def bits(array: pa.BooleanArray) -> Bools:
    """bool [n]: the values of an array without nulls, in a twentieth of the time of `to_numpy`."""
    if not len(array):
        return np.zeros(0, bool)
    first, skipped = divmod(array.offset, 8)
    held = np.frombuffer(array.buffers()[1], np.uint8, offset=first, count=(skipped + len(array) + 7) // 8)
    return np.unpackbits(held, count=skipped + len(array), bitorder="little")[skipped:].view(bool)


class Flat:
    """A list array taken apart.

    `offsets` int64 [n + 1] from 0; `values` the items of all rows in order; `valid` bool [n], false where the list is
    null (its length then counts as 0). Holds for slices, filtered arrays and null rows with stale extents alike.
    """

    def __init__(self, array: pa.Array) -> None:
        self.valid = is_known(array)
        ends = array.offsets.to_numpy().astype(np.int64)
        if array.null_count and np.diff(ends)[~self.valid].any():  # nulls over items that are nobody's
            lengths = np.where(self.valid, np.diff(ends), 0)
            self.offsets: Ints = np.zeros(len(array) + 1, np.int64)
            np.cumsum(lengths, out=self.offsets[1:])
            owned = pa.array(np.repeat(self.valid, np.diff(ends)))
            self.values: pa.Array = array.values.slice(int(ends[0]), int(ends[-1] - ends[0])).filter(owned)
        else:
            self.offsets = ends - ends[0]
            self.values = array.values.slice(int(ends[0]), int(ends[-1] - ends[0]))

    @lazy
    def lengths(self) -> Ints:
        """int64 [n]; 0 where the list is null."""
        return np.diff(self.offsets)

    @lazy
    def rows(self) -> Ints:
        """int64 [items]: the row each item belongs to."""
        return np.repeat(np.arange(len(self.valid)), self.lengths)

    @lazy
    def known(self) -> Bools:
        """bool [items]: false where the item is null."""
        return is_known(self.values)

    def numpy(self, missing: Any = 0) -> npt.NDArray[Any]:
        """The items [items] with nulls replaced by `missing`; look at `known` before believing one."""
        values = self.values.fill_null(missing) if self.values.null_count else self.values
        return bits(values) if pa.types.is_boolean(values.type) else values.to_numpy(zero_copy_only=False)

    def totals(self, values: npt.NDArray[Any]) -> Ints:
        """int64 [n]: the sum of `values` [items] over each row; right for empty rows, wherever they stand."""
        sums = running_sum(values)
        return sums[self.offsets[1:]] - sums[self.offsets[:-1]]

    def row_of(self, items: Any) -> Ints:
        """int64: the row of each of some items, for when they are few."""
        return np.searchsorted(self.offsets, items, side="right") - 1


def flat(column: pa.ChunkedArray | pa.Array) -> Flat:
    """Take a list column apart."""
    return Flat(plain(column))


def running_sum(values: npt.NDArray[Any]) -> Ints:
    """int64 [n + 1]: sums of the first 0, 1, ... n values."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


class Rows:
    """A table seen column by column; each column is taken apart once, when first asked for.

    From a table, or from arrays of `count` rows by name.
    """

    def __init__(self, data: pa.Table | pa.RecordBatch | Mapping[str, pa.Array], count: int | None = None) -> None:
        self._columns: Mapping[str, Any]
        if isinstance(data, Mapping):
            self._columns, self.count = data, count or 0
        else:
            self._columns = dict(zip(data.schema.names, data.columns, strict=True))
            self.count = data.num_rows
        self._arrays: dict[str, pa.Array | None] = {}
        self._flat: dict[str, Flat | None] = {}
        self._children: dict[str, dict[str, pa.Array]] = {}

    def array(self, name: str) -> pa.Array | None:
        """The column, or None where it is absent or all null."""
        if name not in self._arrays:
            column = self._columns.get(name)
            empty = column is None or column.null_count == self.count
            self._arrays[name] = None if empty else plain(column)
        return self._arrays[name]

    def list(self, name: str) -> Flat | None:
        """The list column flattened, or None where it is absent or all null."""
        if name not in self._flat:
            array = self.array(name)
            self._flat[name] = None if array is None else Flat(array)
        return self._flat[name]

    def numbers(self, name: str, missing: Any = 0) -> tuple[npt.NDArray[Any], Bools] | None:
        """(values [rows], known [rows]) of a scalar column, or None where it is absent or all null."""
        array = self.array(name)
        if array is None:
            return None
        filled = array.fill_null(missing) if array.null_count else array
        return filled.to_numpy(zero_copy_only=False), is_known(array)

    def known(self, name: str) -> Bools:
        """bool [rows]: whether the column has a value there."""
        array = self.array(name)
        return np.zeros(self.count, bool) if array is None else is_known(array)

    def objects(self, name: str) -> list[Any]:
        """Python values of a scalar column, all None where it is absent."""
        array = self.array(name)
        return [None] * self.count if array is None else array.to_pylist()

    @lazy
    def names(self) -> list[str]:
        """The columns, absent ones left out."""
        return list(self._columns)

    def children(self, name: str) -> dict[str, pa.Array]:
        """The fields of a list of structs, over all items."""
        if name not in self._children:
            lists = self.list(name)
            values = (
                [] if lists is None else zip([f.name for f in lists.values.type], lists.values.flatten(), strict=True)
            )
            self._children[name] = dict(values)
        return self._children[name]

    @lazy
    def overridden(self) -> set[str]:
        """Fields that some span has a value in."""
        return {name for name, values in self.children("spans").items() if values.null_count < len(values)}

    @lazy
    def drawn(self) -> Bools:
        """bool [tokens]: action_mask over all rows; a null in it counts as no action."""
        mask = self.list("action_mask")
        return np.zeros(0, bool) if mask is None else mask.numpy(False)

    @lazy
    def drawn_before(self) -> Ints:
        """int64 [tokens + 1]: actions before each token of all rows."""
        return running_sum(self.drawn)

    @lazy
    def actions(self) -> Ints:
        """int64 [rows]: how many tokens of each row are actions."""
        mask = self.list("action_mask")
        if mask is None:
            return np.zeros(self.count, np.int64)
        return self.drawn_before[mask.offsets[1:]] - self.drawn_before[mask.offsets[:-1]]
