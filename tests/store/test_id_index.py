"""The id index: a help that is built, kept, merged, thrown away, and never believed."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from rollstore.store import index
from rollstore.store.index import Segment
from rollstore.store.part import Part
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.store.conftest import rollout


@pytest.fixture(autouse=True)
def _small_segments_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_WORTH_KEEPING", 1)


def files(store: Store) -> list[Path]:
    return sorted(path for path in (Path(store.path) / "cache").iterdir() if path.suffix == ".index")


def test_segments_are_kept_and_a_new_process_uses_them(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        store.append("rollouts", [rollout(f"r{number}")])
    assert store.get("r3")
    assert len(files(store)) == 1
    fresh = open_store(store.path)
    monkeypatch.setattr(index, "_segment", None)  # nothing may be built again
    assert fresh.get("r3")[0].rollout_id == "r3"


def test_new_parts_are_covered_as_they_come_and_segments_stay_few(store: Store) -> None:
    for number in range(40):
        store.append("rollouts", [rollout(f"r{number}")])
        assert store.get(f"r{number}")
    assert len(files(store)) <= 6
    fresh = open_store(store.path)
    assert all(fresh.get(f"r{number}")[0].rollout_id == f"r{number}" for number in range(40))


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign"])
def test_a_damaged_segment_is_thrown_away_and_built_again(store: Store, damage: str) -> None:
    store.append("rollouts", [rollout("a"), rollout("b")])
    store.get("a")
    (file,) = files(store)
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes({"flip": bytes(data), "cut": bytes(data[:-9]), "empty": b"", "foreign": b"x" * 100}[damage])
    fresh = open_store(store.path)
    assert fresh.get("b")[0].rollout_id == "b"
    assert fresh.get("b")[0].tokens.tolist() == rollout("b").tokens.tolist()
    assert file not in files(store)


def test_ids_with_one_hash_are_told_apart_by_the_rows_themselves(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index.xxhash, "xxh3_64_intdigest", lambda data, seed=0: 7)
    store.append("rollouts", [rollout("a"), rollout("b")])
    store.append("rollouts", [rollout("c")])
    for name in "abc":
        assert [found.rollout_id for found in store.get(name)] == [name]
    with pytest.raises(KeyError):
        store.get("d")


def test_a_compaction_leaves_the_index_right(store: Store) -> None:
    for number in range(6):
        store.append("rollouts", [rollout(f"r{number}")])
    store.get("r0")
    store.compact()
    assert [store.get(f"r{n}")[0].rollout_id for n in range(6)] == [f"r{n}" for n in range(6)]
    live = {part.name for part in store.parts("rollouts")}
    covered = {name for segment in index._load(store.filesystem) for name in segment.parts}
    assert live <= covered
    assert all(isinstance(segment, Segment) for segment in index._load(store.filesystem))


def test_rows_that_repeat_are_named_wherever_they_lie_and_other_segments_are_not(store: Store) -> None:
    first = rollout("a", ending="continued"), rollout("a", segment=1), rollout("b")
    store.append("rollouts", list(first))
    store.append("rollouts", [rollout("c"), rollout("b")])
    with store.writer() as writer:
        writer.append([rollout("d"), rollout("c"), rollout("d")])
        writer.flush()
        with open_store(store.path).snapshot() as snapshot:
            found = [
                source.batch(batch).column("rollout_id")[row].as_py() for source, batch, row in snapshot.repeated()
            ]
            assert sorted(found) == ["b", "b", "c", "c", "d", "d"]
    store.compact()
    fresh = open_store(store.path)
    with fresh.snapshot() as snapshot:
        assert len(snapshot.repeated()) == 6


def test_rows_of_a_part_that_was_still_being_copied_are_found_when_it_is_whole(store: Store) -> None:
    store.append("rollouts", [rollout("a")])
    store.append("rollouts", [rollout("b")])
    (file,) = [Path(part.path) for part in store.parts("rollouts") if part.statistics.ranges["rollout_id"].min == "b"]
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    fresh = open_store(store.path)
    with pytest.warns(UserWarning, match="no whole part"), pytest.raises(KeyError):
        fresh.get("b")
    copy = file.with_suffix(".copy")
    copy.write_bytes(whole)
    copy.replace(file)
    assert fresh.get("b")[0].rollout_id == "b"
    assert fresh.get("a")[0].rollout_id == "a"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EMFILE, "too many open files"), None])
def test_what_goes_wrong_between_two_reads_hides_no_rollout(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    """Without an error another process compacts and vacuums, and what was to be read is gone."""
    for name in "abc":
        store.append("rollouts", [rollout(name)])
    batches, seen = Part.batches, []

    def second_fails(part: Part, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        seen.append(part)
        if len(seen) == 2:
            if error is not None:
                raise error
            other = open_store(store.path)
            other.compact()
            other.vacuum(grace=0)
        yield from batches(part, columns)

    fresh = open_store(store.path)
    with monkeypatch.context() as patched:
        patched.setattr(Part, "batches", second_fails)
        with suppress(KeyboardInterrupt):
            assert fresh.get("a")[0].rollout_id == "a"
    assert len(seen) >= 2
    assert [fresh.get(name)[0].rollout_id for name in "abc"] == ["a", "b", "c"]


def test_a_snapshot_of_before_a_compaction_still_finds_its_rows_in_an_index_that_went_on(store: Store) -> None:
    for names in ("ab", "bc"):
        store.append("rollouts", [rollout(name) for name in names])
    with store.snapshot() as before:
        assert len(before.repeated()) == 2
        open_store(store.path).compact()
        store.get("a")  # its own segments were merged, without the parts that are no longer live
        assert len(before.repeated()) == 2
        assert all(source.name in before.names["rollouts"] for source, _, _ in before.repeated())
