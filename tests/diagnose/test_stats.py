"""The statistics say what a plain computation over the written rows says."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstore.diagnose.intervals import clustered, t_quantile
from rollstore.diagnose.stages import Stages
from rollstore.diagnose.stats import Slice, follow, stats
from rollstore.schema import Engine, Rollout
from rollstore.store.store import Store
from tests.diagnose.sound import at, sound, stored, table, uses


def only(store: Store, **options: Any) -> Slice:
    (one,) = stats(store, **options).slices
    return one


def test_stages_of_30_10_20_and_5_seconds_take_65_one_by_one_and_35_side_by_side() -> None:
    stages = Stages(seconds={"generation": 30, "scoring": 10, "training": 20, "sync": 5})
    assert (stages.serial, stages.overlapped) == (65, 35)
    assert round(stages.speedup or 0, 2) == 1.86
    assert Stages(seconds={"generation": 30, "sync": 5}, barriers=()).overlapped == 30
    assert Stages(seconds={}).speedup is None


def test_the_stages_of_a_stored_step_give_the_same_numbers(tmp_path: Path) -> None:
    members = [sound("a", begin=0, seconds=30), sound("b", begin=5, seconds=20)]
    scores = table("scores", ({"rollout_id": id_, "scorer": "judge", "status": "scored", "value": 1.0,
                               "created_at": at(40)} for id_ in "ab"))  # fmt: skip
    trained = uses("a", "b", step_started_at=at(40), step_finished_at=at(60), sync_seconds=5.0)
    found = only(stored(tmp_path, *members, scores=scores, uses=trained)).stages
    assert found is not None
    assert dict(found.seconds) == {"generation": 30, "scoring": 10, "training": 20, "sync": 5}
    assert (found.serial, found.overlapped) == (65, 35)


def test_throughput_counts_what_was_generated_and_what_bore_a_loss(tmp_path: Path) -> None:
    members = [sound("a", actions=4, begin=1, seconds=9), sound("b", actions=6, begin=1, seconds=19),
               sound("c", actions=10, begin=1, trainable=[1] * 7 + [0] * 3)]  # fmt: skip
    times = {"step_started_at": at(0), "step_finished_at": at(10)}
    store = stored(tmp_path, *members, uses=uses("a", tokens_trained=3, **times))
    store.append("uses", uses("c", **times))
    store.append("uses", uses("a", tokens_trained=3, epoch=1, **times))
    found = only(store)
    assert (found.rollouts, found.actions, found.seconds) == (3, 20, 20)
    assert found.generated_per_second == 1.0
    assert found.loss_bearing_per_second == (3 + 7 + 3) / 10
    assert (found.reuse_rate, found.passes, found.discard_rate) == (0.5, 1.5, 0.0)


def test_waits_cover_queue_generation_tools_group_scoring_and_trainer(tmp_path: Path) -> None:
    fast = sound("fast", begin=2, seconds=8, requested_at=at(0), tool_seconds=3.0)
    slow = sound("slow", begin=4, seconds=26, requested_at=at(0))
    scores = table("scores", [{"rollout_id": "fast", "scorer": "judge", "status": "scored", "value": 1.0,
                               "created_at": at(17)}])  # fmt: skip
    trained = uses("fast", enqueued_at=at(18), consumed_at=at(25))
    found = only(stored(tmp_path, fast, slow, scores=scores, uses=trained)).waits
    assert {name: (spread.n, spread.mean, spread.quantiles[-1]) for name, spread in found.items()} == {
        "queue": (2, 3, 4), "generation": (2, 15.5, 26), "tools": (1, 3, 3), "group completion": (2, 10, 20),
        "scoring": (1, 7, 7), "before the trainer's queue": (1, 8, 8), "in the trainer's queue": (1, 7, 7),
    }  # fmt: skip


def test_quantiles_are_those_of_numpy(tmp_path: Path) -> None:
    queued = np.linspace(0, 3, 41).astype(np.float32) ** 2
    members = [sound(f"r{n}", queue_seconds=float(value)) for n, value in enumerate(queued)]
    found = only(stored(tmp_path, *members)).waits["queue"]
    assert np.allclose(found.quantiles, np.quantile(queued.astype(np.float64), [0.5, 0.9, 0.99, 1.0]))


def test_lag_is_split_into_what_came_before_and_what_came_in_the_queue(tmp_path: Path) -> None:
    # "early" tells that version 9 was in use at 20 s; "late" was drawn under 7, entered at 25 s and was used under 12.
    store = stored(tmp_path, sound("early"), sound("late"))
    store.append("uses", uses("early", weight_version=9, enqueued_at=at(15), consumed_at=at(20)))
    store.append("uses", uses("late", weight_version=12, enqueued_at=at(25), consumed_at=at(40), train_step=3))
    lags = only(store).lags
    names = ("before the queue", "in the queue", "at the step")
    assert [(lags[name].n, lags[name].quantiles[-1]) for name in names] == [(2, 2), (2, 3), (2, 5)]


def test_what_a_later_attempt_supersedes_is_not_counted(tmp_path: Path) -> None:
    store = stored(tmp_path, sound("a"), sound("b"))
    store.append("uses", uses("a", "b", train_step=5, attempt=0))
    store.append("uses", uses("a", train_step=4, attempt=1))
    assert only(store).passes == 1.0


def test_rates_count_timeouts_aborts_and_what_was_never_trained_on(tmp_path: Path) -> None:
    members = [
        sound("late", ending="truncated", ending_reason="time_limit", reward=None, reward_status="unscored"),
        sound("judge was late", reward=None, reward_status="timeout"),
        sound("gone", ending="aborted", ending_reason="engine_abort", reward=None, reward_status="unscored"),
        sound("fine"),
    ]
    store = stored(tmp_path, *members, uses=uses("fine"))
    store.append("uses", uses("gone", "late", disposition="discarded", reason="stale"))
    found = only(store)
    assert (found.timeout_rate, found.abort_rate) == (0.5, 0.25)
    assert found.discard_rate == 2 / 3


def test_discards_are_shown_by_length_and_task(tmp_path: Path) -> None:
    lengths = {"s1": 4, "s2": 5, "l1": 40, "l2": 50}
    members = [sound(name, actions=count, environment="code" if name == "l2" else "math")
               for name, count in lengths.items()]  # fmt: skip
    store = stored(tmp_path, *members, uses=uses("s1", "s2"))
    store.append("uses", uses("l1", "l2", disposition="discarded"))
    found = [(one.task, one.least, one.n, one.discarded) for one in only(store).discards]
    assert found == [("code", 32, 1, 1), ("math", 4, 2, 0), ("math", 32, 1, 1)]


def test_rewards_come_by_version_with_an_interval_that_takes_groups_as_clusters(tmp_path: Path) -> None:
    rewards = {"g1": [1.0, 0.0, 1.0], "g2": [0.0, 0.0, 0.5], "g3": [1.0, 1.0, 1.0]}
    members = [sound(f"{group}{n}", group_id=group, reward=value)
               for group, values in rewards.items() for n, value in enumerate(values)]  # fmt: skip
    other = sound("new", weight_versions=[8] * 4, reward=0.25, group_id=None)
    first, second = only(stored(tmp_path, *members, other)).rewards
    flat = [value for values in rewards.values() for value in values]
    mean = sum(flat) / 9
    sums = [sum(values) - 3 * mean for values in rewards.values()]
    half = 4.303 * math.sqrt(sum(s * s for s in sums) * 3 / 2) / 9
    assert (first.version, first.n, second.version, second.n) == (7, 9, 8, 1)
    assert np.allclose([first.mean, *(first.interval or ())], [mean, mean - half, mean + half])
    assert second.interval is None


def test_the_interval_of_a_mean_of_single_values_is_that_of_student() -> None:
    values = np.array([0.1, 0.4, 0.2, 0.9, 0.5])
    found = clustered(values.mean(), 5, 5, float(((values - values.mean()) ** 2).sum()))
    half = t_quantile(4) * values.std(ddof=1) / math.sqrt(5)
    assert np.allclose(found or (), (values.mean() - half, values.mean() + half))
    assert abs(t_quantile(31) - 2.0395) < 0.003
    assert abs(t_quantile(10**6) - 1.95996) < 1e-4
    with pytest.raises(ValueError, match="freedom: wanted at least 1, got 0"):
        t_quantile(0)


def test_slices_by_run_environment_and_engine_add_up(tmp_path: Path) -> None:
    members = [sound("a"), sound("b", environment="it's"), sound("c", run_id=None, engine=Engine(name="sglang"))]
    store = stored(tmp_path, *members)
    found = stats(store, by=("run", "environment", "engine")).slices
    assert sorted(one.name for one in found) == [
        "run run, environment it's, engine vllm 0.19", "run run, environment math, engine vllm 0.19",
        "run unknown, environment math, engine sglang",
    ]  # fmt: skip
    assert sum(one.actions for one in found) == only(store).actions == 12
    with pytest.raises(ValueError, match="by: wanted some of run, environment, engine, got 'model'"):
        stats(store, by=("model",))
    with pytest.raises(ValueError, match="task: wanted environment or prompt_id"):
        stats(store, task="step")


def test_a_rollout_of_two_segments_counts_once(tmp_path: Path) -> None:
    first = sound("talk", ending="continued", ending_reason=None, reward=None, reward_status="on_final_segment")
    found = only(stored(tmp_path, first, sound("talk", segment=1, segment_cause="compaction", begin=20)))
    assert (found.rollouts, found.actions, found.rewards[0].n) == (1, 8, 1)
    assert found.waits["generation"].mean == 20


def test_a_store_without_times_says_that_it_does_not_know(tmp_path: Path) -> None:
    bare = Rollout(rollout_id="bare", tokens=[1, 2], action_mask=[0, 1])
    found = only(stored(tmp_path, bare))
    assert (found.generated_per_second, found.loss_bearing_per_second, found.discard_rate, found.stages) == (None,) * 4
    assert dict(found.waits) == dict(found.lags) == {}
    assert found.rewards == found.discards == ()
    assert only(stored(tmp_path / "none")).rollouts == 0


def test_following_looks_again_only_where_the_store_has_grown(tmp_path: Path) -> None:
    store = stored(tmp_path, sound("a"))
    waited: list[float] = []
    steps: list[Callable[[], object]] = []
    with store.writer() as writer:
        steps += [
            lambda: None,
            lambda: (writer.append(sound("b")), writer.flush()),
            lambda: store.append("uses", uses("a")),
            lambda: None,
        ]

        def wait(seconds: float) -> bool:
            waited.append(seconds)
            if not steps:
                return True
            steps.pop(0)()
            return False

        found = [one.slices[0] for one in follow(store, every=7.0, wait=wait)]
    assert [(one.rollouts, one.passes) for one in found] == [(1, None), (2, None), (2, 1.0)]
    assert waited == [7.0] * 5


def test_following_keeps_what_it_read_through_sealing_and_compaction(tmp_path: Path) -> None:
    store = stored(tmp_path, sound("a"))
    kept: dict[str, Any] = {}
    assert stats(store, kept=kept).slices[0].rollouts == 1
    (name,) = kept
    with store.writer() as writer:
        writer.append(sound("b"))
    read = kept[name]
    assert stats(store, kept=kept).slices[0].rollouts == 2
    assert kept[name] is read
    store.compact()
    assert len(store.parts("rollouts")) == 1
    assert stats(store, kept=kept).slices[0].rollouts == 2
    assert set(kept) == {part.name for part in store.parts("rollouts")}


def test_a_size_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory: wanted a size as 512MB, got '1; DROP'"):
        stats(stored(tmp_path), memory="1; DROP")
