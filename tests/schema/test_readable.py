"""What some reader could not hold is refused: types of the caller's own columns, and times outside Python's years."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest

from rollstore.errors import SchemaError
from rollstore.schema import Problem, Rollout, Span, conform, from_table, prepare, problems, to_table

BASE = pa.table(
    {
        "rollout_id": ["a", "b"],
        "segment": [0, 0],
        "tokens": [[5, 6], [5, 6]],
        "action_mask": [[False, True], [False, True]],
    }
)


def of(name: str, array: pa.Array) -> list[Problem]:
    """The problems of two rows with one more column: an append names the same ones as a look at the table."""
    table = BASE.append_column(name, array)
    with pytest.raises(SchemaError) as refused:
        prepare(table)
    assert refused.value.problems == problems(table)
    return refused.value.problems


HARD = {
    "decimal256": pa.decimal256(50, 2),
    "float16": pa.float16(),
    "calendar intervals": pa.month_day_nano_interval(),
    "nanoseconds": pa.timestamp("ns", "UTC"),
    "another zone": pa.timestamp("us", "Europe/Berlin"),
    "an offset": pa.timestamp("us", "+00:00"),
    "durations in ns": pa.duration("ns"),
    "times of day in ns": pa.time64("ns"),
}
AROUND = {
    "alone": lambda type_: type_,
    "in a list": pa.list_,
    "in a large list": pa.large_list,
    "in a struct": lambda type_: pa.struct([("a", pa.int32()), ("b", type_)]),
    "in a map": lambda type_: pa.map_(pa.string(), type_),
    "in a list of structs": lambda type_: pa.list_(pa.struct([("b", type_)])),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("hard", HARD)
def test_a_type_that_some_reader_cannot_hold_is_refused_at_any_depth(hard: str, around: str) -> None:
    found = of("x_a", pa.nulls(2, AROUND[around](HARD[hard])))
    column = "x_a.b" if "struct" in around else "x_a"
    assert [(p.column, p.kind, p.row, p.found) for p in found] == [(column, "wrong_type", None, str(HARD[hard]))]
    assert "decimal128" in found[0].wanted
    assert "timestamp with zone UTC down to us" in found[0].wanted


@pytest.mark.parametrize("around", AROUND)
def test_times_without_a_zone_in_a_callers_column_are_refused(around: str) -> None:
    found = of("x_a", pa.nulls(2, AROUND[around](pa.timestamp("us"))))
    assert [(p.kind, p.row) for p in found] == [("naive_timestamp", None)]


FINE = [
    pa.bool_(), pa.uint64(), pa.float32(), pa.decimal128(38, 3), pa.large_string(), pa.binary(3), pa.date32(),
    pa.date64(), pa.time32("ms"), pa.time64("us"), pa.duration("s"), pa.duration("us"), pa.timestamp("s", "UTC"),
]  # fmt: skip


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("type_", FINE, ids=str)
def test_every_other_type_is_kept_at_any_depth(type_: pa.DataType, around: str) -> None:
    whole = AROUND[around](type_)
    assert prepare(BASE.append_column("x_a", pa.nulls(2, whole)))["x_a"].type == whole


def test_a_reader_still_opens_what_an_append_would_refuse() -> None:
    old = BASE.append_column("x_a", pa.nulls(2, pa.float16()))
    assert conform(old)["x_a"].type == pa.float16()


FIRST = datetime(1, 1, 1, tzinfo=UTC)
LAST = datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)
BEFORE = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5)))
AFTER = datetime(9999, 12, 31, 23, 59, tzinfo=timezone(timedelta(hours=-5)))
SPANS = {"start": 0, "length": 2, "is_action": False}


def record(**change: Any) -> Rollout:
    return Rollout(rollout_id="b", tokens=[5, 6], action_mask=[False, False], **change)


@pytest.mark.parametrize("time", [BEFORE, AFTER])
@pytest.mark.parametrize("inside", [False, True])
def test_a_record_with_a_time_outside_pythons_years_is_refused_by_its_row(time: datetime, inside: bool) -> None:
    made = record(spans=[Span(**SPANS, finished_at=time)]) if inside else record(finished_at=time)
    with pytest.raises(SchemaError) as refused:
        to_table([Rollout(rollout_id="a", tokens=[5], action_mask=[False]), made])
    column = "spans.finished_at" if inside else "finished_at"
    assert [(p.column, p.kind, p.row) for p in refused.value.problems] == [(column, "out_of_range", 1)]
    assert "us since 1970" in str(refused.value)


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
@pytest.mark.parametrize("name", ["started_at", "x_a", "spans"])
def test_an_arrow_time_outside_pythons_years_is_refused_by_its_row(name: str, unit: str) -> None:
    beyond = 10**12 * {"s": 1, "ms": 10**3, "us": 10**6}[unit]
    array = pa.array([0, beyond], pa.timestamp(unit, "UTC"))
    column = name
    if name == "spans":
        parts = [pa.array([value] * 2) for value in (0, 2)] + [pa.array([False] * 2), array]
        structs = pa.StructArray.from_arrays(parts, ["start", "length", "is_action", "started_at"])
        array, column = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), structs), "spans.started_at"
    found = of(name, array)
    assert (column, "out_of_range", 1) in {(p.column, p.kind, p.row) for p in found}
    assert all(p.row != 0 for p in found if p.column == column)


BEYOND = {
    "timestamp": pa.array([0, 2**62], pa.timestamp("us", "UTC")),
    "date32": pa.array([0, 2932897], pa.int32()).view(pa.date32()),
    "date64": pa.array([0, -719163 * 86_400_000], pa.int64()).view(pa.date64()),
    "duration": pa.array([0, 2**62], pa.duration("s")),
}
OFFSETS = pa.array([0, 0, 2], pa.int32())
KEYS = pa.array(["a", "b"])


@pytest.mark.parametrize("kind", BEYOND)
def test_values_that_python_cannot_hold_are_refused_at_any_depth_of_a_callers_column(kind: str) -> None:
    array = BEYOND[kind]
    shapes = {
        "x_a": (array, "x_a"),
        "x_s": (pa.StructArray.from_arrays([array], ["b"]), "x_s.b"),
        "x_l": (pa.ListArray.from_arrays(OFFSETS, array), "x_l"),
        "x_m": (pa.MapArray.from_arrays(OFFSETS, KEYS, array), "x_m"),
    }
    for name, (column, path) in shapes.items():
        found = of(name, column)
        assert [(p.column, p.kind, p.row) for p in found] == [(path, "out_of_range", 1)]


def test_the_first_and_the_last_time_that_python_holds_come_back() -> None:
    made = record(started_at=FIRST, finished_at=LAST, extra={"x_a": LAST, "x_b": [FIRST], "x_c": date.max})
    back = from_table(to_table([made]))[0]
    assert (back.started_at, back.finished_at, back.extra) == (FIRST, LAST, made.extra)
