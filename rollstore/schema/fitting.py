"""Arrow data in, the newest schema out: types cast where nothing is lost, absent columns null, the caller's x_ kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from rollstore.errors import SchemaError
from rollstore.schema.column import SYSTEM_COLUMNS, Column, Table
from rollstore.schema.encodings import decoded, decoded_deep, is_plain
from rollstore.schema.flat import Flat, is_known, plain
from rollstore.schema.leaves import fit_leaf
from rollstore.schema.problem import Problem, at

t = pa.types


@dataclass(kw_only=True)
class Fitted:
    """Columns in the newest schema's types, before they are a table again."""

    count: int
    columns: dict[str, pa.Array] = field(default_factory=dict[str, pa.Array])
    """Declared columns, and the store's own, that are not all null."""
    extra: dict[str, pa.Array] = field(default_factory=dict[str, pa.Array])
    """The others: the caller's x_ columns, and what a newer minor version has added."""
    problems: list[Problem] = field(default_factory=list[Problem])
    """What did not fit; it is null in `columns`."""


def assembled(fitted: Fitted, of: Table) -> pa.Table:
    """One table: the declared columns, the others, the store's own last."""
    present, count = fitted.columns, fitted.count
    arrays = [present[c.name] if c.name in present else c.nulls(count) for c in (*of.columns, *SYSTEM_COLUMNS)]
    kept_types = all(a.type.equals(c.type) for a, c in zip(arrays, (*of.columns, *SYSTEM_COLUMNS), strict=True))
    if not fitted.extra and kept_types:
        return pa.Table.from_arrays(arrays, schema=of.arrow_schema)
    fields = [c.field.with_type(a.type) for a, c in zip(arrays, (*of.columns, *SYSTEM_COLUMNS), strict=True)]
    place = len(of.columns)
    fields[place:place] = [pa.field(name, array.type) for name, array in fitted.extra.items()]
    arrays[place:place] = fitted.extra.values()
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=of.arrow_schema.metadata))


def conform(data: pa.RecordBatch | pa.Table, of: Table, *, unknown: str = "refuse") -> pa.Table:
    """Cast to the newest schema.

    Missing columns become null, `x_*` columns are kept after the declared ones, the store's own columns come last.
    With `unknown="keep"` other columns are kept too, as a reader of a newer minor version wants; otherwise they are
    problems. Raises SchemaError with every column that does not fit.
    """
    if isinstance(data, pa.Table) and data.schema.equals(of.arrow_schema, check_metadata=True):
        return data
    fitted = fit_table(data, of, unknown=unknown)
    if fitted.problems:
        raise SchemaError(fitted.problems)
    return assembled(fitted, of)


def fit_table(data: pa.RecordBatch | pa.Table, of: Table, *, unknown: str = "refuse") -> Fitted:
    """Every column in its type, and the problems met on the way."""
    if not isinstance(data, pa.RecordBatch | pa.Table):
        raise TypeError(f"wanted a pyarrow Table or RecordBatch, got {type(data).__name__}")
    fitted = Fitted(count=data.num_rows)
    found = fitted.problems
    names = data.schema.names
    given: dict[str, pa.ChunkedArray | pa.Array] = dict(zip(names, data.columns, strict=True))
    for name in sorted({name for name in names if names.count(name) > 1} if len(given) < len(names) else ()):
        repeated = f"{names.count(name)} columns"
        found.append(Problem(column=name, kind="repeated_column", row=None, found=repeated, wanted="one"))
    rows = np.arange(data.num_rows)
    for column in (*of.columns, *SYSTEM_COLUMNS):
        raw = given.pop(column.name, None)
        if raw is not None and raw.null_count < len(raw):
            array = _sound(raw, column.name, found)
            if array is not None:
                fitted.columns[column.name] = fit(array, column, column.name, rows, found, unknown)
    for name, raw in given.items():
        if name.startswith("x_") or unknown == "keep":
            array = _sound(raw, name, found)
            if array is not None:
                fit_extra(fitted, name, array)
        else:
            found.append(unknown_column(name, "a column the schema does not know"))
    return fitted


def fit_extra(fitted: Fitted, name: str, array: pa.Array) -> None:
    """A column of the caller's own, in a type that says what its values are. One of nothing has no type to keep."""
    if pa.types.is_null(array.type):
        return
    made = decoded_deep(array)
    if is_plain(made.type):
        fitted.extra[name] = made
    else:
        fitted.problems.append(_wrong_type(name, array.type, "a type that says what the values are"))


def unknown_column(name: str, what: str) -> Problem:
    return Problem(column=name, kind="unknown_column", row=None, found=what, wanted="a declared name, or x_ in front")


def _wrong_type(path: str, given: pa.DataType, wanted: str) -> Problem:
    return Problem(column=path, kind="wrong_type", row=None, found=str(given), wanted=wanted)


def _sound(raw: pa.ChunkedArray | pa.Array, path: str, found: list[Problem]) -> pa.Array | None:
    """One whole array whose bytes are what its type says (offsets in bounds, texts UTF-8), or None with a problem."""
    try:
        raw.validate(full=True)
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        found.append(Problem(column=path, kind="invalid_data", row=None, found=reason, wanted="sound Arrow data"))
        return None
    try:
        return plain(raw)
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        found.append(Problem(column=path, kind="too_large", row=None, found=reason, wanted="smaller calls"))
        return None


def fit(array: pa.Array, column: Column, path: str, rows: Any, found: list[Problem], unknown: str) -> pa.Array:
    """The array in the column's type; what does not fit is reported with its row and becomes null."""
    if array.type.equals(column.type):
        return array
    array = decoded(array)
    if t.is_null(array.type):
        return pa.nulls(len(array), column.type)
    if t.is_map(column.type):
        return _fit_map(array, column, path, rows, found)
    if column.is_list:
        return _fit_list(array, column, path, rows, found, unknown)
    if column.children:
        return _fit_struct(array, column, path, rows, found, unknown)
    return fit_leaf(array, column.type, path, rows, found)


def _lists(array: pa.Array, column: Column, path: str, found: list[Problem]) -> Flat | None:
    """The lists taken apart, or None with a problem."""
    if not (t.is_list(array.type) or t.is_large_list(array.type) or t.is_map(array.type)):
        found.append(_wrong_type(path, array.type, str(column.type)))
        return None
    lists = Flat(array)
    if lists.offsets[-1] >= 2**31 - 1:
        items = f"{lists.offsets[-1]} items"
        found.append(Problem(column=path, kind="too_large", row=None, found=items, wanted="fewer than 2^31-1 a call"))
        return None
    return lists


def _fit_list(array: pa.Array, column: Column, path: str, rows: Any, found: list[Problem], unknown: str) -> pa.Array:
    lists = _lists(array, column, path, found)
    if lists is None:
        return pa.nulls(len(array), column.type)
    values = fit(lists.values, column.item, path, rows[lists.rows], found, unknown)
    type_ = column.type if values.type.equals(column.type.value_type) else None  # a newer minor's struct has more
    offsets = pa.array(lists.offsets, pa.int32())
    return pa.ListArray.from_arrays(offsets, values, type=type_, mask=pa.array(~lists.valid))


def _fit_map(array: pa.Array, column: Column, path: str, rows: Any, found: list[Problem]) -> pa.Array:
    """A map, or a list of (key, value) structs, as some engines hand maps out. Both sides must be texts already."""
    lists = _lists(array, column, path, found)
    if lists is None:
        return pa.nulls(len(array), column.type)
    entries = decoded(lists.values)
    if not t.is_struct(entries.type) or entries.type.num_fields != 2:
        found.append(_wrong_type(path, array.type, str(column.type)))
        return pa.nulls(len(array), column.type)
    entry_rows = rows[lists.rows]
    keys, values = (fit_leaf(decoded(side), pa.string(), path, entry_rows, found) for side in entries.flatten())
    if keys.null_count:
        found.extend(at(path, "null_item", entry_rows[~is_known(keys)], "an entry without a key", "a key"))
        keys = keys.fill_null("")
    offsets = pa.array(lists.offsets, pa.int32())
    return pa.MapArray.from_arrays(offsets, keys, values, type=column.type, mask=pa.array(~lists.valid))


def _fit_struct(array: pa.Array, column: Column, path: str, rows: Any, found: list[Problem], unknown: str) -> pa.Array:
    if not t.is_struct(array.type):
        found.append(_wrong_type(path, array.type, "a struct"))
        return pa.nulls(len(array), column.type)
    given = dict(zip([f.name for f in array.type], array.flatten(), strict=True))
    fields = [child.field for child in column.children]
    children = [
        fit(given.pop(c.name), c, f"{path}.{c.name}", rows, found, unknown)
        if c.name in given
        else pa.nulls(len(array), c.type)
        for c in column.children
    ]
    fields = [f.with_type(child.type) for f, child in zip(fields, children, strict=True)]
    for name, values in given.items():
        if unknown == "keep":
            fields.append(pa.field(name, values.type))
            children.append(values)
        else:
            what = "a field the schema does not know"
            found.append(
                Problem(column=f"{path}.{name}", kind="unknown_column", row=None, found=what, wanted="a declared name")
            )
    return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
