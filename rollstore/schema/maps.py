"""Maps name each key once: readers differ in what they make of a second one, and DuckDB refuses the whole answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.schema.flat import Flat, Ints
from rollstore.schema.problem import Problem, at, first_of_each

t = pa.types


def key_problems(array: pa.Array, path: str, rows: Any) -> Iterator[Problem]:
    """Keys that stand twice in one map, at any depth of a column. `rows` int64 [n] maps values to rows."""
    if not _holds_map(array.type) or array.null_count == len(array):
        return
    if t.is_struct(array.type):
        for field, child in zip(array.type, array.flatten(), strict=True):
            yield from key_problems(child, f"{path}.{field.name}", rows)
        return
    lists = Flat(array)
    sides = lists.values.flatten() if t.is_map(array.type) else [lists.values]
    owners = rows[lists.rows]
    if t.is_map(array.type):
        again = _again(lists, sides[0])
        if len(again):
            first = first_of_each(owners[again], sides[0].take(pa.array(again)).to_pylist())
            found = {row: f"the key {key!a:.80} more than once in one map" for row, key in first.items()}
            yield from at(path, "duplicate_key", list(found), lambda r: found[r], "each key once")
    for side in sides:
        yield from key_problems(side, path, owners)


def _holds_map(type_: pa.DataType) -> bool:
    if t.is_map(type_):
        return True
    if t.is_struct(type_):
        return any(_holds_map(field.type) for field in type_)
    return (t.is_list(type_) or t.is_large_list(type_)) and _holds_map(type_.value_type)


def _again(maps: Flat, keys: pa.Array) -> Ints:
    """int64: the entries whose key stood in their map before."""
    if len(keys) < 2 or maps.lengths.max() < 2:
        return np.zeros(0, np.int64)
    try:
        codes = pc.dictionary_encode(keys, null_encoding="encode").indices.to_numpy(zero_copy_only=False)
    except pa.ArrowNotImplementedError:  # keys that are structs or lists
        numbers: dict[str, int] = {}
        codes = np.array([numbers.setdefault(repr(key), len(numbers)) for key in keys.to_pylist()])
    entries = maps.rows * (int(codes.max()) + 1) + codes
    order = np.argsort(entries, kind="stable")
    return np.sort(order[1:][entries[order][1:] == entries[order][:-1]])
