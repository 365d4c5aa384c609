"""A mapping file: which field of somebody's JSONL is which of our columns.

```toml
[columns]                      # our column = their field; a dot goes into an object, a number into a list
rollout_id = "uid"
prompt_tokens = "prompt_ids"   # what the model saw and did not draw
response_tokens = "output.ids" # what follows: all drawn, or where response_mask is 1
response_logprobs = "output.logprobs"  # one a token of the response
reward = "info.score"
"metadata.source" = "data_source"

[constants]                    # our column = its value in every row
logprob_kind = "behavior"
```
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping as Map
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollstore.exchange.pieces import Texts, from_ids
from rollstore.exchange.records import Made, Place, ids, refuse, text
from rollstore.schema import Rollout
from rollstore.schema.rollouts import ROLLOUTS

PIECES = (
    "prompt_tokens", "response_tokens", "response_mask", "response_logprobs", "prompt_text", "response_text",
)  # fmt: skip
"""Names beside the columns: a rollout from its two halves, as ids or as text."""

NESTED = ("spans", "samplers", "engine", "flags", "heads")
"""Columns of records, which no field of another program holds as they are."""


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """Our column -> the way to their field, and the values that every row has."""

    columns: Map[str, tuple[str, ...]]
    constants: Map[str, Any]


def read_mapping(path: str | os.PathLike[str]) -> Mapping:
    """Read a mapping file. Raises ValueError where it says what cannot be, OSError."""
    try:
        read = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: wanted TOML, got: {error}") from None
    if unknown := set(read) - {"columns", "constants"}:
        raise ValueError(f"{path}: wanted the tables columns and constants, got {sorted(unknown)[0]!r}")
    columns, constants = read.get("columns", {}), read.get("constants", {})
    for name in (*columns, *constants):
        if not _is_column(name) or (name in constants and name in PIECES):
            raise ValueError(f"{path}: {name}: wanted a column of rollouts, metadata.<name> or x_<name>")
    for name, field in columns.items():
        if not isinstance(field, str) or not field:
            raise ValueError(f"{path}: {name}: wanted the name of a field, got {field!r}")
    for name, value in constants.items():
        _check_constant(path, name, value)
    named = set(columns)
    if not ({"tokens", "action_mask"} <= named or named & {"response_tokens", "response_text"}):
        wanted = "tokens and action_mask, or response_tokens, or response_text"
        raise ValueError(f"{path}: columns: wanted {wanted}, got {', '.join(sorted(named)) or 'none'}")
    return Mapping(columns={name: tuple(field.split(".")) for name, field in columns.items()}, constants=constants)


def _check_constant(path: str | os.PathLike[str], name: str, value: Any) -> None:
    """A constant that its column cannot hold would refuse every row."""
    column = ROLLOUTS.by_name.get(name)
    if column is None:  # metadata.<name>, or the caller's own
        return
    try:
        pa.scalar(_fitting(name, value), column.type)
    except (ValueError, TypeError, OverflowError, pa.ArrowException):
        raise ValueError(f"{path}: {name}: wanted a constant of {column.type}, got {value!r}") from None
    if column.enum and value not in column.enum:
        raise ValueError(f"{path}: {name}: wanted one of {', '.join(column.enum)}, got {value!r}")


def _is_column(name: str) -> bool:
    if name.startswith(("metadata.", "x_")) or name in PIECES:
        return True
    column = ROLLOUTS.by_name.get(name)
    return column is not None and column.record is None and name not in (*NESTED, "metadata")


def mapped(record: dict[str, Any], place: Place, mapping: Mapping, texts: Texts | None) -> Made:
    """One record by the mapping. Raises UnsupportedRecordError where a field cannot be what it is said to be."""
    found = {name: _at(record, way) for name, way in mapping.columns.items()} | dict(mapping.constants)
    found = {name: value for name, value in found.items() if value is not None}
    pieces = {name: found.pop(name) for name in PIECES if name in found}
    columns: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    for name, value in found.items():
        if name.startswith("metadata."):
            metadata[name.removeprefix("metadata.")] = value
        elif name.startswith("x_"):
            extra[name] = value
        else:
            columns[name] = _fitting(name, value)
    columns |= {"metadata": metadata or None, "extra": extra or None}
    if "response_text" in mapping.columns and texts is not None:
        said = [text(pieces.get(name, ""), name) for name in ("prompt_text", "response_text")]
        parts = list(zip(("prompt", "assistant"), said, strict=True))
        return Made(rollouts=[texts.rollout(place, parts, **columns)])
    if "response_tokens" in mapping.columns:
        return Made(rollouts=[_halves(place, pieces, columns)])
    for name in ("tokens", "action_mask"):
        if name not in columns:
            raise refuse(".".join(mapping.columns[name]), "a list", None)
    columns.setdefault("rollout_id", place.id())
    return Made(rollouts=[Rollout(**columns)])


def _halves(place: Place, pieces: dict[str, Any], columns: dict[str, Any]) -> Rollout:
    prompt = ids(pieces.get("prompt_tokens", []), "prompt_tokens")
    response = ids(pieces.get("response_tokens"), "response_tokens")
    mask = pieces.get("response_mask", [1] * len(response))
    logprobs = pieces.get("response_logprobs")
    for name, values in (("response_mask", mask), ("response_logprobs", logprobs)):
        if values is not None and (not isinstance(values, list) or len(values) != len(response)):
            raise refuse(name, f"a list of {len(response)}, one a token of the response", values)
    before = [None] * len(prompt)
    both = None if logprobs is None else [*before, *logprobs]
    return from_ids(place, [*prompt, *response], [*([0] * len(prompt)), *mask], both, **columns)


def _fitting(name: str, value: Any) -> Any:
    """A field as its column takes it: what JSON has no type for, and what other programs write for the same.

    In columns of text a whole number becomes text; in those of floats true is 1; times are ISO 8601 with a zone, or
    seconds since 1970; messages become JSON.
    """
    type_ = ROLLOUTS.by_name[name].type
    if name == "messages" and not isinstance(value, str):
        return json.dumps(value)
    if pa.types.is_string(type_) and type(value) is int:
        return str(value)
    if pa.types.is_floating(type_) and isinstance(value, bool):
        return float(value)
    if not pa.types.is_timestamp(type_):
        return value
    return datetime.fromisoformat(value) if isinstance(value, str) else datetime.fromtimestamp(value, UTC)


def _at(value: Any, way: tuple[str, ...]) -> Any:
    for step in way:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.lstrip("-").isdigit():
            value = value[int(step)] if -len(value) <= int(step) < len(value) else None
        else:
            return None
    return value
