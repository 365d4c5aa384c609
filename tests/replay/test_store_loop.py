"""Replay, diff and evaluate over a real store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollstore
from rollstore.replay import diff, evaluate, replay
from rollstore.schema import Rollout, Sampler

Record = Callable[..., Rollout]


@pytest.fixture
def store(tmp_path: Path, record: Record) -> Any:
    store = rollstore.open(tmp_path / "runs", create=True)
    rows = [record(rollout_id=f"r{index}", sample=index, run_id="one") for index in range(3)]
    with store.writer(run="one") as writer:
        writer.append(rows)
    return store


def test_a_rollout_replays_by_id_from_the_store(model: Any, store: Any) -> None:
    found = replay(store, "r1", model)
    assert found.identical
    assert found.draws == 16


def test_a_key_above_two_to_the_63_survives_the_store(model: Any, store: Any, record: Record) -> None:
    with store.writer(run="one") as writer:
        writer.append(record(rollout_id="big", key=2**64 - 5))
    assert store.get("big")[0].replay_key == 2**64 - 5
    assert replay(store, "big", model).identical


def test_new_weights_are_told_by_id(other_model: Any, model: Any, store: Any, record: Record) -> None:
    with store.writer(run="one") as writer:
        writer.append(record(rollout_id="long", new=24))
    found = replay(store, "long", other_model, reference=model, weight_version=1)
    assert not found.identical
    assert "first difference at token" in str(found)


def test_two_stores_are_compared_by_id(tmp_path: Path, store: Any, record: Record) -> None:
    other = rollstore.open(tmp_path / "other", create=True)
    with other.writer(run="two") as writer:
        writer.append([record(rollout_id="r0", sample=0), record(rollout_id="r1", sample=9)])
    found = diff(store, other)
    assert (found.matched, found.changed, found.only_a) == (2, 1, ("r2",))


def test_an_evaluation_scores_every_action_under_its_own_sampler(model: Any, store: Any) -> None:
    assert evaluate(store, model, evaluation_id="e0", weight_version=0, rows_at_once=2) == 3
    rows = {row["rollout_id"]: row for batch in store.scan("evaluations") for row in batch.to_pylist()}
    for rollout_id in ("r0", "r1", "r2"):
        recorded = store.get(rollout_id)[0]
        row = rows[rollout_id]
        np.testing.assert_allclose(row["logprobs"], recorded.logprobs.values, atol=2e-5)
        np.testing.assert_allclose(row["head_logprobs"], recorded.heads.logprobs, atol=2e-5)
        assert row["head_tokens"] == recorded.heads.tokens.tolist()
        assert (row["kind"], row["role"], row["weight_version"]) == ("behavior", "trainer", 0)


def test_an_evaluation_goes_on_where_it_stopped(model: Any, store: Any, record: Record) -> None:
    assert evaluate(store, model, evaluation_id="e0", rollout_ids=["r1"]) == 1
    assert evaluate(store, model, evaluation_id="e0") == 2
    assert evaluate(store, model, evaluation_id="e0") == 0
    assert evaluate(store, model, evaluation_id="e1", kind="raw", role="reference") == 3
    ids = [row["evaluation_id"] for batch in store.scan("evaluations") for row in batch.to_pylist()]
    assert sorted(ids) == ["e0"] * 3 + ["e1"] * 3


def test_a_row_stored_twice_is_evaluated_once(model: Any, store: Any, record: Record) -> None:
    with store.writer(run="one") as writer:
        writer.append(record(rollout_id="r0", sample=0, run_id="one"))
    assert evaluate(store, model, evaluation_id="e0") == 3


def test_a_greedy_rollout_has_one_outcome(model: Any, store: Any, record: Record) -> None:
    with store.writer(run="one") as writer:
        writer.append(record(rollout_id="greedy", sampler=Sampler(temperature=0.0)))
    assert store.get("greedy")[0].logprobs.values.tolist() == [0.0] * 16
    assert replay(store, "greedy", model).identical
