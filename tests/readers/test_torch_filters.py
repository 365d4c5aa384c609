"""What is loaded: by metadata, scores, evaluations, uses, staleness; whole groups or none; and how much at a time."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from rollstore.errors import StoreError
from rollstore.readers import filters
from rollstore.readers.torch import RolloutLoader, as_arrow
from rollstore.readers.torch.windows import Source, Window
from rollstore.store.store import Store
from tests.readers.samples import group, rollout, write


def loaded(store: Store, **options: Any) -> list[str]:
    batches = RolloutLoader(store, tokens_per_batch=999, **options)
    return sorted(id_ for batch in batches for id_ in batch.rollout_ids)


def ints(*values: int | None) -> pa.Array:
    return pa.array(values, pa.int32())


def test_a_filter_may_look_at_metadata_and_at_the_callers_own_columns(store: Store) -> None:
    write(
        store,
        rollout("a", metadata={"split": "train"}, extra={"x_level": 3}),
        rollout("b", metadata={"split": "test"}, extra={"x_level": 5}),
        rollout("c", extra={"x_level": 7}),
    )
    split = pc.map_lookup(pc.field("metadata"), pa.scalar("split"), "first")
    assert loaded(store, where=split == "train") == ["a"]
    assert loaded(store, where=pc.field("x_level") >= 5) == ["b", "c"]


def test_a_filter_that_fails_on_some_rollouts_names_them_and_the_rule(store: Store) -> None:
    write(store, *[rollout(n, metadata={"level": "hard" if n in "bd" else "3"}) for n in "abcd"])
    level = pc.map_lookup(pc.field("metadata"), pa.scalar("level"), "first").cast("int64")
    with pytest.raises(ValueError, match=r"^where: .*level.* fails on rollouts 'b', 'd': Failed to parse"):
        loaded(store, where=level > 2)


def test_a_filter_that_fails_on_all_names_a_few_and_does_not_ask_about_the_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, *[rollout(f"r{n:03}") for n in range(400)])
    asked: list[int] = []
    whole = filters._answers

    def answers(rows: pa.Table, where: pc.Expression) -> Any:
        asked.append(rows.num_rows)
        return whole(rows, where)

    monkeypatch.setattr(filters, "_answers", answers)
    named = ", ".join(f"'r{n:03}'" for n in range(8))
    with pytest.raises(ValueError, match=rf"fails on rollouts {named} and more: divide by zero$"):
        loaded(store, where=pc.divide(pc.field("segment"), pc.field("segment")) == 1)
    assert len(asked) < 40, "of 800"


def test_a_filter_on_metadata_stands_beside_rows_that_were_written_twice(store: Store) -> None:
    for _ in range(2):
        write(store, rollout("a", metadata={"split": "train"}), rollout("b", metadata={"split": "test"}))
    split = pc.map_lookup(pc.field("metadata"), pa.scalar("split"), "first")
    assert loaded(store, where=split == "train") == ["a"]
    assert loaded(store) == ["a", "b"]


def test_rollouts_are_kept_by_what_other_tables_say_of_them(store: Store) -> None:
    write(store, *[rollout(name) for name in "abcd"])
    store.append("scores", pa.table({"rollout_id": ["a", "b", "b"], "scorer": ["judge"] * 3, "value": [0.2, 0.9, 0.1],
                                     "repeat": ints(0, 0, 1), "status": ["scored"] * 3}))  # fmt: skip
    store.append("evaluations", pa.table({"evaluation_id": ["e"] * 2, "rollout_id": ["b", "c"], "segment": ints(0, 0)}))
    good = (pc.field("scorer") == "judge") & (pc.field("value") > 0.5)
    assert loaded(store, having={"scores": good}) == ["b"]
    assert loaded(store, without={"scores": good}) == ["a", "c", "d"]
    evaluated = pc.field("evaluation_id") == "e"
    assert loaded(store, having={"evaluations": evaluated, "scores": good}) == ["b"]
    assert loaded(store, having={"evaluations": evaluated}, without={"scores": good}) == ["c"]
    with pytest.raises(ValueError, match="wanted conditions on scores, evaluations, uses, got one on 'rollouts'"):
        loaded(store, having={"rollouts": good})
    with pytest.raises(StoreError, match="got none with having scores"):
        loaded(store, having={"scores": pc.field("value") > 5})


def test_uses_count_steps_and_not_rows_and_a_resumed_attempt_supersedes(store: Store) -> None:
    write(store, *[rollout(name) for name in "abcd"])
    used = [  # attempt, step, id, segment, disposition
        (0, 0, "a", 0, "trained"), (0, 0, "a", 1, "trained"),
        (0, 1, "b", 0, "trained"), (0, 2, "b", 0, "trained"),
        (1, 1, "b", 0, "trained"), (1, 2, "c", 0, "discarded"),
    ]  # fmt: skip
    names = ("attempt", "train_step", "rollout_id", "segment", "disposition")
    columns = dict(zip(names, zip(*used, strict=True), strict=True))
    store.append("uses", pa.table({**columns, "attempt": ints(*columns["attempt"]), "train_run": ["t"] * len(used),
                                   "epoch": ints(*[0] * len(used)), "segment": ints(*columns["segment"])}))  # fmt: skip
    assert loaded(store, max_uses=1) == ["c", "d"], "a once, b once in the attempt that counts"
    assert loaded(store, max_uses=2) == ["a", "b", "c", "d"]
    assert loaded(store, without={"uses": pc.field("disposition") == "discarded"}) == ["a", "b", "d"]


def test_staleness_counts_from_the_oldest_action_and_unknown_is_not_fresh(store: Store) -> None:
    write(
        store,
        rollout("fresh", weight_versions=np.array([8, 8, 9, 9])),
        rollout("mixed", weight_versions=np.array([5, 9, 9, 9])),
        rollout("first", segment=0, ending="continued", reward_status="on_final_segment",
                weight_versions=np.full(4, 4)),
        rollout("first", segment=1, weight_versions=np.full(4, 9)),
        rollout("unknown", weight_versions=None, weight_version_max=9),
    )  # fmt: skip
    assert loaded(store, version=9, max_lag=1) == ["fresh"]
    assert loaded(store, version=9, max_lag=4) == ["fresh", "mixed"]
    assert loaded(store, version=9, max_lag=5) == ["first", "first", "fresh", "mixed"]
    everyone = loaded(store, version=9, max_lag=9)
    for version, lag in ((-(2**63), 1), (-(2**63) + 5, 2**63 - 1)):
        assert loaded(store, version=version, max_lag=lag) == everyone, "before the oldest that there can be"
    with pytest.raises(ValueError, match="max_lag: wanted together with version"):
        loaded(store, version=9)


def test_filters_follow_the_current_version_from_epoch_to_epoch_and_into_the_state(store: Store) -> None:
    write(store, *[rollout(f"r{n}", weight_versions=np.full(4, n)) for n in range(6)])
    loader = RolloutLoader(store, rollouts_per_batch=1, version=3, max_lag=2)
    assert len(list(loader)) == 5
    loader.set_epoch(1, version=5)
    assert loader.rollouts == 3
    steps = iter(loader)
    first = [next(steps).rollout_ids, next(steps).rollout_ids]
    state = loader.state_dict()
    steps.close()
    resumed = RolloutLoader(store, rollouts_per_batch=1, version=3, max_lag=2)
    resumed.load_state_dict(state)
    assert sorted(id_ for (id_,) in [*first, *(batch.rollout_ids for batch in resumed)]) == ["r3", "r4", "r5"]


def test_groups_that_lack_members_are_taken_as_they_are_or_left_out_whole(store: Store) -> None:
    late = rollout("open-1", group_id="open", group_size=2, ending="continued", reward_status="on_final_segment")
    write(store, *group("full", [0.0, 1.0]), *group("short", [1.0, 1.0], size=3), rollout("alone"),
          *group("open", [1.0], size=2), late)  # fmt: skip
    everyone = ["alone", "full-0", "full-1", "open-0", "open-1", "short-0", "short-1"]
    assert loaded(store, whole_groups=True) == everyone
    loader = RolloutLoader(store, tokens_per_batch=99, whole_groups=True, incomplete="leave_out")
    assert sorted(id_ for batch in loader for id_ in batch.rollout_ids) == ["alone", "full-0", "full-1"]
    assert loader.late == 4
    write(store, group("short", [0.0] * 3)[2])
    assert loaded(store, whole_groups=True, incomplete="leave_out", where=pc.field("reward") > 0.5) == [
        "full-1", "short-0", "short-1",
    ], "complete in the store, whatever the filter takes of it"  # fmt: skip


def test_rollouts_that_lack_segments_are_taken_as_they_are_or_left_out(store: Store) -> None:
    unfinished: dict[str, Any] = {"ending": "continued", "reward_status": "on_final_segment"}
    write(store, rollout("open", **unfinished), rollout("whole", **unfinished), rollout("whole", segment=1))
    write(store, rollout("hole", **unfinished), rollout("hole", segment=2), rollout("headless", segment=1))
    of = {"group_id": "g", "group_size": 1}
    write(
        store,
        rollout("g-0", **of),
        rollout("g-1", **of, **unfinished),
        rollout("h", segment=1, group_id="h", group_size=1),
    )
    assert sorted({*loaded(store)}) == ["g-0", "g-1", "h", "headless", "hole", "open", "whole"]
    for groups in (False, True):
        loader = RolloutLoader(store, tokens_per_batch=99, whole_groups=groups, incomplete="leave_out")
        assert sorted({id_ for batch in loader for id_ in batch.rollout_ids}) == ["g-0", "whole"]
        assert loader.late == 5
    write(store, rollout("hole", segment=1, **unfinished), rollout("open", segment=1))
    assert sorted({*loaded(store, incomplete="leave_out")}) == ["g-0", "hole", "open", "whole"]


def test_raw_arrow_batches_have_the_same_rows_in_the_same_order(store: Store) -> None:
    write(store, *[rollout(f"r{n}", tokens=4 + n) for n in range(9)])
    tables = list(RolloutLoader(store, tokens_per_batch=30, make=as_arrow))
    batches = list(RolloutLoader(store, tokens_per_batch=30))
    assert [table["rollout_id"].to_pylist() for table in tables] == [batch.rollout_ids for batch in batches]
    flat = [table["tokens"].combine_chunks().flatten().to_pylist() for table in tables]
    assert flat == [batch.tokens.tolist() for batch in batches]


def test_batches_are_pinned_only_when_asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write(store, *[rollout(f"r{n}") for n in range(3)])
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    list(RolloutLoader(store, tokens_per_batch=99))
    assert not pinned
    (batch,) = RolloutLoader(store, tokens_per_batch=99, pin_memory=True)
    assert {id(batch.tokens), id(batch.behavior_logprobs), id(batch.group)} <= {id(tensor) for tensor in pinned}


def test_an_epoch_for_which_nothing_is_fresh_is_refused_and_changes_nothing(store: Store) -> None:
    write(store, *[rollout(f"r{n}") for n in range(3)])
    loader, plain = (RolloutLoader(store, rollouts_per_batch=1, version=8, max_lag=1) for _ in range(2))
    for _ in range(2):
        with pytest.raises(StoreError, match="wanted rollouts to load, got none"):
            loader.set_epoch(1, version=9)
    assert loader.state_dict() == plain.state_dict()
    assert [batch.rollout_ids for batch in loader] == [batch.rollout_ids for batch in plain]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_window_at_a_time_is_read_and_the_next(store: Store, prefetch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in range(6):
        write(store, *[rollout(f"r{part}{n}", tokens=5) for n in range(10)])
    whole = list(RolloutLoader(store, tokens_per_batch=25))
    monkeypatch.setattr("rollstore.readers.torch.ahead.PIECE", 1)
    loads: list[int] = []
    windows: weakref.WeakSet[Window] = weakref.WeakSet()
    plain = Source.load

    def load(self: Source, rows: Any, places: Any) -> Window:
        loads.append(len(rows))
        windows.add(window := plain(self, rows, places))
        return window

    monkeypatch.setattr(Source, "load", load)
    loader = RolloutLoader(store, tokens_per_batch=25, window=60, prefetch=prefetch)
    batches, expected = iter(loader), len(loader)
    first = next(batches)
    assert len(loads) <= 1 + 2 * bool(prefetch)
    rest: list[Any] = []
    for batch in batches:
        rest.append(batch)
        assert len(windows) <= (4 if prefetch else 2), "the one in use, what a batch reaches over into, and those ahead"
    assert len(rest) == expected - 1 == len(whole) - 1
    assert max(loads) <= 12
    assert sum(loads) == 60, "each row once"
    seen = Counter(id_ for batch in [first, *rest] for id_ in batch.rollout_ids)
    assert seen == {f"r{part}{n}": 1 for part in range(6) for n in range(10)}


def test_a_loader_with_several_windows_resumes_exactly(store: Store) -> None:
    write(store, *[rollout(f"r{n:02}", tokens=4 + n % 5) for n in range(60)])
    whole = list(RolloutLoader(store, tokens_per_batch=20, window=70))
    for step in range(0, len(whole), 5):
        running = RolloutLoader(store, tokens_per_batch=20, window=70)
        state = running.state_after(step)
        resumed = RolloutLoader(store, tokens_per_batch=20)
        resumed.load_state_dict(state)
        rest = list(resumed)
        assert [batch.rollout_ids for batch in rest] == [batch.rollout_ids for batch in whole[step:]]
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(rest, whole[step:], strict=True))


def test_the_order_does_not_depend_on_ranks_and_long_rollouts_are_shared_out(store: Store) -> None:
    write(store, *[rollout(f"r{n:02}", tokens=4 if n % 2 else 40) for n in range(40)])
    whole = [id_ for batch in RolloutLoader(store, rollouts_per_batch=4) for id_ in batch.rollout_ids]
    ranks = [list(RolloutLoader(store, rollouts_per_batch=4, rank=rank, world_size=2)) for rank in range(2)]
    for step, (a, b) in enumerate(zip(*ranks, strict=True)):
        assert sorted(a.rollout_ids + b.rollout_ids) == sorted(whole[8 * step : 8 * step + 8])
        assert abs(len(a.tokens) - len(b.tokens)) <= 36
