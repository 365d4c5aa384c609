"""What an importer makes of one record of a file, and how it says that a record is none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from rollstore.errors import UnsupportedRecordError
from rollstore.schema import Rollout

OTHER_SHAPE = "record: wanted one of this format"
"""How the reason begins where a record has another shape, in a way that nobody foresaw."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """The rows that one record becomes: all of them are taken, or none."""

    rollouts: Sequence[Rollout] = ()
    scores: Sequence[Mapping[str, Any]] = ()
    """By column name, with the values that JSON has."""
    others: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict[str, Sequence[Mapping[str, Any]]])
    """Rows of any table by its name, likewise."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a record stands: the importer's name, the file, its fingerprint, and the number of the record from 1."""

    format: str
    file: str
    fingerprint: str
    row: int
    raw: bytes | None = None

    def id(self) -> str:
        """An id that this record has whenever it is imported: of its file's beginning, its number and its bytes."""
        sum_ = xxhash.xxh3_64_hexdigest(f"{self.fingerprint} {self.row} ".encode() + (self.raw or b""))
        return f"{self.format}-{sum_}-{self.row}"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record of a file, made or refused."""

    row: int | None
    raw: bytes | None = None
    made: Made | None = None
    reason: str | None = None


def made(row: int, raw: bytes | None, make: Callable[[], Made]) -> Record:
    """What `make` makes of a record, or why it is none."""
    try:
        rows = make()
        if not (rows.rollouts or rows.scores or any(rows.others.values())):
            return Record(row=row, raw=raw, reason="record: wanted at least one sequence, got none")
        return Record(row=row, raw=raw, made=rows)
    except UnsupportedRecordError as error:
        return Record(row=row, raw=raw, reason=str(error))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # Other people's files hold anything anywhere. A row of another shape is a bad row, and the rest goes on.
        return Record(row=row, raw=raw, reason=_other_shape(error))


def _other_shape(error: Exception) -> str:
    """Why a record is none of a format, in the words of what is wrong with it."""
    if isinstance(error, KeyError):
        return f"record: wanted a field {first_line(error)}, got none"
    if isinstance(error, RecursionError):
        return "record: wanted values that are nested less deeply, got too many levels"
    if isinstance(error, UnicodeEncodeError):
        return f"record: wanted texts that UTF-8 can hold, got a lone surrogate: {first_line(error)}"
    if isinstance(error, OverflowError):
        return f"record: wanted numbers that fit into their columns, got: {first_line(error)}"
    return f"{OTHER_SHAPE}, got {type(error).__name__}: {first_line(error)}"


def refuse(where: str, wanted: str, got: Any) -> UnsupportedRecordError:
    """What to raise for a record that cannot be taken."""
    return UnsupportedRecordError(f"{where}: wanted {wanted}, got {shown(got)}")


def first_line(error: Exception) -> str:
    """What an error says, on one line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def shown(value: Any) -> str:
    """A value for a message, cut short."""
    if isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def decoded(line: bytes) -> dict[str, Any]:
    """The object on a line, NaN and infinities as Python's json writes them included.

    Raises UnsupportedRecordError where it is none, or holds a number that is too large for 64 bits.
    """
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        try:  # slower, and takes what the first does not: NaN, and texts with lone surrogates
            value = json.loads(line.decode(), parse_float=_finite)  # of bytes it would guess the encoding
        except RecursionError:
            raise UnsupportedRecordError("line: wanted JSON that is nested less deeply, got too many levels") from None
        except ValueError as error:
            raise UnsupportedRecordError(f"line: wanted JSON, got: {error}") from None
    if not isinstance(value, dict):
        raise refuse("line", "a JSON object", value)
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:40]}, which is too large a number")
    return value


def ids(value: Any, where: str) -> list[int]:
    """A list of token ids. Raises UnsupportedRecordError."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise refuse(where, "a list of token ids", value)
    return value


def number(value: Any, where: str) -> float | None:
    """A number or nothing; NaN is nothing. Raises UnsupportedRecordError."""
    if value is None:
        return None
    if type(value) not in (int, float):
        raise refuse(where, "a number", value)
    return None if value != value else float(value)


def text(value: Any, where: str) -> str:
    """A text. Raises UnsupportedRecordError."""
    if not isinstance(value, str):
        raise refuse(where, "a text", value)
    return value
