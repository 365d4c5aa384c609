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
from rollstore.schema.flat import Flat, Rows, flat
from rollstore.schema.problem import Problem, at
from rollstore.schema.rules import RULES

__all__ = ["Problem", "problems"]


def problems(table: pa.Table, of: Table) -> list[Problem]:
    """Every problem of a table whose types already are the schema's (see `conform`). An absent column is all null."""
    found: list[Problem] = []
    rows = Rows(table)
    for column in of.columns:
        array = rows.array(column.name)
        if array is not None:
            lists = rows.list(column.name) if column.is_list else None
            found.extend(_column_problems(array, column, column.name, np.arange(rows.count), lists))
        elif column.required and rows.count:
            everywhere = np.arange(rows.count)
            found.extend(at(column.name, "null", everywhere, lambda _: "null", "a value: it is required"))
    if any(p.column in {"tokens", "action_mask"} and p.kind in {"null", "null_item"} for p in found):
        return found  # nothing can be aligned to a mask that is not there
    for check in RULES[of.name]:
        found.extend(check(rows))
    return found


def _column_problems(
    array: pa.Array, column: Column, path: str, rows: np.ndarray[Any, Any], lists: Flat | None
) -> Iterator[Problem]:
    """Required, enums, bounds and null items of one column, then of its children. `rows` maps values to table rows."""
    if column.required and array.null_count:
        nulls = rows[array.is_null().to_numpy(zero_copy_only=False)]
        yield from at(path, "null", nulls, lambda _: "null", "a value: it is required")
    if lists is not None:
        array, rows = lists.values, rows[lists.rows]
        if array.null_count and not column.nullable_items:
            nulls = rows[array.is_null().to_numpy(zero_copy_only=False)]
            yield from at(path, "null_item", np.unique(nulls), lambda _: "a null in the list", "a value at every place")
    if column.enum:
        yield from _enum_problems(array, column, path, rows)
    if column.minimum is not None:
        yield from _bound_problems(array, column.minimum, path, rows)
    if column.children:
        if array.null_count:
            valid = array.is_valid()
            array, rows = array.filter(valid), rows[valid.to_numpy(zero_copy_only=False)]
        for child, values in zip(column.children, array.flatten(), strict=True):
            if child.required or values.null_count < len(values):
                inner = flat(values) if child.is_list else None
                yield from _column_problems(values, child, f"{path}.{child.name}", rows, inner)


def _bound_problems(values: pa.Array, minimum: int, path: str, rows: np.ndarray[Any, Any]) -> Iterator[Problem]:
    least = pc.min(values).as_py()
    if least is None or least >= minimum:
        return
    low = pc.less(values, pa.scalar(minimum, values.type)).fill_null(False)
    low_rows = rows[low.to_numpy(zero_copy_only=False)]
    first = dict(zip(low_rows[::-1].tolist(), values.filter(low).to_pylist()[::-1], strict=True))
    kind = "negative" if minimum == 0 else "too_small"
    yield from at(path, kind, sorted(first), lambda r: str(first[r]), f"at least {minimum}")


def _enum_problems(values: pa.Array, column: Column, path: str, rows: np.ndarray[Any, Any]) -> Iterator[Problem]:
    strange = [word for word in pc.unique(values).to_pylist() if word is not None and word not in column.enum]
    if strange:
        bad = pc.is_in(values, value_set=pa.array(strange, pa.string()))
        bad_rows = rows[bad.to_numpy(zero_copy_only=False)]
        first = dict(zip(bad_rows[::-1].tolist(), values.filter(bad).to_pylist()[::-1], strict=True))
        wanted = "one of " + ", ".join(column.enum)
        yield from at(path, "unknown_enum", sorted(first), lambda r: repr(first[r]), wanted)
