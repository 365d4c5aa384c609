"""What JSON holds as Arrow values of a given type: the other way round of `texts.py`. Nothing is guessed or rounded."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from rollstore.errors import SchemaError
from rollstore.exchange.records import first_line
from rollstore.schema import Problem, Table, prepare
from rollstore.schema.column import SYSTEM_COLUMNS
from rollstore.schema.leaves import allowed
from rollstore.schema.nesting import deep_rows

t = pa.types

SPECIAL = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
_SYSTEM = {column.name: column.type for column in SYSTEM_COLUMNS}
_OWN = "x_"
_UTF_8 = "texts that UTF-8 can hold"  # JSON can escape half a pair of surrogates
_EXACT = 2.0**53  # whole numbers below it are floats as they are
REFUSALS = (ValueError, TypeError, OverflowError, pa.ArrowException)


def rows_to_table(rows: Sequence[Mapping[str, Any]], of: Table, types: Mapping[str, pa.DataType]) -> pa.Table:
    """Objects by column name as prepared rows of a table. `types`: those of the caller's x_ columns, where known.

    Raises SchemaError with every problem; one of a whole column has no row.
    """
    wrong: list[Problem] = []
    arrays: dict[str, pa.Array] = {}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        values = [row.get(name) for row in rows]
        declared = of.by_name.get(name)
        type_ = _SYSTEM.get(name, types.get(name)) if declared is None else declared.type
        if type_ is None and not name.startswith(_OWN):
            wrong += [_unknown(name, n) for n, row in enumerate(rows) if name in row]
            continue
        if type_ is None:
            made = _inferred(name, values)
            if isinstance(made, pa.Array):
                arrays[name] = made
            else:
                wrong += made
            continue
        try:
            arrays[name] = array(values, type_)
        except REFUSALS as error:
            wanted = _UTF_8 if isinstance(error, UnicodeEncodeError) else f"what JSON has for {type_}"
            wrong.append(Problem(column=name, kind="wrong_type", row=None, found=first_line(error), wanted=wanted))
    if wrong:
        raise SchemaError(wrong)
    for column in of.columns:
        if column.required and column.name not in arrays:  # said by row, which a column that is not there is not
            arrays[column.name] = pa.nulls(len(rows), column.type)
    return prepare(pa.table(arrays), of.name)


def _inferred(name: str, values: Sequence[Any]) -> pa.Array | list[Problem]:
    """The caller's values [n] in the type that Arrow sees in them, or why they have none, by row where one is wrong."""
    if deep := deep_rows(name, values):
        return deep
    try:
        return pa.array(values)
    except REFUSALS as error:
        problems: list[Problem] = []
        for row, value in enumerate(values):
            try:
                pa.array([value])
            except REFUSALS as alone:
                problems.append(_alone(name, row, value, alone))
        said = first_line(error)
        return problems or [Problem(column=name, kind="wrong_type", row=None, found=said, wanted="values of one type")]


def _alone(name: str, row: int, value: Any, error: Exception) -> Problem:
    """Why no column can hold a value, whatever the other rows have."""
    if isinstance(value, int):
        return Problem(column=name, kind="out_of_range", row=row, found=str(value)[:80], wanted=allowed(pa.int64()))
    found, is_text = first_line(error), isinstance(error, UnicodeEncodeError)
    wanted = _UTF_8 if is_text else "a value that Arrow has one type for"
    return Problem(column=name, kind="wrong_type", row=row, found=found, wanted=wanted)


def _unknown(name: str, row: int) -> Problem:
    found, wanted = "a field that is no column", "a declared name, or x_ in front"
    return Problem(column=name, kind="unknown_column", row=row, found=found, wanted=wanted)


def array(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """The values [n] in exactly this type. Raises ValueError, TypeError or ArrowException where one cannot be."""
    if t.is_map(type_):
        return _maps(values, type_)
    if t.is_list(type_) or t.is_large_list(type_):
        _only(values, list)
        return _lists(values, lambda items: array(items, type_.value_type), type_)
    if t.is_struct(type_):
        return _structs(values, type_)
    if t.is_boolean(type_):
        _only(values, bool)
        return pa.array(values, type_)
    if t.is_integer(type_):
        _only(values, int)
        return pa.array(values, type_)
    if t.is_floating(type_):
        return _floats(values, type_)
    if t.is_decimal(type_):
        return pa.array(_mapped(values, _decimal), type_)
    if t.is_timestamp(type_) or t.is_date32(type_):
        _only(values, str)
        return pa.array(values, pa.string()).cast(type_)
    if t.is_time(type_) or t.is_duration(type_) or t.is_date64(type_):
        _only(values, int)
        return pa.array(values, pa.int32() if type_.bit_width == 32 else pa.int64()).cast(type_)
    if t.is_string(type_) or t.is_large_string(type_):
        _only(values, str)
        return pa.array(values, type_)
    return pa.array(_mapped(values, _bytes), type_)


def _only(values: Iterable[Any], *kinds: type) -> None:
    """Raises TypeError where a value is of no such kind: true is no integer, and 1 no text."""
    others = set(map(type, values)) - {*kinds, type(None)}
    if others:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{sorted(kind.__name__ for kind in others)[0]}, not {wanted}")


def _mapped(values: Iterable[Any], make: Callable[[str], Any]) -> list[Any]:
    held = list(values)
    _only(held, str)
    return [None if value is None else make(value) for value in held]


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text[:40]!r} is no decimal") from None


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError(f"{text[:40]!r} is no base64") from None


def _floats(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    _only(values, float, int, str)
    if set(map(type, values)) <= {float, int}:
        known, held = np.ones(len(values), bool), np.array(values, np.float64)
    else:
        known = np.array([value is not None for value in values], bool)
        held = np.array([0.0 if value is None else _float(value) for value in values], np.float64)
    for at in np.flatnonzero(np.abs(held) >= _EXACT).tolist():
        if type(values[at]) is int and values[at] != int(held[at]):
            raise ValueError(f"{values[at]}, a whole number that {type_} would round")
    with np.errstate(over="ignore"):
        narrow = held.astype(type_.to_pandas_dtype())
    if (np.isinf(narrow) & np.isfinite(held)).any():
        raise ValueError(f"{held[np.isinf(narrow) & np.isfinite(held)][0]}, too large for {type_}")
    return pa.array(narrow, type_, mask=~known, from_pandas=False)


def _float(value: Any) -> float:
    if isinstance(value, str):
        if value not in SPECIAL:
            raise ValueError(f"{value[:40]!r} is no number")
        return SPECIAL[value]
    return float(value)


def _lists(values: Sequence[Any], items: Callable[[list[Any]], pa.Array], type_: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([0 if value is None else len(value) for value in values], out=offsets[1:])
    held = items(list(chain.from_iterable(value for value in values if value is not None)))
    missing = pa.array([value is None for value in values], pa.bool_())
    if t.is_map(type_):
        entries: Any = held
        return pa.MapArray.from_arrays(
            pa.array(offsets, pa.int32()), entries.field(0), entries.field(1), type=type_, mask=missing
        )
    if t.is_large_list(type_):
        return pa.LargeListArray.from_arrays(pa.array(offsets), held, type=type_, mask=missing)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), held, type=type_, mask=missing)


def _structs(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    _only(values, dict)
    fields = [type_.field(n) for n in range(type_.num_fields)]
    unknown = set(chain.from_iterable(value for value in values if value is not None)) - {f.name for f in fields}
    if unknown:
        raise ValueError(f"a field {sorted(unknown)[0]!r} that is none")
    children = [array([None if value is None else value.get(f.name) for value in values], f.type) for f in fields]
    missing = pa.array([value is None for value in values], pa.bool_())
    return pa.StructArray.from_arrays(children, fields=fields, mask=missing)


def _maps(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """Of objects, or of lists of pairs."""
    _only(values, dict, list)
    pairs = [list(value.items()) if isinstance(value, dict) else value for value in values]

    def entries(items: list[Any]) -> pa.Array:
        if not all(isinstance(item, list | tuple) and len(item) == 2 for item in items):
            raise ValueError("an entry of a map that is no pair")
        sides = [array([item[n] for item in items], kind) for n, kind in enumerate((type_.key_type, type_.item_type))]
        if sides[0].null_count:
            raise ValueError("an entry of a map without a key")
        return pa.StructArray.from_arrays(sides, names=["key", "value"])

    return _lists(pairs, entries, type_)
