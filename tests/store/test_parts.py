"""Sealed parts: bounded batches, statistics, columns left out, and refusal of what is newer or not ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstore.errors import CorruptionError, StoreError, VersionError
from rollstore.store import frame, statistics
from rollstore.store.batching import filled, row_bytes
from rollstore.store.filesystem import LocalFilesystem
from rollstore.store.part import Orphan, open_part, write_part
from rollstore.store.store import Store
from tests.store.conftest import rollout

META = {"rollstore.schema": "1.0", "rollstore.table": "scores"}
NAME = "20260101T000000-" + "a" * 32 + "-000001"


@pytest.fixture
def place(tmp_path: Path) -> LocalFilesystem:
    filesystem = LocalFilesystem(tmp_path)
    filesystem.make_folder("scores")
    filesystem.make_folder("staging")
    return filesystem


def table(**columns: object) -> pa.Table:
    return pa.table(columns).replace_schema_metadata(META)


def test_batches_hold_at_most_the_limit_or_one_row_and_keep_the_order() -> None:
    sizes = [10, 300_000, 5, 5, 2_000_000, 7]
    lists = pa.array([np.arange(n, dtype=np.int32) for n in sizes], pa.list_(pa.int32()))
    rows = pa.table({"tokens": lists, "n": sizes})
    batches = list(filled(rows.to_batches(), 1 << 20))
    assert [n for batch in batches for n in batch.column("n").to_pylist()] == sizes
    assert all(batch.num_rows == 1 or row_bytes(batch.column("tokens")).sum() <= 1 << 20 for batch in batches)
    assert len(batches) == 6


def test_batches_cross_the_chunks_of_a_table() -> None:
    rows = pa.concat_tables([pa.table({"n": [i]}) for i in range(100)])
    assert [batch.num_rows for batch in list(filled(rows.to_batches(), 1 << 20))] == [100]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([[1, 2], None, []], pa.list_(pa.int32())),
        pa.array([[1, 2], None, []], pa.large_list(pa.int32())),
        pa.array(["abc", None, ""]),
        pa.array([b"abc", None, b""], pa.large_binary()),
        pa.array([{"a": 1, "b": ["x"]}, None, {"a": 2, "b": None}]),
        pa.array([[{"a": 1}], [], None]),
        pa.array([[("k", "v")], None, []], pa.map_(pa.string(), pa.string())),
        pa.array([[1, 2], [3, 4], None], pa.list_(pa.int32(), 2)),
        pa.array([True, None, False]),
        pa.array([1, None, 3], pa.timestamp("us", "UTC")),
    ],
    ids=lambda array: str(array.type),
)
def test_the_size_of_a_row_is_told_for_every_type_and_every_slice(array: pa.Array) -> None:
    sizes = row_bytes(array)
    assert len(sizes) == len(array)
    assert (sizes > 0).all()
    assert row_bytes(array.slice(1, 2)).tolist() == pytest.approx(sizes[1:].tolist())


KEYS = [f"reward/of/some/component/{n}" for n in range(40)]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([[(key, 1.0) for key in KEYS], None, [], [("k" * 900, 2.0)]], pa.map_(pa.string(), pa.float32())),
        pa.array([[(key, key) for key in KEYS], [("a", "b")]], pa.map_(pa.string(), pa.string())),
        pa.array(
            [[[(key, 1) for key in KEYS]], [], None, [[("a", 2)]] * 9], pa.list_(pa.map_(pa.string(), pa.int32()))
        ),
        pa.array([{"a": [(key, 1) for key in KEYS]}, None], pa.struct([("a", pa.map_(pa.string(), pa.int64()))])),
        pa.array([["x" * 900, "y" * 90], None, ["z" * 300, None]], pa.list_(pa.string(), 2)),
        pa.array([[[1] * 9, [2] * 99], None, [[3] * 999, None]], pa.list_(pa.list_(pa.int32()), 2)),
        pa.array([[[1.0, 2.0]] * 99, None, [[3.0, 4.0]]], pa.list_(pa.list_(pa.float64(), 2))),
        pa.array([[["x" * 90, "y"]] * 9, [], [None]], pa.list_(pa.list_(pa.string(), 2))),
    ],
    ids=lambda array: str(array.type),
)
def test_the_size_of_a_row_counts_all_that_is_in_it(array: pa.Array) -> None:
    for start in range(len(array)):
        own = array.take(pa.array([start]))
        assert row_bytes(array)[start] == pytest.approx(own.nbytes, abs=24, rel=0.05)
        assert row_bytes(array.slice(start, 1))[0] == row_bytes(array)[start]


def test_the_sizes_of_slices_of_a_large_table_look_at_their_own_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(array: pa.Array) -> object:
        seen.append(len(array))
        return row_bytes(array)

    rows = 1000
    structs = pa.array([[{"role": "user", "text": "abcdefgh"}] * 3] * rows)
    maps = pa.array([[("key", "value")] * 3] * rows, pa.map_(pa.string(), pa.string()))
    texts = pa.array([[["abc", "de"]] * 3] * rows)
    parent = pa.RecordBatch.from_arrays([structs, maps, texts], names=["structs", "maps", "texts"])
    monkeypatch.setattr("rollstore.store.batching.row_bytes", counted)
    slices = [[counted(column.slice(start, 10)) for start in range(0, rows, 10)] for column in parent.columns]
    assert max(seen) <= 10 * 3 * 2
    for column, found in zip(parent.columns, slices, strict=True):
        assert np.concatenate(found).tolist() == pytest.approx(row_bytes(column).tolist())


def test_a_column_of_nulls_is_left_out_of_the_file(place: LocalFilesystem) -> None:
    write_part(place, "scores", NAME, table(a=[1, 2], b=pa.nulls(2, pa.list_(pa.string())), c=["x", None]))
    part = open_part(place, "scores", NAME)
    assert part.schema.names == ["a", "c"]
    assert pa.Table.from_batches(part.batches()).to_pydict() == {"a": [1, 2], "c": ["x", None]}


def test_statistics_name_ends_counts_and_nulls(place: LocalFilesystem) -> None:
    rows = table(
        rollout_id=["b", "a", "c"],
        step=[3, None, 9],
        weight_versions=pa.array([[5, None], None, [7, 6]], pa.list_(pa.int64())),
        created_at=pa.array([10, 20, None], pa.timestamp("us", "UTC")),
        environment=["gsm", "gsm", "gsm"],
    )
    write_part(place, "scores", NAME, rows, source="me")
    part = open_part(place, "scores", NAME)
    assert part.rows == 3
    assert part.source == "me"
    assert part.statistics.ranges == {
        "rollout_id": statistics.Range("a", "c", 0),
        "step": statistics.Range(3, 9, 1),
        "weight_versions": statistics.Range(5, 7, 1),
        "created_at": statistics.Range(10, 20, 1),
        "environment": statistics.Range("gsm", "gsm", 0),
    }
    assert part.statistics.single("environment") == "gsm"
    assert part.statistics.single("step") is None


def test_a_text_too_long_to_keep_twice_has_no_range() -> None:
    assert statistics.statistics(table(rollout_id=["a", "z" * 300])).ranges == {}
    assert statistics.statistics(table(rollout_id=["a", "l" * 257, "z"])).ranges == {}, "also where it is at no end"
    assert statistics.statistics(table(rollout_id=["a", "é" * 256])).ranges != {}, "characters, not bytes"


def test_one_batch_and_chosen_columns_are_read_alone(place: LocalFilesystem) -> None:
    write_part(place, "scores", NAME, table(a=list(range(1000)), b=["x" * 100] * 1000), batch_bytes=10_000)
    part = open_part(place, "scores", NAME)
    assert len(part.tail.batches) > 5
    assert part.batch(3, ["a"]).to_pydict() == {"a": list(range(part.first_rows[3], part.first_rows[4]))}


def test_the_same_bytes_under_the_name_are_success_and_others_an_error(place: LocalFilesystem) -> None:
    write_part(place, "scores", NAME, table(a=[1]))
    write_part(place, "scores", NAME, table(a=[1]))
    with pytest.raises(StoreError, match="free name"):
        write_part(place, "scores", NAME, table(a=[2]))
    assert place.list("staging") == []


def test_a_part_under_another_name_is_refused(place: LocalFilesystem) -> None:
    write_part(place, "scores", NAME, table(a=[1]))
    other = NAME.replace("-000001", "-000002")
    place.publish(f"scores/{NAME}.arrow", f"scores/{other}.arrow")
    with pytest.raises(CorruptionError, match="wanted part"):
        open_part(place, "scores", other)


def rewritten(place: LocalFilesystem, metadata: dict[str, str], schema: dict[str, str]) -> None:
    rows = pa.table({"a": [1]}).replace_schema_metadata(schema)
    text = statistics.encode(statistics.statistics(rows))
    about = {"rollstore.table": "scores", "rollstore.part": NAME, "rollstore.statistics": text, **metadata}
    (place.root / f"scores/{NAME}.arrow").write_bytes(frame.encode_file(rows.schema, rows.to_batches(), about))


def test_a_newer_major_layout_or_schema_is_refused_and_a_newer_minor_read(place: LocalFilesystem) -> None:
    rewritten(place, {"rollstore.format": "2.0"}, META)
    with pytest.raises(VersionError, match=r"format: wanted at most 1\.x, got 2\.0"):
        open_part(place, "scores", NAME)
    rewritten(place, {"rollstore.format": "1.0"}, {"rollstore.schema": "2.0"})
    with pytest.raises(VersionError, match=r"schema: wanted at most 1\.x, got 2\.0"):
        open_part(place, "scores", NAME)
    rewritten(place, {"rollstore.format": "1.9"}, {"rollstore.schema": "1.7"})
    assert open_part(place, "scores", NAME).rows == 1


def test_a_plain_arrow_file_is_no_part(place: LocalFilesystem) -> None:
    with pa.OSFile(place.locate(f"scores/{NAME}.arrow"), "wb") as sink, pa.ipc.new_file(sink, pa.schema([])) as writer:
        writer.write_batch(pa.RecordBatch.from_pydict({}, schema=pa.schema([])))
    with pytest.raises(Orphan):
        open_part(place, "scores", NAME)


def test_a_part_cut_at_any_length_is_damaged_or_none_of_ours(place: LocalFilesystem) -> None:
    write_part(place, "scores", NAME, table(a=[1, 2, 3]))
    path = Path(place.locate(f"scores/{NAME}.arrow"))
    data = path.read_bytes()
    kinds = set()
    for length in range(0, len(data), 3):
        path.write_bytes(data[:length])
        with pytest.raises((CorruptionError, Orphan)) as caught:
            open_part(place, "scores", NAME)
        kinds.add(caught.type)
    assert kinds == {CorruptionError, Orphan}


def test_parts_that_cannot_match_are_not_opened(store: Store) -> None:
    for step in (1, 2, 3, None):
        store.append("rollouts", [rollout(f"r{step}", step=step)])
    with store.snapshot() as snapshot:

        def chosen(where: pc.Expression) -> list[str]:
            return [part.statistics.ranges["rollout_id"].min for part in snapshot.matching("rollouts", where)]

        step = pc.field("step")
        assert sorted(chosen(step == 2)) == ["r2"]
        assert sorted(chosen(step > 1)) == ["r2", "r3"]
        assert sorted(chosen((step == 2) & (pc.field("rollout_id") == "r3"))) == []
        assert "rNone" in chosen(step.is_null())
        assert "rNone" in chosen(~step.is_valid() | (step == 3))
        assert sorted(chosen(pc.field("tokens").is_valid())) == ["r1", "r2", "r3", "rNone"]
        assert sorted(chosen(pc.field("reward") > 0)) == []
    found = store.scan("rollouts", ["rollout_id"], where=pc.field("step").isin([1, 3])).read_all()
    assert sorted(found.column(0).to_pylist()) == ["r1", "r3"]


SLACK = 48
"""Bytes by which what a row is taken for and what Arrow counts may differ: bits of validity, an offset a piece."""


def lists_of(lengths: list[int]) -> pa.RecordBatch:
    lists = pa.array([[0] * n for n in lengths], pa.list_(pa.int32()))
    return pa.RecordBatch.from_arrays([lists], names=["tokens"])


def lengths_of(batch: pa.RecordBatch) -> list[int]:
    return pc.list_value_length(batch.column(0)).to_pylist()


@given(st.lists(st.lists(st.integers(0, 120), max_size=6), max_size=8), st.integers(64, 1200))
def test_batches_hold_at_most_the_limit_whatever_pieces_the_rows_come_in(pieces: list[list[int]], limit: int) -> None:
    batches = list(filled((lists_of(piece) for piece in pieces), limit))
    assert [n for batch in batches for n in lengths_of(batch)] == [n for piece in pieces for n in piece]
    assert all(batch.num_rows == 1 or batch.nbytes <= limit + SLACK for batch in batches)


@given(st.integers(0, 60), st.lists(st.integers(0, 40), max_size=8), st.integers(64, 1200))
def test_batches_of_like_rows_are_as_full_as_the_limit_allows(length: int, counts: list[int], limit: int) -> None:
    batches = list(filled((lists_of([length] * count) for count in counts), limit))
    assert sum(batch.num_rows for batch in batches) == sum(counts)
    for batch in batches[:-1]:
        row = 4.125 * (length + 1)
        assert batch.nbytes + row > limit - SLACK - batch.num_rows, "the next row would have fitted"
