"""Following a live store when something goes wrong: a restart, rows that contradict, a function that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rollstore.errors import DuplicateError
from rollstore.readers.torch import RolloutFollower
from rollstore.schema import Rollout
from rollstore.store.store import Store
from tests.readers.samples import group, rollout, write
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
    assert not first._fill(), "a look that found no full batch"
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
        patched.setattr("rollstore.readers.follow.kept", none)
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
