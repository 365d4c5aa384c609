"""The caller's own `x_` columns: the first use of a name fixes its type for the whole store."""

from __future__ import annotations

import base64
import re

import pyarrow as pa

from rollstore.errors import CorruptionError, SchemaError
from rollstore.schema import Problem
from rollstore.schema.problem import Kind
from rollstore.store import document
from rollstore.store.filesystem import Filesystem, read_file

FOLDER = "columns"
_NAME = re.compile(r"x_[A-Za-z0-9_]{1,100}")
_UNFIT = (
    pa.types.is_dictionary, pa.types.is_run_end_encoded, pa.types.is_union, pa.types.is_null, pa.types.is_list_view,
    pa.types.is_large_list_view, pa.types.is_string_view, pa.types.is_binary_view,
)  # fmt: skip


def read_types(filesystem: Filesystem) -> dict[str, pa.DataType]:
    """Every published column of the store, in order of name."""
    files = [file for file in filesystem.list(FOLDER) if is_ours(file)]
    return {file[:-5]: _read(filesystem, file[:-5]) for file in files}


def is_ours(file: str) -> bool:
    """Whether a file of this folder has the name of a column's type."""
    return file.endswith(".json") and _NAME.fullmatch(file.removesuffix(".json")) is not None


def publish_types(filesystem: Filesystem, table: pa.Table, known: dict[str, pa.DataType]) -> pa.Table:
    """Fix the types of the `x_` columns of a table, or hold them to those fixed before; `known` learns them.

    Returns the table with plain field metadata, and without `x_` columns that hold only nulls of no type. Raises
    SchemaError with every column of another type, and OSError.
    """
    if not any(name.startswith("x_") for name in table.column_names):
        return table
    found: list[Problem] = []
    fields: list[pa.Field] = []
    for field in table.schema:
        if not field.name.startswith("x_"):
            fields.append(field)
            continue
        if pa.types.is_null(field.type):
            continue
        if problem := _unfit(field):
            found.append(problem)
            continue
        fields.append(_bare(field))
        if field.name not in known:
            known[field.name] = _publish(filesystem, fields[-1])
        if known[field.name] != fields[-1].type:
            found.append(
                _problem(
                    field.name, "wrong_type", str(field.type), f"{known[field.name]}, its type since its first use"
                )
            )
    if found:
        raise SchemaError(found)
    return table.select([field.name for field in fields]).cast(pa.schema(fields, table.schema.metadata))


def _publish(filesystem: Filesystem, field: pa.Field) -> pa.DataType:
    schema = base64.b64encode(memoryview(pa.schema([field]).serialize())).decode()
    try:
        document.publish(
            filesystem, f"{FOLDER}/{field.name}.json", {"name": field.name, "type": str(field.type), "schema": schema}
        )
    except FileExistsError:
        return _read(filesystem, field.name)
    return field.type


def _read(filesystem: Filesystem, name: str) -> pa.DataType:
    path = f"{FOLDER}/{name}.json"
    body = document.decode(read_file(filesystem, path), path)
    try:
        type_ = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(body["schema"]))).field(name).type
    except (KeyError, TypeError, ValueError, OSError, pa.ArrowException) as error:
        raise CorruptionError(f"{path}: the type cannot be read") from error
    if _unfit_type(type_) is not None:
        raise CorruptionError(f"{path}: wanted a plain type, got {type_}")
    return type_


def _unfit(field: pa.Field) -> Problem | None:
    if not _NAME.fullmatch(field.name):
        return _problem(
            field.name, "unknown_column", repr(field.name), "x_ and letters, digits or _, at most 102 characters"
        )
    unfit = _unfit_type(field.type)
    return (
        _problem(field.name, "wrong_type", str(unfit), "a plain type, that every reader of Arrow files knows")
        if unfit
        else None
    )


def _unfit_type(type_: pa.DataType) -> pa.DataType | None:
    if isinstance(type_, pa.BaseExtensionType) or any(test(type_) for test in _UNFIT):
        return type_
    return next((unfit for child in _children(type_) if (unfit := _unfit_type(child.type))), None)


def _bare(field: pa.Field) -> pa.Field:
    """The field without metadata, children included, and nullable: names and types are all that is kept."""
    return pa.field(field.name, _bare_type(field.type))


def _bare_type(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(type_):
        return pa.struct([_bare(child) for child in _children(type_)])
    if pa.types.is_map(type_):
        return pa.map_(_bare_type(type_.key_type), _bare_type(type_.item_type))
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(pa.field("item", _bare_type(type_.value_type)), type_.list_size)
    if pa.types.is_large_list(type_):
        return pa.large_list(pa.field("item", _bare_type(type_.value_type)))
    if pa.types.is_list(type_):
        return pa.list_(pa.field("item", _bare_type(type_.value_type)))
    return type_


def _children(type_: pa.DataType) -> list[pa.Field]:
    return [type_.field(i) for i in range(type_.num_fields)]


def _problem(column: str, kind: Kind, found: str, wanted: str) -> Problem:
    return Problem(column=column, kind=kind, row=None, found=found, wanted=wanted)
