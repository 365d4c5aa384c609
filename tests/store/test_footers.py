"""The ends of parts, kept together: a help that saves reading each, and that is never believed about a row."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.compute as pc
import pytest

from rollstore.errors import CorruptionError, StoreError
from rollstore.store import footers, snapshot
from rollstore.store.filesystem import LocalFilesystem, ReadHandle
from rollstore.store.store import Store, open_on
from rollstore.store.store import open as open_store
from tests.store.conftest import errors, ids, once, rollout

NAMES = [f"r{number:02d}" for number in range(12)]


class Watched(LocalFilesystem):
    """A local folder that remembers which parts were opened."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.opened: list[str] = []

    def open(self, path: str) -> ReadHandle:
        if path.startswith("rollouts/"):
            self.opened.append(path)
        return super().open(path)


@pytest.fixture(autouse=True)
def _few_parts_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "WORTH_KEEPING", 4)


@pytest.fixture
def parts(store: Store) -> Store:
    for step, name in enumerate(NAMES):
        store.append("rollouts", [rollout(name, step=step, run_id="a" if step < 6 else "b")])
    return store


def rollout_file(store: Store, number: int) -> Path:
    """The part that holds one of `NAMES`."""
    ranges = {part.statistics.ranges["rollout_id"].min: part.path for part in store.parts("rollouts")}
    return Path(ranges[NAMES[number]])


def kept(store: Store) -> list[str]:
    return footers.derived_files(store.filesystem, "footers")


def watched(store: Store) -> tuple[Store, Watched]:
    place = Watched(store.path)
    return open_on(place), place


def test_a_second_process_counts_and_filters_without_opening_every_part(parts: Store) -> None:
    assert parts.info().tables["rollouts"].rows == len(NAMES)
    assert len(kept(parts)) == 1
    fresh, place = watched(parts)
    assert fresh.info().tables["rollouts"].rows == len(NAMES)
    fresh, place = watched(parts)
    found = fresh.scan("rollouts", ["rollout_id"], pc.field("step") == 7).read_all()
    assert found.column(0).to_pylist() == ["r07"]
    assert set(place.opened) == {f"rollouts/{rollout_file(parts, 7).name}"}


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        (pc.field("run_id") == "b", NAMES[6:]),
        (pc.field("step") >= 10, NAMES[10:]),
        (pc.field("rollout_id") == "r03", ["r03"]),
        (pc.field("step") == 99, []),
    ],
)
def test_a_filter_opens_only_the_parts_that_can_match(parts: Store, where: pc.Expression, wanted: list[str]) -> None:
    fresh, place = watched(parts)
    fresh.parts("rollouts")
    place.opened.clear()
    found = fresh.scan("rollouts", ["rollout_id"], where).read_all()
    assert sorted(found.column(0).to_pylist()) == wanted
    assert len(set(place.opened)) == len(wanted)


def test_few_parts_are_opened_without_a_file(store: Store) -> None:
    for name in NAMES[:3]:
        store.append("rollouts", [rollout(name)])
    assert ids(open_store(store.path)) == once(*NAMES[:3])
    assert not kept(store)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign"])
def test_a_damaged_file_is_thrown_away_and_made_again(parts: Store, damage: str) -> None:
    ids(parts)
    (path,) = kept(parts)
    file = Path(parts.path, path)
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes({"flip": bytes(data), "cut": bytes(data[:-9]), "empty": b"", "foreign": b"x" * 100}[damage])
    fresh = open_store(parts.path)
    assert ids(fresh) == once(*NAMES)
    assert len(kept(fresh)) == 1
    assert kept(fresh) != [path]


def test_a_part_that_was_replaced_is_refused_and_not_read_as_the_old_one(parts: Store) -> None:
    ids(parts)
    first, second = rollout_file(parts, 0), rollout_file(parts, 1)
    shutil.copy(second, first)
    fresh = open_store(parts.path)
    with pytest.raises(CorruptionError, match=r"wanted the part that was here before|got another file"):
        ids(fresh)
    assert any(first.stem in text for text in errors(open_store(parts.path)))


def test_a_part_whose_end_is_damaged_later_is_found_when_it_is_read(parts: Store) -> None:
    ids(parts)
    file = rollout_file(parts, 2)
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    fresh = open_store(parts.path)
    with pytest.raises(CorruptionError, match=file.stem):
        ids(fresh)
    assert fresh.get("r05")[0].rollout_id == "r05"
    assert any(file.stem in text for text in errors(open_store(parts.path)))


def test_a_part_that_is_gone_is_an_error_and_no_empty_answer(parts: Store) -> None:
    fresh = open_store(parts.path)
    with fresh.snapshot() as fixed:
        fixed.parts("rollouts")
        other = open_store(parts.path)
        with other.snapshot() as seen:
            seen.parts("rollouts")
            rollout_file(parts, 4).unlink()
            with pytest.raises(StoreError, match="no"):
                seen.scan("rollouts").read_all()


def test_files_stay_few_and_the_merged_one_has_all_that_is_live(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "WORTH_KEEPING", 1)
    for number in range(30):
        store.append("rollouts", [rollout(f"r{number}")])
        ids(open_store(store.path))
        assert len(kept(store)) <= footers._FEW_FILES
    assert len(footers.load_footers(store.filesystem)) == 30
    store.compact()
    assert ids(open_store(store.path)) == once(*(f"r{number}" for number in range(30)))
