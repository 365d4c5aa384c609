"""Two runs side by side, from what is recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from msgspec.structs import replace

import rollstore
from rollstore.errors import DuplicateError
from rollstore.replay import by_draw, diff, noise
from rollstore.replay.draw import draw, joined
from rollstore.replay.transform import Settings
from rollstore.schema import TABLES, Rollout, Sampler

Record = Callable[..., Rollout]


def moved(rollout: Rollout, *positions: int, **fields: Any) -> Rollout:
    """The rollout with other tokens at some positions."""
    tokens = rollout.tokens.copy()
    tokens[list(positions)] = (tokens[list(positions)] + 1) % 200
    return replace(rollout, tokens=tokens, **fields)


@pytest.fixture
def run(record: Record) -> list[Rollout]:
    return [record(rollout_id=f"r{index}", sample=index, turns=1, reward=float(index % 2)) for index in range(4)]


def test_the_same_run_differs_nowhere(run: list[Rollout]) -> None:
    found = diff(run, run)
    assert (found.matched, found.changed, found.share_changed) == (4, 0, 0.0)
    assert (found.decisions, found.flipped_first, found.flipped_all, found.earliest) == (32, 0, 0, None)
    assert found.flips == ()


def test_flips_are_counted_up_to_the_first_difference_and_in_all(run: list[Rollout]) -> None:
    other = [moved(run[0], 5, 6, 9), run[1], moved(run[2], 4), run[3]]
    found = diff(run, other)
    assert (found.changed, found.share_changed) == (2, 0.5)
    assert (found.flipped_first, found.flipped_all) == (2, 4)
    assert found.earliest == 4
    assert [(flip.a, flip.flipped) for flip in found.flips] == [("r0", 3), ("r2", 1)]
    first = found.flips[0].comparison.first
    assert first is not None
    assert (first.position, first.token_a) == (5, int(run[0].tokens[5]))


def test_a_changed_observation_is_no_flipped_decision(run: list[Rollout]) -> None:
    found = diff(run[0], moved(run[0], 1))
    assert (found.changed, found.flipped_first, found.flipped_all) == (1, 0, 0)
    assert found.flips[0].comparison.verdict == "different_input"


def test_rewards_say_which_way_a_flip_went(run: list[Rollout]) -> None:
    other = [
        moved(run[0], 5, reward=1.0),
        moved(run[1], 5, reward=0.0),
        moved(run[2], 5),
        moved(run[3], 5, reward=None),
    ]
    assert [flip.outcome for flip in diff(run, other).flips] == ["better", "worse", "neither", "unknown"]


def test_rewards_within_the_noise_floor_of_their_scorer_are_neither_better_nor_worse(run: list[Rollout]) -> None:
    rewards = [0.0, 0.02, 0.021, -0.02]
    found = diff([replace(one, reward=0.0) for one in run], [moved(run[n], 5, reward=r) for n, r in enumerate(rewards)],
                 floor=0.02)  # fmt: skip
    assert [flip.outcome for flip in found.flips] == ["neither", "below_floor", "better", "below_floor"]
    assert "1 better, 0 worse, 1 neither, 0 unknown, 2 below the floor of 0.02" in str(found)
    assert found.to_dict()["floor"] == 0.02
    assert "floor" not in str(diff(run, [moved(run[0], 5), *run[1:]]))


@pytest.mark.parametrize("floor", [-0.1, float("nan"), float("inf")])
def test_a_floor_that_is_none_is_refused(run: list[Rollout], floor: float) -> None:
    with pytest.raises(ValueError, match=r"^floor: wanted a finite number of at least 0, got"):
        diff(run, run, floor=floor)


def test_rollouts_of_one_side_only_are_named(run: list[Rollout]) -> None:
    found = diff(run[:3], run[1:])
    assert (found.matched, found.only_a, found.only_b) == (2, ("r0",), ("r3",))


def test_two_runs_match_by_draw_where_their_ids_differ(run: list[Rollout]) -> None:
    renamed = [replace(one, rollout_id=f"other-{one.rollout_id}") for one in run]
    assert diff(run, renamed).matched == 0
    assert diff(run, renamed).share_changed is None
    assert diff(run, renamed, match=by_draw).matched == 4


def test_two_single_rollouts_are_compared_whatever_they_are_called(run: list[Rollout]) -> None:
    assert diff(run[0], replace(run[0], rollout_id="other")).matched == 1


def test_one_run_is_picked_out_of_many(run: list[Rollout]) -> None:
    both = [replace(one, run_id="a") for one in run] + [moved(one, 5, run_id="b") for one in run]
    found = diff(both, both, run_a="a", run_b="b")
    assert (found.matched, found.changed) == (4, 4)


def test_a_row_stored_twice_counts_once_and_two_contents_are_refused(run: list[Rollout]) -> None:
    assert diff([run[0], run[0]], run).matched == 1
    with pytest.raises(ValueError, match="a: wanted one segment a match, got 'r0' and 'r0'"):
        diff([run[0], moved(run[0], 5)], run)


def test_a_position_that_one_side_alone_drew_is_no_decision() -> None:
    a = Rollout(rollout_id="a", tokens=[1, 2, 3], action_mask=[0, 1, 1])
    b = Rollout(rollout_id="b", tokens=[1, 9, 3], action_mask=[0, 0, 1])
    for one, other in ((a, b), (b, a)):
        found = diff(one, other)
        assert (found.changed, found.decisions, found.flipped_first, found.flipped_all) == (1, 1, 0, 0)


def test_a_rollout_of_two_changed_segments_counts_once(run: list[Rollout]) -> None:
    segments = [replace(run[0], reward=None), replace(run[0], segment=1, reward=1.0)]
    worse = [moved(segments[0], 5), moved(segments[1], 5, reward=0.0)]
    found = diff([*segments, run[1]], [*worse, run[1]])
    assert (found.matched, found.changed) == (3, 2)
    assert (found.rollouts, found.rollouts_changed, found.share_rollouts_changed) == (2, 1, 0.5)
    assert found.outcomes == {"worse": 1}
    assert "1 of 2 rollouts changed (50.0%)" in found.lines()
    assert "0 better, 1 worse" in str(found)


def test_one_id_in_two_runs_has_a_reward_in_each(run: list[Rollout]) -> None:
    first, second = (
        replace(run[0], run_id=f"run{key}", replay_key=key, reward=reward) for key, reward in ((1, 1.0), (2, 0.0))
    )
    found = diff([first, second], [moved(first, 5), second], match=by_draw)
    assert [(flip.reward_a, flip.reward_b) for flip in found.flips] == [(1.0, 1.0)]


def test_a_row_that_was_written_twice_counts_once(run: list[Rollout], tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    for _ in range(2):
        with store.writer(run="r") as writer:
            writer.append(run[0])
    assert diff(store, store).matched == 1


def test_one_segment_stored_with_two_rewards_is_refused(run: list[Rollout]) -> None:
    with pytest.raises(DuplicateError, match="a: rollout 'r0': segment 0: wanted one content, got two of the same"):
        diff([run[0], replace(run[0], reward=0.5)], run)


def test_a_score_that_fits_two_runs_is_refused(run: list[Rollout], tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    for run_id, key in (("one", 1), ("two", 2)):
        with store.writer(run=run_id) as writer:
            writer.append(replace(run[0], run_id=run_id, replay_key=key))
    declared = TABLES["scores"].arrow_schema
    row = {"rollout_id": "r0", "scorer": "judge", "value": 1.0, "status": "scored"}
    store.append("scores", pa.Table.from_pylist([row], schema=pa.schema([declared.field(name) for name in row])))
    assert diff(store, store, match=by_draw, run_a="one", run_b="one", scorer="judge").matched == 1
    with pytest.raises(DuplicateError, match="a: rollout 'r0': wanted one run, since a score names none, got several"):
        diff(store, store, match=by_draw, scorer="judge")


def test_a_report_tells_the_counts_and_is_plain_data(run: list[Rollout]) -> None:
    found = diff(run, [moved(one, 5) for one in run])
    lines = found.lines(most=1)
    assert lines[0] == "4 of 4 segments changed (100.0%); only in a 0, only in b 0"
    assert lines[-1] == "and 3 more"
    assert lines[1] == "4 of 4 rollouts changed (100.0%)"
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["flips"][0]["a"] == "r0"


def test_a_flip_under_one_noise_is_told_with_both_checkpoints_preferences() -> None:
    """Both prefer b; by 2.1 the noise still draws a, by 2.75 it draws b."""
    gap = next(
        (sample, float(pair[0] - pair[1]))
        for sample in range(1000)
        for pair in noise.gumbel(key=5, sample=sample, positions=2, vocab_size=2)
        if 2.3 < pair[0] - pair[1] < 2.5
    )

    def drawn(version: int, preference: float) -> Rollout:
        logits = torch.tensor([[0.0, preference]])
        where: dict[str, Any] = {"keys": [5], "samples": [gap[0]], "segments": [0], "positions": [2], "head_size": 2}
        choice = draw(logits, [Settings()], **where)[0]
        return Rollout(
            rollout_id="r", tokens=[7, 8, choice.token], action_mask=[False, False, True],
            logprobs=[choice.logprob], logprob_kind="behavior", head_kind="behavior", weight_versions=[version],
            heads=joined([choice.head], 2), samplers=(Sampler(temperature=1.0),), replay_key=5,
            replay_sample=gap[0], noise=noise.RECIPE, reward=float(choice.token == 1),
        )  # fmt: skip

    found = diff(drawn(0, 2.1), drawn(1, 2.75))
    (flip,) = found.flips
    first = flip.comparison.first
    assert first is not None
    assert (first.token_a, first.token_b, first.position) == (0, 1, 2)
    assert (first.margin_a, first.margin_b) == (pytest.approx(2.1), pytest.approx(2.75))
    assert first.noise_gap == pytest.approx(gap[1])
    assert (first.noised_margin_a, first.noised_margin_b) == (pytest.approx(2.1 - gap[1]), pytest.approx(2.75 - gap[1]))
    assert (first.verdict, first.contradicted, flip.outcome) == ("real", False, "better")
    assert (found.flipped_first, found.flipped_all) == (1, 1)
    weights = next(one for one in flip.comparison.explanations if one.name == "weights")
    assert weights.status == "possible"
