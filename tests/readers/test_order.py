"""The order of an epoch is a permutation that follows from its arguments alone; cuts respect the budget."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstore.readers.order import BLOCKS, cuts, epoch_order, share, steps

SIZES = st.lists(st.integers(1, 50), max_size=400).map(lambda sizes: np.array(sizes, np.int64))
SEED = st.integers(0, 2**64 - 1)


@given(sizes=SIZES, seed=SEED, epoch=st.integers(0, 2**63), window=st.integers(1, 20_000))
def test_an_epoch_visits_every_unit_once(sizes: np.ndarray, seed: int, epoch: int, window: int) -> None:
    order, windows = epoch_order(sizes, seed=seed, epoch=epoch, window=window)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    assert (windows[0], windows[-1]) == (0, len(sizes))
    assert (np.diff(windows) > 0).all()


def test_the_order_is_the_same_for_ever() -> None:
    found, _ = epoch_order(np.ones(10, np.int64), seed=3, epoch=1, window=100)
    assert found.tolist() == [0, 9, 2, 6, 7, 8, 5, 3, 4, 1]


@given(seed=SEED, epoch=st.integers(0, 100))
def test_another_seed_or_epoch_gives_another_order(seed: int, epoch: int) -> None:
    sizes = np.ones(200, np.int64)
    order = epoch_order(sizes, seed=seed, epoch=epoch, window=1000)[0].tolist()
    assert order != epoch_order(sizes, seed=seed, epoch=epoch + 1, window=1000)[0].tolist()
    assert order != epoch_order(sizes, seed=seed ^ 1, epoch=epoch, window=1000)[0].tolist()


def test_a_window_keeps_blocks_together_and_mixes_within() -> None:
    block, window = 64, 64 * BLOCKS
    order, starts = epoch_order(np.ones(window * 4, np.int64), seed=0, epoch=0, window=window)
    assert starts.tolist() == [0, window, 2 * window, 3 * window, 4 * window]
    windows = order.reshape(-1, window) // block
    assert all(len(set(blocks.tolist())) == BLOCKS for blocks in windows)
    assert all((np.diff(blocks) != 0).sum() > window // 2 for blocks in windows)


def test_a_unit_above_the_window_is_a_window_of_its_own() -> None:
    order, starts = epoch_order(np.array([1, 50, 1, 1], np.int64), seed=0, epoch=0, window=32)
    assert [set(order[a:b].tolist()) for a, b in pairwise(starts)].count({1}) == 1


def test_every_place_is_about_as_likely_in_one_window() -> None:
    first = [int(epoch_order(np.ones(8, np.int64), seed=0, epoch=e, window=8)[0][0]) for e in range(800)]
    assert np.bincount(first, minlength=8).min() > 60


@given(sizes=SIZES, budget=st.integers(50, 200), most=st.none() | st.integers(1, 9))
def test_batches_are_as_full_as_the_budget_allows(sizes: np.ndarray, budget: int, most: int | None) -> None:
    found = cuts(sizes, budget=budget, most=most)
    assert (found[0], found[-1]) == (0, len(sizes))
    for start, stop in pairwise(found):
        assert 0 < stop - start <= (most or len(sizes))
        assert sizes[start:stop].sum() <= budget
        assert stop == len(sizes) or stop - start == most or sizes[start : stop + 1].sum() > budget


@given(sizes=SIZES, most=st.none() | st.integers(1, 9))
def test_limits_far_above_everything_are_like_none(sizes: np.ndarray, most: int | None) -> None:
    plain = cuts(sizes, budget=None, most=len(sizes) + 1 if most is None else most)
    for budget in (2**62, 2**63 - 1, 2**64):
        assert cuts(sizes, budget=budget, most=most).tolist() == plain.tolist()
    assert cuts(sizes, budget=2**63 - 1, most=2**63 - 1).tolist() == cuts(sizes, budget=None, most=None).tolist()
    order, windows = epoch_order(sizes, seed=0, epoch=0, window=2**64 - 1)
    assert windows.tolist() == ([0, len(sizes)] if len(sizes) else [0])
    assert order.tolist() == epoch_order(sizes, seed=0, epoch=0, window=2**62)[0].tolist()


def test_more_ranks_than_units_cost_nothing() -> None:
    tokens = np.array([5, 3, 9])
    parts = [share(tokens, np.array([0, 1, 2, 3]), rank=rank, world_size=2**62) for rank in (0, 1, 2, 3, 2**62 - 1)]
    assert [part.tolist() for part in parts] == [[0], [1], [2], [], []]


@given(sizes=SIZES, budget=st.integers(50, 200), at=st.integers(0, 20))
def test_what_is_left_is_cut_as_if_nothing_had_gone_before(sizes: np.ndarray, budget: int, at: int) -> None:
    whole = cuts(sizes, budget=budget, most=None)
    done = whole[min(at, len(whole) - 1)]
    assert (cuts(sizes[done:], budget=budget, most=None) + done).tolist() == whole[whole >= done].tolist()


def test_a_unit_above_the_budget_is_an_error() -> None:
    with pytest.raises(ValueError, match="wanted at most 5 tokens, got 6"):
        cuts(np.array([5, 6, 1]), budget=5, most=None)


@given(sizes=SIZES, world=st.integers(1, 5), budget=st.none() | st.integers(50, 200), most=st.integers(1, 9))
def test_ranks_share_every_step_and_none_takes_more_than_is_allowed(
    sizes: np.ndarray, world: int, budget: int | None, most: int
) -> None:
    bounds = cuts(sizes, budget=budget, most=most)
    seen: list[int] = []
    for step in range(steps(len(bounds) - 1, world)):
        own = bounds[step * world : step * world + world + 1]
        tokens = sizes[own[0] : own[-1]]
        parts = [share(tokens, own - own[0], rank=r, world_size=world) for r in range(world)]
        assert all(len(part) <= most and (budget is None or tokens[part].sum() <= budget) for part in parts)
        seen += [int(own[0]) + place for part in parts for place in sorted(part.tolist())]
    assert sorted(seen) == list(range(len(sizes)))


def test_long_and_short_units_are_dealt_out_evenly() -> None:
    tokens = np.array([100, 90, 10, 5, 80, 20, 70, 1])
    parts = [share(tokens, np.array([0, 4, 8]), rank=rank, world_size=2) for rank in range(2)]
    assert [int(tokens[part].sum()) for part in parts] == [191, 185]
    assert all((np.diff(part) > 0).all() for part in parts), "in the order of the epoch"


@pytest.mark.parametrize(("world", "each", "most"), [(4, 8, 1.02), (8, 50, 1.001), (64, 16, 1.02)])
def test_ranks_have_about_as_many_tokens_where_lengths_have_a_long_tail(world: int, each: int, most: float) -> None:
    tokens = np.exp(np.arange(world * each) / (world * each) * 3 + 4).astype(np.int64)
    bounds = np.arange(0, world * each + 1, each)
    parts = [share(tokens, bounds, rank=rank, world_size=world) for rank in range(world)]
    assert {len(part) for part in parts} == {each}
    sums = np.array([tokens[part].sum() for part in parts])
    assert sums.max() < most * sums.mean()
