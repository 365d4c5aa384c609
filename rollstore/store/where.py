"""Whether a filter can be asked of a table: said before anything is read, by the name of the column that is wrong."""

from __future__ import annotations

import re

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
