"""The caller's own `x_` columns: the first use of a name fixes its type for the whole store."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping

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
    return dict(sorted(_read(filesystem, f"{FOLDER}/{file}") for file in filesystem.list(FOLDER) if is_ours(file)))


def held_types(schemas: Iterable[pa.Schema], published: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """The types of `x_` columns that parts and journals hold and no document names: a copy may have lost those.

    Raises CorruptionError where two files hold one in different types, and nothing says which is right.
    """
    found: dict[str, pa.DataType] = {}
    for field in (field for schema in schemas for field in schema):
        if field.name.startswith("x_") and field.name not in published:
            type_ = found.setdefault(field.name, field.type)
            if type_ != field.type:
                raise CorruptionError(
                    f"{FOLDER}/{_file(field.name)}: wanted the type of {field.name}, got no such file, and both "
                    f"{type_} and {field.type} in parts"
                )
    return found


def is_ours(file: str) -> bool:
    """Whether a file of this folder has the name of a column's type."""
    return file.endswith(".json") and _NAME.fullmatch(file.removesuffix(".json")) is not None


def publish_types(
    filesystem: Filesystem, table: pa.Table, known: dict[str, pa.DataType], held: Callable[[], dict[str, pa.DataType]]
) -> pa.Table:
    """Fix the types of the `x_` columns of a table, or hold them to those fixed before; `known` learns them.

    held: the types of such columns in the store's rows, asked for when a name is new: see `held_types`.

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
            stored = held().get(field.name, fields[-1].type)
            name, type_ = _publish(filesystem, pa.field(field.name, stored), known)
            if name != field.name:
                wanted = f"a name that differs from {name} beyond upper and lower case: SQL knows no other difference"
                found.append(_problem(field.name, "unknown_column", field.name, wanted))
                continue
            known[name] = type_
        if known[field.name] != fields[-1].type:
            found.append(
                _problem(
                    field.name, "wrong_type", str(field.type), f"{known[field.name]}, its type since its first use"
                )
            )
    if found:
        raise SchemaError(found)
    return table.select([field.name for field in fields]).cast(pa.schema(fields, table.schema.metadata))


def _publish(filesystem: Filesystem, field: pa.Field, known: Mapping[str, pa.DataType]) -> tuple[str, pa.DataType]:
    """The column that has the name now, whatever its case: this one, or the one that had it before."""
    for name, type_ in known.items():
        if name.lower() == field.name.lower():
            return name, type_
    schema = base64.b64encode(memoryview(pa.schema([field]).serialize())).decode()
    path = f"{FOLDER}/{_file(field.name)}"
    try:
        document.publish(filesystem, path, {"name": field.name, "type": str(field.type), "schema": schema})
    except FileExistsError:
        return _read(filesystem, path)
    return field.name, field.type


def _file(name: str) -> str:
    """One file for all cases of a name, so that only one of them can be made."""
    return f"{name.lower()}.json"


def _read(filesystem: Filesystem, path: str) -> tuple[str, pa.DataType]:
    body = document.decode(read_file(filesystem, path), path)
    try:
        name = str(body["name"])
        type_ = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(body["schema"]))).field(name).type
    except (KeyError, TypeError, ValueError, OSError, pa.ArrowException) as error:
        raise CorruptionError(f"{path}: the type cannot be read") from error
    if _unfit_type(type_) is not None or not _NAME.fullmatch(name):
        raise CorruptionError(f"{path}: wanted a plain type, got {type_}")
    return name, type_


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
