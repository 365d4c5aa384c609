"""Snapshots: fixed when opened, protected while open, complete whatever is sealed or compacted meanwhile."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pyarrow.compute as pc
import pytest

from rollstore.errors import CorruptionError, StoreError, VersionError
from rollstore.store import commits
from rollstore.store.names import part_name, stem
from rollstore.store.snapshot import Snapshot
from rollstore.store.store import Store, open_on
from rollstore.store.store import open as open_store
from rollstore.testing import MemoryFilesystem
from tests.store.conftest import ids, once, rollout


def held(snapshot: Snapshot) -> list[str]:
    return sorted(snapshot.scan("rollouts", ["rollout_id"]).read_all().column(0).to_pylist())


def test_a_snapshot_stays_as_it_was_through_flush_seal_compact_and_vacuum(store: Store) -> None:
    store.append("rollouts", [rollout("a")])
    writer = store.writer()
    writer.append(rollout("b"))
    writer.flush()
    with store.snapshot() as snapshot:
        assert held(snapshot) == ["a", "b"]
        writer.append(rollout("c"))
        writer.flush()
        assert held(snapshot) == ["a", "b"]
        writer.close()
        assert held(snapshot) == ["a", "b"]
        store.compact()
        store.vacuum(grace=0)
        assert held(open_store(store.path).snapshot()) == ["a", "b", "c"]
        assert held(snapshot) == ["a", "b"]
        assert len(list((Path(store.path) / "rollouts").iterdir())) == 3
    store.vacuum(grace=0)
    assert len(list((Path(store.path) / "rollouts").iterdir())) == 1


def test_a_reader_that_stops_early_gives_its_lease_back(store: Store) -> None:
    store.append("rollouts", [rollout("a")])
    reader = store.scan("rollouts")
    reader.read_next_batch()
    del reader
    leases = [path for path in (Path(store.path) / "cache").iterdir() if path.name.startswith("lease-")]
    assert leases == []


def test_the_lease_of_a_dead_reader_protects_nothing(store: Store) -> None:
    store.append("rollouts", [rollout("a")])
    store.append("rollouts", [rollout("b")])
    (Path(store.path) / "cache" / ("lease-0000000000-" + "0" * 32)).touch()
    store.compact()
    assert len(store.vacuum(grace=0)) == 2


def test_a_part_deleted_under_a_reader_is_an_error_that_names_it(store: Store) -> None:
    store.append("rollouts", [rollout("a")])
    store.append("rollouts", [rollout("b")])
    with store.snapshot() as snapshot:
        victim = Path(snapshot.filesystem.locate(f"rollouts/{snapshot.names['rollouts'][0]}.arrow"))
        victim.unlink()
        with pytest.raises(StoreError, match=victim.name):
            held(snapshot)


def test_get_sees_what_was_flushed_a_moment_ago(store: Store) -> None:
    with store.writer() as writer:
        for number in range(20):
            writer.append(rollout(f"r{number}"))
            writer.flush()
            assert store.get(f"r{number}")[0].rollout_id == f"r{number}"


def test_get_goes_on_after_a_compaction_and_a_vacuum(store: Store) -> None:
    reader = open_store(store.path)
    for name in "abc":
        store.append("rollouts", [rollout(name)])
    assert reader.get("a")
    store.compact()
    store.vacuum(grace=0)
    assert [reader.get(name)[0].rollout_id for name in "abc"] == ["a", "b", "c"]


def test_a_compacted_part_counts_only_once_the_log_adds_it(disk: MemoryFilesystem) -> None:
    store = open_on(disk)
    store.append("rollouts", [rollout("a")])
    store.append("rollouts", [rollout("b")])
    report = store.compact()
    (added,) = report.added["rollouts"]
    entry = commits.entry(1)
    data = disk.open(entry).read(0, 10_000)
    disk.delete(entry)
    fresh = open_on(disk)
    assert [part.name for part in fresh.parts("rollouts")] == sorted(report.replaced["rollouts"])
    disk.create(entry).write(0, data)
    assert [part.name for part in open_on(disk).parts("rollouts")] == [added]
    assert ids(open_on(disk)) == once("a", "b")


def test_two_compactors_of_the_same_parts_leave_one_output(store: Store) -> None:
    for name in "abcd":
        store.append("rollouts", [rollout(name)])
    with store.snapshot() as first, store.snapshot() as second:
        from rollstore.store.compact import compact

        assert compact(first).added
        assert not compact(second).added
    assert ids(store) == once("a", "b", "c", "d")
    assert len(store.parts("rollouts")) == 1


def test_the_log_is_read_through_its_checkpoints_and_stays_whole(store: Store) -> None:
    fs = store.filesystem
    log = commits.read_log(fs)
    names = [part_name("f" * 32, n, compacted=True) for n in range(commits.CHECKPOINT_EVERY + 3)]
    for before, name in zip([None, *names], names, strict=False):
        commit = commits.Commit(add={"scores": [name]}, replace={"scores": [before] if before else []})
        after = commits.append(fs, log, commit)
        assert after is not None
        log = after
    assert [f for f in fs.list("commits") if "checkpoint" in f] == ["0000000064-checkpoint.json"]
    assert commits.read_log(fs) == log == commits.read_log(fs, commits.Log())
    assert commits.append(fs, commits.Log(), commits.Commit(add={}, replace={"scores": [names[0]]})) is None


def test_a_damaged_entry_of_the_log_is_an_error(store: Store) -> None:
    store.append("rollouts", [rollout("a")])
    store.append("rollouts", [rollout("b")])
    store.compact()
    path = Path(store.path) / commits.entry(1)
    path.write_text(path.read_text().replace('"reason":"compact"', '"reason":"compacT"'))
    with pytest.raises(CorruptionError, match="0000000001"):
        ids(open_store(store.path))


def test_a_path_that_is_no_store_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"wanted a store, found no rollstore\.json"):
        open_store(tmp_path)
    with pytest.raises(StoreError, match="wanted a store"):
        open_store(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="an address that fsspec opens"):
        open_store("nowhere://bucket/store", create=True)
    (tmp_path / "mine.txt").touch()
    with pytest.raises(StoreError, match=r"empty folder.*mine\.txt"):
        open_store(tmp_path, create=True)


def test_a_store_of_a_newer_major_version_is_refused_and_damage_is_told_from_it(store: Store) -> None:
    path = Path(store.path) / "rollstore.json"
    text = path.read_text()
    path.write_text(text.replace('"format":"1.0"', '"format":"2.0"'))
    with pytest.raises(VersionError, match=r"wanted at most 1\.x, got 2\.0"):
        open_store(store.path)
    path.write_text(text.replace('"format":"1.0"', '"format":"1.1"'))
    with pytest.raises(CorruptionError, match="holds its sum"):
        open_store(store.path)
    path.write_text("{")
    with pytest.raises(CorruptionError, match="wanted JSON"):
        open_store(store.path)


def test_opening_with_create_twice_opens_the_same_store(tmp_path: Path) -> None:
    first = open_store(tmp_path / "s", create=True)
    assert open_store(f"file://{tmp_path}/s", create=True).store_id == first.store_id


def test_no_name_is_used_again_and_only_our_names_are_names(store: Store) -> None:
    seen = set()
    for _ in range(3):
        with store.writer() as writer:
            for name in ("a", "b"):
                writer.append(rollout(name))
                writer.seal()
    seen = {part.name for part in store.parts("rollouts")}
    assert len(seen) == 6
    assert all(stem(f"{name}.arrow", ".arrow") == name for name in seen)
    for other in ("x.arrow", f"{next(iter(seen))}.arrow.tmp", f"../{next(iter(seen))}.arrow", ".arrow"):
        assert stem(other, ".arrow") is None


def test_a_scan_refuses_columns_it_does_not_know_and_filters_rows(store: Store) -> None:
    store.append("rollouts", [rollout("a", step=1), rollout("b", step=2)])
    with pytest.raises(ValueError, match="no column 'tokenz'"):
        store.scan("rollouts", ["tokenz"])
    found = store.scan("rollouts", ["rollout_id"], where=pc.field("step") == 2).read_all()
    assert found.to_pydict() == {"rollout_id": ["b"]}
    assert found.schema.names == ["rollout_id"]


def test_compaction_keeps_every_row_its_origin_and_puts_groups_together(store: Store) -> None:
    for number in range(6):
        store.append("rollouts", [rollout(f"r{number}", group_id=f"g{number % 2}", step=1)])
    before = store.scan("rollouts").read_all().sort_by("rollout_id")
    report = store.compact(codec="lz4")
    assert len(report.replaced["rollouts"]) == 6
    after = store.scan("rollouts").read_all()
    assert after.sort_by("rollout_id").equals(before)
    groups = after.column("group_id").to_pylist()
    assert sum(one != other for one, other in pairwise(groups)) == 1
