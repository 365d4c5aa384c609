"""Arrow to records. For the edges: hot paths read the columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pyarrow as pa

from rollstore.schema.column import Column
from rollstore.schema.flat import Flat, flat, is_known, plain
from rollstore.schema.known import Known
from rollstore.schema.rollouts import ROLLOUTS
from rollstore.schema.structs import Flag, Heads, Rollout, Sampler
from rollstore.schema.text import AS_JSON, ESCAPED, from_json, unescape
from rollstore.schema.to_arrow import CLASSES

FEW = 8
"""Rows up to which structs are made from Arrow's own dicts, in a quarter of the time; of many rows that takes longer
than column by column."""


def from_table(table: pa.Table | pa.RecordBatch) -> list[Rollout]:
    """Records from rows of the rollouts table: arrays numpy. Those of one row are copies; those of many view
    the table's buffers, and keep all of it in memory.

    Columns that the table lacks are None; `x_` columns come back in `extra`.
    """
    count = table.num_rows
    if count == 1:
        return [_only(table)]
    names = table.schema.names
    fields: dict[str, list[Any]] = {}
    for name, column in zip(names, table.columns, strict=True):
        declared = ROLLOUTS.by_name.get(name)
        if declared is not None and column.null_count < count:
            fields[declared.record or name] = _values(plain(column), declared)
    heads = {name.split(".")[1]: fields.pop(name) for name in list(fields) if name.startswith("heads.")}
    if heads:
        fields["heads"] = [_heads({k: v[n] for k, v in heads.items()}) for n in range(count)]
    extras = {name: plain(table.column(name)).to_pylist() for name in names if name.startswith("x_")}
    records: list[Rollout] = []
    for n in range(count):
        row = {name: values[n] for name, values in fields.items() if values[n] is not None}
        if extras:
            row["extra"] = {name: values[n] for name, values in extras.items() if values[n] is not None} or None
        _undo_flags(row)
        records.append(Rollout(**row))
    return records


def _only(table: pa.Table | pa.RecordBatch) -> Rollout:
    """The one row, value by value: as columns it takes twice as long, which is what finding a rollout is for."""
    row: dict[str, Any] = {}
    heads: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        declared = ROLLOUTS.by_name.get(name)
        if declared is None:
            if name.startswith("x_"):
                extra[name] = column[0].as_py()
        elif (value := _value(column[0], declared)) is not None:
            field = declared.record or name
            if field.startswith("heads."):
                heads[field.removeprefix("heads.")] = value
            else:
                row[field] = value
    if heads:
        row["heads"] = Heads(**heads)
    if extra:
        row["extra"] = {name: value for name, value in extra.items() if value is not None} or None
    _undo_flags(row)
    return Rollout(**row)


def _value(scalar: pa.Scalar, column: Column) -> Any:
    """One value of a column, as `_values` gives those of all rows."""
    if not column.is_array:
        value = scalar.as_py()
        return value if value is None or column.is_plain else _child(value, column)
    if not scalar.is_valid:
        return None
    items = scalar.values
    viewed = (items.fill_null(0) if items.null_count else items).to_numpy(zero_copy_only=False)
    values = viewed.copy()  # whoever keeps one record of a batch does not keep the batch
    values.flags.writeable = viewed.flags.writeable
    return Known(values, is_known(items)) if column.nullable_items else values


def _heads(fields: dict[str, Any]) -> Heads | None:
    return None if all(value is None for value in fields.values()) else Heads(**fields)


def _undo_flags(row: dict[str, Any]) -> None:
    """Texts that were escaped and map values that were written as JSON become what they were."""
    flags: tuple[Flag, ...] = row.get("flags") or ()
    for flag in flags:
        name, *path = (flag.column or "").split(".")
        if flag.kind == ESCAPED and name in row:
            row[name] = _unescape_at(row[name], path)
        elif flag.kind == ESCAPED and name in (row.get("extra") or {}):
            row["extra"][name] = unescape(row["extra"][name])
    json_at = {
        column: {f.index for f in flags if f.kind == AS_JSON and f.column == column}
        for column in ("metadata", "samplers.extra")
    }
    if json_at["metadata"] and "metadata" in row:
        row["metadata"] = _parsed(row["metadata"], json_at["metadata"], 0)
    if json_at["samplers.extra"] and "samplers" in row:
        row["samplers"] = _parsed_extras(row["samplers"], json_at["samplers.extra"])
    if flags:
        row["flags"] = tuple(f for f in flags if f.kind not in (ESCAPED, AS_JSON)) or None


def _parsed_extras(samplers: tuple[Sampler, ...], json_at: set[int | None]) -> tuple[Sampler, ...]:
    """The index of a flag counts the entries of all samplers of the row."""
    first, made = 0, list(samplers)
    for number, sampler in enumerate(samplers):
        if sampler.extra:
            made[number] = msgspec.structs.replace(sampler, extra=_parsed(sampler.extra, json_at, first))
            first += len(sampler.extra)
    return tuple(made)


def _parsed(values: Mapping[str, Any], json_at: set[int | None], first: int) -> dict[str, Any]:
    return {k: from_json(v) if n in json_at else v for n, (k, v) in enumerate(values.items(), first)}


def _unescape_at(value: Any, path: list[str]) -> Any:
    if not path:
        return unescape(value)
    if isinstance(value, tuple):
        return tuple(_unescape_at(v, path) for v in value)
    inner = getattr(value, path[0])
    return value if inner is None else msgspec.structs.replace(value, **{path[0]: _unescape_at(inner, path[1:])})


def _values(array: pa.Array, column: Column) -> list[Any]:
    if column.children:
        return _struct_values(array, column)
    if pa.types.is_map(column.type):
        return [None if v is None else dict(v) for v in array.to_pylist()]
    if not column.is_array:
        values = array.to_pylist()
        return [tuple(v) if isinstance(v, list) else v for v in values] if column.is_list else values
    lists = flat(array)
    values, bounds, valid = lists.numpy(), lists.offsets.tolist(), lists.valid.tolist()
    if not column.nullable_items:
        return [values[a:b] if ok else None for a, b, ok in zip(bounds, bounds[1:], valid, strict=False)]
    known = lists.known
    return [Known(values[a:b], known[a:b]) if ok else None for a, b, ok in zip(bounds, bounds[1:], valid, strict=False)]


def _struct_values(array: pa.Array, column: Column) -> list[Any]:
    if len(array) <= FEW:
        found = array.to_pylist()
        if not column.is_list:
            return [_record(value, column) for value in found]
        return [None if values is None else tuple([_record(one, column) for one in values]) for values in found]
    lists: Flat | None = flat(array) if column.is_list else None
    values = array if lists is None else lists.values
    count, kind = len(values), CLASSES[column.name]
    given = zip(column.children, _in_order(values, column), strict=True)
    held = {c.name: _values(items, c) for c, items in given if items is not None and items.null_count < count}
    names = list(held)
    rows = zip(*held.values(), strict=True) if held else [()] * count
    records: list[Any] = [kind(**dict(zip(names, row, strict=True))) for row in rows]
    if values.null_count:
        records = [record if ok else None for record, ok in zip(records, values.is_valid().to_pylist(), strict=True)]
    if lists is None:
        return records
    bounds, valid = lists.offsets.tolist(), lists.valid.tolist()
    return [tuple(records[a:b]) if ok else None for a, b, ok in zip(bounds, bounds[1:], valid, strict=False)]


def _in_order(values: pa.Array, column: Column) -> list[pa.Array | None]:
    """The children of a struct array in the order of the declaration; None for one that the array lacks."""
    flattened = values.flatten()
    if values.type.equals(column.item.type if column.is_list else column.type):
        return flattened
    given = dict(zip([f.name for f in values.type], flattened, strict=True))
    return [given.get(child.name) for child in column.children]


def _record(value: dict[str, Any] | None, column: Column) -> Any:
    """A struct as Arrow gives it, without nulls and without children that this version does not know."""
    if value is None:
        return None
    inside = column.inside
    given: dict[str, Any] = {}
    for name, found in value.items():
        if found is not None and name in inside:
            child = inside[name]
            given[name] = found if child is None else _child(found, child)
    return CLASSES[column.name](**given)


def _child(value: Any, column: Column) -> Any:
    if column.children:
        return tuple([_record(one, column) for one in value]) if column.is_list else _record(value, column)
    return tuple(value) if column.is_list else dict(value)
