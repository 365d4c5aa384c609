"""How deep a value of the caller's own may be nested: as deep as every format and reader can follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from rollstore.schema.problem import Problem, at

LEVELS = 32
"""Lists, structs and maps in one another, in a column of the caller's. Arrow's files end at 64, Parquet's lists before
50."""

FOUND, WANTED = f"values nested more than {LEVELS} deep", f"at most {LEVELS} lists, structs or maps in one another"

_FLAT = frozenset({type(None), bool, int, float, str, bytes})


def is_too_deep(value: Any) -> bool:
    """Whether a Python value is nested more than LEVELS deep. It recurses nowhere, so that no depth is one too many."""
    if type(value) in _FLAT:
        return False
    inside: list[Any] = [value]
    for _ in range(LEVELS):
        inside = [item for one in inside for item in _items(one)]
        if not inside:
            return False
    return any(isinstance(one, Mapping | list | tuple) for one in inside)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def deep_rows(name: str, values: Sequence[Any]) -> list[Problem]:
    """A problem for each of a column's Python values [n] that is too deep."""
    rows = [row for row, value in enumerate(values) if is_too_deep(value)]
    return list(at(name, "wrong_type", rows, FOUND, WANTED)) if rows else []


def deep_columns(schema: pa.Schema) -> list[Problem]:
    """A problem for each column of the caller's whose type is too deep."""
    own = (field for field in schema if field.name.startswith("x_"))
    return [
        Problem(column=field.name, kind="wrong_type", row=None, found=FOUND, wanted=WANTED)
        for field in own
        if _is_deep_type(field.type)
    ]


def _is_deep_type(type_: pa.DataType) -> bool:
    inside = [type_]
    for _ in range(LEVELS + 1):
        inside = [inner for outer in inside for inner in _held(outer)]
        if not inside:
            return False
    return True


def _held(type_: Any) -> list[pa.DataType]:
    """What a type is made of, be it wrapped in an encoding."""
    if isinstance(type_, pa.BaseExtensionType):
        return [type_.storage_type]
    if pa.types.is_dictionary(type_):
        return [type_.value_type]
    return [type_.field(n).type for n in range(type_.num_fields)]
