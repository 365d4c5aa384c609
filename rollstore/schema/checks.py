"""What is wrong with rows, as data: every problem found, each with its column, kind, row, what was found and wanted.

The functions here are pure and look at columns, never at row objects. Checks over several columns are in `rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.schema.column import Column, Table
from rollstore.schema.flat import Flat, Rows, is_known
from rollstore.schema.maps import key_problems
from rollstore.schema.problem import Kind, Problem, at, first_of_each
from rollstore.schema.rules import RULES
from rollstore.schema.times import readable, shown, unreadable

FEW = 256
"""Up to so many words it is quicker to look at each than to have Arrow make them unique."""

REQUIRED = "a value: it is required"


def problems(rows: Rows, of: Table) -> list[Problem]:
    """Every problem of rows whose types already are the schema's (see `conform`). An absent column is all null."""
    found: list[Problem] = []
    everywhere = np.arange(rows.count)
    for column in of.columns:
        array = rows.array(column.name)
        if array is not None:
            lists = rows.list(column.name) if column.is_list else None
            found.extend(_column_problems(array, column, column.name, everywhere, lists))
        elif column.required and rows.count:
            found.extend(at(column.name, "null", everywhere, "null", REQUIRED))
    for name in rows.names:
        if name.startswith("x_") and (array := rows.array(name)) is not None:
            found.extend(key_problems(array, name, everywhere))
    if any(p.column in {"tokens", "action_mask"} and p.kind in {"null", "null_item"} for p in found):
        return found  # nothing can be aligned to a mask that is not there
    for check in RULES[of.name]:
        found.extend(check(rows))
    return found


def _column_problems(
    array: pa.Array, column: Column, path: str, rows: np.ndarray[Any, Any], lists: Flat | None
) -> Iterator[Problem]:
    """Required, enums, bounds, NaN and null items of one column, then of its children. `rows` maps values to rows."""
    if column.required and array.null_count:
        yield from at(path, "null", rows[~is_known(array)], "null", REQUIRED)
    owner = None
    if lists is not None:
        array, owner = lists.values, lists
        if array.null_count and not column.nullable_items:
            nulls = lists.row_of(np.flatnonzero(~lists.known))
            yield from at(path, "null_item", rows[nulls], "a null in the list", "a value at every place")
    for kind, bad, wanted in _value_problems(array, column):
        items = np.flatnonzero(bad)
        owners = rows[items] if owner is None else rows[owner.row_of(items)]
        first = first_of_each(owners, shown(array.take(pa.array(items))))
        yield from at(path, kind, owners, lambda r, f=first: f[r], wanted)
    if pa.types.is_map(column.type):
        yield from key_problems(array, path, rows)
    if column.children:
        places = rows if owner is None else rows[owner.rows]
        if array.null_count:
            places, array = places[is_known(array)], array.drop_null()
        for child, values in zip(column.children, array.flatten(), strict=False):
            if child.required or values.null_count < len(values):
                inner = Flat(values) if child.is_list else None
                yield from _column_problems(values, child, f"{path}.{child.name}", places, inner)


def _value_problems(values: pa.Array, column: Column) -> Iterator[tuple[Kind, np.ndarray[Any, Any], str]]:
    """(kind, which values, what is wanted) of the values [n] of one column or list."""
    if column.enum:
        words = values if len(values) <= FEW else pc.unique(values)
        strange = [word for word in set(words.to_pylist()) if word is not None and word not in column.enum]
        if strange:
            bad = pc.is_in(values, value_set=pa.array(strange, pa.string()))
            yield "unknown_enum", bad.to_numpy(zero_copy_only=False), "one of " + ", ".join(column.enum)
    late = unreadable(values)
    if late is not None:
        yield "out_of_range", late, readable(values.type)
    if pa.types.is_floating(values.type):
        yield from _float_problems(values, column)
    elif column.minimum is not None and values.null_count < len(values):
        numbers = (values.fill_null(column.minimum) if values.null_count else values).to_numpy(zero_copy_only=False)
        if numbers.min() < column.minimum:
            kind: Kind = "negative" if column.minimum == 0 else "too_small"
            yield kind, numbers < column.minimum, f"at least {column.minimum}"


def _float_problems(values: pa.Array, column: Column) -> Iterator[tuple[Kind, np.ndarray[Any, Any], str]]:
    numbers = values.to_numpy(zero_copy_only=False)  # a null is NaN there, and NaN is outside no bound
    if column.minimum is not None or column.maximum is not None:
        least = -np.inf if column.minimum is None else column.minimum
        most = np.inf if column.maximum is None else column.maximum
        bad = (numbers < least) | (numbers > most)
        if bad.any():
            yield "out_of_range", bad, column.bounds
    nan = np.isnan(numbers)
    if np.count_nonzero(nan) > values.null_count:
        yield "nan", nan & is_known(values), "a number, or null where it is not known"
