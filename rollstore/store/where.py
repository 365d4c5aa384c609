"""Whether columns and a filter can be asked of a table: said before anything is read, by the name that is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_UNKNOWN = re.compile(r"No match for FieldRef\.(?:Name\((?P<name>.*)\)|(?P<nested>.*)) in ")
_CHILD = re.compile(r"FieldRef\.Name\((.*?)\)(?=\)| |$)")
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def check_where(where: pc.Expression, schema: pa.Schema, table: str) -> None:
    """Raises ValueError where a filter names a column that `schema` lacks, TypeError where it is no filter over it."""
    if not isinstance(where, pc.Expression):
        raise TypeError(f"where: wanted an expression of pyarrow.compute, got {type(where).__name__}")
    if "FieldPath(" in _TEXT.sub("", str(where)):
        raise ValueError(f"where: wanted columns of {table} by name, got one by number")
    try:
        schema.empty_table().filter(where)
    except pa.ArrowException as error:
        first = str(error).partition("\n")[0]
        if missing := _UNKNOWN.match(first):
            name = missing["name"] or ".".join(_CHILD.findall(missing["nested"]))
            raise ValueError(f"where: {table} has no column {name!r}") from None
        raise TypeError(f"where: wanted a filter over {table}: {first}") from None


def kept(rows: pa.Table, where: pc.Expression, table: str) -> pa.Table:
    """The rows that a filter keeps. Raises ValueError where it fails on them."""
    try:
        return rows.filter(where)
    except pa.ArrowInvalid as error:
        raise ValueError(f"where: {where} fails on rows of {table}: {error}") from error


def check_names(columns: Any, known: Sequence[str], table: str) -> list[str]:
    """The names of the columns that are asked for, all where None is. Raises TypeError on what is no sequence of names,
    ValueError on those that `known` lacks and those that come twice."""
    if columns is None:
        return [*known]
    if isinstance(columns, str | bytes) or not isinstance(columns, Iterable):
        raise TypeError(f"columns: wanted a sequence of names, got {columns!r}")
    names: list[Any] = [*columns]  # pyright: ignore[reportUnknownArgumentType]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"columns: {table} has no column {', '.join(map(repr, unknown))}")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"columns: wanted each once, got {', '.join(map(repr, twice))} more than once")
    return names
