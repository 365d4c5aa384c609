"""A mapping file: which field of somebody's JSONL is which of our columns.

```toml
[columns]                      # our column = their field; a dot goes into an object, a number into a list
rollout_id = "uid"
prompt_tokens = "prompt_ids"   # what the model saw and did not draw
response_tokens = "output.ids" # what follows: all drawn, or where response_mask is 1
response_logprobs = "output.logprobs"  # one a token of the response
reward = "info.score"
"metadata.source" = "data_source"
x_share = '"share.of.all"'     # a name in quotes is taken as it is, dots and all

[constants]                    # our column = its value in every row
logprob_kind = "behavior"

[types]                        # columns of your own whose first rows would not show their type
x_share = "float64"
```
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping as Map
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rollstore.errors import SchemaError
from rollstore.exchange.declared import check_names, declared
from rollstore.exchange.pieces import Texts, from_ids
from rollstore.exchange.records import Made, Place, first_line, ids, refuse, text
from rollstore.schema import Problem, Rollout, to_table
from rollstore.schema.column import Column
from rollstore.schema.rollouts import ROLLOUTS

PIECES = (
    "prompt_tokens", "response_tokens", "response_mask", "response_logprobs", "prompt_text", "response_text",
)  # fmt: skip
"""Names beside the columns: a rollout from its two halves, as ids or as text."""

WHOLE = {"tokens", "action_mask"}
HALVES = {"prompt_tokens", "response_tokens", "response_mask", "response_logprobs"}
TEXTS = {"prompt_text", "response_text"}
"""Three ways to name the tokens, of which a file takes one."""

OF_TEXTS = {"messages", "tokenizer", "tokenizer_size"}
"""Columns that are made where texts become tokens."""

NESTED = ("spans", "samplers", "engine", "flags", "heads")
"""Columns of records, which no field of another program holds as they are."""


_ABSENT: Any = object()
_STEP = re.compile(r"""(?:"([^"]+)"|'([^']+)'|([^."'][^.]*))(?=\.|$)""")
_INDEX = re.compile(r"-?[0-9]{1,18}")
_SOME = np.arange(2)
_OF_ITS_OWN = {"wrong_type", "out_of_range", "naive_timestamp", "unknown_column", "negative", "too_small", "nan"}
"""Kinds of problems that a value has whatever stands beside it."""


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """Our column -> the way to their field, and the values that every row has."""

    columns: Map[str, tuple[str, ...]]
    constants: Map[str, Any]
    types: Map[str, pa.DataType]
    """Types of the caller's columns, where the file says them."""
    unmet: dict[str, str]
    """Column -> the field that it is mapped to, of those that no record has had so far."""

    @property
    def own(self) -> list[str]:
        """Names of the caller's columns."""
        return [name for name in (*self.columns, *self.constants, *self.types) if name.startswith("x_")]


def read_mapping(path: str | os.PathLike[str]) -> Mapping:
    """Read a mapping file. Raises ValueError where it says what cannot be, OSError."""
    try:
        read = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: wanted TOML, got: {error}") from None
    if unknown := set(read) - {"columns", "constants", "types"}:
        raise ValueError(f"{path}: wanted the tables columns, constants and types, got {sorted(unknown)[0]!r}")
    for name, value in read.items():
        if not isinstance(value, dict):
            raise ValueError(f"{path}: {name}: wanted a table, [{name}], got {value!r}")  # noqa: TRY004 # of a file
    columns, constants = read.get("columns", {}), read.get("constants", {})
    for name in (*columns, *constants):
        if not _is_column(name) or (name in constants and name in PIECES):
            raise ValueError(f"{path}: {name}: wanted a column of rollouts, metadata.<name> or x_<name>")
    check_names([*columns, *constants, *read.get("types", {})], str(path))
    for name, field in columns.items():
        if not isinstance(field, str) or not field:
            raise ValueError(f"{path}: {name}: wanted the name of a field, got {field!r}")
    ways = {name: _way(path, name, field) for name, field in columns.items()}
    if both := sorted(set(columns) & set(constants)):
        raise ValueError(f"{path}: {both[0]}: wanted a column or a constant, got both")
    for name, value in constants.items():
        _check_constant(path, name, value)
    named = set(columns)
    sources = [one for one in (WHOLE, HALVES, TEXTS) if named & one]
    if len(sources) > 1:
        got = " and ".join(sorted(named & one)[0] for one in sources)
        raise ValueError(f"{path}: columns: wanted tokens, or the halves as ids, or those as text, got {got}")
    if not ({"tokens", "action_mask"} <= named or named & {"response_tokens", "response_text"}):
        wanted = "tokens and action_mask, or response_tokens, or response_text"
        raise ValueError(f"{path}: columns: wanted {wanted}, got {', '.join(sorted(named)) or 'none'}")
    if TEXTS & named and (made := sorted(OF_TEXTS & {*columns, *constants})):
        raise ValueError(f"{path}: {made[0]}: wanted none beside texts, of which it is made")
    types = declared(read.get("types", {}), str(path))
    return Mapping(columns=ways, constants=constants, types=types, unmet=dict(columns))


def _way(path: str | os.PathLike[str], name: str, field: str) -> tuple[str, ...]:
    """The steps to a field: what stands between dots, or in quotes."""
    steps: list[str] = []
    rest = field
    while True:
        found = _STEP.match(rest)
        if found is None:
            wanted = "names between dots, and one with a dot in quotes, as '\"a.b\"'"
            raise ValueError(f"{path}: {name}: wanted {wanted}, got {field!r}")
        steps.append(found[1] or found[2] or found[3] or "")
        if found.end() == len(rest):
            return tuple(steps)
        rest = rest[found.end() + 1 :]


def _check_constant(path: str | os.PathLike[str], name: str, value: Any) -> None:
    """A constant that its column cannot hold would refuse every row."""
    column = ROLLOUTS.by_name.get(name)
    if column is not None and column.enum and value not in column.enum:
        raise ValueError(f"{path}: {name}: wanted one of {', '.join(column.enum)}, got {value!r}")
    try:
        some: dict[str, Any] = {"rollout_id": "any", "tokens": _SOME, "action_mask": _SOME > 0}
        to_table([Rollout(**(some | _columns({name: value})))])
    except SchemaError as error:  # of the rules that need other columns a row may hold what is missing here
        wrong = [p for p in error.problems if p.column in (name, name.partition(".")[0]) and p.kind in _OF_ITS_OWN]
        if wrong:
            raise ValueError(f"{path}: {name}: wanted {_constant(column, wrong[0])}, got {value!r}") from None
    except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
        wanted = "a constant" if column is None else f"a constant of {column.type}"
        raise ValueError(f"{path}: {name}: wanted {wanted}, got {value!r} ({first_line(error)})") from None


def _constant(column: Column | None, problem: Problem) -> str:
    return problem.wanted if column is None or problem.kind != "wrong_type" else f"a constant of {column.type}"


def _is_column(name: str) -> bool:
    if name.startswith(("metadata.", "x_")) or name in PIECES:
        return True
    column = ROLLOUTS.by_name.get(name)
    return column is not None and column.record is None and name not in (*NESTED, "metadata")


def mapped(record: dict[str, Any], place: Place, mapping: Mapping, texts: Texts | None) -> Made:
    """One record by the mapping. Raises UnsupportedRecordError where a field cannot be what it is said to be."""
    found = {name: _at(record, way) for name, way in mapping.columns.items()} | dict(mapping.constants)
    for name in [name for name in mapping.unmet if found[name] is not _ABSENT]:
        del mapping.unmet[name]
    found = {name: value for name, value in found.items() if value is not None and value is not _ABSENT}
    pieces = {name: found.pop(name) for name in PIECES if name in found}
    columns = _columns(found)
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


def _columns(found: Map[str, Any]) -> dict[str, Any]:
    """The fields of a Rollout, of values by the mapping's names."""
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
    return columns | {"metadata": metadata or None, "extra": extra or None}


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
    if isinstance(value, datetime):  # TOML has times
        return value
    return datetime.fromisoformat(value) if isinstance(value, str) else datetime.fromtimestamp(value, UTC)


def _at(value: Any, way: tuple[str, ...]) -> Any:
    """The value at a field, or _ABSENT."""
    for step in way:
        if isinstance(value, dict):
            value = value.get(step, _ABSENT)
        elif isinstance(value, list) and _INDEX.fullmatch(step):
            value = value[int(step)] if -len(value) <= int(step) < len(value) else _ABSENT
        else:
            return _ABSENT
    return value
