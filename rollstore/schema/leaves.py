"""Single values in the schema's types: what may be cast, and which value of which row cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.schema.flat import is_known
from rollstore.schema.problem import Problem, at, first_of_each
from rollstore.schema.times import shown

t = pa.types


def fit_leaf(array: pa.Array, type_: pa.DataType, path: str, rows: Any, found: list[Problem]) -> pa.Array:
    """The values [n] in the wanted type. What does not fit is reported with its row of `rows` [n] and becomes null."""
    if array.type.equals(type_):
        return array
    if t.is_null(array.type):
        return pa.nulls(len(array), type_)
    if t.is_timestamp(type_) and t.is_timestamp(array.type) and array.type.tz is None:
        found.extend(at(path, "naive_timestamp", rows[is_known(array)], "a time without a zone", "a zone, as +00:00"))
        return pa.nulls(len(array), type_)
    if t.is_boolean(type_) and (t.is_integer(array.type) or t.is_floating(array.type)):
        return _booleans(array, path, rows, found)
    if not _same_family(array.type, type_):
        found.append(Problem(column=path, kind="wrong_type", row=None, found=str(array.type), wanted=str(type_)))
        return pa.nulls(len(array), type_)
    try:
        cast = array.cast(type_, safe=True)
    except pa.ArrowInvalid as error:
        if t.is_string(type_) or t.is_binary(type_):
            found.append(Problem(column=path, kind="too_large", row=None, found=str(error), wanted="smaller calls"))
            return pa.nulls(len(array), type_)
        return _without_misfits(array, type_, path, rows, found)
    if t.is_floating(type_) and t.is_floating(array.type) and array.type.bit_width > type_.bit_width:
        return _without_overflow(array, cast, path, rows, found)
    return cast


def allowed(type_: pa.DataType) -> str:
    """The range of a type, for a message."""
    if t.is_integer(type_):
        limits = np.iinfo(str(type_))
        return f"{type_}: {limits.min} to {limits.max}"
    return f"a value of {type_}"


def _same_family(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Casts that a caller would not call a conversion: between integers, between floats, integer to float, texts."""
    if t.is_integer(wanted):
        return t.is_integer(given)
    if t.is_floating(wanted):
        return t.is_floating(given) or t.is_integer(given)
    if t.is_string(wanted):
        return t.is_string(given) or t.is_large_string(given)
    if t.is_binary(wanted):
        return t.is_binary(given) or t.is_large_binary(given) or t.is_fixed_size_binary(given)
    return t.is_timestamp(wanted) and t.is_timestamp(given)


def _booleans(array: pa.Array, path: str, rows: Any, found: list[Problem]) -> pa.Array:
    """0 and 1 are false and true; anything else is reported."""
    known = is_known(array)
    values = array.fill_null(0).to_numpy(zero_copy_only=False)
    bad = (values != 0) & (values != 1)
    if bad.any():
        first = first_of_each(rows[bad], values[bad].tolist())
        found.extend(at(path, "not_boolean", list(first), lambda r: str(first[r]), "0 or 1, false or true"))
    return pa.array(values == 1, mask=~known)


def _without_overflow(given: pa.Array, cast: pa.Array, path: str, rows: Any, found: list[Problem]) -> pa.Array:
    """A finite number that the narrow type holds as infinity is reported."""
    bad = pc.and_(pc.is_inf(cast), pc.is_finite(given)).fill_null(False).to_numpy(zero_copy_only=False)
    if not bad.any():
        return cast
    return _nulled(cast, bad, given, path, rows, found)


def _without_misfits(array: pa.Array, type_: pa.DataType, path: str, rows: Any, found: list[Problem]) -> pa.Array:
    """After a cast of the whole failed: the unsafe cast, without the values that do not come back from it."""
    cast = array.cast(type_, safe=False)
    back = cast.cast(array.type, safe=False)
    bad = ~pc.equal(back, array).fill_null(True).to_numpy(zero_copy_only=False)
    if t.is_integer(array.type) and t.is_integer(type_):  # the wrap between signed and unsigned comes back
        negative = pc.less(array, pa.scalar(0, array.type)).fill_null(False).to_numpy(zero_copy_only=False)
        turned = pc.less(cast, pa.scalar(0, type_)).fill_null(False).to_numpy(zero_copy_only=False)
        bad |= negative != turned
    return _nulled(cast, bad, array, path, rows, found)


def _nulled(cast: pa.Array, bad: Any, given: pa.Array, path: str, rows: Any, found: list[Problem]) -> pa.Array:
    first = first_of_each(rows[bad], shown(given.filter(pa.array(bad))))
    found.extend(at(path, "out_of_range", list(first), lambda r: first[r], allowed(cast.type)))
    return pc.if_else(pa.array(bad), pa.scalar(None, cast.type), cast)
