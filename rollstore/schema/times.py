"""Times that Python can hold: what is outside is refused, for no reader could show it."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollstore.schema.flat import is_known

t = pa.types

A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
A_DAY = 24 * 60 * 60


def readable(type_: pa.DataType) -> str:
    """The limits of a type, for a message."""
    return "at most 2^63-1 us" if t.is_duration(type_) else "a time within the years 1 to 9999 in UTC"


def limits(type_: pa.DataType) -> tuple[int, int] | None:
    """(least, greatest) number of the type's units that Python's datetime holds; None where every number will do."""
    if t.is_timestamp(type_):
        if type_.unit == "ns":
            return None  # 64 bits of nanoseconds end long before the years do
        unit = 10**6 // A_SECOND[type_.unit]
        least = (datetime.min.replace(tzinfo=UTC) - EPOCH) // MICROSECOND
        return least // unit, ((datetime.max.replace(tzinfo=UTC) - EPOCH) // MICROSECOND) // unit
    if t.is_date(type_):
        units = 1 if t.is_date32(type_) else A_DAY * 1000
        return (date.min - EPOCH.date()).days * units, ((date.max - EPOCH.date()).days + 1) * units - 1
    if t.is_duration(type_) and type_.unit in ("s", "ms"):  # as microseconds, which is what readers count in
        most = (2**63 - 1) * A_SECOND[type_.unit] // 10**6
        return -most, most
    return None


def unreadable(values: pa.Array) -> npt.NDArray[np.bool_] | None:
    """bool [n]: the values outside the limits of their type; None where there is none."""
    bounds = limits(values.type)
    if bounds is None or values.null_count == len(values):
        return None
    units = counted(values).fill_null(bounds[0]).to_numpy(zero_copy_only=False)
    if bounds[0] <= units.min() and units.max() <= bounds[1]:
        return None
    return is_known(values) & ((units < bounds[0]) | (units > bounds[1]))


def counted(values: pa.Array) -> pa.Array:
    """The values as numbers of their unit, for a message too: Python could not show what it cannot hold."""
    return values.view(pa.int32() if t.is_date32(values.type) else pa.int64())


def shown(values: pa.Array) -> list[Any]:
    """Texts of a few values, each of which Python may be unable to hold."""
    if limits(values.type) is not None:
        unit = "days" if t.is_date32(values.type) else "ms" if t.is_date64(values.type) else values.type.unit
        since = "" if t.is_duration(values.type) else " since 1970"
        return [f"{number} {unit}{since}" for number in counted(values).to_pylist()]
    return [repr(value) for value in values.to_pylist()]
