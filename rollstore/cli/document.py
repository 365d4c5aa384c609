"""What `--json` writes: one JSON document, with the same rules in every command.

Unknown is null. NaN is the string "NaN", the infinities are "Infinity" and "-Infinity" (Python's `float()` and
JavaScript's `Number()` read all three). Integers are written with all their digits. Times are ISO 8601, infinite ones
are "infinity" and "-infinity". Durations are seconds, bytes are base64. Decimals are numbers where a double has the
same digits, else strings.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from rollstore.schema import Heads, Known, Rollout


def document(value: Any, *, indent: int | None = 2) -> str:
    """The JSON text of records, arrays, mappings and what databases return. ASCII: any terminal or pipe takes it."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def plain(value: Any) -> Any:
    """The value in what JSON has: dict, list, str, int, finite float, bool, None."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _special(value)
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Known):
        return plain(value.to_list())
    if isinstance(value, Rollout):
        return plain(columns(value))
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())  # pyright: ignore[reportUnknownMemberType] # a NamedTuple has no static name for it
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, pa.MonthDayNano):
        return {"months": value.months, "days": value.days, "nanoseconds": value.nanoseconds}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return _scalar(value)


def columns(rollout: Rollout) -> dict[str, Any]:
    """A record by its column names: the heads as head_size, head_counts, ...; the caller's own columns at the end."""
    row: dict[str, Any] = {}
    for name in rollout.__struct_fields__:
        value = getattr(rollout, name)
        if name == "heads":
            heads = value or Heads()
            row |= {f"head_{part}": getattr(heads, part) for part in heads.__struct_fields__}
        elif name == "extra":
            row |= value or {}
        else:
            row[name] = value
    return row


def _special(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _scalar(value: Any) -> Any:
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Decimal):
        return _decimal(value)
    return str(value)


def _decimal(value: Decimal) -> int | float | str:
    if not value.is_finite():
        return _special(float(value))
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)
