"""Polars gives back what was written, once, and filters by its own rules."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings

from rollstore.errors import CorruptionError
from rollstore.readers.polars import scan
from rollstore.schema import Rollout, to_table
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.readers.samples import rollout, rows, settled, write
from tests.strategies import rollout_lists


@settings(max_examples=12, deadline=None)
@given(sealed=rollout_lists(max_size=3), live=rollout_lists(max_size=2))
def test_rollouts_come_back_bit_for_bit_from_parts_and_journals(sealed: list[Rollout], live: list[Rollout]) -> None:
    sealed = [settled(r) for r in sealed]
    live = [settled(r, f"{r.rollout_id}-live") for r in live]
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "store", create=True)
        with store.writer() as writer:
            writer.append(sealed)
        with store.writer() as writer:
            writer.append(live)
            writer.flush()
            found = scan(store).collect().to_arrow()
    written = [*rows(to_table(sealed)), *rows(to_table(live))]
    assert rows(found) == sorted(written, key=lambda row: (row["rollout_id"], row["segment"]))


def test_types_are_those_of_the_newest_schema_even_where_nothing_was_recorded(store: Store) -> None:
    schema = scan(store).collect_schema()
    assert schema["requested_at"] == pl.Datetime("us", "UTC")
    assert schema["replay_key"] == pl.UInt64
    assert schema["weight_versions"] == pl.List(pl.Int64)
    write(store, rollout("a"))
    assert scan(store).collect_schema() == schema
    assert scan(store).collect().schema == schema


def test_a_filter_means_what_it_means_over_a_frame_in_memory(store: Store) -> None:
    values = [0.25, math.nan, None, 0.25, -math.inf]
    write(store, *[rollout(f"r{n}", extra={"x_value": value, "x_row": n}) for n, value in enumerate(values)])
    frame = scan(store).collect()
    for condition in (
        pl.col("x_value").is_nan(), pl.col("x_value") > 0.1, pl.col("x_value") != 0.25, pl.col("x_value") <= 0.25,
        pl.col("x_value").is_null(), pl.col("step").is_in([0, 3]) & (pl.col("x_row") < 2),
    ):  # fmt: skip
        assert scan(store).filter(condition).collect().equals(frame.filter(condition))
    assert scan(store).filter(pl.col("x_value") > 0.1).collect()["rollout_id"].to_list() == ["r0", "r1", "r3"]


def test_a_head_reads_no_more_rows_than_asked(store: Store) -> None:
    write(store, *[rollout(f"r{n}") for n in range(10)])
    write(store, *[rollout(f"s{n}") for n in range(10)])
    assert scan(store).head(12).collect().height == 12
    assert scan(store).filter(pl.col("rollout_id").str.starts_with("s")).head(3).collect().height == 3
    assert scan(store).select(pl.len()).collect().item() == 20


def test_a_column_that_only_some_parts_have_is_null_in_the_others(store: Store) -> None:
    write(store, rollout("old"))
    write(store, rollout("new", extra={"x_cost": 3, "x_list": [1, 2]}))
    frame = scan(store)
    for name, value in (("x_cost", 3), ("x_list", [1, 2])):
        found = frame.select(name).collect()[name].to_list()
        assert sorted(found, key=lambda one: one is None) == [value, None]
    assert frame.filter(pl.col("x_cost").is_null()).select("x_cost").collect().height == 1


def test_rows_written_twice_count_once(store: Store) -> None:
    write(store, rollout("a"), rollout("b"))
    write(store, rollout("b"), rollout("c"))
    assert sorted(scan(store).select("rollout_id").collect()["rollout_id"]) == ["a", "b", "c"]


def test_a_frame_stays_at_its_snapshot_however_often_it_is_collected(store: Store) -> None:
    write(store, rollout("a"))
    frame = scan(store).select("rollout_id")
    assert frame.collect().height == 1
    write(store, rollout("b"))
    assert frame.collect().height == 1
    assert scan(store).collect().height == 2


def test_an_unknown_table_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="'rollout'"):
        scan(store, "rollout")


def test_a_damaged_part_is_refused(store: Store) -> None:
    write(store, *[rollout(f"r{n}") for n in range(20)])
    part = store.parts("rollouts")[0]
    data = bytearray(Path(part.path).read_bytes())
    data[part.tail.batches[0].offset + part.tail.batches[0].length // 2] ^= 1
    Path(part.path).write_bytes(data)
    with pytest.raises(CorruptionError, match=part.name):
        scan(open_store(store.path))
