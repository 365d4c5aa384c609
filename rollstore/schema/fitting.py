"""Arrow data in, the newest schema out: types cast where nothing is lost, absent columns null, the caller's x_ kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import SchemaError
from rollstore.schema.column import SYSTEM_COLUMNS, Column, Table
from rollstore.schema.flat import flat, plain
from rollstore.schema.problem import Problem, at


def conform(data: pa.RecordBatch | pa.Table, of: Table, *, unknown: str = "refuse") -> pa.Table:
    """Cast to the newest schema.

    Missing columns become null, `x_*` columns are kept after the declared ones, the store's own columns come last.
    With `unknown="keep"` other columns are kept too, as a reader of a newer minor version wants; otherwise they are
    problems. Raises SchemaError with every column that does not fit.
    """
    table, found = conformed(data, of, unknown=unknown)
    if found:
        raise SchemaError(found)
    return table


def conformed(data: pa.RecordBatch | pa.Table, of: Table, *, unknown: str = "refuse") -> tuple[pa.Table, list[Problem]]:
    """As `conform`, with the problems returned; a value that does not fit is null in the table."""
    found: list[Problem] = []
    names = data.schema.names
    found.extend(
        Problem(column=name, kind="repeated_column", row=None, found=f"{names.count(name)} columns", wanted="one")
        for name in sorted({name for name in names if names.count(name) > 1})
    )
    given = {name: plain(array) for name, array in zip(names, data.columns, strict=True)}
    rows = np.arange(data.num_rows)
    arrays: list[pa.Array] = []
    fields: list[pa.Field] = []

    def put(field: pa.Field, array: pa.Array) -> None:
        fields.append(field)
        arrays.append(array)

    for column in of.columns:
        array = given.pop(column.name, None)
        if array is None:
            put(column.field, pa.nulls(data.num_rows, column.type))
        else:
            put(column.field, fit(array, column, column.name, rows, found, unknown))
    system = [
        (c.field, fit(given.pop(c.name, pa.nulls(data.num_rows)), c, c.name, rows, found, unknown))
        for c in SYSTEM_COLUMNS
    ]
    for name, array in given.items():
        if name.startswith("x_") or unknown == "keep":
            put(pa.field(name, array.type), array)
        else:
            found.append(
                Problem(
                    column=name,
                    kind="unknown_column",
                    row=None,
                    found="a column the schema does not know",
                    wanted="a declared name, or x_ in front",
                )
            )
    for field, array in system:
        put(field, array)
    return pa.table(arrays, schema=pa.schema(fields, metadata=of.arrow_schema.metadata)), found


def fit(array: pa.Array, column: Column, path: str, rows: Any, found: list[Problem], unknown: str) -> pa.Array:
    """The array in the column's type; what does not fit is reported with its row and becomes null."""
    if array.type.equals(column.type):
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), column.type)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if column.is_list and not pa.types.is_map(column.type):
        return _fit_list(array, column, path, rows, found, unknown)
    if column.children:
        return _fit_struct(array, column, path, rows, found, unknown)
    return _fit_leaf(array, column.type, path, rows, found)


def _fit_list(array: pa.Array, column: Column, path: str, rows: Any, found: list[Problem], unknown: str) -> pa.Array:
    type_ = array.type
    if not (
        pa.types.is_list(type_)
        or pa.types.is_large_list(type_)
        or pa.types.is_fixed_size_list(type_)
        or pa.types.is_list_view(type_)
    ):
        found.append(Problem(column=path, kind="wrong_type", row=None, found=str(type_), wanted=str(column.type)))
        return pa.nulls(len(array), column.type)
    if pa.types.is_list_view(type_) or pa.types.is_fixed_size_list(type_):
        array = array.cast(pa.large_list(type_.value_field))
    lists = flat(array)
    if lists.offsets[-1] >= 2**31 - 1:
        found.append(
            Problem(
                column=path,
                kind="too_large",
                row=None,
                found=f"{lists.offsets[-1]} items",
                wanted="fewer than 2^31-1 in one call",
            )
        )
        return pa.nulls(len(array), column.type)
    item = Column(name="item", id=0, type=column.type.value_type, meaning="", children=column.children)
    values = fit(lists.values, item, path, rows[lists.rows], found, unknown)
    return pa.ListArray.from_arrays(
        pa.array(lists.offsets, pa.int32()), values, type=column.type, mask=pa.array(~lists.valid)
    )


def _fit_struct(array: pa.Array, column: Column, path: str, rows: Any, found: list[Problem], unknown: str) -> pa.Array:
    if not pa.types.is_struct(array.type):
        found.append(Problem(column=path, kind="wrong_type", row=None, found=str(array.type), wanted="a struct"))
        return pa.nulls(len(array), column.type)
    given = dict(zip([f.name for f in array.type], array.flatten(), strict=True))
    fields = [child.field for child in column.children]
    children = [
        fit(given.pop(c.name), c, f"{path}.{c.name}", rows, found, unknown)
        if c.name in given
        else pa.nulls(len(array), c.type)
        for c in column.children
    ]
    for name, values in given.items():
        if unknown == "keep":
            fields.append(pa.field(name, values.type))
            children.append(values)
        else:
            found.append(
                Problem(
                    column=f"{path}.{name}",
                    kind="unknown_column",
                    row=None,
                    found="a field the schema does not know",
                    wanted="a declared name",
                )
            )
    return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())


def _fit_leaf(array: pa.Array, type_: pa.DataType, path: str, rows: Any, found: list[Problem]) -> pa.Array:
    if pa.types.is_timestamp(type_) and pa.types.is_timestamp(array.type) and array.type.tz is None:
        naive = rows[array.is_valid().to_numpy(zero_copy_only=False)]
        found.extend(
            at(path, "naive_timestamp", np.unique(naive), lambda _: "a time without a zone", "a zone, as +00:00")
        )
        return pa.nulls(len(array), type_)
    if pa.types.is_boolean(type_) and pa.types.is_integer(array.type):
        bad = pc.invert(pc.is_in(array, value_set=pa.array([0, 1, None], array.type))).to_numpy(zero_copy_only=False)
        first = dict(zip(rows[bad][::-1].tolist(), array.filter(pa.array(bad)).to_pylist()[::-1], strict=True))
        found.extend(at(path, "not_boolean", sorted(first), lambda r: str(first[r]), "0 or 1, false or true"))
        return array.cast(pa.bool_())
    if _same_family(array.type, type_):
        try:
            return array.cast(type_, safe=True)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return _cast_each(array, type_, path, rows, found)
    found.append(Problem(column=path, kind="wrong_type", row=None, found=str(array.type), wanted=str(type_)))
    return pa.nulls(len(array), type_)


def _same_family(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Casts that a caller would not call a conversion: between integers, between floats, integer to float, texts."""
    t = pa.types
    if t.is_integer(wanted):
        return t.is_integer(given)
    if t.is_floating(wanted):
        return t.is_floating(given) or t.is_integer(given)
    if t.is_string(wanted):
        return t.is_string(given) or t.is_large_string(given) or t.is_string_view(given)
    if t.is_binary(wanted):
        return (
            t.is_binary(given) or t.is_large_binary(given) or t.is_binary_view(given) or t.is_fixed_size_binary(given)
        )
    if t.is_timestamp(wanted):
        return t.is_timestamp(given)
    if t.is_map(wanted):
        return t.is_map(given) or (t.is_list(given) and t.is_struct(given.value_type))
    return given == wanted


def _cast_each(array: pa.Array, type_: pa.DataType, path: str, rows: Any, found: list[Problem]) -> pa.Array:
    """Cast value by value, after a cast of the whole failed, to name the rows."""
    bad: dict[int, str] = {}
    out: list[Any] = []
    for number in range(len(array)):
        one = array.slice(number, 1)
        try:
            out.append(one.cast(type_, safe=True)[0])
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            out.append(pa.scalar(None, type_))
            bad.setdefault(int(rows[number]), str(one[0]))
    found.extend(at(path, "out_of_range", sorted(bad), lambda r: bad[r], f"a value of {type_}"))
    return pa.array([scalar.as_py() for scalar in out], type_)
