"""Every rollout exactly once an epoch, in an order that can be taken up again anywhere, by any number of ranks."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from tqdm import tqdm

from rollstore import losses
from rollstore.batch import TokenBatch, collate
from rollstore.errors import (
    CorruptionError,
    DuplicateError,
    StoreError,
    UnsupportedRecordError,
    VersionError,
)
from rollstore.readers import rows as reading
from rollstore.readers.arrow import dataset
from rollstore.readers.torch import RolloutLoader, as_arrow, check_ranks
from rollstore.readers.torch.ahead import pieces
from rollstore.schema import Heads, Media, Span, to_table
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.batch.test_packing import equal, mixed
from tests.readers.samples import group, rollout, settled, write


@pytest.fixture
def filled(store: Store) -> Store:
    """23 rollouts of 4 to 12 tokens in two parts and a journal whose writer is gone."""
    records = [rollout(f"r{n:02}", tokens=4 + n % 9, group_id=f"g{n // 4}", reward=float(n % 2)) for n in range(23)]
    write(store, *records[:10])
    write(store, *records[10:18])
    writer = store.writer(run="run")
    writer.append(records[18:])
    writer.flush()
    yield store
    writer.close()


def ids(batches: Any) -> list[list[str]]:
    return [batch.rollout_ids for batch in batches]


def test_every_rollout_comes_exactly_once_an_epoch_within_the_budget(filled: Store) -> None:
    loader = RolloutLoader(filled, tokens_per_batch=30)
    assert loader.rollouts == 23
    for _ in range(2):
        expected = len(loader)
        batches = list(loader)
        assert len(batches) == expected
        assert Counter(id_ for batch in batches for id_ in batch.rollout_ids) == {f"r{n:02}": 1 for n in range(23)}
        assert all(0 < batch.tokens.shape[0] <= 30 for batch in batches)
    assert loader.epoch == 2


def test_a_batch_holds_what_was_written(filled: Store) -> None:
    for batch in RolloutLoader(filled, tokens_per_batch=30):
        bounds = batch.cu_seqlens.tolist()
        for number, id_ in enumerate(batch.rollout_ids):
            written = filled.get(id_)[0]
            assert batch.tokens[bounds[number] : bounds[number + 1]].tolist() == written.tokens.tolist()
            own = batch.sequence == number
            assert batch.behavior_logprobs[own].numpy().tobytes() == written.logprobs.values.tobytes()
            assert batch.rewards[number].item() == written.reward


def test_the_order_follows_from_seed_and_epoch(filled: Store) -> None:
    def order(seed: int, epoch: int = 0) -> list[list[str]]:
        loader = RolloutLoader(filled, tokens_per_batch=30, seed=seed)
        loader.set_epoch(epoch)
        return ids(loader)

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != order(1, epoch=1)
    twice = RolloutLoader(filled, tokens_per_batch=30, seed=1)
    assert [ids(twice), ids(twice)] == [order(1), order(1, epoch=1)]


def test_prefetching_changes_nothing(filled: Store) -> None:
    plain = ids(RolloutLoader(filled, tokens_per_batch=30, prefetch=0))
    assert ids(RolloutLoader(filled, tokens_per_batch=30, prefetch=5)) == plain


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_loader_resumed_at_any_step_goes_on_exactly(filled: Store, prefetch: int) -> None:
    def loader() -> RolloutLoader:
        return RolloutLoader(filled, tokens_per_batch=30, seed=5, prefetch=prefetch)

    whole = [*loader(), *_epoch(loader(), 1)]
    running, states = loader(), []
    states.append(json.dumps(running.state_dict()))
    for _ in range(2):
        states += [json.dumps(running.state_dict()) for _ in running]
    assert len(whole) == len(states) - 1
    for step, state in enumerate(states):
        resumed = loader()
        resumed.load_state_dict(json.loads(state))
        rest = [*resumed, *resumed][: len(whole) - step]
        assert ids(rest) == ids(whole[step : step + len(rest)])
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(rest, whole[step:], strict=False))


def _epoch(loader: RolloutLoader, epoch: int) -> RolloutLoader:
    loader.set_epoch(epoch)
    return loader


def test_left_within_an_epoch_it_goes_on_where_it_was_left(filled: Store) -> None:
    whole = ids(RolloutLoader(filled, tokens_per_batch=30))
    loader = RolloutLoader(filled, tokens_per_batch=30)
    first = []
    for batch in loader:
        first.append(batch.rollout_ids)
        if len(first) == 2:
            break
    assert len(loader) == len(whole) - 2
    assert loader.state_after(2) == loader.state_dict()
    begun = iter(loader)
    first.append(next(begun).rollout_ids)
    assert loader.state_after(1) == loader.state_dict(), "counted from where it went on"
    begun.close()
    assert first + ids(loader) == whole


def test_an_iteration_that_is_gone_on_with_after_a_later_one_began_raises_and_moves_nothing(filled: Store) -> None:
    def refused(earlier: Any) -> None:
        state = loader.state_dict()
        with pytest.raises(ValueError, match=r"^iteration: wanted one at a time, got one that went on after a later"):
            next(earlier)
        assert loader.state_dict() == state

    whole = ids(RolloutLoader(filled, tokens_per_batch=30))
    loader = RolloutLoader(filled, tokens_per_batch=30)
    first, second = iter(loader), iter(loader)
    given = [next(first).rollout_ids, next(second).rollout_ids]
    refused(first)
    given += [next(second).rollout_ids for _ in whole[2:]]
    assert given == whole
    assert (list(loader), loader.epoch) == ([], 1), "what was left of epoch 0"
    refused(second)
    third = iter(loader)
    next(third)
    loader.set_epoch(0)
    next(third)
    assert ids(loader) == whole
    refused(third)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_state_or_an_epoch_that_is_refused_changes_nothing(store: Store, prefetch: int) -> None:
    write(store, *[rollout(f"r{n:02}", weight_versions=np.full(4, 6 + n // 10)) for n in range(20)])
    options: dict[str, Any] = {"rollouts_per_batch": 3, "max_lag": 0, "prefetch": prefetch, "window": 40}
    loader, plain = (RolloutLoader(store, version=7, **options) for _ in range(2))
    state = RolloutLoader(store, version=6, **options).state_dict()
    given: list[list[str]] = []
    for batch in loader:
        given.append(batch.rollout_ids)
        before = loader.state_dict(), loader.rollouts, len(loader)
        for refused, said in (
            ({**state, "selection": "x"}, "whole_groups or what is joined differs"),
            ({**state, "position": 99}, "wanted a position up to 20, got 99"),
            ({**state, "weights": 9}, "wanted rollouts to load, got none"),
        ):
            with pytest.raises((StoreError, ValueError), match=said):
                loader.load_state_dict(refused)
        with pytest.raises(StoreError, match="wanted rollouts to load, got none"):
            loader.set_epoch(5, version=9)
        assert (loader.state_dict(), loader.rollouts, len(loader)) == before
        if len(given) == 2:
            break
    assert given + ids(loader) == ids(plain)


def test_ranks_are_disjoint_make_equal_steps_and_have_one_state(filled: Store) -> None:
    loaders = [RolloutLoader(filled, tokens_per_batch=30, rank=rank, world_size=3) for rank in range(3)]
    assert len({len(loader) for loader in loaders}) == 1
    seen: list[str] = []
    for batches in zip(*loaders, strict=True):
        assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
        seen += [id_ for batch in batches for id_ in batch.rollout_ids]
    assert sorted(seen) == [f"r{n:02}" for n in range(23)]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
def test_another_number_of_ranks_takes_up_the_rest(filled: Store, before: int, after: int) -> None:
    first = [RolloutLoader(filled, tokens_per_batch=30, rank=rank, world_size=before) for rank in range(before)]
    steps = [iter(loader) for loader in first]
    seen = [id_ for _ in range(2) for step in steps for id_ in next(step).rollout_ids]
    state = first[-1].state_dict()
    for step in steps:
        step.close()
    for rank in range(after):
        loader = RolloutLoader(filled, tokens_per_batch=24, rank=rank, world_size=after)
        loader.load_state_dict(state)
        seen += [id_ for batch in loader for id_ in batch.rollout_ids]
    assert sorted(seen) == [f"r{n:02}" for n in range(23)]


def test_resuming_twice_in_an_epoch_counts_what_was_given(store: Store) -> None:
    write(store, *[rollout(f"r{n:03}", tokens=3) for n in range(100)])
    whole = [id_ for (id_,) in ids(RolloutLoader(store, rollouts_per_batch=1))]
    state, seen = None, []
    for count in (23, 9, 100):
        loader = RolloutLoader(store, rollouts_per_batch=1, prefetch=8)
        if state is not None:
            loader.load_state_dict(state)
        for batch, _ in zip(loader, range(count), strict=False):
            seen += batch.rollout_ids
            state = loader.state_dict()
            if len(seen) in (23, 32):
                break
        assert state is not None
        assert state["position"] == len(seen)
    assert seen == whole


def test_a_position_counts_rollouts_and_not_packs(store: Store) -> None:
    write(store, *[rollout(f"r{n:02}", tokens=4) for n in range(20)])
    loader = RolloutLoader(store, tokens_per_batch=12)
    whole = [id_ for batch in RolloutLoader(store, tokens_per_batch=12) for id_ in batch.rollout_ids]
    packs = iter(loader)
    for _ in range(4):
        next(packs)
    assert loader.state_dict()["position"] == 12
    assert next(packs).rollout_ids == whole[12:15]
    packs.close()


def test_the_last_step_is_filled_with_batches_without_rows(store: Store) -> None:
    write(store, *[rollout(f"r{n}", tokens=5) for n in range(7)])
    loaders = [RolloutLoader(store, rollouts_per_batch=1, rank=rank, world_size=3) for rank in range(3)]
    batches = [batch for loader in loaders for batch in loader]
    assert [len(loader) for loader in loaders] == [3, 3, 3]
    assert len(batches) == 9
    assert sum(batch.rows for batch in batches) == 7
    assert sum(float(batch.weights.sum()) for batch in batches) == 7 * 3
    empty = [batch for batch in batches if not batch.rows]
    assert len(empty) == 2
    assert all(isinstance(batch, TokenBatch) and batch.tokens.shape == (0,) for batch in empty)


def test_all_segments_of_a_rollout_come_together(store: Store) -> None:
    parts = [
        rollout(f"r{n}", segment=s, ending="continued" if s < 2 else "terminated", tokens=4,
                reward=1.0 if s == 2 else None, reward_status="scored" if s == 2 else "on_final_segment")
        for n in range(6) for s in range(3)
    ]  # fmt: skip
    random.Random(0).shuffle(parts)
    for start in range(0, 18, 5):
        write(store, *parts[start : start + 5])
    batches = list(RolloutLoader(store, tokens_per_batch=27))
    assert sorted(id_ for batch in batches for id_ in batch.rollout_ids) == sorted(
        f"r{n}" for n in range(6) for _ in range(3)
    )
    for batch in batches:
        assert set(Counter(batch.rollout_ids).values()) == {3}
        assert batch.segment.tolist() == [0, 1, 2] * (batch.rows // 3)
        assert (batch.rewards == 1.0).all()


def test_whole_groups_come_in_one_batch(store: Store) -> None:
    members = [member for n in range(6) for member in group(f"g{n}", [0.0, 1.0, 1.0])]
    random.Random(1).shuffle(members)
    write(store, *members[:9], rollout("alone"))
    write(store, *members[9:], *[settled(r, f"s1-{r.rollout_id}") for r in group("g0", [1.0], step=1)])
    batches = list(RolloutLoader(store, tokens_per_batch=40, whole_groups=True))
    where: dict[str, set[int]] = {}
    for number, batch in enumerate(batches):
        for id_ in batch.rollout_ids:
            where.setdefault(id_.rpartition("-")[0], set()).add(number)
    assert {name: len(found) for name, found in where.items()} == {f"g{n}": 1 for n in range(6)} | {"": 1, "s1-g0": 1}
    assert max(batch.rows for batch in batches) > 3


def test_a_rollout_above_the_budget_raises_or_is_skipped_and_counted(store: Store) -> None:
    write(store, rollout("small", tokens=5), rollout("large", tokens=50), rollout("other", tokens=6))
    with pytest.raises(
        ValueError, match="rollout 'large' has 50 tokens, wanted at most 20; oversize='skip' leaves 1 out"
    ):
        RolloutLoader(store, tokens_per_batch=20)
    loader = RolloutLoader(store, tokens_per_batch=20, oversize="skip")
    assert (loader.skipped, loader.rollouts) == (1, 2)
    assert sorted(id_ for batch in loader for id_ in batch.rollout_ids) == ["other", "small"]


def test_a_filter_looks_at_the_last_segment_and_the_oldest_version(store: Store) -> None:
    old = {"weight_versions": np.full(4, 2, np.int64)}
    write(
        store,
        rollout("stale", segment=0, ending="continued", reward_status="on_final_segment", **old),
        rollout("stale", segment=1, ending="terminated", reward=1.0),
        rollout("fresh", ending="terminated", reward=1.0),
        rollout("cut", ending="truncated", reward=0.0),
        rollout("open", segment=0, ending="continued", reward_status="on_final_segment", weight_versions=None,
                weight_version_max=7),
        rollout("open", segment=1, ending="terminated", reward=1.0),
    )  # fmt: skip

    def chosen(where: pc.Expression) -> Counter[str]:
        return Counter(
            id_ for batch in RolloutLoader(store, tokens_per_batch=99, where=where) for id_ in batch.rollout_ids
        )

    assert chosen(pc.field("ending") == "terminated") == {"stale": 2, "fresh": 1, "open": 2}
    assert chosen(pc.field("reward") < 0.5) == {"cut": 1}
    assert chosen(pc.field("weight_version_min") >= 7) == {"fresh": 1, "cut": 1}
    assert chosen(pc.field("weight_version_max") >= 7) == {"stale": 2, "fresh": 1, "cut": 1, "open": 2}


def test_an_empty_selection_is_an_error(store: Store) -> None:
    with pytest.raises(StoreError, match="wanted rollouts to load, got none"):
        RolloutLoader(store, tokens_per_batch=9)
    write(store, rollout("a"))
    with pytest.raises(StoreError, match=r"got none with \(step == 5\)"):
        RolloutLoader(store, tokens_per_batch=9, where=pc.field("step") == 5)
    with pytest.raises(StoreError, match="at most 3 tokens, got none"):
        RolloutLoader(store, tokens_per_batch=3, oversize="skip")


def test_a_state_of_other_rows_or_another_selection_is_refused(filled: Store) -> None:
    state = RolloutLoader(filled, tokens_per_batch=30).state_dict()
    other = RolloutLoader(filled, tokens_per_batch=30, where=pc.field("reward") > 0)
    with pytest.raises(StoreError, match="whole_groups or what is joined differs"):
        other.load_state_dict(state)
    with pytest.raises(VersionError, match="at most version 2, got 9"):
        other.load_state_dict({**state, "version": 9})
    with pytest.raises(ValueError, match="wanted what state_dict gave"):
        other.load_state_dict({"version": 1})
    write(filled, rollout("late"))
    with pytest.raises(StoreError, match="the store has other rows now"):
        RolloutLoader(filled, tokens_per_batch=30).load_state_dict(state)


def test_sealing_a_journal_changes_neither_order_nor_state(store: Store) -> None:
    write(store, *[rollout(f"a{n}") for n in range(9)])
    writer = store.writer(run="run")
    writer.append([rollout(f"b{n}") for n in range(9)])
    writer.flush()
    live = RolloutLoader(store, tokens_per_batch=20)
    whole, state = ids(live), RolloutLoader(store, tokens_per_batch=20).state_dict()
    writer.close()
    sealed = RolloutLoader(open_store(store.path), tokens_per_batch=20)
    sealed.load_state_dict(state)
    assert ids(sealed) == whole


def test_compaction_changes_neither_order_nor_state(store: Store) -> None:
    records = [rollout(f"r{n}", group_id=f"g{n % 3}") for n in range(12)]
    for start in range(0, 12, 3):
        write(store, *records[start : start + 3])
    loader = RolloutLoader(store, tokens_per_batch=20)
    before, state = ids(RolloutLoader(store, tokens_per_batch=20)), loader.state_dict()
    store.compact()
    store.vacuum(grace=0)
    assert len(store.parts("rollouts")) == 1
    after = RolloutLoader(open_store(store.path), tokens_per_batch=20)
    after.load_state_dict(state)
    assert ids(after) == before
    assert ids(loader) == before, "its own parts are kept for it"


def test_a_loader_stays_at_its_snapshot_while_a_writer_goes_on(store: Store) -> None:
    write(store, *[rollout(f"a{n}") for n in range(5)])
    loader = RolloutLoader(store, tokens_per_batch=20)
    write(store, rollout("late"))
    assert loader.rollouts == 5
    assert sorted(id_ for batch in loader for id_ in batch.rollout_ids) == [f"a{n}" for n in range(5)]


def test_rows_written_twice_come_once_and_different_ones_are_refused(store: Store) -> None:
    write(store, rollout("a"), rollout("b"))
    write(store, rollout("b"), rollout("c"))
    assert sorted(id_ for batch in RolloutLoader(store, tokens_per_batch=99) for id_ in batch.rollout_ids) == [
        "a",
        "b",
        "c",
    ]
    write(store, rollout("c", reward=0.5))
    with pytest.raises(DuplicateError, match="'c', segment 0"):
        RolloutLoader(store, tokens_per_batch=99)


def test_heads_are_read_only_when_asked(store: Store) -> None:
    heads = Heads(size=2, tokens=np.tile([1, 2], 4), logprobs=np.tile(np.log([0.5, 0.25]), 4).astype(np.float32))
    write(store, rollout("a", heads=heads, head_kind="behavior", messages="[]", logprobs=None, logprob_kind=None))
    read: list[list[str]] = []

    def make(table: pa.Table) -> int:
        read.append(table.column_names)
        return table.num_rows

    assert list(RolloutLoader(store, tokens_per_batch=99, make=make)) == [1]
    assert list(RolloutLoader(store, tokens_per_batch=99, make=make, heads=True, columns=("messages",))) == [1]
    assert not {"head_tokens", "head_logprobs", "messages"} & set(read[0])
    assert {"head_tokens", "head_logprobs", "head_counts", "head_size", "messages"} <= set(read[1])
    (batch,) = RolloutLoader(store, tokens_per_batch=99, heads=True)
    assert batch.heads.tokens.tolist() == [1, 2] * 4
    with pytest.raises(ValueError, match="no column 'message'"):
        RolloutLoader(store, tokens_per_batch=99, columns=("message",))


def test_anchor_and_reference_come_from_the_named_evaluations(filled: Store) -> None:
    def evaluate(name: str, chosen: list[str], shift: float) -> None:
        moved = [filled.get(id_)[0].logprobs.values + np.float32(shift) for id_ in chosen]
        filled.append(
            "evaluations",
            pa.table(
                {
                    "evaluation_id": [name] * len(chosen),
                    "rollout_id": chosen,
                    "segment": pa.array([0] * len(chosen), pa.int32()),
                    "logprobs": pa.array(moved, pa.list_(pa.float32())),
                }
            ),
        )  # fmt: skip

    everyone = [f"r{n:02}" for n in range(23)]
    evaluate("anchor@7", everyone[::-1], -1.0)
    evaluate("reference", everyone[5:], -2.0)
    evaluate("reference", everyone[:5], -2.0)
    evaluate("some", everyone[:5], 0.0)
    for batch in RolloutLoader(filled, tokens_per_batch=30, anchor="anchor@7", reference="reference"):
        assert torch.equal(batch.anchor_logprobs, batch.behavior_logprobs - 1.0)
        assert torch.equal(batch.reference_logprobs, batch.behavior_logprobs - 2.0)
    with pytest.raises(ValueError, match=r"^extra: anchor_logprobs: wanted a column or an evaluation, got both$"):
        RolloutLoader(filled, tokens_per_batch=30, anchor="anchor@7", extra={"anchor_logprobs": "logprobs"})
    with pytest.raises(UnsupportedRecordError, match="'some': wanted log-probs of all 23 rows, 18 have none"):
        RolloutLoader(filled, tokens_per_batch=30, anchor="some")
    evaluate("some", everyone, 0.0)
    with pytest.raises(DuplicateError, match="'some': wanted one row"):
        RolloutLoader(filled, tokens_per_batch=30, anchor="some")


def evaluation(name: str, rollouts: list[str], **columns: pa.Array) -> pa.Table:
    segments = pa.array([0] * len(rollouts), pa.int32())
    return pa.table({"evaluation_id": [name] * len(rollouts), "rollout_id": rollouts, "segment": segments, **columns})


@pytest.mark.parametrize("sealed", [True, False])
def test_an_evaluation_without_log_probs_as_an_anchor_leaves_them_unknown(store: Store, sealed: bool) -> None:
    write(store, rollout("a"), rollout("b"))
    floats = pa.list_(pa.float32())
    for rows in (
        evaluation("critic", ["a", "b"], values=pa.array([[1.0] * 4] * 2, floats)),
        evaluation("some", ["a"], values=pa.array([[1.0] * 4], floats)),
        evaluation("some", ["b"], logprobs=pa.array([[-0.5] * 4], floats)),
    ):
        writer = store.writer(table="evaluations")
        writer.append(rows)
        writer.flush()
        if sealed:
            writer.close()
        else:
            writer.after_fork()  # as if its process had died: the rows stay in the journal
    for window in (1, 1 << 22):
        batches = list(RolloutLoader(store, rollouts_per_batch=1, anchor="critic", reference="some", window=window))
        found = {batch.rollout_ids[0]: batch for batch in batches}
        for unknown in (found["a"].anchor_logprobs, found["b"].anchor_logprobs, found["a"].reference_logprobs):
            assert unknown is None or bool(unknown.isnan().all())
        assert found["b"].reference_logprobs.tolist() == [-0.5] * 4


def test_rewards_can_come_from_named_scores(store: Store) -> None:
    write(
        store,
        rollout("a", ending="continued", reward_status="on_final_segment"),
        rollout("a", segment=1, reward=1.0),
        rollout("b", reward=1.0),
        rollout("c", reward=1.0),
    )
    scores = {
        "rollout_id": ["a", "b", "b", "b", "c"],
        "scorer": ["judge", "judge", "judge", "rule", "judge"],
        "repeat": pa.array([0, 0, 1, 0, 0], pa.int32()),
        "position": pa.array([None, None, None, None, 3], pa.int32()),
        "value": [0.25, 0.5, 0.75, 9.0, 9.0],
        "status": ["scored"] * 5,
    }
    store.append("scores", pa.table(scores))
    judge = pc.field("scorer") == "judge"
    (batch,) = RolloutLoader(store, tokens_per_batch=99, rewards=judge & (pc.field("repeat") == 0))
    found = dict(zip(batch.rollout_ids, batch.rewards.tolist(), strict=True))
    assert (found["a"], found["b"], np.isnan(found["c"])) == (0.25, 0.5, True)
    assert batch.rewards[[id_ == "a" for id_ in batch.rollout_ids]].tolist() == [0.25, 0.25]
    with pytest.raises(DuplicateError, match="wanted one row for each rollout_id"):
        RolloutLoader(store, tokens_per_batch=99, rewards=judge)
    with pytest.raises(UnsupportedRecordError, match=r"wanted one for some of 4 rows, got none$"):
        RolloutLoader(store, tokens_per_batch=99, rewards=pc.field("scorer") == "jugde")
    (table,) = RolloutLoader(
        store, tokens_per_batch=99, rewards=judge & (pc.field("repeat") == 0), make=as_arrow, columns=["reward_status"]
    )
    assert {row["rollout_id"]: (row["reward"], row["reward_status"]) for row in table.to_pylist()} == {
        "a": (0.25, "scored"), "b": (0.5, "scored"), "c": (None, "unscored"),
    }  # fmt: skip
    first = RolloutLoader(store, tokens_per_batch=99, rewards=judge & (pc.field("repeat") == 0))
    first.load_state_dict(RolloutLoader(
        store, tokens_per_batch=99, rewards=judge & (pc.field("repeat") == 0), columns=["reward_status"]
    ).state_dict())  # fmt: skip
    fails = pc.field("scorer").cast(pa.int64()) > 2
    for name, options in (("rewards", {"rewards": fails}), ("having", {"having": {"scores": fails}})):
        with pytest.raises(ValueError, match=rf"^{name}: .* fails on rows of scores: Failed to parse string: 'judge'"):
            RolloutLoader(store, tokens_per_batch=99, **options)


def test_a_state_and_ranks_are_of_what_is_joined_too(store: Store) -> None:
    write(store, *[rollout(name) for name in "abc"])
    judge, made = pc.field("scorer") == "judge", {"scorer": ["judge"], "value": [2.0], "status": ["scored"]}
    store.append("scores", pa.table({"rollout_id": ["a"], **made}))
    store.append(
        "evaluations", evaluation("e", ["a", "b", "c"], logprobs=pa.array([[-0.5] * 4] * 3, pa.list_(pa.float32())))
    )

    def loader(rank: int = 0, **options: Any) -> RolloutLoader:
        return RolloutLoader(store, rollouts_per_batch=1, rank=rank, world_size=2, **options)

    first, anchored, plain = loader(rewards=judge), loader(anchor="e"), loader()
    store.append("scores", pa.table({"rollout_id": ["b"], **made}))
    second = loader(1, rewards=judge)
    for one, other, said in (
        (first, second, "rank 1: joined: wanted"),
        (plain, loader(1, extra={"weights": "logprobs"}), "rank 1: extra: wanted"),
        (plain, loader(1, anchor="e"), r"joined: wanted \[\] as on rank 0, got \['anchor_logprobs [0-9a-f]+'\]"),
        (plain, loader(1, heads=True), "rank 1: columns: wanted"),
    ):
        with pytest.raises(StoreError, match=said):
            check_ranks(one, lambda own, other=other: [own, other.terms()])
    with pytest.raises(StoreError, match=r"or scores, evaluations or uses that they look at were written since$"):
        second.load_state_dict(first.state_dict())
    for same in (anchored, plain):
        again = loader(anchor="e") if same is anchored else loader()
        again.load_state_dict(same.state_dict())


@pytest.mark.parametrize("named", ["head_tokens", "head_logprobs", "head_size"])
def test_columns_that_mean_nothing_alone_are_read_together(uneven: Store, named: str) -> None:
    def loader() -> RolloutLoader:
        return RolloutLoader(uneven, rollouts_per_batch=1, columns=(named, "support_tokens"))

    whole = {batch.rollout_ids[0]: batch for batch in loader()}
    assert whole["r6"].heads is not None
    assert whole["r6"].heads.tokens.tolist() == [5, 6]
    resumed = loader()
    resumed.load_state_dict(resumed.state_after(6))
    (last,) = resumed
    assert equal(last, whole[last.rollout_ids[0]])


def test_a_slice_loads_as_the_same_rows_written_afresh(store: Store, tmp_path: Path) -> None:
    table = to_table([rollout(f"r{n}", tokens=4 + n) for n in range(8)])
    with store.writer() as writer:
        writer.append(table.slice(3, 2))
    other = open_store(tmp_path / "other", create=True)
    with other.writer() as writer:
        writer.append([rollout("r3", tokens=7), rollout("r4", tokens=8)])
    (sliced,), (fresh,) = (list(RolloutLoader(s, tokens_per_batch=99)) for s in (store, other))
    rows = [sliced.rollout_ids.index(id_) for id_ in fresh.rollout_ids]
    bounds = sliced.cu_seqlens.tolist()
    tokens = torch.cat([sliced.tokens[bounds[row] : bounds[row + 1]] for row in rows])
    assert torch.equal(tokens, fresh.tokens)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_rows_of_many_files_come_in_the_order_asked(
    filled: Store, cache_bytes: int, threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(RolloutLoader(filled, tokens_per_batch=70))
    monkeypatch.setattr("rollstore.readers.rows._ITEMS", 20)
    monkeypatch.setattr("rollstore.readers.rows._RUN", 1)
    monkeypatch.setattr("rollstore.readers.rows._FEW", 0 if threads else 1 << 20)
    pieces = list(RolloutLoader(filled, tokens_per_batch=70, cache_bytes=cache_bytes))
    assert ids(pieces) == ids(whole)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(pieces, whole, strict=True))


def test_a_damaged_part_is_refused(store: Store) -> None:
    write(store, *[rollout(f"r{n}") for n in range(20)])
    part = store.parts("rollouts")[0]
    data = bytearray(Path(part.path).read_bytes())
    data[part.tail.batches[0].offset + part.tail.batches[0].length // 2] ^= 1
    Path(part.path).write_bytes(data)
    with pytest.raises(CorruptionError, match=part.name):
        RolloutLoader(open_store(store.path), tokens_per_batch=99)


def a_folder(part: Path) -> None:
    part.unlink()
    part.mkdir()


@pytest.mark.parametrize("columns", [(), "all"])
@pytest.mark.parametrize("how", [Path.unlink, a_folder, lambda part: part.parent.rename(part.parent.with_name("away"))])
def test_a_part_that_went_after_the_loader_was_made_is_an_error_of_ours(store: Store, columns: Any, how: Any) -> None:
    write(store, *[rollout(f"r{n}") for n in range(20)])
    (part,) = store.parts("rollouts")
    snapshot = store.snapshot()
    everything = dataset(snapshot, "rollouts")
    asked = tuple(snapshot.schema("rollouts").names) if columns else ()
    loader = RolloutLoader(store, tokens_per_batch=99, make=as_arrow, columns=asked)
    how(Path(part.path))
    for read in (
        lambda: list(loader),
        lambda: everything.to_table(columns=["rollout_id"]),
        lambda: everything.to_table(filter=pc.field("step") == 0),
        lambda: list(part.batches()),
        part.check_head,
    ):
        with pytest.raises(StoreError, match=part.name):
            read()


def test_a_store_at_a_path_that_is_no_text_loads_like_any_other(tmp_path: Path) -> None:
    store = open_store(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"), create=True)
    records = [rollout(f"r{n}", entropies=[0.5] * 4) for n in range(9)]
    write(store, *records)
    (batch,) = RolloutLoader(store, tokens_per_batch=99)
    assert sorted(batch.rollout_ids) == [record.rollout_id for record in records]
    assert batch.behavior_logprobs.sum().item() == pytest.approx(sum(r.logprobs.values.sum() for r in records))


LOADED = """
import sys, rollstore
from rollstore.readers.torch import RolloutLoader
store = rollstore.open(sys.argv[1])
it = iter(RolloutLoader(store, rollouts_per_batch=1))
next(it)
"""
SCANNED = """
import sys, rollstore
import pyarrow.compute as pc
from rollstore.readers.arrow import dataset
store = rollstore.open(sys.argv[1])
it = dataset(store.snapshot(), "rollouts").scanner(filter=pc.field("segment") == 0).to_batches()
next(it)
"""


@pytest.mark.parametrize("script", [LOADED, SCANNED], ids=["loaded", "scanned"])
def test_a_script_may_end_with_an_iterator_left_open(store: Store, script: str) -> None:
    for n in range(8):
        write(store, rollout(f"r{n}"))
    command = [sys.executable, "-c", script, store.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("column", "most"),
    [
        (pa.array([[[True] * 100], [[False] * 300]]), 400),
        (pa.array([[True] * 9, [], None, [False] * 4]), 13),
        (pa.array([["x" * 50, "y" * 30], ["z" * 9]]), 89),
        (pa.array([[{"a": [1] * 70}], [{"a": [2] * 5}] * 2], pa.list_(pa.struct([("a", pa.list_(pa.int32()))]))), 80),
        (pa.array([[("k" * 60, True)], [("l", False)] * 4], pa.map_(pa.string(), pa.bool_())), 64),
        (pa.array([[[True] * 40, [False] * 9], None], pa.list_(pa.list_(pa.bool_()), 2)), 49),
        (pa.array(["x" * 70, "y"]), 71),
    ],
    ids=lambda given: str(getattr(given, "type", given)),
)
def test_what_offsets_count_is_counted_in_any_depth_and_for_a_slice_alone(column: pa.Array, most: int) -> None:
    assert most <= reading._items(column) <= most + 24
    assert reading._items(pa.concat_arrays([column, column]).slice(len(column))) <= most + 24
    assert reading._items(column.slice(0, 0)) <= 24
    assert reading._items(column) <= reading._most_items(pa.chunked_array([column])), "told by the bytes"


def test_impossible_arguments_are_refused(filled: Store) -> None:
    with pytest.raises(ValueError, match="rank: wanted 0 to 1, got 2"):
        RolloutLoader(filled, tokens_per_batch=30, rank=2, world_size=2)
    with pytest.raises(ValueError, match="tokens_per_batch: wanted at least 1"):
        RolloutLoader(filled)
    with pytest.raises(ValueError, match="tokens_per_batch: wanted at least 1"):
        RolloutLoader(filled, tokens_per_batch=0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"oversize": "drop"}, "oversize: wanted 'raise' or 'skip', got 'drop'"),
        ({"prefetch": -1}, "prefetch: wanted a whole number of at least 0, got -1"),
        ({"window": 0}, "window: wanted a whole number of at least 1, got 0"),
        ({"seed": 1.5}, "seed: wanted a whole number of at least 0, got 1.5"),
        ({"columns": "tokens"}, "columns: wanted a sequence of names, got the text 'tokens'"),
    ],
)
def test_wrong_arguments_are_named_when_the_loader_is_made(store: Store, wrong: dict[str, object], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        RolloutLoader(store, tokens_per_batch=100, **wrong)  # pyright: ignore  the wrong type is the point


def test_ranks_that_disagree_are_told_what_differs(filled: Store) -> None:
    def rank(number: int, **options: Any) -> RolloutLoader:
        return RolloutLoader(filled, **{"tokens_per_batch": 30, "rank": number, "world_size": 2, **options})

    def agree(first: RolloutLoader, second: RolloutLoader) -> None:
        check_ranks(first, lambda own: [own, second.terms()])

    agree(rank(0), rank(1))
    for other, said in (
        (rank(1, seed=7), "rank 1: seed: wanted 0 as on rank 0, got 7"),
        (rank(1, tokens_per_batch=40), "rank 1: tokens_per_batch: wanted 30 as on rank 0, got 40"),
        (rank(1, where=pc.field("reward") > 0), "rank 1: selection: wanted"),
        (rank(0), r"ranks: wanted each of 0 to 1 once, got \[0, 0\]"),
    ):
        with pytest.raises(StoreError, match=said):
            agree(rank(0), other)
    first = rank(0)
    write(filled, rollout("late", tokens=3, prompt=3))
    with pytest.raises(StoreError, match=r"rank 1: (steps|snapshot): wanted"):
        agree(first, rank(1))
    with pytest.raises(ValueError, match="gather: wanted a function"):
        check_ranks(first)
    for gather in ("all", lambda own: None, lambda own: [own, None]):
        with pytest.raises(TypeError, match=r"^gather: wanted a"):
            check_ranks(first, gather)  # pyright: ignore  the wrong type is the point
    with pytest.raises(TypeError, match=r"^loader: wanted a RolloutLoader, got None$"):
        check_ranks(None)  # pyright: ignore
    with pytest.raises(TypeError, match=r"^follow: wanted True or False, got 'x'$"):
        RolloutLoader(filled, follow="x", rollouts_per_batch=1)  # pyright: ignore
    lagging = rank(0, version=7, max_lag=9)
    for one, other, said in ((rank(0), lagging, "without max_lag"), (lagging, rank(0), "with max_lag")):
        with pytest.raises(StoreError, match=f"^state: wanted one of a loader {said}, got one of a loader with"):
            one.load_state_dict(other.state_dict())


def test_ranks_ask_each_other_through_torchs_process_group(filled: Store, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        check_ranks(RolloutLoader(filled, tokens_per_batch=30))
        with pytest.raises(StoreError, match=r"wanted each of 0 to 1 once, got \[0\]"):
            check_ranks(RolloutLoader(filled, tokens_per_batch=30, world_size=2))
    finally:
        torch.distributed.destroy_process_group()


def test_a_progress_bar_knows_how_many_batches_there_are(filled: Store) -> None:
    loader = RolloutLoader(filled, tokens_per_batch=30)
    with tqdm(loader, file=io.StringIO()) as bar:
        assert bar.total == len(loader)
        assert len(list(bar)) == bar.total


def test_the_first_of_many_small_batches_does_not_wait_for_the_rest(store: Store) -> None:
    write(store, *[rollout(f"r{n:03}", tokens=3) for n in range(300)])
    loader = RolloutLoader(store, rollouts_per_batch=1)
    made = [len(steps) for steps in pieces(loader._plan(0), range(0, len(loader), 2))]
    assert (sum(made), max(made)) == (150, 64)


def test_a_very_long_rollout_between_short_ones_loads_exactly(store: Store) -> None:
    long = rollout("long", tokens=1 << 20, logprobs=-np.linspace(0, 9, (1 << 20) - 2, dtype=np.float32))
    write(store, rollout("a", tokens=3), long, rollout("b", tokens=3))
    for window in (1, 1 << 22):
        found = {b.rollout_ids[0]: b for b in RolloutLoader(store, rollouts_per_batch=1, window=window, prefetch=0)}
        assert {name: len(batch.tokens) for name, batch in found.items()} == {"a": 3, "b": 3, "long": 1 << 20}
        assert found["long"].tokens[1_000_000:1_000_010].tolist() == long.tokens[1_000_000:1_000_010].tolist()
        logprobs = found["long"].behavior_logprobs
        assert float(logprobs.sum()) == pytest.approx(float(logprobs.double().sum()), rel=1e-5)


@pytest.mark.parametrize("window", [1, 20, 1 << 22])
def test_any_rows_loaded_together_are_those_rows(store: Store, window: int) -> None:
    """Rows with several spans, one and none, with heads and without, read as slices of a part's batches."""
    table = mixed()
    with store.writer() as writer:
        writer.append(table)
    for batch in RolloutLoader(store, rollouts_per_batch=2, heads=True, window=window):
        rows = pc.indices_nonzero(pc.is_in(table["rollout_id"], value_set=pa.array(batch.rollout_ids)))
        own = table.take(rows)
        order = [own["rollout_id"].to_pylist().index(id_) for id_ in dict.fromkeys(batch.rollout_ids)]
        wanted = pa.concat_tables(
            own.filter(pc.field("rollout_id") == own["rollout_id"][place].as_py()) for place in order
        )
        assert equal(replace(batch, heads=None), replace(collate(wanted), heads=None))
        heads = collate(wanted).heads
        if heads is not None:
            assert torch.equal(batch.heads.counts, heads.counts)
            assert torch.equal(batch.heads.tokens, heads.tokens)


WITH_ALL: dict[str, Any] = {
    "extra": {"x_a": [1.0, 2.0], "x_v": 0.5},
    "heads": Heads(size=1, tokens=[5, 6], logprobs=[-0.5, -0.25]),
    "head_kind": "behavior",
    "support_counts": [1, 1],
    "support_tokens": [3, 4],
}
ASKED: dict[str, Any] = {
    "heads": True,
    "columns": ("support_counts", "support_tokens"),
    "extra": {"advantages": "x_a", "final_values": "x_v"},
    "anchor": "e",
    "reference": "e",
}


@pytest.fixture
def uneven(store: Store) -> Store:
    """Seven rollouts of two actions: the last two have all that can be asked for, and only these were evaluated."""
    write(
        store,
        *[rollout(f"r{n}", tokens=4) for n in range(5)],
        *[rollout(f"r{n}", tokens=4, **WITH_ALL) for n in (5, 6)],
    )
    evaluated = {"evaluation_id": ["e"] * 7, "rollout_id": [f"r{n}" for n in range(7)]}
    columns = {
        "segment": pa.array([0] * 7, pa.int32()),
        "logprobs": pa.array([None] * 5 + [[-1.0, -2.0]] * 2, pa.list_(pa.float32())),
    }
    store.append("evaluations", pa.table({**evaluated, **columns}))
    return store


@pytest.mark.parametrize("window", [1, 1 << 22])
def test_a_batch_does_not_depend_on_which_rollouts_were_read_with_it(uneven: Store, window: int) -> None:
    def loader(window: int) -> RolloutLoader:
        return RolloutLoader(uneven, rollouts_per_batch=1, window=window, **ASKED)

    whole = {batch.rollout_ids[0]: batch for batch in loader(window)}
    for begun in range(7):
        resumed = loader(window)
        resumed.load_state_dict(resumed.state_after(begun))
        for batch in resumed:
            assert equal(batch, whole[batch.rollout_ids[0]])
    lacking, having = whole["r0"], whole["r6"]
    assert lacking.heads is not None
    assert lacking.heads.counts.tolist() == [0, 0]
    assert having.heads is not None
    assert having.heads.tokens.tolist() == [5, 6]
    assert lacking.support is not None
    assert lacking.support.counts.tolist() == [0, 0]
    for name in ("advantages", "anchor_logprobs", "reference_logprobs", "final_values"):
        assert torch.isnan(getattr(lacking, name)).all(), name
        assert not torch.isnan(getattr(having, name)).any(), name


def test_a_batch_without_rows_has_every_field_that_was_asked_for(uneven: Store) -> None:
    (empty,) = [
        batch
        for rank in range(4)
        for batch in RolloutLoader(uneven, rollouts_per_batch=1, rank=rank, world_size=4, **ASKED)
        if not batch.rows
    ]
    for name in ("advantages", "anchor_logprobs", "reference_logprobs", "final_values", "heads", "support"):
        assert getattr(empty, name) is not None, name
    loss, _ = losses.ppo_clip(empty, empty.behavior_logprobs.clone())
    assert loss.item() == 0


def test_media_of_other_rollouts_do_not_show_in_a_batch_without_any(store: Store) -> None:
    shown = Span(start=0, length=2, is_action=False, role="user", media=(Media(kind="image", count=1),))
    drawn = Span(start=2, length=2, is_action=True, role="assistant", sampler=0)
    write(store, rollout("a", tokens=4), rollout("b", tokens=4, spans=(shown, drawn)))
    found = {batch.rollout_ids[0]: batch.media for batch in RolloutLoader(store, rollouts_per_batch=1)}
    assert found["a"] is None
    assert found["b"] is not None
    assert found["b"].tolist() == [1, 1, 0, 0]
