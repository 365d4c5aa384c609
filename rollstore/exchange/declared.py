"""The caller's own columns as a person names them, and their types where the first rows would not show them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

WORDS: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "float32": pa.float32(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", "UTC"),
    "date": pa.date32(),
}

_LIST = "[]"

_NAME = re.compile(r"x_[A-Za-z0-9_]{1,100}")
"""What a store takes for the name of such a column; it would refuse each row for another."""


def check_names(names: Iterable[str], where: str) -> None:
    """Raise ValueError, naming `where`, for an x_ name that no store takes, or that another is but for case."""
    before: dict[str, str] = {}
    for name in names:
        if not name.startswith("x_"):
            continue
        if not _NAME.fullmatch(name):
            raise ValueError(f"{where}: {name}: wanted x_ and letters, digits or _, at most 102 characters")
        other = before.setdefault(name.lower(), name)
        if other != name:
            raise ValueError(
                f"{where}: {name}: wanted a name that differs from {other} beyond upper and lower case: SQL knows no "
                "other difference"
            )


def declared(types: Mapping[str, Any], where: str) -> dict[str, pa.DataType]:
    """x_ columns -> types, of `float64` and the like, and `float64[]` for lists. Raises ValueError, naming `where`."""
    made: dict[str, pa.DataType] = {}
    check_names(types, where)
    for name, word in types.items():
        if not name.startswith("x_"):
            raise ValueError(f"{where}: {name}: wanted a column of your own, x_<name>, got one whose type is ours")
        if not isinstance(word, str) or (type_ := _type(word)) is None:
            raise ValueError(f"{where}: {name}: wanted one of {', '.join(WORDS)}, or a list as float64[], got {word!r}")
        made[name] = type_
    return made


def _type(word: str) -> pa.DataType | None:
    if word.endswith(_LIST):
        inner = _type(word.removesuffix(_LIST))
        return None if inner is None else pa.list_(inner)
    return WORDS.get(word)
