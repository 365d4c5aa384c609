"""Values of a query that Arrow or Python has no type for: exact all the same, as text where nothing else holds them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from duckdb import DuckDBPyRelation

# What DuckDB gives to Arrow changed or as its own bytes: the zone of a time is lost, 128 unsigned bits become signed.
_FOREIGN = {"bit", "bignum", "varint", "time with time zone", "uhugeint", "variant"}
_NESTED = {"list", "array", "struct", "map", "union"}
_TEMPORAL = {"date", "time", "time_ns"}

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY = 86_400
_INFINITE = {pa.date32(): 2**31 - 1}  # of other types: the largest 64-bit integer
_EPOCH = date(1970, 1, 1)
_FIRST, _LAST = (date.min - _EPOCH).days, (date.max - _EPOCH).days
_CYCLE = 146_097  # days of 400 years, after which the calendar repeats


def carried(relation: DuckDBPyRelation) -> DuckDBPyRelation:
    """The relation with the columns that Arrow cannot carry cast to text, as DuckDB writes them."""
    kinds = relation.types
    if not any(_foreign(kind) for kind in kinds):
        return relation
    columns = [
        f"#{n}{'::varchar' if _foreign(kind) else ''} as {_quoted(name)}"
        for n, (name, kind) in enumerate(zip(relation.columns, kinds, strict=True), 1)
    ]
    return relation.project(", ".join(columns))


def values(array: pa.Array) -> list[Any]:
    """The values of a column in Python. Dates and times that Python has no value for are ISO 8601 text or `infinity`.

    Those are years outside 1 to 9999, nanoseconds, and 24:00:00. Maps become dicts.
    """
    kind = array.type
    if not _holds_time(kind):
        return array.to_pylist(maps_as_pydicts="lossy")
    if pa.types.is_temporal(kind):
        return [None if value is None else _moment(value, kind) for value in _integers(array)]
    if pa.types.is_struct(kind):
        names = [field.name for field in kind.fields]
        rows = zip(*(values(field) for field in array.flatten()), strict=True)
        valid = array.is_valid().to_pylist()
        return [dict(zip(names, row, strict=True)) if known else None for row, known in zip(rows, valid, strict=True)]
    if pa.types.is_map(kind):
        return [None if pairs is None else dict(pairs) for pairs in _pairs(array)]
    lengths = pc.list_value_length(array).to_pylist()
    items = iter(values(array.flatten()))
    return [None if length is None else list(islice(items, length)) for length in lengths]


def _foreign(kind: Any) -> bool:
    """Whether Arrow has no type for it, or for anything in it; a union that may hold a time counts too."""
    if kind.id not in _NESTED:
        return kind.id in _FOREIGN
    inner = [child for _, child in kind.children if hasattr(child, "id")]
    return any(_foreign(child) or (kind.id == "union" and _is_time(child)) for child in inner)


def _is_time(kind: Any) -> bool:
    if kind.id in _NESTED:
        return any(_is_time(child) for _, child in kind.children if hasattr(child, "id"))
    return kind.id in _TEMPORAL or kind.id.startswith("timestamp")


def _quoted(name: str) -> str:
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def _holds_time(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind) and not pa.types.is_union(kind):
        return any(_holds_time(kind.field(n).type) for n in range(kind.num_fields))
    return pa.types.is_date(kind) or pa.types.is_time(kind) or pa.types.is_timestamp(kind)


def _pairs(array: pa.Array) -> Iterator[list[tuple[Any, Any]] | None]:
    offsets, valid = array.offsets.to_pylist(), array.is_valid().to_pylist()
    keys, items = values(array.keys), values(array.items)
    for n, known in enumerate(valid):
        start, stop = offsets[n] - offsets[0], offsets[n + 1] - offsets[0]
        yield list(zip(keys[start:stop], items[start:stop], strict=True)) if known else None


def _integers(array: pa.Array) -> list[int | None]:
    width = pa.int32() if array.type.bit_width == 32 else pa.int64()
    return array.view(width).to_pylist()


def _moment(value: int, kind: pa.DataType) -> Any:
    if abs(value) == _INFINITE.get(kind, 2**63 - 1):
        return "infinity" if value > 0 else "-infinity"
    if pa.types.is_date(kind):
        return _EPOCH + timedelta(days=value) if _FIRST <= value <= _LAST else _day(value)
    per = _PER_SECOND[kind.unit]
    seconds, part = divmod(value, per)
    nanoseconds = part * (10**9 // per)
    days, seconds = divmod(seconds, _DAY)
    if pa.types.is_time(kind):
        if days or nanoseconds % 1000:
            return _clock(days * _DAY + seconds, nanoseconds)
        return (datetime.min + timedelta(seconds=seconds, microseconds=nanoseconds // 1000)).time()
    zone = kind.tz
    if _FIRST < days < _LAST and not nanoseconds % 1000:
        moment = datetime.combine(_EPOCH + timedelta(days=days), time()) + timedelta(
            seconds=seconds, microseconds=nanoseconds // 1000
        )
        if zone is None:
            return moment
        return moment.replace(tzinfo=UTC) if zone == "UTC" else moment.replace(tzinfo=UTC).astimezone(ZoneInfo(zone))
    return f"{_day(days)}T{_clock(seconds, nanoseconds)}{'' if zone is None else 'Z'}"


def _day(days: int) -> str:
    """An ISO date of any year, in days since 1970. The year before year 1 is 0, the one before that -1."""
    cycles, rest = divmod(days - (date(2000, 1, 1) - _EPOCH).days, _CYCLE)
    same = date(2000, 1, 1) + timedelta(days=rest)
    year = same.year + 400 * cycles
    return f"{'-' if year < 0 else ''}{abs(year):04d}-{same:%m-%d}"


def _clock(seconds: int, nanoseconds: int) -> str:
    fraction = f".{nanoseconds:09d}".rstrip("0").rstrip(".")
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{fraction}"
