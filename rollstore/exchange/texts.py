"""Arrow values as JSON text, column by column, so that `values.py` makes the same arrays of it again.

Integers have all their digits. A float is the shortest number that reads back as the same one; NaN and the infinities
are the texts "NaN", "Infinity" and "-Infinity". Bytes are base64, times and dates ISO 8601, durations and times of day
whole numbers of their unit, decimals texts. A map is an object where its keys are distinct texts, else a list of pairs.
A null child of a struct is left out, a null item of a list is null.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.schema.flat import Flat

t = pa.types

NOTHING = ""
_SPECIAL = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"', "-0": "-0.0"}


def lines(table: pa.Table) -> list[str]:
    """Each row as the text of one JSON object, without the columns that are null in it."""
    if not table.num_rows:
        return []
    columns = [column.combine_chunks() for column in table.columns]
    return _objects(table.column_names, columns, table.num_rows).to_pylist()


def texts(array: pa.Array) -> pa.Array:
    """The JSON of each value [n]; null stays null."""
    type_ = array.type
    if t.is_null(type_):
        return pa.nulls(len(array), pa.string())
    if t.is_map(type_):
        return _maps(array)
    if t.is_list(type_) or t.is_large_list(type_):
        lists = Flat(array)
        return _lists(lists, pc.fill_null(texts(lists.values), "null"))
    if t.is_struct(type_):
        made = _objects([field.name for field in type_], array.flatten(), len(array))
        return _without(made, array)
    if t.is_floating(type_):
        return _floats(array)
    if t.is_boolean(type_) or t.is_integer(type_):
        return array.cast(pa.string())
    if t.is_timestamp(type_):
        return _quoted(pc.replace_substring(array.cast(pa.string()), " ", "T"))
    if t.is_date32(type_) or t.is_decimal(type_):
        return _quoted(array.cast(pa.string()))
    if t.is_time(type_) or t.is_duration(type_) or t.is_date64(type_):
        return array.cast(pa.int32() if type_.bit_width == 32 else pa.int64()).cast(pa.string())
    if t.is_string(type_) or t.is_large_string(type_):
        return _each(array, lambda text: msgspec.json.encode(text).decode())
    return _each(array, lambda data: f'"{base64.b64encode(data).decode("ascii")}"')


def _each(array: pa.Array, encode: Callable[[Any], str]) -> pa.Array:
    """By Python, once for each different value: most columns of texts hold few."""
    words: Any = array.dictionary_encode()
    made = pa.array([encode(word) for word in words.dictionary.to_pylist()], pa.string())
    return made.take(words.indices)


def _quoted(array: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise('"', array, '"', NOTHING)


def _floats(array: pa.Array) -> pa.Array:
    made = array.cast(pa.string())
    for word, text in _SPECIAL.items():
        found = pc.equal(made, word)
        if pc.any(found).as_py():
            made = pc.if_else(found, text, made)
    return made


def _without(made: pa.Array, array: pa.Array) -> pa.Array:
    """The texts, null where the value is."""
    return pc.if_else(array.is_valid(), made, pa.scalar(None, pa.string())) if array.null_count else made


def _lists(lists: Flat, items: pa.Array, around: tuple[str, str] = ("[", "]")) -> pa.Array:
    held = pa.ListArray.from_arrays(pa.array(lists.offsets, pa.int32()), items, mask=pa.array(~lists.valid))
    return pc.binary_join_element_wise(around[0], pc.binary_join(held, ","), around[1], NOTHING)


def _objects(names: list[str], columns: list[pa.Array], count: int) -> pa.Array:
    """One object a row of its values that are not null, in the order of the columns."""
    # The join leaves out rows in which every piece is null, so one piece never is; each other brings its own comma.
    pieces: list[Any] = [pa.array([NOTHING] * count, pa.string())]
    for name, column in zip(names, columns, strict=True):
        if column.null_count < count:
            head = f",{msgspec.json.encode(name).decode()}:"
            pieces.append(pc.binary_join_element_wise(head, texts(column), NOTHING))
    inside = pc.binary_join_element_wise(*pieces, NOTHING, null_handling="skip")
    return pc.binary_join_element_wise("{", pc.replace_substring_regex(inside, "^,", NOTHING), "}", NOTHING)


def _maps(array: pa.Array) -> pa.Array:
    lists = Flat(array)
    keys, items = lists.values.flatten()
    sides = texts(keys), pc.fill_null(texts(items), "null")
    if (t.is_string(keys.type) or t.is_large_string(keys.type)) and _distinct(lists, keys):
        return _lists(lists, pc.binary_join_element_wise(*sides, ":"), ("{", "}"))
    return _lists(lists, pc.binary_join_element_wise("[", pc.binary_join_element_wise(*sides, ","), "]", NOTHING))


def _distinct(lists: Flat, keys: pa.Array) -> bool:
    """Whether no map of the array has a key twice."""
    codes: Any = keys.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    pairs = np.stack([lists.rows, codes]) if len(codes) else np.zeros((2, 0))
    return len(np.unique(pairs, axis=1).T) == len(codes)
