"""Two scored runs of the same questions: what their difference is worth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

import rollstore
from rollstore.errors import DuplicateError
from rollstore.replay import diff, last_mean, paired, smallest_difference
from rollstore.schema import TABLES, Rollout


def scores(*values: float) -> dict[str, float]:
    return {str(number): value for number, value in enumerate(values)}


def test_five_hundred_questions_resolve_about_six_points() -> None:
    assert smallest_difference(500) == pytest.approx(0.062, abs=5e-4)
    assert smallest_difference(2000) == pytest.approx(0.031, abs=5e-4)
    assert smallest_difference(500, 0.9) < 0.04
    with pytest.raises(ValueError, match="wanted n of at least 1 and a rate in"):
        smallest_difference(0)


def test_a_case_done_by_hand() -> None:
    found = paired(scores(0, 0, 1, 1, 0), scores(1, 1, 1, 0, 1))
    assert found is not None
    assert (found.n, found.better, found.worse) == (5, 3, 1)
    assert (found.mean_a, found.mean_b, found.difference) == pytest.approx((0.4, 0.8, 0.4))
    error = math.sqrt((3 * 0.6**2 + 0.4**2 + 1.4**2) / 4 / 5)
    assert (found.low, found.high) == pytest.approx((0.4 - 1.95996 * error, 0.4 + 1.95996 * error), abs=1e-4)
    # Four questions changed, three one way: 2 * (1 + 4) / 16.
    assert found.p == pytest.approx(0.625)
    assert found.resolvable == pytest.approx((1.95996 + 0.84162) * error, abs=1e-4)
    assert found.unseen == pytest.approx(smallest_difference(5, 0.6))


def test_scores_of_several_sizes_are_tested_by_flipping_every_sign() -> None:
    a, b = scores(0, 0, 0), scores(1, 2, 4)
    found = paired(a, b)
    assert found is not None
    assert found.p == pytest.approx(2 / 8)  # only all signs alike are as far
    assert math.isnan(found.unseen)
    many = paired(scores(*[0.0] * 40), scores(*np.linspace(0.1, 1, 40)))
    assert many is not None
    assert many.p < 1e-3


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_an_infinite_score_is_left_out_and_counted(odd: float) -> None:
    whole = paired(scores(0, 0, 1, 1, 0), scores(1, 1, 1, 0, 1))
    assert whole is not None
    for a, b in ((odd, 1.0), (0.0, odd), (odd, odd)):
        found = paired(scores(0, 0, 1, 1, 0, a), scores(1, 1, 1, 0, 1, b))
        assert found == dataclasses.replace(whole, infinite=1)
        assert found.line() == f"{whole.line()}; 1 more left out, with an infinite score"
    assert paired(scores(odd, 0), scores(1, 1)) is None


def test_runs_with_infinite_rewards_are_compared_by_the_others() -> None:
    def run(*rewards: float) -> list[Rollout]:
        return [
            Rollout(
                rollout_id=str(n), prompt_id=f"p{n // 2}", tokens=[1, 2], action_mask=[False, True], reward=reward,
                reward_status="scored",
            )
            for n, reward in enumerate(rewards)
        ]  # fmt: skip

    found = diff(
        run(0, 0, 1, 0, math.inf, -math.inf, 1e308, 1e308, math.inf, 1),
        run(1, 0, 1, 1, 0, 0, 0, 0, math.inf, 1),
    ).paired
    assert found is not None
    assert (found.n, found.infinite, found.mean_a, found.mean_b) == (2, 3, 0.25, 0.75)
    assert all(map(math.isfinite, (found.low, found.high, found.p, found.resolvable)))


def test_the_unit_of_the_scores_changes_no_p() -> None:
    for unit in (1e-300, 1e-10, 1.0, 1e10):
        found = paired({str(n): 0.0 for n in range(10)}, {str(n): (n + 1) * unit for n in range(10)})
        assert found is not None
        assert found.p == 2 / 1024


def test_no_difference_is_no_evidence_and_one_question_no_test() -> None:
    same = paired(scores(1, 0, 1), scores(1, 0, 1))
    assert same is not None
    assert (same.p, same.difference, same.low, same.high) == (1.0, 0.0, 0.0, 0.0)
    assert paired(scores(1), scores(1)) is None
    assert paired({"a": 1.0, "b": 1.0}, {"c": 1.0, "d": 0.0}) is None
    with pytest.raises(ValueError, match="level: wanted a number between 0 and 1, got 95"):
        paired(scores(1, 0), scores(1, 0), level=95)


def test_under_no_difference_the_test_rarely_says_otherwise_and_the_interval_holds() -> None:
    rng = np.random.default_rng(3)
    called = missed = 0
    for _ in range(400):
        a, b = rng.random(30) < 0.5, rng.random(30) < 0.5
        found = paired(scores(*a.astype(float)), scores(*b.astype(float)))
        assert found is not None
        called += found.p <= 0.05
        missed += not found.low <= 0.0 <= found.high
    assert called <= 0.05 * 400 + 3 * math.sqrt(0.05 * 0.95 * 400)
    assert 0.01 * 400 <= missed <= 0.10 * 400


def test_the_mean_of_the_last_checkpoints_stands_beside_the_last() -> None:
    assert last_mean([0.1, 0.5, 0.3, 0.7], 3) == (0.7, pytest.approx(0.5))
    with pytest.raises(ValueError, match="k: wanted 1 to 2, the checkpoints there are, got 3"):
        last_mean([0.1, 0.2], 3)


@pytest.fixture
def run(record: Callable[..., Rollout]) -> list[Rollout]:
    return [
        record(rollout_id=f"r{n}", sample=n, turns=1, reward=float(n % 2), prompt_id=f"p{n // 2}", run_id="a")
        for n in range(6)
    ]


def test_a_question_is_a_prompt_and_its_score_the_mean_of_its_rollouts(run: list[Rollout]) -> None:
    found = diff(run, [replace(one, reward=1.0) for one in run]).paired
    assert found is not None
    assert (found.n, found.mean_a, found.mean_b) == (3, 0.5, 1.0)
    assert "scores: mean 0.5 to 1 over 3 questions: +0.5" in str(diff(run, [replace(one, reward=1.0) for one in run]))
    assert diff(run, [replace(one, reward=None) for one in run]).paired is None


def test_a_scorers_scores_stand_in_for_the_rewards(run: list[Rollout], tmp_path: Path) -> None:
    stores: list[Any] = []
    for side, value in enumerate((0.25, 0.75)):
        store = rollstore.open(tmp_path / str(side), create=True)
        with store.writer() as writer:
            writer.append(run)
        scored(store, "judge", {one.rollout_id: value for one in run})
        stores.append(store)
    found = diff(*stores, scorer="judge").paired
    assert found is not None
    assert (found.mean_a, found.mean_b) == (0.25, 0.75)
    assert diff(*stores, scorer="nobody").paired is None
    scored(stores[1], "judge", {"r0": 1.0})
    with pytest.raises(DuplicateError, match="b: rollout 'r0': wanted one outcome score of 'judge', got several"):
        diff(*stores, scorer="judge")
    with pytest.raises(TypeError, match="a: wanted a store to find the scores of 'judge' in, got rollouts"):
        diff(run, run, scorer="judge")


def scored(store: Any, scorer: str, values: dict[str, float]) -> None:
    rows = [
        {"rollout_id": name, "scorer": scorer, "value": value, "status": "scored"} for name, value in values.items()
    ]
    declared = TABLES["scores"].arrow_schema
    store.append("scores", pa.Table.from_pylist(rows, schema=pa.schema([declared.field(name) for name in rows[0]])))
