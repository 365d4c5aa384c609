"""The caller's own columns: which types every reader can hold, and which values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from rollstore.schema.flat import Flat
from rollstore.schema.maps import key_problems
from rollstore.schema.problem import Problem, at, first_of_each
from rollstore.schema.times import readable, shown, unreadable

t = pa.types

FINE = (
    "bool, int8 to uint64, float32, float64, decimal128, string, binary, date, time and duration down to us, "
    "timestamp with zone UTC down to us, or lists, structs and maps of these"
)


def extra_problems(columns: Mapping[str, pa.Array]) -> Iterator[Problem]:
    """Every problem of the columns whose names begin with x_.

    Nanoseconds, decimal256, float16 and calendar intervals would lose digits or fail in one reader or another; a zone
    other than UTC would be another type in each.
    """
    for name, array in columns.items():
        if name.startswith("x_"):
            wrong = [*_type_problems(array.type, name)]
            rows = np.arange(len(array))
            yield from wrong or (*_range_problems(array, name, rows), *key_problems(array, name, rows))


def _type_problems(type_: pa.DataType, path: str) -> Iterator[Problem]:
    if t.is_struct(type_) and not type_.num_fields:  # Parquet has none
        yield Problem(column=path, kind="wrong_type", row=None, found="a struct without fields", wanted=FINE)
    elif t.is_struct(type_) and len({field.name.lower() for field in type_}) < type_.num_fields:
        found = f"a struct with fields {', '.join(field.name for field in type_)}"
        wanted = "names that differ beyond upper and lower case: SQL knows no other difference"
        yield Problem(column=path, kind="wrong_type", row=None, found=found, wanted=wanted)
    elif t.is_nested(type_):
        for name, inner in _inner(type_, path):
            yield from _type_problems(inner, name)
    elif t.is_timestamp(type_) and type_.tz is None:
        yield Problem(
            column=path, kind="naive_timestamp", row=None, found="times without a zone", wanted="the zone UTC"
        )
    elif not _is_fine(type_):
        yield Problem(column=path, kind="wrong_type", row=None, found=str(type_), wanted=FINE)


def _inner(type_: pa.DataType, path: str) -> Iterator[tuple[str, pa.DataType]]:
    """(path, type) of what a nested type holds; items of a list, keys and values of a map go by the outer name."""
    if t.is_map(type_):
        yield from ((path, type_.key_type), (path, type_.item_type))
        return
    for field in (type_.field(n) for n in range(type_.num_fields)):
        yield f"{path}.{field.name}" if t.is_struct(type_) else path, field.type


def _is_fine(type_: pa.DataType) -> bool:
    if t.is_timestamp(type_):
        return type_.unit != "ns" and type_.tz == "UTC"
    if t.is_duration(type_) or t.is_time(type_):
        return type_.unit != "ns"
    return (
        t.is_boolean(type_)
        or t.is_integer(type_)
        or t.is_float32(type_)
        or t.is_float64(type_)
        or t.is_decimal128(type_)
        or t.is_string(type_)
        or t.is_large_string(type_)
        or t.is_binary(type_)
        or t.is_large_binary(type_)
        or (t.is_fixed_size_binary(type_) and type_.byte_width > 0)  # Parquet has no empty one
        or t.is_date(type_)
    )


def _range_problems(array: pa.Array, path: str, rows: Any) -> Iterator[Problem]:
    """Times that Python cannot hold. `rows` [n] maps values to rows of the call."""
    if t.is_struct(array.type):
        for (name, _), child in zip(_inner(array.type, path), array.flatten(), strict=True):
            yield from _range_problems(child, name, rows)
    elif t.is_map(array.type) or t.is_list(array.type) or t.is_large_list(array.type):
        lists = Flat(array)
        owners = rows[lists.rows]
        sides = lists.values.flatten() if t.is_map(array.type) else [lists.values]
        for side in sides:
            yield from _range_problems(side, path, owners)
    else:
        bad = unreadable(array)
        if bad is not None:
            first = first_of_each(rows[bad], shown(array.filter(pa.array(bad))))
            yield from at(path, "out_of_range", list(first), lambda r: first[r], readable(array.type))
