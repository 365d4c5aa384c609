"""List columns as numpy sees them: offsets from 0 and values, with slices and nulls taken care of."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def plain(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """One array, whatever the chunks."""
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


class Flat:
    """A list array taken apart.

    `offsets` int64 [n + 1] from 0; `values` the items of all rows in order; `valid` bool [n], false where the list is
    null (its length then counts as 0). Holds for slices, filtered arrays and null rows with stale extents alike.
    """

    def __init__(self, array: pa.Array) -> None:
        self.valid = array.is_valid().to_numpy(zero_copy_only=False)
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        self.offsets = np.zeros(len(array) + 1, np.int64)
        np.cumsum(lengths, out=self.offsets[1:])
        self.values: pa.Array = array.flatten()

    @cached_property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64 [n]; 0 where the list is null."""
        return np.diff(self.offsets)

    @cached_property
    def rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64 [items]: the row each item belongs to."""
        return np.repeat(np.arange(len(self.valid)), self.lengths)

    @cached_property
    def known(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """bool [items]: false where the item is null."""
        return self.values.is_valid().to_numpy(zero_copy_only=False)

    def numpy(self, missing: Any = 0) -> np.ndarray[Any, Any]:
        """The items [items] with nulls replaced by `missing`; look at `known` before believing one."""
        values = self.values.fill_null(missing) if self.values.null_count else self.values
        return values.to_numpy(zero_copy_only=False)


def flat(column: pa.ChunkedArray | pa.Array) -> Flat:
    """Take a list column apart."""
    return Flat(plain(column))


class Rows:
    """A table seen column by column; each column is taken apart once, when first asked for."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.count = table.num_rows
        self._columns = dict(zip(table.schema.names, table.columns, strict=True))
        self._arrays: dict[str, pa.Array | None] = {}
        self._flat: dict[str, Flat] = {}

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
            if array is None:
                return None
            self._flat[name] = flat(array)
        return self._flat[name]

    def numbers(self, name: str, missing: Any = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
        """(values [rows], known [rows]) of a scalar column, or None where it is absent or all null."""
        array = self.array(name)
        if array is None:
            return None
        known = array.is_valid().to_numpy(zero_copy_only=False)
        return array.fill_null(missing).to_numpy(zero_copy_only=False), known

    def objects(self, name: str) -> list[Any]:
        """Python values of a scalar column, all None where it is absent."""
        array = self.array(name)
        return [None] * self.count if array is None else array.to_pylist()
