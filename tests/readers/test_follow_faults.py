"""Following a live store when something goes wrong: a restart, rows that contradict, a function that fails."""

from __future__ import annotations

import gc
import itertools
import linecache
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rollstore.errors import DuplicateError, StoreError
from rollstore.readers.follow import Follower, Rules
from rollstore.readers.torch import RolloutFollower, RolloutLoader
from rollstore.schema import Rollout
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.readers.samples import SYSTEM, group, rollout, write
from tests.readers.test_follow import Time, follower, given, record

UNFINISHED = {"ending": "continued", "reward_status": "on_final_segment"}


def append(store: Store, *rollouts: Rollout) -> None:
    """One sealed part, of which each append is checked alone."""
    with store.writer(run="run") as writer:
        for one in rollouts:
            writer.append(one)


def filtered(store: Store) -> dict[str, Any]:
    write(store, *[one for name in "gh" for one in group(name, [1.0, 0.0])])
    return {"where": pc.field("reward") > 0.5}


def unfinished(store: Store) -> dict[str, Any]:
    of = {name: {"group_id": name, "group_size": 2} for name in "gh"}
    write(
        store,
        *[
            one
            for name in "gh"
            for one in (rollout(f"{name}-0", **of[name]), rollout(f"{name}-1", **of[name], **UNFINISHED))
        ],
    )
    return {"group_wait": 0.0, "incomplete": "take"}


@pytest.mark.parametrize("left_out", [filtered, unfinished], ids=lambda case: case.__name__)
def test_a_group_that_lost_a_member_and_is_not_given_yet_comes_after_a_restart(
    store: Store, left_out: Callable[[Store], dict[str, Any]]
) -> None:
    rules = {"whole_groups": True, **left_out(store)}
    first = follower(store, Time(), **rules)
    assert first.next()["rollout_id"].to_pylist() == ["g-0"]
    assert first.waiting == 1, "the other group is ready"
    first.commit()
    first.close()
    assert set(record(store)) == {"g-0", "g-1"}, "what was left out is on record with its group"
    second = follower(store, Time(), **rules)
    assert given(second) == [["h-0"]]
    second.commit()
    second.close()
    assert set(record(store)) == {"g-0", "g-1", "h-0", "h-1"}


@pytest.mark.parametrize("late", ["i-1", "late"], ids=["new", "of which a segment without a group was there"])
def test_a_member_that_comes_late_to_a_group_that_is_not_given_yet_does_not_close_it_after_a_restart(
    store: Store, late: str
) -> None:
    write(store, *[rollout(f"{name}-0", group_id=name, group_size=1) for name in "ghi"], rollout("late", **UNFINISHED))
    rules = {"whole_groups": True, "rollouts_per_batch": 2}
    first = follower(store, **rules)
    assert first.next()["rollout_id"].to_pylist() == ["g-0", "h-0"]
    write(store, rollout(late, segment=int(late == "late"), group_id="i", group_size=1))
    assert not first._pending.fill(), "a look that found no full batch"
    first.commit()
    first.close()
    second = follower(store, **rules)
    assert "i-0" in [id_ for ids in given(second) for id_ in ids]


OTHERWISE: dict[str, dict[str, Any]] = {
    "another group": {"group_id": "b"},
    "another step": {"step": 1},
    "no group": {"group_id": None, "group_size": None},
    "other tokens": {"tokens": 9},
}


@pytest.mark.parametrize("ready", [True, False], ids=["ready", "coming"])
@pytest.mark.parametrize("otherwise", OTHERWISE.values(), ids=OTHERWISE)
@pytest.mark.parametrize("incomplete", ["take", "leave_out"])
def test_an_id_that_comes_again_otherwise_is_an_error_and_is_not_given(
    store: Store, otherwise: dict[str, Any], ready: bool, incomplete: str
) -> None:
    of = {"group_id": "a", "group_size": 2}
    writer = store.writer(run="run")
    writer.append([*[rollout(name, group_id=name, group_size=1) for name in "xy"], rollout("a-0", **of)])
    if ready:
        writer.append(rollout("a-1", **of))
    writer.flush()
    following = follower(store, whole_groups=True, rollouts_per_batch=2, incomplete=incomplete)
    assert following.next()["rollout_id"].to_pylist() == ["x", "y"]
    writer.append([rollout("a-0", **{**of, **otherwise}), rollout("c", group_id="c", group_size=1)])
    if not ready:
        writer.append(rollout("a-1", **of))
    writer.close()
    with pytest.raises(DuplicateError, match=r"^'a-0', segment 0: wanted one content, got different ones$"):
        following.next()
    assert given(following) == [["a-1", "c"] if incomplete == "take" else ["c"]]
    following.commit()
    following.close()
    left_out = ("discarded", "incomplete: a member of its group came with different contents")
    assert record(store) == {
        **dict.fromkeys("xy", ("trained", None)),
        "a-0": ("discarded", "conflict: one segment came with different contents"),
        "a-1": ("trained", None) if incomplete == "take" else left_out,
        "c": ("trained", None),
    }


def test_all_that_came_with_different_contents_are_named_at_once_and_none_is_given(store: Store) -> None:
    append(store, *[rollout(name, tokens=tokens) for name in "abc" for tokens in (6, 9)], rollout("d"))
    following = follower(store, rollouts_per_batch=9)
    said = "'a', segment 0; 'b', segment 0; 'c', segment 0: wanted one content, got different ones"
    with pytest.raises(DuplicateError, match=f"^{said}$"):
        following.next()
    assert given(following) == [["d"]]
    assert following.waiting == 0
    following.commit()
    following.close()
    conflict = ("discarded", "conflict: one segment came with different contents")
    assert record(store) == {**dict.fromkeys("abc", conflict), "d": ("trained", None)}
    assert given(follower(store)) == [], "decided once, and said once"


def test_a_row_of_a_rollout_that_is_done_leaves_another_group_that_it_names_as_it_is(store: Store) -> None:
    write(store, *group("a", [1.0, 0.0]))
    following = follower(store, whole_groups=True)
    assert given(following) == [["a-0", "a-1"]]
    write(store, rollout("a-0", group_id="b", group_size=2), *group("b", [1.0, 0.0]))
    assert given(following) == [["b-0", "b-1"]]


def test_a_third_content_of_a_rollout_does_not_close_its_group(store: Store) -> None:
    of = {"group_id": "a", "group_size": 3}
    append(store, *[rollout("a-0", tokens=tokens, **of) for tokens in (6, 7, 8)], rollout("a-1", **of))
    following = follower(store, whole_groups=True, incomplete="take")
    with pytest.raises(DuplicateError, match=r"^'a-0', segment 0: wanted"):
        following.next()
    write(store, rollout("a-2", **of))
    assert given(following) == [["a-1", "a-2"]]


STEPS = pc.scalar(10) / pc.field("step") > 1
FAILS = "where fails: divide by zero"


def test_a_filter_that_fails_names_the_rollouts_and_the_rest_comes_with_the_next_call(store: Store) -> None:
    write(store, *[rollout(f"r{n}", step=n % 5) for n in range(11)], rollout("old", step=20))
    following = follower(store, where=STEPS, rollouts_per_batch=9)
    said = "'r0': divide by zero; 'r5': divide by zero; 'r10': divide by zero"
    with pytest.raises(ValueError, match=rf"^where: .*divide.* fails on rollouts, which are not given: {said}$"):
        following.next()
    assert following.waiting == 8
    assert given(following) == [[f"r{n}" for n in (1, 2, 3, 4, 6, 7, 8, 9)]]
    following.commit()
    following.close()
    assert {id_: said for id_, said in record(store).items() if said[0] != "trained"} == {
        **dict.fromkeys(("r0", "r5", "r10"), ("discarded", FAILS)),
        "old": ("filtered", f"where: {STEPS}"),
    }
    assert given(follower(store, where=STEPS)) == [], "decided once, and said once"


def test_a_filter_that_fails_and_is_mended_before_the_commit_loses_nothing(store: Store) -> None:
    """A key of the metadata that is a number in most rows and a word in one."""
    write(store, *[rollout(f"r{n}", metadata={"level": level}) for n, level in enumerate(("3", "hard", "4"))])
    level = pc.map_lookup(pc.field("metadata"), pa.scalar("level"), "first")
    following = follower(store, where=level.cast(pa.int64()) > 2)
    with pytest.raises(ValueError, match=r"'r1': Failed to parse string: 'hard' as a scalar of type int64$"):
        following.next()
    following.close()
    assert given(follower(store, where=level != "3")) == [["r1"], ["r2"]]


def test_a_filter_that_fails_on_everything_names_some_and_ends(store: Store) -> None:
    write(store, *[rollout(f"r{n}") for n in range(30)])
    following = follower(store, where=STEPS)
    with pytest.raises(ValueError, match=r"'r7': divide by zero; and 22 more$"):
        following.next()
    assert following.next() is None
    assert following.waiting == 0


@pytest.mark.parametrize("incomplete", ["take", "leave_out"])
def test_the_group_of_a_member_that_the_filter_fails_on_is_one_that_stays_incomplete(
    store: Store, incomplete: str
) -> None:
    of = {"group_id": "g", "group_size": 3}
    level = pc.map_lookup(pc.field("metadata"), pa.scalar("level"), "first").cast(pa.int64())
    write(store, *[rollout(f"g-{n}", metadata={"level": said}, **of) for n, said in enumerate(("1", "?", "5"))])
    following = follower(store, where=level > 2, whole_groups=True, incomplete=incomplete)
    with pytest.raises(ValueError, match="fails on rollouts, which are not given: 'g-1': Failed to parse"):
        following.next()
    assert given(following) == ([["g-2"]] if incomplete == "take" else [])
    following.commit()
    following.close()
    found = record(store)
    assert [found[name][0] for name in ("g-0", "g-1")] == ["filtered", "discarded"]
    left_out = ("discarded", "incomplete: where fails on a member of its group")
    assert found["g-2"] == (("trained", None) if incomplete == "take" else left_out)


def test_a_filter_that_finds_no_memory_asks_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    write(store, *group("g", [1.0, 0.0], size=3))
    following = follower(store, where=pc.field("reward") > 0.5, whole_groups=True, group_wait=0.0, incomplete="take")
    with monkeypatch.context() as patched:
        patched.setattr("rollstore.readers.pending.kept", none)
        with pytest.raises(MemoryError, match="malloc"):
            following.next()
    assert given(following) == [["g-0"]]


def test_after_a_restart_a_row_of_a_rollout_that_is_done_closes_no_other_group_that_it_names(store: Store) -> None:
    with store.writer(run="run") as writer:
        writer.append(group("a", [1.0, 0.0]))
        writer.flush()
        first = follower(store, whole_groups=True)
        assert given(first) == [["a-0", "a-1"]]
        first.commit()
        first.close()
        # Parts come before what is still in a journal: the rows that say what was given come last.
        write(store, rollout("a-0", group_id="b", group_size=2), *group("b", [1.0, 0.0]), rollout("a-2", group_id="a"))
        second = follower(store, whole_groups=True, group_wait=0.0, incomplete="take")
        assert given(second) == [["b-0", "b-1"]]
        second.commit()
        second.close()
        assert record(store)["a-2"] == ("discarded", "late: its group was closed"), (
            "the rest of its group speaks for it"
        )


def test_after_a_restart_a_late_member_that_comes_before_those_that_were_given_is_late(store: Store) -> None:
    of = {"group_id": "a", "group_size": 2}
    with store.writer(run="run") as writer:
        writer.append([rollout("a-0", **UNFINISHED), rollout("a-0", segment=1, **of), rollout("a-1", **of)])
        writer.flush()
        first = follower(store, whole_groups=True)
        assert given(first) == [["a-0", "a-0", "a-1"]]
        first.commit()
        first.close()
        write(store, rollout("a-2", **of))
        second = follower(store, whole_groups=True, group_wait=0.0, incomplete="take")
        assert given(second) == []
        second.commit()
        second.close()
    assert record(store)["a-2"] == ("discarded", "late: its group was closed")


def test_a_batch_that_could_not_be_made_comes_again_and_is_not_on_record_before(store: Store) -> None:
    def make(table: pa.Table) -> list[str]:
        ids = table["rollout_id"].to_pylist()
        if ids == ["b"] and not failed:
            failed.append("b")
            raise OSError("no memory")
        return ids

    failed: list[str] = []
    write(store, *[rollout(name) for name in "abc"])
    rules = {"version": lambda: 7, "max_lag": 0}
    following = RolloutFollower(store, train_run="t", rollouts_per_batch=1, timeout=0.0, make=make, **rules)
    batches = iter(following)
    assert next(batches) == ["a"]
    with pytest.raises(OSError, match="no memory"):
        next(batches)
    following.commit()
    assert set(record(store)) == {"a"}
    assert following.waiting == 2
    assert list(following) == [["b"], ["c"]]
    following.commit()
    following.close()
    assert record(store) == dict.fromkeys("abc", ("trained", None))


@pytest.mark.parametrize("incomplete", ["leave_out", "take"])
@pytest.mark.parametrize("sealed", [True, False])
def test_groups_that_are_whole_in_the_store_are_whole_however_long_the_trainer_takes(
    store: Store, incomplete: str, sealed: bool
) -> None:
    groups, writers = range(300), [store.writer(run="run", source=f"engine-{n}") for n in range(2)]
    for number, writer in enumerate(writers):
        tokens = 1_500 if sealed else 6  # more than is read at one go
        rows = [rollout(f"{name}-{number}", tokens, group_id=f"{name}", group_size=2) for name in groups]
        for some in [rows] if sealed else [rows[at : at + 4] for at in range(0, len(rows), 4)]:
            writer.append(some)
            writer.flush()
        if sealed:
            writer.close()
    time = Time()
    following = follower(store, time, whole_groups=True, group_wait=600.0, incomplete=incomplete, rollouts_per_batch=50)
    found: list[str] = []
    while (table := following.next()) is not None:
        found += table["rollout_id"].to_pylist()
        following.commit()
        time.seconds += 1_000
    assert sorted(found) == sorted(f"{name}-{number}" for name in groups for number in range(2))
    assert all(one.split("-")[0] == other.split("-")[0] for one, other in zip(found[::2], found[1::2], strict=True))
    assert {*record(store).values()} == {("trained", None)}


def test_a_member_that_comes_in_time_is_not_late_because_the_trainer_looks_late(store: Store) -> None:
    members, time = group("g", [0.0, 1.0]), Time()
    write(store, members[0])
    following = follower(store, time, whole_groups=True, group_wait=10.0)
    assert following.next() is None
    write(store, members[1])
    time.seconds += 700
    assert given(following) == [["g-0", "g-1"]]


def test_a_group_of_which_a_member_never_comes_is_closed_under_a_store_that_is_never_at_rest(store: Store) -> None:
    time, numbers = Time(), iter(range(1_000))
    write(store, rollout("lone", group_id="g", group_size=2))
    following = follower(store, time, whole_groups=True, group_wait=10.0)
    for _ in range(20):  # more comes than is taken
        write(store, *[rollout(f"r{next(numbers)}") for _ in range(2)])
        assert following.next() is not None
        following.commit()
        time.seconds += 5
    assert record(store)["lone"] == ("discarded", "incomplete: its group has 1 of 2 after 10.0 s")


MODULES = ("follow.py", "pending.py", "ledger.py", "waiting.py", "arrivals.py")


class Interrupt:
    """Ctrl-C at the line that comes after so many others of what a follower is made of."""

    def __init__(self, after: int) -> None:
        self.left, self.line = after, ""

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        if path.parent.name != "readers" or path.name not in MODULES:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def test_after_an_interrupt_anywhere_everything_comes_once(tmp_path: Path) -> None:
    """But for a batch that is made already and whose caller is interrupted before it has it."""
    store = open_store(tmp_path / "store", create=True)
    rows = [row for name in "abcd" for row in group(name, [1.0, 0.0, 1.0])]
    for half in (rows[::2], rows[1::2]):
        write(store, *half)
    write(store, rollout("s", segment=1), rollout("lone", group_id="e", group_size=2), rollout("long", tokens=99))
    write(store, rollout("s", **UNFINISHED))
    rules = {"whole_groups": True, "group_wait": 0.0, "where": pc.field("reward") > 0.5, "incomplete": "take",
             "tokens_per_batch": 60, "rollouts_per_batch": 2}  # fmt: skip
    total = Interrupt(1 << 40)
    wanted, _ = interrupted(store, total, "whole", rules)
    lines = (1 << 40) - total.left
    assert lines > 1_500
    for after in range(1, lines, 7 if os.environ.get("ROLLSTORE_THOROUGH") else 31):
        interrupt = Interrupt(after)
        found, on_record = interrupted(store, interrupt, f"after {after}", rules)
        lost = wanted - found
        assert not found - wanted, f"{interrupt.line}: came twice"
        assert not lost or interrupt.line in ("if ends:", "return made"), f"{interrupt.line}: {lost}"
        assert {id_ for id_, what in on_record.items() if what == "trained"} == {*wanted}


def interrupted(
    store: Store, interrupt: Interrupt, run: str, rules: dict[str, Any]
) -> tuple[Counter[str], dict[str, str]]:
    """What is given in all, with an interrupt on the way, and what is on record then."""
    following = Follower(store, train_run=run, rules=Rules(timeout=0.0, **rules), columns=["rollout_id"],
                         clock=Time().clock)  # fmt: skip
    found: Counter[str] = Counter()
    again, before = True, sys.gettrace()
    while again:
        again = False
        try:
            sys.settrace(interrupt)
            while (table := following.next()) is not None:
                sys.settrace(None)
                found.update({*table["rollout_id"].to_pylist()})
                following.commit()
                sys.settrace(interrupt if interrupt.left > 0 else None)
        except KeyboardInterrupt:
            again = True
        finally:
            sys.settrace(before)
    following.commit()
    following.close()
    rows = store.scan("uses", where=pc.field("train_run") == run).read_all().to_pylist()
    assert len(rows) == len({row["rollout_id"] for row in rows}), f"{interrupt.line}: two rows of one rollout"
    return found, {row["rollout_id"]: row["disposition"] for row in rows}


def test_a_commit_that_is_interrupted_anywhere_and_tried_again_writes_each_row_once(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", create=True)
    write(store, *[rollout(name) for name in "abcd"])
    after, line = 0, "begin"
    while line:
        after += 1
        interrupt = Interrupt(after)
        following = Follower(store, train_run=f"after {after}", rules=Rules(timeout=0.0, rollouts_per_batch=2),
                             columns=["rollout_id"], clock=Time().clock)  # fmt: skip
        for _ in range(2):
            assert following.next() is not None
            before = sys.gettrace()
            try:
                sys.settrace(interrupt if interrupt.left > 0 else None)
                following.commit()
            except KeyboardInterrupt:
                sys.settrace(None)
                following.commit()
            finally:
                sys.settrace(before)
        following.commit()
        following.close()
        rows = store.scan("uses", where=pc.field("train_run") == f"after {after}").read_all().to_pylist()
        assert sorted(row["rollout_id"] for row in rows) == [*"abcd"], interrupt.line
        assert len({row["train_step"] for row in rows}) == 2, interrupt.line
        line = interrupt.line
    assert after > 30


def test_two_followers_that_began_at_once_are_told_with_the_first_commit(store: Store) -> None:
    write(store, rollout("a"), rollout("b"))
    one, other = follower(store), follower(store)
    assert one.next()["rollout_id"].to_pylist() == other.next()["rollout_id"].to_pylist() == ["a"]
    one.commit()
    said = (
        r"^train_run 't': wanted one follower at a time, .* got another that began as attempt 0 as well, or an earlier"
    )
    for _ in range(2):
        with pytest.raises(StoreError, match=said):
            other.commit()
    assert one.next() is not None
    one.commit()
    one.close()
    other.close()
    assert [row["rollout_id"] for row in store.scan("uses").read_all().to_pylist()] == ["a", "b"]


def test_two_followers_that_commit_at_once_are_told_with_the_second_commit(store: Store) -> None:
    write(store, rollout("a"), rollout("b"))
    one = follower(store)
    assert one.next() is not None
    one.commit()
    rows = store.scan("uses").read_all()
    store.append("uses", rows.drop_columns([name for name in SYSTEM if name in rows.column_names]))
    assert one.next() is not None
    with pytest.raises(StoreError, match="got another that began as attempt 0 as well"):
        one.commit()


def test_a_conflict_of_a_rollout_that_is_not_all_there_closes_no_group_after_a_restart(store: Store) -> None:
    of = {"group_id": "g", "group_size": 2}
    with store.writer(run="run") as one, store.writer(run="run") as other:
        one.append(rollout("a", segment=1, **{**of, **UNFINISHED}))
        other.append(rollout("a", segment=1, tokens=9, **{**of, **UNFINISHED}))
        one.flush()
        other.flush()
        first = follower(store, whole_groups=True)
        with pytest.raises(DuplicateError, match="'a', segment 1"):
            first.next()
        first.commit()
        first.close()
        assert record(store)["a"][0] == "discarded"
        second = follower(store, whole_groups=True)
        one.append([rollout("b", **of), rollout("c", **of)])
        one.flush()
        assert given(second) == [["b", "c"]]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("incomplete", ["take", "leave_out"])
def test_a_group_of_which_nothing_was_finished_but_a_conflict_is_not_closed(
    store: Store, incomplete: str, again: bool
) -> None:
    of, rules = {"group_id": "g", "group_size": 1}, {"whole_groups": True, "incomplete": incomplete}
    append(store, rollout("b", **{**of, **UNFINISHED}), *[rollout("a", tokens=tokens, **of) for tokens in (6, 9)])
    following = follower(store, **rules)
    with pytest.raises(DuplicateError, match="'a', segment 0"):
        following.next()
    assert following.next() is None
    following.commit()
    if again:
        following.close()
        following = follower(store, **rules)
    write(store, rollout("c", **of))
    assert given(following) == [["c"]]
    following.commit()
    following.close()
    unfinished = ("discarded", "incomplete: unfinished when its group was closed")
    assert (record(store)["b"], record(store)["c"]) == (unfinished, ("trained", None))


@pytest.mark.parametrize("again", [False, True])
def test_a_ready_group_whose_only_member_comes_otherwise_is_not_closed(store: Store, again: bool) -> None:
    def fails(_: pa.Table) -> None:
        raise OSError("no memory")

    time, of = Time(), {"group_id": "g", "group_size": 2}
    rules = {"whole_groups": True, "group_wait": 5.0, "incomplete": "take", "rollouts_per_batch": 9}
    write(store, rollout("a", **of))
    following = follower(store, time, **rules)
    assert following.next() is None
    time.seconds += 6
    with pytest.raises(OSError, match="no memory"):
        following.batch(fails)
    write(store, rollout("a", tokens=9, **of))
    with pytest.raises(DuplicateError, match="'a', segment 0"):
        following.next()
    following.commit()
    if again:
        following.close()
        following = follower(store, time, **rules)
    write(store, rollout("b", **of))
    assert following.next() is None
    time.seconds += 6
    assert following.next()["rollout_id"].to_pylist() == ["b"]


def test_what_was_given_up_unfinished_closes_no_group_that_it_turns_out_to_be_in(store: Store) -> None:
    time, rules = Time(), {"whole_groups": True, "group_wait": 5.0, "incomplete": "take"}
    with store.writer(run="run") as writer:
        writer.append(rollout("a", segment=1, group_id="g", group_size=2, step=1))
        writer.flush()
        first = follower(store, time, **rules)
        assert first.next() is None
        time.seconds += 6
        assert first.next() is None
        writer.append(rollout("a", group_id="h", group_size=3, **UNFINISHED))
        writer.flush()
        assert first.next() is None
        first.commit()
        first.close()
        assert record(store)["a"] == ("discarded", "incomplete: unfinished after 5.0 s")
        second = follower(store, time, **rules)
        writer.append([rollout(name, group_id="h", group_size=3) for name in "bc"])
        writer.flush()
        assert second.next() is None
        time.seconds += 6
        assert second.next()["rollout_id"].to_pylist() == ["b", "c"]


class Elapsed(Exception):
    """What the handler of an alarm raises."""


@pytest.mark.parametrize("at", range(1, 9))
def test_an_error_that_is_not_of_the_filter_but_comes_while_it_is_asked_is_not_blamed_on_it(
    store: Store, at: int
) -> None:
    calls, failing = itertools.count(1), [True]

    def handler(_: Any, levels: pa.Array) -> Any:
        if next(calls) == at and failing.pop():
            raise Elapsed("a minute")
        return pc.equal(levels, "wrong") if "wrong" in levels.to_pylist() and 1 / 0 else pc.equal(levels, "hard")

    level = pc.map_lookup(pc.field("metadata"), pa.scalar("level"), "first")
    where = asked_of(f"levels_{at}", handler, level)
    levels = ["hard", "easy", "wrong", "hard", "hard"]
    write(store, *[rollout(f"r{n}", metadata={"level": level}) for n, level in enumerate(levels)])
    following = follower(store, where=where, rollouts_per_batch=9)
    with pytest.raises(Elapsed, match="a minute"):
        following.next()
    with pytest.raises(ValueError, match=r"'r2': division by zero$"):
        following.next()
    assert given(following) == [["r0", "r3", "r4"]]
    following.commit()
    assert {id_: said[0] for id_, said in record(store).items()} == {
        "r0": "trained", "r1": "filtered", "r2": "discarded", "r3": "trained", "r4": "trained",
    }  # fmt: skip
    failing.append(True)
    calls = itertools.count(at)
    with pytest.raises(Elapsed):
        RolloutLoader(store, where=where, rollouts_per_batch=9)


def asked_of(name: str, function: Callable[[Any, pa.Array], Any], of: pc.Expression) -> pc.Expression:
    """A filter that asks a function of one's own."""
    pc.register_scalar_function(
        function, name, {"summary": name, "description": ""}, {"levels": pa.string()}, pa.bool_()
    )
    return pc.Expression._call(name, [of])  # pyright: ignore[reportPrivateUsage]  # the only way to name one


@pytest.mark.parametrize("said", [float("nan"), None, "7", True, 1 << 70, 1.5])
def test_a_version_that_is_none_is_refused_and_nothing_discarded(store: Store, said: Any) -> None:
    versions = [said, 8]
    write(store, rollout("a"))
    following = follower(store, version=lambda: versions.pop(0) if len(versions) > 1 else versions[0], max_lag=1)
    with pytest.raises(ValueError, match=r"^version: wanted a whole number"):
        following.next()
    assert given(following) == [["a"]]


@pytest.mark.parametrize(("name", "value"), [("weight_version", 1.5), ("epoch", 2.9), ("weight_version", True)])
def test_a_commit_takes_no_number_for_another(store: Store, name: str, value: Any) -> None:
    write(store, rollout("a"))
    following = follower(store)
    assert following.next() is not None
    with pytest.raises(TypeError, match=f"^{name}: wanted int"):
        following.commit(**{name: value})
    following.commit(weight_version=8, epoch=2)
    (row,) = store.scan("uses").read_all().to_pylist()
    assert (row["weight_version"], row["epoch"]) == (8, 2)


def test_what_is_no_clock_is_refused(store: Store) -> None:
    with pytest.raises(TypeError, match=r"^clock: now: wanted a function, got 5$"):
        Follower(store, train_run="t", rules=Rules(rollouts_per_batch=1), columns=[], clock=5)  # pyright: ignore


def test_members_are_lacking_only_where_groups_are_whole() -> None:
    with pytest.raises(ValueError, match=r"^incomplete: wanted whole_groups with 'take'"):
        Rules(rollouts_per_batch=1, incomplete="take")


def test_a_follower_goes_to_no_other_process(store: Store) -> None:
    with pytest.raises(ValueError, match=r"^follow: wanted the process that commits"):
        pickle.dumps(RolloutFollower(store, train_run="t", rollouts_per_batch=1))


def test_a_follower_that_is_dropped_lets_its_record_go(store: Store) -> None:
    write(store, rollout("a"))
    following = follower(store)
    assert following.next() is not None
    following.commit()
    assert store.snapshot().views("uses")
    del following
    gc.collect()
    assert not store.snapshot().views("uses"), "sealed"
    assert [one.rows for one in store.snapshot().parts("uses")] == [1]
