"""Retention by age, run and version; and the choice between two contents of one rollout. Whole, or not at all."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from rollstore.errors import DuplicateError, StoreError, WriteError
from rollstore.schema import Rollout
from rollstore.store import commits, dropping
from rollstore.store.retention import Gone, Keep, retain
from rollstore.store.store import Store, open_on
from rollstore.testing import Fault, MachineCrash, MemoryFilesystem
from tests.store.conftest import errors, ids, once, rollout


def days_ago(days: float) -> datetime:
    return datetime.now(UTC) - timedelta(days=days)


def of_versions(name: str, *versions: int, **fields: object) -> Rollout:
    return rollout(name, tokens=2 * len(versions), weight_versions=list(versions), **fields)


def about(store: Store, *names: str) -> None:
    """A score, an evaluation and a use of each rollout."""
    each = list(names)
    store.append("scores", pa.table({"rollout_id": each, "scorer": ["judge"] * len(each), "value": [0.5] * len(each)}))
    store.append(
        "evaluations",
        pa.table({"rollout_id": each, "segment": pa.array([0] * len(each), pa.int32()), "evaluation_id": each,
                  "role": ["trainer"] * len(each)}),
    )  # fmt: skip
    store.append(
        "uses",
        pa.table({"rollout_id": each, "segment": pa.array([0] * len(each), pa.int32()), "train_run": ["t"] * len(each),
                  "train_step": [1] * len(each), "disposition": ["trained"] * len(each)}),
    )  # fmt: skip


def named(store: Store, table: str) -> list[str]:
    return sorted(store.scan(table, ["rollout_id"]).read_all().column(0).to_pylist())


def test_old_rollouts_go_and_those_of_a_run_or_version_that_is_kept_stay(store: Store) -> None:
    store.append("rollouts", [rollout("old", written_at=days_ago(40), run_id="a"), rollout("new", run_id="a")])
    store.append("rollouts", [rollout("baseline", written_at=days_ago(400), run_id="base")])
    store.append("rollouts", [of_versions("late", 39, 41, written_at=days_ago(50), run_id="a")])
    keep = Keep(age=timedelta(days=30), runs=("base",), versions=(41, None))
    before = store.retain(keep, dry_run=True)
    assert set(ids(store)) == {"old", "new", "baseline", "late"}
    assert before.tables["rollouts"].rows == 1
    assert store.retain(keep) == before
    assert ids(store) == once("new", "baseline", "late")
    assert errors(store) == []
    assert store.retain(keep).tables == {}


@pytest.mark.parametrize(
    ("versions", "stay"),
    [
        ((41, None), {"late", "across", "unknown"}),
        ((None, 40), {"early", "across", "unknown"}),
        ((40, 40), {"early", "across", "unknown"}),
        ((42, 60), {"late", "unknown"}),
    ],
)
def test_a_version_is_kept_where_any_of_a_rollout_s_weights_was_of_it(
    store: Store, versions: tuple[int | None, int | None], stay: set[str]
) -> None:
    store.append("rollouts", [of_versions("early", 39, 40), of_versions("late", 41, 42), of_versions("across", 39, 41)])
    store.append("rollouts", [rollout("unknown")])
    store.retain(Keep(versions=versions))
    assert set(ids(store)) == stay


def test_what_no_rule_can_tell_is_not_thrown_away(store: Store) -> None:
    store.append("rollouts", [rollout("a", run_id="one"), rollout("b"), rollout("c", written_at=days_ago(2))])
    store.append("rollouts", [rollout("d", run_id="other")])
    store.retain(Keep(runs=("other",)))
    assert ids(store) == once("b", "c", "d")
    store.retain(Keep(runs=("other",), age=timedelta(days=1)))
    assert ids(store) == once("b", "d")


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("keep", "named"),
    [
        (Keep(runs=("basline", "base")), "run=basline"),
        (Keep(runs=("base",), versions=(400, None)), r"version=400\.\."),
        (Keep(runs=("x",), age=timedelta(days=1)), "run=x"),
        (Keep(runs=("x", "y"), versions=(2, 2)), "run=x, run=y, version=2..2"),
    ],
)
def test_where_no_row_has_a_run_or_version_to_be_kept_nothing_goes(
    keep: Keep, named: str, dry_run: bool, store: Store
) -> None:
    store.append("rollouts", [of_versions("a", 1, run_id="base"), of_versions("b", 40, run_id="two")])
    store.append("rollouts", [of_versions("c", 3, run_id="three", written_at=days_ago(9))])
    with pytest.raises(StoreError, match=f"got {named}, which no row has: nothing is retired"):
        store.retain(keep, dry_run=dry_run)
    assert ids(store) == once("a", "b", "c")
    assert store.retain(Keep(runs=("unknown",), age=timedelta(days=99))).tables == {}, "nothing would go"


def test_a_rollout_stays_or_goes_whole_whatever_parts_its_segments_are_in(store: Store) -> None:
    store.append("rollouts", [rollout("a", segment=0, ending="continued", written_at=days_ago(9)), rollout("x")])
    store.append("rollouts", [rollout("a", segment=1), rollout("b", segment=1, written_at=days_ago(9))])
    store.append("rollouts", [rollout("b", segment=0, ending="continued", written_at=days_ago(9))])
    gone = store.retain(Keep(age=timedelta(days=5)))
    assert [found.segment for found in store.get("a")] == [0, 1]
    assert "b" not in ids(store)
    assert (gone.tables["rollouts"].rows, gone.tables["rollouts"].parts, gone.tables["rollouts"].rewritten) == (2, 1, 1)


def test_what_was_said_about_a_rollout_goes_with_it_and_nothing_else_does(store: Store) -> None:
    store.append("rollouts", [rollout("a", run_id="one"), rollout("b", run_id="two")])
    about(store, "a", "b", "elsewhere")
    gone = store.retain(Keep(runs=("two",)))
    assert ids(store) == once("b")
    for table in ("scores", "evaluations", "uses"):
        assert named(store, table) == ["b", "elsewhere"]
        assert gone.tables[table].rows == 1
    assert len(store.filesystem.list("commits")) == 1, "all of it in one entry"
    assert errors(store) == []


def test_rows_in_journals_stay_and_keep_their_rollouts(store: Store) -> None:
    store.append("rollouts", [rollout("a", run_id="one", segment=0, ending="continued"), rollout("b", run_id="one")])
    with store.writer() as writer:
        writer.append([rollout("a", run_id="one", segment=1), rollout("c", run_id="one")])
        writer.flush()
        writer.append([rollout("d", run_id="two")])
        writer.flush()
        store.retain(Keep(runs=("two",)))
        assert sorted(ids(store)) == ["a", "c", "d"]
        assert len(store.get("a")) == 2
    assert ids(store)["a"] == 2


def test_an_open_snapshot_keeps_what_it_sees_until_it_is_closed(store: Store) -> None:
    store.append("rollouts", [rollout("a", run_id="one"), rollout("b", run_id="two")])
    with store.snapshot() as snapshot:
        store.retain(Keep(runs=("two",)))
        store.vacuum(grace=0)
        assert sorted(snapshot.scan("rollouts", ["rollout_id"]).read_all().column(0).to_pylist()) == ["a", "b"]
    assert len(store.vacuum(grace=0)) == 1
    assert ids(store) == once("b")


def test_bytes_are_counted_by_the_share_of_rows(store: Store) -> None:
    store.append("rollouts", [rollout(f"r{n}", run_id="one" if n % 4 else "two") for n in range(8)])
    (part,) = store.parts("rollouts")
    gone = store.retain(Keep(runs=("one",)), dry_run=True)
    assert gone.tables == {"rollouts": Gone(rows=2, parts=0, rewritten=1, bytes=round(part.size / 4))}


def test_an_entry_of_the_log_says_what_was_kept(store: Store) -> None:
    store.append("rollouts", [of_versions("a", 1, run_id="one")])
    store.append("rollouts", [of_versions("b", 3, run_id="two")])
    store.retain(Keep(runs=("two",), versions=(3, 9)))
    entry = json.loads((Path(store.path) / commits.entry(1)).read_text())
    assert (entry["reason"], entry["note"], entry["add"]) == ("retain", "run=two version=3..9", {})


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({}, "nothing would stay"),
        ({"age": timedelta(days=-1)}, "not negative"),
        ({"versions": (None, None)}, "got neither"),
        ({"versions": (5, 4)}, "not after the last"),
        ({"runs": ("a", "")}, "got an empty one"),
        ({"runs": "baseline"}, "got the text 'baseline'"),
    ],
)
def test_rules_that_mean_nothing_are_refused(rules: dict[str, object], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        Keep(**rules)  # pyright: ignore  the wrong value is the point


def twice(store: Store) -> tuple[tuple[str, int], tuple[str, int]]:
    """One rollout with two contents; the origins of both."""
    store.append("rollouts", [rollout("other"), rollout("a")])
    store.append("rollouts", [rollout("a", tokens=8), rollout("more")])
    rows = store.scan("rollouts", ["rollout_id", "written_by", "written_row", "tokens"]).read_all().to_pylist()
    found = sorted((row for row in rows if row["rollout_id"] == "a"), key=lambda row: len(row["tokens"]))
    first, second = ((row["written_by"], row["written_row"]) for row in found)
    return first, second


def test_one_of_two_contents_is_dropped_and_the_other_is_found_from_then_on(store: Store) -> None:
    first, second = twice(store)
    with pytest.raises(DuplicateError):
        store.get("a")
    (line,) = errors(store)
    assert all(f"{by}:{row}" in line for by, row in (first, second))
    store.drop_rows([first])
    assert len(store.get("a", segment=0).tokens) == 8
    assert ids(store) == once("a", "other", "more")
    assert errors(store) == []
    entry = json.loads((Path(store.path) / commits.entry(1)).read_text())
    assert (entry["reason"], entry["note"]) == ("drop", f"{first[0]}:{first[1]}")


def test_the_last_row_of_a_rollout_is_never_dropped(store: Store) -> None:
    first, second = twice(store)
    with pytest.raises(StoreError, match="the last one of 'a', segment 0"):
        store.drop_rows([first, second])
    store.drop_rows([second])
    with pytest.raises(StoreError, match="the last one of 'a', segment 0"):
        store.drop_rows([first])
    with pytest.raises(StoreError, match="none with this origin"):
        store.drop_rows([second])
    assert len(store.get("a", segment=0).tokens) == 6


def test_a_row_still_in_a_journal_replaces_one_and_cannot_be_dropped(store: Store) -> None:
    store.append("rollouts", [rollout("a")])
    with store.writer() as writer:
        writer.append(rollout("a", tokens=8))
        writer.flush()
        (part,) = store.parts("rollouts")
        (view,) = store.snapshot().views("rollouts")
        with pytest.raises(StoreError, match="none with this origin"):
            store.drop_rows([(view.name, 0)])
        store.drop_rows([(part.name, 0)])
        assert len(store.get("a", segment=0).tokens) == 8


def test_another_compaction_that_was_faster_makes_it_start_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = twice(store)
    append = commits.append
    turns: list[int] = []

    def late(*arguments: object) -> commits.Log | None:
        if not turns:
            turns.append(1)
            monkeypatch.setattr(commits, "append", append)
            store.compact()
        return append(*arguments)  # pyright: ignore

    monkeypatch.setattr(commits, "append", late)
    store.drop_rows([first])
    assert len(store.get("a", segment=0).tokens) == 8
    assert ids(store) == once("a", "other", "more")
    live = {part.name for part in store.parts("rollouts")}
    assert len(live) == 1
    assert {file for file in store.filesystem.list("rollouts") if file.startswith("c-")} >= {f"{n}.arrow" for n in live}


def test_without_end_it_is_an_error_and_nothing_is_left_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = twice(store)
    before = store.filesystem.list("rollouts")
    monkeypatch.setattr(commits, "append", lambda *_: None)
    with pytest.raises(StoreError, match="other compactions 10 times"):
        store.drop_rows([first])
    assert store.filesystem.list("rollouts") == before
    assert store.filesystem.list("staging") == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("action", ["retain", "drop"])
def test_rows_that_go_go_at_one_instant_wherever_the_machine_dies(seed: int, action: str) -> None:
    at = 0
    while True:
        at += 1
        disk = MemoryFilesystem(seed * 1000 + at)
        store = open_on(disk, create=True)
        disk.sync_folder("")
        first, _ = twice(store)
        about(store, "other", "more")
        whole, less = {"other": 1, "more": 1, "a": 2}, {"other": 1, "more": 1, "a": 1}
        if action == "retain":
            store.append("rollouts", [rollout("out", run_id="gone"), rollout("in", run_id="kept")])
            about(store, "out")
            less = whole | {"in": 1}
            whole = less | {"out": 1}
        fault = disk.fault = Fault(at=at, crash=True)
        with suppress(MachineCrash):
            store.retain(Keep(runs=("kept",))) if action == "retain" else store.drop_rows([first])
        for after in (disk.crash(), disk):
            after.kill()
            again = open_on(after)
            found = dict(ids(again))
            assert found in (whole, less)
            assert ("out" in named(again, "scores")) == ("out" in found)
            if not fault.fired:
                assert found == less
            after.age(1_000_000)
            again.vacuum(grace=10)
            again.recover()
            assert dict(ids(open_on(after))) == found
            assert set(after.list("rollouts")) == {f"{part.name}.arrow" for part in open_on(after).parts("rollouts")}
        if not fault.fired:
            break
    assert at > 10


@pytest.mark.parametrize("lasting", [False, True])
def test_a_disk_that_refuses_changes_nothing_or_all(lasting: bool) -> None:
    at = 0
    while True:
        at += 1
        disk = MemoryFilesystem(at)
        store = open_on(disk, create=True)
        first, _ = twice(store)
        fault = disk.fault = Fault(at=at, lasting=lasting)
        with suppress(WriteError):
            store.drop_rows([first])
        disk.fault = None
        assert ids(open_on(disk)) in ({"other": 1, "more": 1, "a": 2}, {"other": 1, "more": 1, "a": 1})
        if not fault.fired:
            break
    assert at > 5


def test_no_part_is_held_that_does_not_change(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append("rollouts", [rollout("a", run_id="kept")])
    store.append("rollouts", [rollout("b", run_id="gone")])
    monkeypatch.setattr(dropping, "PartWriter", None)
    with store.snapshot() as snapshot:
        gone = retain(snapshot, Keep(runs=("kept",)))
    assert gone is not None
    assert (gone.tables["rollouts"].parts, gone.tables["rollouts"].rewritten) == (1, 0)
