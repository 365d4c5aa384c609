"""Copies of stores: some lose files or empty folders, some are still under way, some are links, some share an id."""

from __future__ import annotations

import os
import shutil
import warnings
from itertools import count
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

import rollstore
from rollstore.errors import CorruptionError, SchemaError, StoreError, WriteError
from rollstore.readers.duckdb import connect
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.store.conftest import errors, ids, once, rollout

NUMBERS = count()


@pytest.fixture
def measured(store: Store) -> Store:
    """Two parts with a column of the caller's own."""
    for number in range(2):
        store.append("rollouts", rollout(str(number), extra={"x_loss": float(number)}))
    return store


def losses(store: Store) -> list[float]:
    return sorted(store.scan("rollouts", ["x_loss"]).read_all()["x_loss"].to_pylist())


def test_a_copy_without_the_types_of_columns_reads_them_from_the_parts_and_says_what_is_missing(
    measured: Store,
) -> None:
    shutil.rmtree(Path(measured.path) / "columns")
    copy = open_store(measured.path)
    assert losses(copy) == [0, 1]
    assert copy.get("1")[0].extra == {"x_loss": 1.0}
    assert connect(copy).execute("SELECT sum(x_loss) FROM rollouts").fetchall() == [(1.0,)]
    assert [line for line in errors(copy) if "x_loss: wanted a file in columns/ that says its type, got double" in line]


def test_compaction_keeps_a_column_whose_type_no_file_says_and_the_next_append_writes_it_again(measured: Store) -> None:
    shutil.rmtree(Path(measured.path) / "columns")
    copy = open_store(measured.path)
    copy.compact()
    copy.vacuum(grace=0)
    assert losses(open_store(measured.path)) == [0, 1]
    with pytest.raises(SchemaError, match="x_loss: wrong_type: string, wanted double, its type since its first use"):
        copy.append("rollouts", rollout("2", extra={"x_loss": "text"}))
    copy.append("rollouts", rollout("2", extra={"x_loss": 2.0}))
    assert losses(open_store(measured.path)) == [0, 1, 2]
    assert errors(open_store(measured.path)) == []


def test_two_types_of_one_column_without_the_file_that_decides_are_damage(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", "text")):
        open_store(tmp_path / name, create=True).append("rollouts", rollout(name, extra={"x_q": value}))
    (part,) = (tmp_path / "b" / "rollouts").iterdir()
    shutil.copy(part, tmp_path / "a" / "rollouts")
    shutil.rmtree(tmp_path / "a" / "columns")
    with pytest.raises(CorruptionError, match=r"columns/x_q\.json: wanted the type of x_q, got no such file, and both"):
        open_store(tmp_path / "a").scan("rollouts").read_all()


def test_a_damaged_part_keeps_nobody_from_a_new_column(measured: Store) -> None:
    part = max((Path(measured.path) / "rollouts").iterdir())
    data = bytearray(part.read_bytes())
    data[-200] ^= 1
    part.write_bytes(data)
    with open_store(measured.path).writer() as writer:
        writer.append(rollout("new", extra={"x_new": 1}))


@pytest.mark.parametrize("at_once", [False, True])
def test_names_that_differ_by_case_alone_are_one_to_sql_so_the_second_is_refused(store: Store, at_once: bool) -> None:
    writer = open_store(store.path).writer()  # knows of no column yet
    if at_once:
        with pytest.raises(SchemaError, match="x_Loss"):
            store.append("rollouts", rollout("1", extra={"x_loss": 1.0, "x_Loss": 2.0}))
    else:
        store.append("rollouts", rollout("1", extra={"x_loss": 1.0}))
        with pytest.raises(SchemaError, match="a name that differs from x_loss beyond upper and lower case"):
            writer.append(rollout("2", extra={"x_Loss": 2.0}))
        with pytest.raises(SchemaError, match="x_Loss"):
            open_store(store.path).append("rollouts", rollout("2", extra={"x_Loss": 2.0}))
        writer.append(rollout("2", extra={"x_loss": 2.0}))
    writer.close()
    assert errors(store) == []


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), "a struct with fields a, a"),
        (pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "A"]), "a struct with fields a, A"),
        (pa.array([b""], pa.binary(0)), "fixed_size_binary"),
    ],
)
def test_a_type_that_some_reader_cannot_hold_is_refused(store: Store, array: pa.Array, said: str) -> None:
    table = pa.table({
        "rollout_id": ["a"], "segment": pa.array([0], pa.int32()), "tokens": [[1, 2]], "action_mask": [[False, True]],
        "x_a": array,
    })  # fmt: skip
    for columns in (table, table.set_column(4, "x_a", pa.ListArray.from_arrays([0, 1], array))):
        with pytest.raises(SchemaError, match=said):
            store.append("rollouts", columns)


def test_a_copy_without_its_empty_folders_is_written_and_kept_up_like_any_store(store: Store) -> None:
    store.append("rollouts", rollout("a"))
    for folder in sorted(Path(store.path).iterdir()):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    copy = open_store(store.path)
    copy.append("rollouts", rollout("b"))
    copy.append("scores", pa.table({"rollout_id": ["a"], "scorer": ["s"], "value": [1.0]}))
    copy.compact()
    copy.vacuum(grace=0)
    copy.recover()
    assert ids(copy) == once("a", "b")
    assert errors(copy) == []


def test_a_store_that_was_deleted_is_not_made_again_in_part(store: Store) -> None:
    writer = store.writer()
    shutil.rmtree(store.path)
    writer.append(rollout("a"))
    with pytest.raises(WriteError):
        writer.flush()
    assert not Path(store.path).exists()


def test_a_snapshot_has_its_lease_also_where_the_cache_was_deleted(store: Store) -> None:
    for number in range(3):
        store.append("rollouts", rollout(str(number)))
    shutil.rmtree(Path(store.path) / "cache")
    with open_store(store.path).snapshot() as snapshot:
        assert snapshot.lease is not None
        other = open_store(store.path)
        other.compact()
        other.vacuum(grace=0)
        assert snapshot.scan("rollouts").read_all().num_rows == 3


def test_a_part_that_was_half_there_is_seen_once_its_copy_is_whole(store: Store) -> None:
    for number in range(3):
        store.append("rollouts", rollout(str(number)))
    part = max((Path(store.path) / "rollouts").iterdir())
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    early = open_store(store.path)
    with pytest.warns(UserWarning, match="no whole part"):
        (missing,) = once("0", "1", "2") - ids(early)
    with pytest.warns(UserWarning, match="no whole part"), pytest.raises(rollstore.NotFoundError):
        early.get(missing)
    part.write_bytes(whole)
    assert ids(early) == once("0", "1", "2")
    assert early.get(missing)[0].rollout_id == missing
    assert early.verify() == []


def test_a_store_of_links_is_read_and_a_link_to_nothing_is_named(store: Store, tmp_path: Path) -> None:
    for number in range(3):
        store.append("rollouts", rollout(str(number)))
    copy = tmp_path / "copy"
    shutil.copytree(store.path, copy, copy_function=os.symlink)
    assert ids(open_store(copy)) == once("0", "1", "2")
    assert errors(open_store(copy)) == []
    next((Path(store.path) / "rollouts").iterdir()).unlink()
    with pytest.raises(StoreError, match="wanted a part of the snapshot, got no file"):
        open_store(copy).scan("rollouts").read_all()


def test_a_journal_sealed_under_a_look_is_no_orphan(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    other = open_store(store.path)
    listed = other.filesystem.list
    for verb in ("recover", "verify", "info"):
        with store.writer() as writer:

            def sealing(folder: str, writer: object = writer, verb: str = verb) -> list[str]:
                if folder != "journal":
                    return listed(folder)
                writer.append(rollout(f"{verb}{next(NUMBERS)}"))
                writer.flush()
                names = listed(folder)
                writer.seal()
                return names

            monkeypatch.setattr(other.filesystem, "list", sealing)
            found = getattr(other, verb)()
            monkeypatch.undo()
            if verb == "verify":
                assert found == []
            elif verb == "info":
                assert found.orphans == ()
            else:
                assert (found.moved, found.kept) == ([], {})


def test_more_journals_than_files_may_be_open_are_one_clear_error(store: Store) -> None:
    import resource

    for number in range(40):
        writer = store.writer()
        writer.append(rollout(str(number)))
        writer.flush()
        writer.after_fork()  # as if its process had died
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    try:
        with pytest.raises(StoreError, match=r"wanted to open every journal, got Too many open files after .*recover"):
            open_store(store.path).scan("rollouts")
        store.recover()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sum(ids(open_store(store.path)).values()) == 40


def test_a_copied_bucket_has_a_spool_of_its_own(tmp_path: Path) -> None:
    name = f"memory://test_copies/{next(NUMBERS)}"

    def opened(which: str, **options: object) -> Store:
        return rollstore.open(f"{name}/{which}", spool=tmp_path, **options)

    opened("run", create=True).append("rollouts", rollout("1"))
    memory = fsspec.filesystem("memory")
    for file in memory.find(f"{name}/run"):
        memory.pipe_file(file.replace("/run/", "/copy/"), memory.cat_file(file))
    writer = opened("copy").writer()
    writer.append(rollout("2"))
    writer.flush()
    writer.after_fork()
    with pytest.warns(UserWarning, match="1 journals of a store with this id wait there"):
        run = opened("run")
    assert ids(run) == once("1")
    run.recover()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = opened("copy")
    copy.recover()
    assert ids(opened("run")) == once("1")
    assert ids(copy) == once("1", "2")
