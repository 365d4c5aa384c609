"""A rollout whose segments differ in step or group: every reader puts it into the same group."""

from __future__ import annotations

import os
import random
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstore.batch import collate
from rollstore.diagnose.stats import stats
from rollstore.losses import group_mean
from rollstore.readers.duckdb import connect
from rollstore.readers.torch import RolloutFollower, RolloutLoader
from rollstore.schema import Rollout
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.readers.samples import rollout, write

THOROUGH = bool(os.environ.get("ROLLSTORE_THOROUGH"))
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def part(name: str, segment: int, last: bool, reward: float, **fields: Any) -> Rollout:
    """A segment that takes ten seconds, after those before it."""
    ends = {"ending": "terminated", "reward": reward, "reward_status": "scored"}
    more = ends if last else {"ending": "continued", "reward_status": "on_final_segment"}
    begin = BEGIN + timedelta(seconds=10 * segment)
    times = {"started_at": begin, "finished_at": begin + timedelta(seconds=10)}
    return rollout(name, segment=segment, **{"group_size": 2, **times, **more, **fields})


LATER: dict[str, dict[str, Any]] = {
    "in a later step": {"step": 4, "group_id": "g"},
    "without a group": {"step": 3, "group_id": None, "group_size": None},
    "without a step": {"step": None, "group_id": "g"},
    "in another group": {"step": 4, "group_id": "h"},
}


@pytest.mark.parametrize("later", LATER.values(), ids=LATER)
def test_sql_loader_advantages_and_statistics_put_a_rollout_into_the_group_of_its_first_segment(
    store: Store, later: dict[str, Any]
) -> None:
    here = {"step": 3, "group_id": "g"}
    write(store, part("a", 0, False, 1.0, **here), part("b", 0, True, 0.0, **here))
    write(store, part("a", 1, True, 1.0, **later), part("z", 0, True, 1.0, step=4, group_id="g", group_size=1))
    with connect(store) as connection:
        found = connection.sql("SELECT step, group_id, present, reward_mean FROM groups ORDER BY step").fetchall()
    assert found == [(3, "g", 2, 0.5), (4, "g", 1, 1.0)]

    loader = RolloutLoader(store, rollouts_per_batch=1, whole_groups=True, incomplete="leave_out")
    assert sorted(sorted({*batch.rollout_ids}) for batch in loader) == [["a", "b"], ["z"]]
    assert loader.late == 0

    with connect(store) as connection:
        batch, _ = group_mean(collate(connection.sql("SELECT * FROM rollouts").to_arrow_table()))
    assert batch.advantages is not None
    wanted = {"a": 0.5, "b": -0.5, "z": 0.0}
    assert batch.advantages.tolist() == [wanted[batch.rollout_ids[row]] for row in batch.sequence.tolist()]

    waits = stats(store).slices[0].waits["group completion"]
    assert (waits.n, waits.quantiles[-1]) == (3, 10)  # b waits ten seconds for a


@pytest.mark.parametrize("later", LATER.values(), ids=LATER)
def test_a_follower_gives_a_rollout_that_goes_on_in_a_later_step_with_its_group(
    store: Store, later: dict[str, Any]
) -> None:
    here = {"step": 3, "group_id": "g"}
    write(store, part("a", 0, False, 1.0, **here), part("b", 0, True, 0.0, **here))
    write(store, part("a", 1, True, 1.0, **later))
    loader = RolloutLoader(store, follow=True, train_run="t", rollouts_per_batch=1, whole_groups=True, timeout=0.0)
    assert [sorted({*batch.rollout_ids}) for batch in loader] == [["a", "b"]]
    loader.close()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("early", [{"step": 3}, {"step": 3, "group_size": None}, {"step": None}])
def test_loader_and_follower_take_run_step_and_group_each_of_the_first_segment_that_says_it(
    store: Store, early: dict[str, Any], turned: bool
) -> None:
    here = {"step": early["step"] or 4, "group_id": "g"}
    of_b = [part("b", 0, False, 0.0, **{"group_id": None, **early}), part("b", 1, True, 0.0, **{**here, "step": 4})]
    write(store, part("a", 0, True, 1.0, **here))
    for one in reversed(of_b) if turned else of_b:
        write(store, one)
    loader = RolloutLoader(store, rollouts_per_batch=1, whole_groups=True, incomplete="leave_out")
    assert [sorted({*batch.rollout_ids}) for batch in loader] == [["a", "b"]]
    rules: dict[str, Any] = {"train_run": "t", "rollouts_per_batch": 1, "whole_groups": True, "timeout": 0.0}
    following = RolloutLoader(store, follow=True, **rules)
    assert [sorted({*batch.rollout_ids}) for batch in following] == [["a", "b"]]
    following.commit()
    following.close()
    write(store, part("c", 0, True, 1.0, **here))
    again = RolloutLoader(store, follow=True, **rules)
    assert [*again] == []
    again.commit()
    again.close()
    assert [row["reason"] for row in store.scan("uses").read_all().to_pylist() if row["rollout_id"] == "c"] == [
        "late: its group was closed"
    ]


def test_a_size_that_stands_on_a_segment_without_a_group_is_that_of_the_group(store: Store) -> None:
    for name in "ab":
        write(store, part(name, 0, False, 1.0, group_id=None), part(name, 1, True, 1.0, group_id="g", group_size=None))
    following = RolloutLoader(store, follow=True, train_run="t", rollouts_per_batch=1, whole_groups=True, timeout=0.0)
    assert [sorted({*batch.rollout_ids}) for batch in following] == [["a", "b"]]
    following.close()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"weights": "x_wieght"}, r"^extra: rollouts has no column 'x_wieght'$"),
        (["weights"], r"^extra: wanted a mapping of fields to names"),
    ],
)
def test_an_extra_column_that_is_not_there_is_refused_when_the_loader_is_made(
    store: Store, extra: Any, said: str
) -> None:
    write(store, rollout("a", extra={"x_weight": [0.5, 0.0, 1.0, 2.0]}), rollout("b"))
    with pytest.raises((ValueError, TypeError), match=said):
        RolloutLoader(store, tokens_per_batch=99, extra=extra)
    (batch,) = RolloutLoader(store, tokens_per_batch=99, extra={"weights": "x_weight"})
    weights = {name: batch.weights[batch.sequence == row].tolist() for row, name in enumerate(batch.rollout_ids)}
    assert weights == {"a": [0.5, 0, 1, 2], "b": [1, 1, 1, 1]}


def wandering(chance: random.Random) -> list[Rollout]:
    """Segments of rollouts in the order in which they are written.

    A rollout is in the group that the first segment with a group says, in the step that the first with a step says;
    what later ones say is anything. Members that say a size say the same one, and one that is finished does.
    """
    rows = [part("alone", 0, True, 1.0, group_id=None, group_size=None)]
    for step, name in ((0, "g"), (0, "h"), (1, "g")):
        size = chance.randint(1, 3)
        for member in range(max(1, size - (chance.random() < 0.2))):
            count, says_size = chance.choice((1, 1, 2, 3)), chance.random() < 0.7 or not member
            finished = chance.random() < 0.9 or not member
            first = {field: chance.randrange(count) for field in ("step", "group_id", "group_size")}
            true = {"step": step, "group_id": name, "group_size": size if says_size else None}
            later = {
                "step": (0, 1, None),
                "group_id": ("g", "h", None),
                "group_size": (1, 2, 3) if says_size else (None,),
            }
            for segment in range(count):
                said = {
                    field: true[field] if segment == at else chance.choice(later[field]) if segment > at else None
                    for field, at in first.items()
                }
                rows.append(part(f"{step}{name}{member}", segment, segment == count - 1 and finished, 1.0, **said))
    chance.shuffle(rows)
    return rows


@settings(max_examples=300 if THOROUGH else 40)
@given(seed=st.integers(0, 1 << 32))
def test_a_follower_gives_the_groups_of_the_loader_in_whatever_order_segments_come(seed: int) -> None:
    chance, found = random.Random(seed), list[list[str]]()
    rows = wandering(chance)
    cuts = sorted(chance.sample(range(1, len(rows)), min(3, len(rows) - 1)))
    rules: dict[str, Any] = {"rollouts_per_batch": 1, "whole_groups": True}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        store = open_store(folder, create=True)

        def follow() -> RolloutFollower:
            return stack.enter_context(closing(RolloutFollower(store, train_run="t", timeout=0.0, **rules)))

        following = follow()
        for begin, end in pairwise([0, *cuts, len(rows)]):
            for one in rows[begin:end]:
                write(store, one)
            if chance.random() < 0.7 or end == len(rows):
                found += [sorted({*batch.rollout_ids}) for batch in following]
                following.commit()
            if chance.random() < 0.3:
                following.close()
                following = follow()
        whole = RolloutLoader(store, incomplete="leave_out", **rules)
        assert sorted(found) == sorted(sorted({*batch.rollout_ids}) for batch in whole)
        assert {row["disposition"] for row in store.scan("uses").read_all().to_pylist()} == {"trained"}
