"""Following a live store: each rollout once, groups whole, nothing stale, and on record what became of each."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from torch.utils.data import DataLoader

from rollstore.batch import TokenBatch
from rollstore.errors import CorruptionError, DuplicateError
from rollstore.readers.arrivals import Arrivals
from rollstore.readers.duckdb import connect
from rollstore.readers.filters import uses
from rollstore.readers.follow import Clock, Follower, Rules
from rollstore.readers.torch import RolloutFollower, RolloutLoader
from rollstore.readers.waiting import Rollout as Arriving
from rollstore.readers.waiting import gather, release, rows_of, together
from rollstore.store.filesystem import LocalFilesystem
from rollstore.store.part import Part
from rollstore.store.store import Store
from tests.readers import follow_processes
from tests.readers.follow_processes import GROUPS, IDS
from tests.readers.samples import group, rollout, write

ROOT = Path(__file__).parent.parent.parent


class Time:
    """A clock that goes on when somebody sleeps; `then` is what happens meanwhile, a sleep each."""

    def __init__(self, *then: Any) -> None:
        self.seconds, self.slept, self.then = 0.0, list[float](), list(then)

    def sleep(self, seconds: float) -> None:
        assert len(self.slept) < 1000, "waits for ever"
        self.slept.append(seconds)
        self.seconds += seconds
        if self.then:
            self.then.pop(0)()

    @property
    def clock(self) -> Clock:
        begun = datetime(2026, 1, 1, tzinfo=UTC)
        return Clock(lambda: self.seconds, self.sleep, lambda: begun + timedelta(seconds=self.seconds))


def follower(store: Store, time: Time | None = None, resume_step: int | None = None, **rules: Any) -> Follower:
    rules = {"rollouts_per_batch": 1, "timeout": 0.0, **rules}
    return Follower(
        store, train_run="t", rules=Rules(**rules), columns=["rollout_id", "tokens"], resume_step=resume_step,
        clock=(time or Time()).clock,
    )  # fmt: skip


def given(follower: Follower) -> list[list[str]]:
    return [table["rollout_id"].to_pylist() for table in follower]


def record(store: Store) -> dict[str, tuple[str, str | None]]:
    rows = store.scan("uses").read_all().to_pylist()
    return {row["rollout_id"]: (row["disposition"], row["reason"]) for row in rows}


def test_what_comes_is_given_once_as_it_is_sealed_and_compacted_meanwhile(store: Store) -> None:
    writer = store.writer(run="run")
    following = follower(store)
    assert given(following) == []
    writer.append([rollout("a"), rollout("b")])
    writer.flush()
    assert given(following) == [["a"], ["b"]]
    writer.append(rollout("c"))
    writer.close()
    assert given(following) == [["c"]]
    write(store, rollout("d"))
    store.compact()
    store.vacuum(grace=0)
    assert given(following) == [["d"]]
    assert given(following) == []


def test_a_row_arrives_once_and_what_was_looked_through_is_not_read_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new() -> list[str]:
        return sorted(id_ for batch in arrivals.new() for id_ in batch.column("rollout_id").to_pylist())

    writer, arrivals = store.writer(run="run"), Arrivals(store, ["rollout_id"])
    writer.append([rollout("a"), rollout("b")])
    writer.flush()
    assert new() == ["a", "b"]
    writer.append(rollout("c"))
    writer.flush()
    assert new() == ["c"]
    writer.close()
    write(store, rollout("d"))
    assert new() == ["d"], "the others are in a part now"
    store.compact()
    store.vacuum(grace=0)
    assert new() == []
    read: list[str] = []
    plain = Part.batch
    monkeypatch.setattr(Part, "batch", lambda self, *rest: read.append(self.name) or plain(self, *rest))
    write(store, rollout("e"))
    assert new() == ["e"]
    assert len(read) == 1


def test_a_follower_started_again_goes_on_after_what_was_committed(store: Store) -> None:
    write(store, *[rollout(name) for name in "abcd"])
    first = follower(store)
    assert [first.next()["rollout_id"][0].as_py() for _ in range(2)] == ["a", "b"]
    first.commit(weight_version=3)
    assert first.next()["rollout_id"].to_pylist() == ["c"], "given and never committed"
    first.close()
    second = follower(store)
    assert (second.attempt, second.step) == (1, 1)
    assert given(second) == [["c"], ["d"]]


def take_three(store: Store) -> None:
    """A trainer that makes three steps, and ends."""
    first = follower(store)
    for _ in range(3):
        first.next()
        first.commit()
    first.close()


def test_a_checkpoint_that_is_older_than_the_record_gets_those_steps_again(store: Store) -> None:
    write(store, *[rollout(name) for name in "abc"])
    take_three(store)
    second = follower(store, resume_step=1)
    assert given(second) == [["b"], ["c"]]
    second.commit()
    second.close()
    with store.snapshot() as snapshot:
        counted = uses(snapshot)
    assert dict(zip(counted["rollout_id"].to_pylist(), counted["uses"].to_pylist(), strict=True)) == dict.fromkeys(
        "abc", 1
    )


def test_a_group_waits_for_its_members_and_a_rollout_for_its_last_segment(store: Store) -> None:
    members = group("g", [0.0, 1.0, 1.0])
    time = Time(
        lambda: write(store, members[0], rollout("r", segment=0, ending="continued", reward_status="on_final_segment")),
        lambda: write(store, members[2]),
        lambda: write(store, rollout("r", segment=2, ending="terminated")),
        lambda: write(store, rollout("r", segment=1, ending="continued", reward_status="on_final_segment")),
        lambda: write(store, members[1]),
    )
    following = follower(store, time, whole_groups=True, timeout=2.0)
    assert given(following) == [["r", "r", "r"], ["g-0", "g-2", "g-1"]]


@pytest.mark.parametrize(("rule", "wanted"), [("leave_out", []), ("take", [["g-0", "g-1"]])])
def test_a_group_that_stays_incomplete_is_closed_and_who_comes_later_is_late(
    store: Store, rule: str, wanted: list[list[str]]
) -> None:
    members, time = group("g", [0.0, 1.0, 1.0]), Time()
    write(store, *members[:2])
    following = follower(store, time, whole_groups=True, group_wait=10.0, incomplete=rule, timeout=12.0)
    assert given(following) == wanted
    assert time.seconds >= 10
    write(store, members[2])
    assert given(following) == []
    following.commit()
    following.close()
    reasons = record(store)
    assert reasons["g-2"] == ("discarded", "late: its group was closed")
    left_out = ("discarded", "incomplete: its group has 2 of 3 after 10.0 s")
    assert reasons["g-0"] == (left_out if rule == "leave_out" else ("trained", None))


def test_a_member_that_comes_after_its_group_was_trained_is_late_after_a_restart_too(store: Store) -> None:
    members = group("g", [0.0, 1.0, 1.0])
    write(store, *members[1:])
    first = follower(store, Time(), whole_groups=True, group_wait=1.0, incomplete="take", timeout=2.0)
    assert given(first) == [["g-1", "g-2"]]
    first.commit()
    first.close()
    write(store, members[0])
    second = follower(store, Time(), whole_groups=True, group_wait=1.0, incomplete="take", timeout=2.0)
    assert given(second) == []
    second.commit()
    second.close()
    assert record(store)["g-0"] == ("discarded", "late: its group was closed")


def test_what_is_stale_when_it_would_be_given_is_discarded_with_the_reason(store: Store) -> None:
    write(
        store,
        rollout("old", weight_versions=np.array([3, 9, 9, 9])),
        rollout("fresh", weight_versions=np.array([8, 9, 9, 9])),
        rollout("unknown", weight_versions=None, weight_version_max=9),
        rollout("first", ending="continued", reward_status="on_final_segment", weight_versions=np.full(4, 2)),
        rollout("first", segment=1, ending="terminated", weight_versions=np.full(4, 9)),
        rollout(
            "partly", ending="continued", reward_status="on_final_segment", weight_versions=None, weight_version_max=9
        ),
        rollout("partly", segment=1, ending="terminated", weight_versions=np.full(4, 9)),
        *group("g", [1.0, 0.0], weight_versions=np.full(4, 9)),
        rollout("m", group_id="g2", group_size=2, weight_versions=np.full(4, 9)),
        rollout("n", group_id="g2", group_size=2, weight_versions=np.full(4, 2)),
    )
    following = follower(store, version=lambda: 10, max_lag=2, whole_groups=True)
    assert given(following) == [["fresh"], ["g-0", "g-1"]]
    following.commit()
    following.close()
    found = record(store)
    assert found["old"] == ("discarded", "stale: lag 7, wanted at most 2")
    assert found["first"] == ("discarded", "stale: lag 8, wanted at most 2")
    assert found["partly"] == ("discarded", "stale: an unknown version, wanted at most 2")
    assert found["unknown"] == ("discarded", "stale: an unknown version, wanted at most 2")
    assert found["m"] == found["n"] == ("discarded", "stale: lag 8, wanted at most 2")
    assert found["fresh"] == ("trained", None)


PARTLY_KNOWN = {
    "[None, 1], then [9, 9]": ([None, 1], [9, 9]),
    "none, then [9, 9]": (None, [9, 9]),
    "[None, None], then [9, 9]": ([None, None], [9, 9]),
    "[9, 9], then none": ([9, 9], None),
}


@pytest.mark.parametrize("versions", PARTLY_KNOWN.values(), ids=PARTLY_KNOWN)
def test_a_rollout_with_an_action_of_an_unknown_version_is_not_fresh(
    store: Store, versions: tuple[list[int | None] | None, ...]
) -> None:
    first = {"segment": 0, "ending": "continued", "reward_status": "on_final_segment"}
    write(
        store,
        rollout("a", 4, weight_versions=versions[0], **first),
        rollout("a", 4, segment=1, weight_versions=versions[1]),
        rollout("b", 2, weight_versions=None, logprobs=None, logprob_kind=None, spans=None, **first),
        rollout("b", 4, segment=1, weight_versions=[9, 9]),
    )
    following = follower(store, version=lambda: 9, max_lag=0)
    assert given(following) == [["b", "b"]], "a segment without actions says nothing"
    following.commit()
    following.close()
    assert record(store)["a"] == ("discarded", "stale: an unknown version, wanted at most 0")
    (batch,) = RolloutLoader(store, rollouts_per_batch=9, version=9, max_lag=0)
    assert batch.rollout_ids == ["b", "b"]


def test_a_filter_sees_the_oldest_and_newest_version_of_all_segments(store: Store) -> None:
    write(
        store,
        rollout("a", 4, ending="continued", reward_status="on_final_segment", weight_versions=[9, 9]),
        rollout("a", 4, segment=1, weight_versions=[5, 5]),
        rollout("b", 4, weight_versions=[5, 5]),
    )
    where = (pc.field("weight_version_max") == 9) & (pc.field("weight_version_min") == 5)
    assert given(follower(store, where=where)) == [["a", "a"]]
    (batch,) = RolloutLoader(store, rollouts_per_batch=9, where=where)
    assert batch.rollout_ids == ["a", "a"]


WHERE = {
    "no such column": (pc.field("nope") > 0, "^where: rollouts has no column 'nope'$"),
    "a list": (pc.is_valid(pc.field("tokens")), "^where: wanted scalar columns of rollouts, got the list 'tokens'$"),
    "of another type": (pc.field("tokens") == 1, "^where: wanted a filter over rollouts: .*$"),
    "no condition": (lambda row: row, "^where: wanted an expression of pyarrow.compute, got function$"),
    "a text": ("reward > 0", "^where: wanted an expression of pyarrow.compute, got str$"),
}


@pytest.mark.parametrize(("where", "said"), WHERE.values(), ids=WHERE)
def test_a_filter_that_cannot_be_asked_is_refused_by_name_before_anything_is_read(
    store: Store, where: Any, said: str
) -> None:
    write(store, rollout("a"))
    for load in (lambda: RolloutLoader(store, rollouts_per_batch=1, where=where), lambda: follower(store, where=where)):
        with pytest.raises((ValueError, TypeError), match=said) as refused:
            load()
        assert type(refused.value) in (ValueError, TypeError)


def test_a_filter_that_names_no_column_is_one_too(store: Store) -> None:
    write(store, rollout("a"))
    assert RolloutLoader(store, rollouts_per_batch=1, where=pc.scalar(True)).rollouts == 1
    assert given(follower(store, where=pc.scalar(True))) == [["a"]]


def test_a_group_that_says_no_size_waits_for_late_members_and_is_then_what_is_there(store: Store) -> None:
    a, b, c, d = (rollout(name, group_id="g", ending="terminated") for name in "abcd")
    time = Time(lambda: write(store, b), lambda: write(store, c))
    write(store, a)
    following = follower(store, time, whole_groups=True, group_wait=10.0, timeout=12.0, poll=3.0)
    assert given(following) == [["a", "b", "c"]]
    write(store, d)
    assert given(following) == []
    following.commit()
    following.close()
    assert record(store)["d"] == ("discarded", "late: its group was closed")


def test_a_commit_of_nothing_is_no_step_so_what_was_rolled_back_comes_again(store: Store) -> None:
    write(store, *[rollout(name) for name in "abcd"])
    take_three(store)
    second = follower(store, resume_step=1)
    second.commit()
    step = second.step
    second.close()
    third = follower(store, resume_step=step)
    third.commit()
    third.next()
    third.commit()
    third.close()
    with store.snapshot() as snapshot:
        counted = uses(snapshot)
    assert sorted(zip(counted["rollout_id"].to_pylist(), counted["uses"].to_pylist(), strict=True)) == [
        ("a", 1), ("b", 1),
    ]  # fmt: skip
    assert given(follower(store, resume_step=step)) == [["b"], ["c"], ["d"]]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"train_step": 7}, "^train_step: wanted columns of a step "),
        ({"rollout_id": "z"}, "^rollout_id: wanted columns of a step "),
        ({"disposition": "trained"}, "^disposition: wanted columns of a step "),
        ({"advantages": [1.0]}, "^advantages: wanted columns of a step "),
        ({"nope": 1}, "^uses has no column 'nope'$"),
        ({"weight_version": "x"}, "^weight_version: wanted int64, got 'x'$"),
        ({"sync_seconds": "a"}, "^sync_seconds: wanted float, got 'a'$"),
    ],
)
def test_a_commit_takes_columns_of_the_step_alone_and_goes_on_after_a_wrong_one(
    store: Store, columns: dict[str, Any], said: str
) -> None:
    write(store, rollout("a"))
    following = follower(store)
    following.next()
    with pytest.raises((ValueError, TypeError), match=said):
        following.commit(**columns)
    assert following.step == 0
    following.commit(sync_seconds=0.5, anchor_version=3)
    following.close()
    assert record(store) == {"a": ("trained", None)}


def test_a_follower_that_is_left_at_the_end_of_the_program_says_nothing(store: Store) -> None:
    write(store, rollout("a"))
    write(store, rollout("b"))
    script = (
        "import sys, rollstore\n"
        "from rollstore.readers.torch import RolloutLoader\n"
        "store = rollstore.open(sys.argv[1])\n"
        "following = RolloutLoader(store, follow=True, train_run='t', rollouts_per_batch=1, timeout=0.0)\n"
        "for batch in following:\n"
        "    break\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(store.path)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_files_are_closed_when_the_modules_are_gone_already(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalFilesystem(store.path)
    handles = [local.create("new"), local.open("new")]
    monkeypatch.setattr("rollstore.store.filesystem.os", None)
    for handle in handles:
        handle.close()


def test_what_a_filter_or_the_budget_leaves_out_is_on_record(store: Store) -> None:
    write(store, rollout("a", reward=1.0), rollout("b", reward=0.0), rollout("c", tokens=40, reward=1.0))
    following = follower(store, rollouts_per_batch=None, tokens_per_batch=20, where=pc.field("reward") > 0.5)
    assert given(following) == [["a"]]
    following.commit()
    following.close()
    assert record(store)["b"] == ("filtered", "where: (reward > 0.5)")
    assert record(store)["c"] == ("discarded", "oversize: 40 tokens, wanted at most 20")
    assert given(follower(store, where=pc.field("reward") < 0.5)) == [], "decided once"


def test_waiting_sleeps_between_looks_and_ends_with_the_timeout(store: Store) -> None:
    time = Time()
    assert follower(store, time, timeout=1.0, poll=0.3).next() is None
    assert time.slept == pytest.approx([0.3, 0.3, 0.3, 0.1])
    write(store, rollout("a"), rollout("b"))
    time = Time()
    table = follower(store, time, rollouts_per_batch=5, timeout=1.0, poll=0.5).next()
    assert table["rollout_id"].to_pylist() == ["a", "b"], "what is there, when the time is over"
    assert time.seconds == 1.0


def test_a_full_batch_does_not_wait_and_what_does_not_fit_is_in_the_next(store: Store) -> None:
    write(store, *[rollout(f"r{n}", tokens=6) for n in range(5)])
    time = Time()
    following = follower(store, time, rollouts_per_batch=None, tokens_per_batch=14, timeout=3.0, poll=1.0)
    assert [following.next()["rollout_id"].to_pylist() for _ in range(2)] == [["r0", "r1"], ["r2", "r3"]]
    assert time.slept == []
    assert following.waiting == 1


def test_one_id_with_two_contents_is_an_error_and_with_one_is_given_once(store: Store) -> None:
    write(store, rollout("a", ending="continued", reward_status="on_final_segment"), rollout("b"))
    write(store, rollout("a", ending="continued", reward_status="on_final_segment"), rollout("b"))
    following = follower(store)
    assert given(following) == [["b"]]
    write(store, rollout("a", tokens=9, ending="continued", reward_status="on_final_segment"))
    with pytest.raises(DuplicateError, match="'a', segment 0"):
        following.next()


def test_a_rollout_that_was_written_twice_is_one_where_a_value_is_nan_too(store: Store) -> None:
    odd = rollout("a", logprobs=[float("nan"), -1.0, -1.0, -1.0], ending="continued", reward_status="on_final_segment")
    write(store, odd)
    write(store, odd)
    write(store, rollout("a", segment=1, ending="terminated"))
    assert given(follower(store)) == [["a", "a"]]


def test_a_group_that_is_closed_as_it_arrives_leaves_those_beside_it_as_they_are(store: Store) -> None:
    waiting = {"ending": "continued", "reward_status": "on_final_segment", "group_id": "g", "group_size": 5}
    members = [rollout(f"g-{n}", **waiting) for n in range(4)]
    done = rollout("g-4", group_id="g", group_size=5)
    write(store, rollout("a", segment=1), *members, done, *[rollout(name, tokens=5) for name in "bcd"])
    first = follower(store)
    assert first.next()["rollout_id"].to_pylist() == ["g-4"]
    first.commit()
    first.close()
    second = follower(store, whole_groups=True)
    assert given(second) == [["b"], ["c"], ["d"]]
    second.commit()
    second.close()
    assert record(store)["g-0"] == ("discarded", "late: its group was closed")


def test_earlier_segments_of_a_rollout_whose_group_was_closed_do_not_wait_for_ever(store: Store) -> None:
    write(store, rollout("g-0", group_id="g", group_size=1))
    write(store, rollout("late", ending="continued", reward_status="on_final_segment"))
    following = follower(store, whole_groups=True)
    assert given(following) == [["g-0"]]
    assert following.waiting == 1
    write(store, rollout("late", segment=1, group_id="g", group_size=1))
    assert given(following) == []
    assert following.waiting == 0
    following.commit()
    following.close()
    assert record(store)["late"] == ("discarded", "late: its group was closed")


def test_what_comes_beside_an_id_with_two_contents_is_not_lost(store: Store) -> None:
    unfinished = {"ending": "continued", "reward_status": "on_final_segment"}
    write(store, rollout("a", **unfinished))
    write(store, rollout("a", tokens=9, **unfinished), rollout("b"))
    following = follower(store)
    with pytest.raises(DuplicateError, match="'a', segment 0"):
        following.next()
    assert given(following) == [["b"]]


def test_rows_that_wait_keep_few_of_those_they_came_with_in_memory(store: Store) -> None:
    write(store, *[rollout(f"r{n}", tokens=4 + n % 5) for n in range(64)])
    (batch,) = store.scan("rollouts").read_all().combine_chunks().to_batches()
    rows = rows_of(batch)
    arrived = [Arriving(id=row.id, since=0.0) for row in rows]
    for one, row in zip(arrived, rows, strict=True):
        one.add(row)
        row.hold()
    block = rows[0].block
    block.arrived()
    waiting = arrived[1::20]
    release([one for one in arrived if one not in waiting])
    assert block.batch.num_rows == len(waiting)
    assert gather([one.last for one in waiting], ["rollout_id", "tokens"]).equals(
        pa.Table.from_batches([batch]).select(["rollout_id", "tokens"]).take(list(range(64))[1::20])
    )


def test_small_batches_come_together_and_what_came_before_an_error_comes_first(store: Store) -> None:
    def broken(count: int) -> Iterator[pa.RecordBatch]:
        for number in range(count):
            yield pa.record_batch({"n": [number]})
        raise CorruptionError("torn")

    read = together(broken(600))
    assert [next(read).num_rows for _ in range(3)] == [256, 256, 88]
    with pytest.raises(CorruptionError, match="torn"):
        next(read)
    large = [pa.record_batch({"n": range(300)})] * 2
    assert [batch.num_rows for batch in together(iter(large))] == [300, 300]


def test_queue_wait_lag_and_reuse_can_be_asked_of_the_record(store: Store) -> None:
    write(store, rollout("a", weight_versions=np.array([5, 6, 7, 7])))
    time = Time(lambda: write(store, rollout("b")))
    following = follower(store, time, rollouts_per_batch=2, timeout=9.0, poll=4.0)
    following.next()
    following.commit(weight_version=9, recipe="grpo")
    following.close()
    with connect(store) as connection:
        rows = connection.sql(
            "SELECT u.rollout_id, epoch(u.consumed_at - u.enqueued_at), u.weight_version - r.weight_version_min,"
            " u.tokens_trained, u.recipe FROM uses u JOIN rollouts r USING (rollout_id) ORDER BY 1"
        ).fetchall()
    assert rows == [("a", 4.0, 4, 4, "grpo"), ("b", 0.0, 2, 4, "grpo")]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rollouts_per_batch": None}, "tokens_per_batch: wanted at least 1, got None"),
        ({"rollouts_per_batch": 0}, "rollouts_per_batch: wanted at least 1, got 0"),
        ({"poll": 0}, "poll: wanted more than 0 seconds"),
        ({"max_lag": 3}, "max_lag: wanted together with version"),
        ({"incomplete": "drop"}, "incomplete: wanted 'take' or 'leave_out', got 'drop'"),
    ],
)
def test_wrong_rules_are_named(store: Store, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        follower(store, **wrong)


def test_the_loader_follows_when_asked_and_gives_batches(store: Store) -> None:
    write(store, *group("g", [0.0, 1.0]), rollout("a"))
    following = RolloutLoader(store, follow=True, train_run="t", tokens_per_batch=99, timeout=0.0, whole_groups=True)
    assert isinstance(following, RolloutFollower)
    (batch,) = following
    assert isinstance(batch, TokenBatch)
    assert batch.rollout_ids == ["g-0", "g-1", "a"]
    following.commit()
    state = json.loads(json.dumps(following.state_dict()))
    following.close()
    write(store, rollout("b"))
    resumed = RolloutLoader(store, follow=True, train_run="t", tokens_per_batch=99, timeout=0.0)
    resumed.load_state_dict(state)
    assert [batch.rollout_ids for batch in resumed] == [["b"]]
    with pytest.raises(ValueError, match="state: wanted one of run 't'"):
        resumed.load_state_dict({"train_run": "other", "step": 1})
    with pytest.raises(ValueError, match="follow with num_workers=0"):
        list(DataLoader(resumed, batch_size=None, num_workers=1, multiprocessing_context="fork"))


class Process:
    """One of the two processes, at a point; `go` lets it run to its next one."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None

    def go(self) -> str:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", follow_processes.__name__, *self._arguments], cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        elif self._process.stdin is not None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture
def processes(store: Store, tmp_path: Path) -> Iterator[tuple[Process, Process, Path]]:
    checkpoint = tmp_path / "checkpoint.json"
    pair = (Process("produce", str(store.path)), Process("consume", str(store.path), str(checkpoint)))
    yield (*pair, checkpoint)
    for process in pair:
        process.kill()


def test_producer_and_consumer_killed_anywhere_lose_and_repeat_nothing(
    store: Store, processes: tuple[Process, Process, Path]
) -> None:
    producer, consumer, checkpoint = processes
    deaths, died = ["appended", "given", "flushed", "committed", "saved"], []
    chance, made = random.Random(4), False
    while not made or deaths:
        who = consumer if made or chance.random() < 0.5 else producer
        at = who.go()
        made = made or at == "done"
        if at in deaths:
            deaths.remove(at)
            died.append(at)
            who.kill()
    assert len(died) == 5, "each at every point once"
    while consumer.go() != "nothing":
        pass
    trained = json.loads(checkpoint.read_text())["trained"]
    assert Counter(id_ for batch in trained for id_ in batch) == dict.fromkeys(IDS, 1)
    assert sorted(sorted(batch) for batch in trained) == [[f"g{n}-0", f"g{n}-1"] for n in range(GROUPS)]
    with store.snapshot() as snapshot:
        counted = uses(snapshot)
    assert dict(zip(counted["rollout_id"].to_pylist(), counted["uses"].to_pylist(), strict=True)) == dict.fromkeys(
        IDS, 1
    )
