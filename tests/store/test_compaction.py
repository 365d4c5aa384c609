"""Compaction: the same rows in fewer parts, groups together, bounded in memory, and never taken for a dead one's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstore.errors import StoreError
from rollstore.schema import Rollout, prepare
from rollstore.store import commits, grouping
from rollstore.store.batching import BATCH_BYTES, filled
from rollstore.store.compact import compact
from rollstore.store.filesystem import LocalFilesystem, read_file
from rollstore.store.grouping import in_groups
from rollstore.store.names import part_name
from rollstore.store.part import open_part, without_null_columns, write_part
from rollstore.store.store import Store, open_on
from rollstore.store.streamed import PartWriter
from rollstore.testing import Fault, MemoryFilesystem
from tests.store.conftest import errors, ids, once, rollout

NAME = part_name("a" * 32, 1, compacted=True)


@pytest.fixture
def place(tmp_path: Path) -> LocalFilesystem:
    filesystem = LocalFilesystem(tmp_path)
    for folder in ("scores", "staging"):
        filesystem.make_folder(folder)
    return filesystem


def groups_of(rows: list[tuple[str | None, int]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"group_id": [g for g, _ in rows], "n": [n for _, n in rows]})


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_part_written_batch_by_batch_has_the_bytes_of_one_written_whole(
    store: Store, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstore.store.streamed._TOLD", 2)
    rng = np.random.default_rng(1)
    rows = [
        rollout(
            f"r{n}",
            tokens=20_000,
            logprobs=-rng.random(10_000, dtype=np.float32),
            weight_versions=[n] * 10_000,
            environment={0: "a", 9: "l" * 300, 19: "z"}.get(n),
            step=n,
        )
        for n in range(20)
    ]
    with store.writer() as writer:
        writer.append(rows)
    table = store.scan("rollouts").read_all()
    write_part(store.filesystem, "rollouts", NAME, table, codec=codec)
    whole = read_file(store.filesystem, f"rollouts/{NAME}.arrow")
    store.filesystem.delete(f"rollouts/{NAME}.arrow")
    physical = without_null_columns(table)
    streamed = PartWriter(store.filesystem, "rollouts", NAME, physical.schema, codec)
    batches = list(filled(physical.to_batches(), BATCH_BYTES))
    for batch in batches:
        streamed.write(streamed.encode(batch))
    streamed.publish()
    streamed.close()
    assert len(batches) > 3
    assert read_file(store.filesystem, f"rollouts/{NAME}.arrow") == whole
    assert store.filesystem.list("staging") == []


def test_publishing_again_after_a_lost_reply_is_success_and_over_another_part_an_error(store: Store) -> None:
    table = without_null_columns(
        prepare(pa.table({"rollout_id": ["a"], "scorer": ["judge"], "value": [0.5]}), "scores")
    )
    (batch,) = table.to_batches()

    def written(batch: pa.RecordBatch) -> None:
        writer = PartWriter(store.filesystem, "scores", NAME, table.schema, "lz4")
        writer.write(writer.encode(batch))
        try:
            writer.publish()
        finally:
            writer.close()

    written(batch)
    written(batch)
    with pytest.raises(StoreError, match="free name"):
        written(batch.set_column(batch.schema.get_field_index("rollout_id"), "rollout_id", pa.array(["b"])))
    assert store.filesystem.list("staging") == []


def test_rows_of_a_group_come_together_in_the_order_of_their_first_and_ungrouped_rows_stay() -> None:
    batches = [
        groups_of([("a", 0), ("b", 1), (None, 2)]),
        groups_of([("b", 3), (None, 4), ("a", 5)]),
        groups_of([("c", 6), ("a", 7)]),
    ]
    found = pa.Table.from_batches(in_groups(batches)).column("n").to_pylist()
    assert found == [0, 5, 7, 1, 3, 2, 4, 6]


KEYS = st.tuples(st.none() | st.sampled_from("xyz"), st.none() | st.integers(-1, 1), st.none() | st.sampled_from("abc"))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(KEYS, max_size=12), max_size=6))
def test_rows_are_of_one_group_where_run_step_and_group_are_and_never_without_a_group(
    rows_of: list[list[tuple[str | None, int | None, str | None]]],
) -> None:
    schema = pa.schema([("run_id", pa.string()), ("step", pa.int64()), ("group_id", pa.string()), ("n", pa.int64())])
    rows = [(*key, number) for number, key in enumerate(key for keys in rows_of for key in keys)]
    first: dict[object, int] = {}
    wanted = sorted(rows, key=lambda row: row[3] if row[2] is None else first.setdefault(row[:3], row[3]))
    coming = iter(rows)
    batches = [
        pa.RecordBatch.from_pylist([dict(zip(schema.names, next(coming), strict=True)) for _ in keys], schema)
        for keys in rows_of
    ]
    found = pa.Table.from_batches(in_groups(batches), schema).to_pylist()
    assert [tuple(row.values()) for row in found] == wanted


def test_rows_already_together_are_passed_on_as_they_are() -> None:
    batches = [groups_of([("a", 0), ("a", 1)]), groups_of([("a", 2), ("b", 3)])]
    assert all(one is other for one, other in zip(in_groups(batches), batches, strict=True))


@pytest.mark.parametrize("slice_bytes", [1, 1 << 20])
def test_groups_come_together_within_a_window_and_every_row_comes_once(
    monkeypatch: pytest.MonkeyPatch, slice_bytes: int
) -> None:
    monkeypatch.setattr(grouping, "WINDOW_BYTES", 2_000)
    monkeypatch.setattr(grouping, "_PIECE_BYTES", 300)
    monkeypatch.setattr(grouping, "_SLICE_BYTES", slice_bytes)
    batches = [groups_of([(f"g{n % 3}", n)]) for n in range(400)]
    rows = pa.Table.from_batches(in_groups(iter(batches))).to_pydict()
    assert sorted(rows["n"]) == list(range(400))
    assert [f"g{n % 3}" for n in rows["n"]] == rows["group_id"]
    changes = sum(one != other for one, other in pairwise(rows["group_id"]))
    assert changes < 60, "399 where nothing is brought together"


def test_batches_are_packed_to_the_limit_and_a_larger_row_stands_alone() -> None:
    sizes = [10, 20, 3_000, 100, 100, 9_000, 5, 700, 600]
    lists = [pa.array([np.arange(n, dtype=np.int32)], pa.list_(pa.int32())) for n in sizes]
    found = list(filled((pa.RecordBatch.from_arrays([one], names=["tokens"]) for one in lists), 4_000))
    assert [n for batch in found for n in pc.list_value_length(batch.column(0)).to_pylist()] == sizes
    assert all(batch.nbytes <= 4_000 or batch.num_rows == 1 for batch in found)
    assert len(found) == 6
    whole = pa.concat_batches([pa.RecordBatch.from_arrays([one], names=["tokens"]) for one in lists])
    cut = list(filled([whole], 4_000))
    assert pa.Table.from_batches(cut).equals(pa.Table.from_batches([whole]))
    assert all(batch.nbytes <= 4_000 or batch.num_rows == 1 for batch in cut)


def test_more_list_elements_than_an_offset_holds_are_compacted_and_none_is_lost(place: LocalFilesystem) -> None:
    """2^31 + 8 booleans in rows of 2^24: in one array their offsets would wrap."""
    row = 1 << 24
    rows = (1 << 31) // row
    mask = pa.BooleanArray.from_buffers(pa.bool_(), row, [None, pa.py_buffer(b"\xaa" * (row // 8))])
    first = pa.array([0, row], pa.int32())
    one = pa.ListArray.from_arrays(first, mask)
    eight = pa.ListArray.from_arrays(pa.array([0, 8], pa.int32()), mask.slice(0, 8))
    schema = pa.schema(
        [("group_id", pa.string()), ("mask", pa.list_(pa.bool_()))], metadata={"rollstore.schema": "1.0"}
    )

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(rows):
            # Two groups in turn: every row has to find its place.
            yield pa.RecordBatch.from_arrays([pa.array([f"g{number % 2}"]), one], schema=schema)
        yield pa.RecordBatch.from_arrays([pa.array(["g0"]), eight], schema=schema)

    writer = PartWriter(place, "scores", NAME, schema, "lz4")
    for batch in filled(in_groups(batches()), BATCH_BYTES):
        writer.write(writer.encode(batch))
    writer.publish()
    writer.close()
    part = open_part(place, "scores", NAME)
    assert part.rows == rows + 1
    lengths, true = [], 0
    for batch in part.batches():
        lengths += pc.list_value_length(batch.column("mask")).to_pylist()
        true += pc.sum(batch.column("mask").flatten()).as_py()
    assert sum(lengths) == 2**31 + 8
    assert sorted(set(lengths)) == [8, row]
    assert true == (2**31 + 8) // 2
    assert max(batch.rows for batch in part.tail.batches) == 1, "each row is larger than a batch may be"


def test_more_text_than_an_offset_holds_is_written_so_that_it_can_be_read(place: LocalFilesystem) -> None:
    """2,200 lists of one text of a million characters: in one batch their offsets would wrap."""
    text = pa.array(["x" * 1_000_000])
    one = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), text)
    schema = pa.schema([("texts", pa.list_(pa.string()))], metadata={"rollstore.schema": "1.0"})
    rows = (pa.RecordBatch.from_arrays([one], schema=schema) for _ in range(2_200))
    writer = PartWriter(place, "scores", NAME, schema, "lz4")
    for batch in filled(in_groups(rows), BATCH_BYTES):
        writer.write(writer.encode(batch))
    writer.publish()
    writer.close()
    part = open_part(place, "scores", NAME)
    assert part.rows == 2_200
    assert max(batch.rows for batch in part.tail.batches) == 1
    assert sum(pc.sum(pc.binary_length(b.column(0).flatten())).as_py() for b in part.batches()) == 2_200_000_000


def test_a_rollout_of_a_million_tokens_is_compacted_between_two_short_ones(store: Store) -> None:
    rng = np.random.default_rng(0)
    long = 1 << 20
    mask = np.zeros(long, bool)
    mask[1:] = True
    logprobs = -rng.exponential(0.5, long - 1).astype(np.float32)
    tokens = rng.integers(0, 50_000, long, dtype=np.int32)
    store.append("rollouts", [rollout("a", tokens=3)])
    store.append("rollouts", [Rollout(rollout_id="long", tokens=tokens, action_mask=mask, logprobs=logprobs)])
    store.append("rollouts", [rollout("b", tokens=3)])
    store.compact()
    (part,) = store.parts("rollouts")
    assert sorted(batch.rows for batch in part.tail.batches) in ([1, 2], [1, 1, 1]), "a short row comes without it"
    found = store.get("long", segment=0)
    assert np.array_equal(found.tokens[1_000_000:1_000_010], tokens[1_000_000:1_000_010])
    assert np.array_equal(found.tokens, tokens)
    assert np.array_equal(found.logprobs.values, logprobs)
    assert float(found.logprobs.values.sum()) == pytest.approx(float(logprobs.astype(np.float64).sum()), rel=1e-5)
    assert [store.get(name)[0].tokens.tolist() for name in "ab"] == [rollout(n, tokens=3).tokens.tolist() for n in "ab"]


def test_compaction_looks_at_no_part_that_it_does_not_merge(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        store.append("rollouts", [rollout(name)])
    store.compact()
    monkeypatch.setattr("rollstore.store.part.Part.batch", None)
    assert store.compact().added == {}
    assert store.compact(part_bytes=10).added == {}


def test_parts_are_merged_up_to_the_size_asked_for(store: Store) -> None:
    for number in range(6):
        store.append("rollouts", [rollout(f"r{number}")])
    each = store.parts("rollouts")[0].size
    store.compact(part_bytes=round(2.5 * each))
    assert sorted(part.rows for part in store.parts("rollouts")) == [2, 2, 2]
    assert ids(store) == once(*(f"r{n}" for n in range(6)))


def test_progress_counts_the_bytes_of_every_batch_read(store: Store) -> None:
    for name in "abc":
        store.append("rollouts", [rollout(name)])
    parts = store.parts("rollouts")
    wanted = sorted((part.file, batch.length) for part in parts for batch in part.tail.batches)
    seen: list[tuple[str, int]] = []
    assert store.verify(progress=lambda file, size: seen.append((file, size))) == []
    assert sorted(seen) == wanted
    seen.clear()
    store.compact(progress=lambda file, size: seen.append((file, size)))
    assert sorted(seen) == wanted


def test_vacuum_leaves_the_output_of_a_compaction_that_is_not_yet_in_the_log(
    disk: MemoryFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_on(disk)
    for name in "ab":
        store.append("rollouts", [rollout(name)])
    append, deleted = commits.append, []

    def vacuumed_first(filesystem: object, log: commits.Log, commit: commits.Commit) -> commits.Log | None:
        disk.age(1_000_000)
        deleted.extend(open_on(disk).vacuum(grace=0))
        return append(disk, log, commit)

    monkeypatch.setattr(commits, "append", vacuumed_first)
    store.compact()
    assert deleted == []
    assert ids(open_on(disk)) == once("a", "b")


def test_vacuum_takes_the_output_of_a_compaction_that_died(disk: MemoryFilesystem) -> None:
    store = open_on(disk)
    for name in "ab":
        store.append("rollouts", [rollout(name)])
    rows = store.scan("rollouts").read_all()
    write_part(disk, "rollouts", NAME, rows)
    assert ids(open_on(disk)) == once("a", "b")
    assert store.vacuum(grace=10) == []
    disk.age(100)
    assert store.vacuum(grace=10, dry_run=True) == [f"rollouts/{NAME}.arrow"]
    assert store.vacuum(grace=10) == [f"rollouts/{NAME}.arrow"]
    assert ids(open_on(disk)) == once("a", "b")


def test_an_entry_added_while_vacuum_looks_keeps_its_part(
    disk: MemoryFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_on(disk)
    for name in "ab":
        store.append("rollouts", [rollout(name)])
    read_log = commits.read_log

    def and_then_a_compaction(filesystem: MemoryFilesystem, *known: commits.Log) -> commits.Log:
        log = read_log(filesystem, *known)
        if not known:
            monkeypatch.setattr(commits, "read_log", read_log)
            open_on(disk).compact()
            disk.age(1_000_000)
        return log

    monkeypatch.setattr(commits, "read_log", and_then_a_compaction)
    assert store.vacuum(grace=0) == []
    assert ids(open_on(disk)) == once("a", "b")


@pytest.mark.parametrize("seed", range(10))
def test_vacuum_deletes_nothing_that_power_loss_could_ask_back(seed: int) -> None:
    """The folder's sync failed after the entry was published: it is there, until the power goes."""
    disk = MemoryFilesystem(seed)
    store = open_on(disk, create=True)
    disk.sync_folder("")
    for name in "ab":
        store.append("rollouts", [rollout(name)])
    with store.snapshot() as snapshot:
        disk.fault = Fault(at=2, verbs=frozenset({"sync_folder"}))
        with pytest.raises(OSError, match="sync_folder"):
            compact(snapshot)
        disk.fault = None
    assert disk.list("commits")
    disk.age(1_000)
    store.vacuum(grace=10)
    disk.sync_folder("rollouts")
    again = open_on(disk.crash())
    assert ids(again) == once("a", "b")
    assert errors(again) == []


def test_an_entry_of_the_log_says_why(store: Store) -> None:
    for name in "ab":
        store.append("rollouts", [rollout(name)])
    store.compact()
    entry = json.loads((Path(store.path) / commits.entry(1)).read_text())
    assert (entry["reason"], list(entry["add"]), len(entry["replace"]["rollouts"])) == ("compact", ["rollouts"], 2)
