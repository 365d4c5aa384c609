"""What a file must hold so that rows can be read from it, whoever wrote it: a sum only says that the bytes are whole.

Everything else about rows is the schema's, and `verify` checks it.
"""

from __future__ import annotations

import pyarrow as pa

from rollstore.errors import CorruptionError
from rollstore.schema import SYSTEM_COLUMNS, TABLES

_ORIGIN = tuple(column.name for column in SYSTEM_COLUMNS)
_ROLLOUT = (*(column.name for column in TABLES["rollouts"].columns if column.required), *_ORIGIN)


def check_columns(schema: pa.Schema, table: str, where: str) -> None:
    """Raises CorruptionError where a column stands twice or has not the schema's type, or a rollout's is missing.

    Structs may have other children than this version knows.
    """
    try:
        names = schema.names
    except ValueError as error:
        raise CorruptionError(f"{where}: the names of the columns cannot be read: {error}") from error
    if len(set(names)) < len(names):
        raise CorruptionError(f"{where}: wanted each column once, got {sorted(n for n in names if names.count(n) > 1)}")
    if missing := [name for name in _ROLLOUT if table == "rollouts" and name not in names]:
        raise CorruptionError(f"{where}: wanted the column {missing[0]}, got {', '.join(names)}")
    known = {column.name: column.type for column in (*TABLES[table].columns, *SYSTEM_COLUMNS)}
    for field in schema:
        if field.name in known and not _fits(field.type, known[field.name]):
            raise CorruptionError(f"{where}: {field.name}: wanted {known[field.name]}, got {field.type}")


def check_rows(batch: pa.RecordBatch, table: str, where: str) -> None:
    """Raises CorruptionError where a row lacks its origin, or a rollout what every one has."""
    for name in _ROLLOUT if table == "rollouts" else _ORIGIN:
        place = batch.schema.get_field_index(name)
        if place >= 0 and batch.column(place).null_count:
            raise CorruptionError(f"{where}: {name}: wanted a value in every row, got a null")


def _fits(held: pa.DataType, known: pa.DataType) -> bool:
    if pa.types.is_list(held) and pa.types.is_list(known):
        return _fits(held.value_type, known.value_type)
    if not (pa.types.is_struct(held) and pa.types.is_struct(known)):
        return held.equals(known)
    children = {field.name: field.type for field in known}
    names = [field.name for field in held]
    return len(set(names)) == len(names) and all(
        field.name not in children or _fits(field.type, children[field.name]) for field in held
    )
