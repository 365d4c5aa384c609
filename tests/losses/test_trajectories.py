"""gae and td across segments and at the end of a rollout; rollouts that were cut off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rollstore.batch import select
from rollstore.batch.token_batch import Ending
from rollstore.errors import UnsupportedRecordError
from rollstore.losses import gae, mask_truncated, penalise_overlong, td
from tests.losses.padded import Padded, doubles, line

close = torch.testing.assert_close
int8 = torch.int8


def two_segments(order: list[int] | None = None) -> Any:
    """Rollout x: segment 0 with two actions, segment 1 with one; rollout y between them in the batch."""
    pad = Padded([[1, 1], [1, 0], [0, 1]])
    batch = pad.batch(
        rollout_ids=["x", "y", "x"],
        rollout=torch.tensor([0, 1, 0]),
        segment=torch.tensor([0, 0, 1]),
        values=doubles(0.1, 0.2, 9.0, 0.4),
        rewards=doubles(1.0, 5.0, 1.0),
        bootstrap=torch.tensor([-1, 0, 0], dtype=int8),
    )
    return batch if order is None else select(batch, order)


def test_the_recursion_runs_through_a_continued_segment_into_the_next_ones_first_value() -> None:
    got, _ = gae(two_segments(), gamma=0.9, lam=0.5)
    last = 1.0 - 0.4
    middle = 0.9 * 0.4 - 0.2 + 0.45 * last
    first = 0.9 * 0.2 - 0.1 + 0.45 * middle
    close(got.advantages, doubles(first, middle, 5.0 - 9.0, last))
    close(got.returns, doubles(first + 0.1, middle + 0.2, 5.0, 1.0))


def test_the_order_of_rows_does_not_matter() -> None:
    got, _ = gae(two_segments([2, 1, 0]), gamma=0.9, lam=0.5)
    whole, _ = gae(two_segments(), gamma=0.9, lam=0.5)
    assert got.advantages is not None
    assert whole.advantages is not None
    close(got.advantages[[2, 3, 1, 0]], whole.advantages)


def test_a_cut_rollout_ends_in_its_own_final_value_and_never_in_another_rollouts_first() -> None:
    pad = Padded([[1], [1]])
    batch = pad.batch(
        values=doubles(0.5, 100.0),
        final_values=doubles(0.8, float("nan")),
        rewards=doubles(0.2, 0.0),
        bootstrap=torch.tensor([1, 0], dtype=int8),
    )
    got, did = gae(batch, gamma=0.9, lam=1.0)
    close(got.advantages, doubles(0.2 + 0.9 * 0.8 - 0.5, -100.0))
    assert did.bootstrapped == 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"bootstrap": torch.tensor([-1, 0], dtype=int8)}, "bootstrap is not known.*rollouts r0$"),
        ({"bootstrap": torch.tensor([0, 1], dtype=int8)}, "no finite final value: rollouts r1$"),
        ({"values": doubles(0.1, float("nan"))}, "an action with weight has no finite value: rollouts r1$"),
        ({"values": None}, "a value before each action"),
    ],
)
def test_an_end_that_is_not_decided_is_refused_by_id(columns: dict[str, Any], message: str) -> None:
    given = {"values": doubles(0.1, 0.2), "bootstrap": torch.zeros(2, dtype=int8), **columns}
    with pytest.raises(UnsupportedRecordError, match=message):
        gae(Padded([[1], [1]]).batch(**given))


def test_a_missing_segment_in_the_middle_is_refused() -> None:
    batch = replace(two_segments(), segment=torch.tensor([0, 0, 2]))
    with pytest.raises(UnsupportedRecordError, match="segment before this one is not in the batch: rollouts x"):
        gae(batch)


def test_what_has_no_weight_is_not_asked_how_it_ended() -> None:
    batch = Padded([[1], [1]]).batch(values=doubles(0.1, 0.2), bootstrap=torch.tensor([0, -1], dtype=int8))
    batch = replace(batch, weights=torch.tensor([1.0, 0.0]), rewards=doubles(1.0, 1.0))
    close(gae(batch)[0].advantages, doubles(0.9, 0.0))


def test_an_unscored_rollout_gets_no_weight_and_is_counted() -> None:
    batch = Padded([[1], [1]]).batch(values=doubles(0.1, 0.2), rewards=doubles(1.0, float("nan")))
    got, did = td(batch)
    close(got.advantages, doubles(0.9, 0.0))
    assert (got.weights.tolist(), did.unscored.item()) == ([1, 0], 1)


def test_a_long_trajectory_agrees_with_the_recursion_written_out() -> None:
    generator = torch.Generator().manual_seed(0)
    values, rewards = (torch.randn(37, generator=generator, dtype=torch.float64) for _ in range(2))
    got, _ = gae(line(37, values=values, action_rewards=rewards, rewards=doubles(0.5)), gamma=0.97, lam=0.9)
    wanted, running = [], 0.0
    for at in reversed(range(37)):
        beyond = values[at + 1] if at < 36 else 0.0
        running = rewards[at] + 0.5 * (at == 36) + 0.97 * beyond - values[at] + 0.97 * 0.9 * running
        wanted.append(running)
    close(got.advantages, torch.stack(wanted[::-1]))


def test_truncated_rollouts_are_masked_by_name_with_all_their_segments() -> None:
    batch = replace(
        two_segments(), ending=torch.tensor([Ending.continued, Ending.terminated, Ending.truncated]).to(int8)
    )
    assert mask_truncated(batch).weights.tolist() == [0, 0, 1, 0]


def test_the_overlong_penalty_is_linear_in_the_buffer() -> None:
    lengths = [4, 6, 8, 10, 12]
    pad = Padded([[1] * length + [0] * (12 - length) for length in lengths])
    batch = penalise_overlong(pad.batch(), limit=10, buffer=4)
    close(batch.rewards, doubles(0, 0, -0.5, -1, -1))
