"""What the dead left: sealed once, moved aside, or left alone."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from rollstore.errors import CorruptionError
from rollstore.store.store import Store, open_on
from rollstore.store.store import open as open_store
from rollstore.testing import MemoryFilesystem
from tests.store.conftest import errors, ids, once, rollout


def left_behind(disk: MemoryFilesystem, *names: str) -> str:
    """A journal with these rows whose writer died; returns its file."""
    writer = open_on(disk).writer()
    for name in names:
        writer.append(rollout(name))
        writer.flush()
    file = next(f for f in disk.list("journal"))
    disk.kill()
    return f"journal/{file}"


def overwrite(disk: MemoryFilesystem, path: str, data: bytes) -> None:
    handle = disk.lock(path)
    assert handle is not None
    handle.truncate(0)
    handle.write(0, data)
    handle.close()


def contents(disk: MemoryFilesystem, path: str) -> bytes:
    handle = disk.open(path)
    return handle.read(0, handle.size())


def test_a_dead_writer_s_journal_becomes_a_part_of_the_same_name(disk: MemoryFilesystem) -> None:
    file = left_behind(disk, "a", "b")
    report = open_on(disk).recover()
    assert [f"journal/{name}.arrows" for name in report.sealed] == [file]
    assert [part.name for part in open_on(disk).parts("rollouts")] == report.sealed
    assert ids(open_on(disk)) == once("a", "b")


def test_a_living_writer_s_journal_is_left_alone(disk: MemoryFilesystem) -> None:
    store = open_on(disk)
    with store.writer() as writer:
        writer.append(rollout("a"))
        writer.flush()
        report = store.recover()
        assert list(report.kept.values()) == ["its writer holds it"]
        assert report.sealed == []
        writer.append(rollout("b"))
    assert ids(store) == once("a", "b")


def test_recovering_twice_changes_nothing(disk: MemoryFilesystem) -> None:
    left_behind(disk, "a")
    store = open_on(disk)
    store.recover()
    again = store.recover()
    assert (again.sealed, again.deleted, again.moved, again.kept) == ([], [], [], {})


def test_a_journal_that_comes_back_after_its_part_was_published_is_deleted(disk: MemoryFilesystem) -> None:
    file = left_behind(disk, "a")
    data = contents(disk, file)
    store = open_on(disk)
    store.recover()
    disk.create(file).write(0, data)
    disk.kill()
    assert ids(open_on(disk)) == once("a")
    assert store.recover().deleted
    assert ids(store) == once("a")


def test_a_journal_whose_name_was_retired_never_counts_again_even_after_vacuum(disk: MemoryFilesystem) -> None:
    file = left_behind(disk, "a")
    data = contents(disk, file)
    store = open_on(disk)
    store.recover()
    store.append("rollouts", [rollout("b")])
    store.compact()
    disk.age(1_000_000)
    assert len(store.vacuum()) == 2
    disk.create(file).write(0, data)
    disk.kill()
    assert ids(open_on(disk)) == once("a", "b")
    assert open_on(disk).recover().deleted
    assert ids(open_on(disk)) == once("a", "b")
    assert open_on(disk).get("a")


def test_a_journal_cut_at_any_length_gives_its_whole_batches(disk: MemoryFilesystem) -> None:
    file = left_behind(disk, "a", "b", "c")
    data = contents(disk, file)
    seen = set()
    for length in range(0, len(data), 7):
        overwrite(disk, file, data[:length])
        found = "".join(sorted(ids(open_on(disk))))
        assert found in ("", "a", "ab", "abc"[:3])
        seen.add(found)
    assert seen == {"", "a", "ab"}


def test_a_torn_page_in_a_journal_ends_it_there_and_the_file_is_kept_for_a_person(disk: MemoryFilesystem) -> None:
    file = left_behind(disk, "a", "b", "c")
    store = open_on(disk)
    (view,) = store.snapshot().views("rollouts")
    second = view.messages[1]
    data = bytearray(contents(disk, file))
    middle = second.offset + second.length // 2
    data[middle : middle + 512] = bytes(min(512, len(data) - middle))
    overwrite(disk, file, bytes(data))
    store = open_on(disk)
    assert ids(store) == once("a")
    assert any("torn" in line for line in errors(store))
    report = store.recover()
    assert ids(store) == once("a")
    (kept,) = report.moved
    assert contents(disk, kept) == bytes(data)
    assert errors(store) == []


def test_an_unfinished_last_write_is_dropped_without_a_trace(disk: MemoryFilesystem) -> None:
    file = left_behind(disk, "a", "b")
    data = contents(disk, file)
    overwrite(disk, file, data[:-9])
    report = open_on(disk).recover()
    assert (len(report.sealed), report.moved) == (1, [])
    assert ids(open_on(disk)) == once("a")


def test_half_empty_and_foreign_files_are_listed_never_read_and_moved_aside(store: Store) -> None:
    for name in ("a", "b", "c"):
        store.append("rollouts", [rollout(name)])
    folder = Path(store.path) / "rollouts"
    whole = Path(store.parts("rollouts")[0].path)
    half = folder / whole.name.replace("-000001", "-000009")
    half.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    (folder / whole.name.replace("-000001", "-000008")).touch()
    (folder / "notes.txt").write_text("mine")
    (folder / "other.arrow").write_bytes(b"ARROW1\0\0" + bytes(100) + b"ARROW1")
    (Path(store.path) / "journal" / "x.arrows").write_bytes(b"\xff\xff\xff\xff\x10")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    store = open_store(store.path)
    with pytest.warns(UserWarning, match="no whole part, nothing of it is read") as said:
        assert ids(store) == once("a", "b", "c")
    assert len(said) == 2, "one for each file under a part's name, none for foreign ones"
    with pytest.warns(UserWarning, match="no whole part"):  # again: rows may be missing from this answer too
        assert len(store.info().orphans) == 5
    report = store.recover()
    assert len(report.moved) == 5
    assert len(list(folder.iterdir())) == 3
    assert all(before[path] == path.read_bytes() for path in folder.iterdir())
    kept = [p for p in (Path(store.path) / "orphans").rglob("*") if p.is_file()]
    assert sorted(p.stat().st_size for p in kept if p.parent.name == "rollouts") == sorted(
        len(data) for path, data in before.items() if not path.exists()
    )
    assert store.info().orphans == ()
    assert errors(store) == []


def test_half_empty_and_foreign_files_in_every_folder_are_harmless_and_only_foreign_names_are_moved(
    store: Store,
) -> None:
    for number in range(3):
        store.append("rollouts", [rollout(f"r{number}-{n}", extra={"x_mine": n}) for n in range(10)])
    store.append("scores", pa.table({"rollout_id": ["r0-0"], "scorer": ["judge"], "value": [0.5]}))
    folder = Path(store.path)
    whole = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    part = next(path for path in whole if path.parent.name == "rollouts")
    folders = [path for path in folder.iterdir() if path.is_dir()]
    assert len(folders) == 9
    for place in folders:
        (place / "empty").touch()
        (place / "notes.txt").write_text("mine")
        (place / "shard-4.parquet").write_bytes(b"PAR1" + bytes(200))
        (place / f"half-{part.name}").write_bytes(whole[part][: len(whole[part]) // 2])
        (place / "within").mkdir()
        (place / "within" / part.name).write_bytes(whole[part])
        (place / "link.arrow").symlink_to(part)
    (folder / "cache" / "lease-x-y").touch()
    (folder / "cache" / f"lease-{7:010d}-").touch()
    (folder / "cache" / "index-0.index").write_bytes(whole[part][:500])
    (folder / "staging" / "half.part").write_bytes(whole[part][:500])
    read = open_store(folder)
    wanted = once(*(f"r{number}-{n}" for number in range(3) for n in range(10)))
    assert ids(read) == wanted
    assert read.get("r1-3")[0].rollout_id == "r1-3"
    assert errors(read) == []
    info = read.info()
    assert (info.tables["rollouts"].rows, info.tables["rollouts"].parts, info.tables["scores"].rows) == (30, 3, 1)
    assert len(info.orphans) == 5 * 7, "those of staging and cache are disposable"
    read.append("rollouts", [rollout("later", extra={"x_mine": 1})])
    read.compact()
    report = read.recover()
    assert len(report.moved) == 5 * 8
    assert read.info().orphans == ()
    assert {path: path.read_bytes() for path in whole} == whole, "nothing else is changed"
    read.vacuum(grace=0)
    assert ids(open_store(folder)) == wanted + once("later")
    assert open_store(folder).recover().moved == []
    moved = {path.read_bytes() for path in (folder / "orphans").rglob("*") if path.is_file()}
    assert moved == {b"", b"mine", b"PAR1" + bytes(200), whole[part][: len(whole[part]) // 2]}


def test_half_a_part_beside_its_journal_is_moved_aside_and_the_journal_sealed(disk: MemoryFilesystem) -> None:
    file = left_behind(disk, "a", "b")
    data = contents(disk, file)
    store = open_on(disk)
    (name,) = store.recover().sealed
    part = f"rollouts/{name}.arrow"
    half = contents(disk, part)[:900]
    overwrite(disk, part, half)
    disk.create(file).write(0, data)
    disk.kill()
    report = open_on(disk).recover()
    assert report.sealed == [name]
    assert [contents(disk, path) for path in report.moved] == [half]
    assert ids(open_on(disk)) == once("a", "b")
    assert errors(open_on(disk)) == []


@pytest.mark.parametrize("content", [b"", b'{"format":"1.0","number":1', b"junk"])
@pytest.mark.parametrize("file", ["commits/0000000001.json", "columns/x_mine.json"])
def test_a_damaged_document_under_one_of_our_names_is_an_error_and_stays(
    store: Store, file: str, content: bytes
) -> None:
    for name in "ab":
        store.append("rollouts", [rollout(name, extra={"x_mine": 1})])
    store.compact()
    path = Path(store.path) / file
    path.write_bytes(content)
    with pytest.raises(CorruptionError, match=path.name):
        ids(open_store(store.path))
    for work in (open_store(store.path).recover, open_store(store.path).vacuum):
        with suppress(CorruptionError):
            work()
    assert path.read_bytes() == content


def test_a_damaged_part_is_an_error_and_is_not_moved(store: Store) -> None:
    store.append("rollouts", [rollout("a")])
    path = Path(store.parts("rollouts")[0].path)
    data = path.read_bytes()
    os.chmod(path, 0o644)
    path.write_bytes(data[:-3] + b"?" + data[-2:])
    store = open_store(store.path)
    assert any(path.name in line for line in errors(store))
    with pytest.raises(CorruptionError, match=path.name):
        ids(store)
    assert store.recover().moved == []
    assert path.exists()


def test_a_journal_with_a_damaged_head_is_named_and_moved_aside(disk: MemoryFilesystem) -> None:
    file = left_behind(disk, "a")
    data = bytearray(contents(disk, file))
    data[200] ^= 4
    overwrite(disk, file, bytes(data))
    store = open_on(disk)
    with pytest.raises(CorruptionError, match="head"):
        ids(store)
    assert any("head" in line for line in errors(store))
    (kept,) = store.recover().moved
    assert contents(disk, kept) == bytes(data)
    assert (errors(store), ids(store)) == ([], {})
