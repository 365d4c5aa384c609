"""The order of an epoch and its cut into batches: pure functions, the same on every machine and in every process."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rollstore.readers import arguments

Ints: TypeAlias = npt.NDArray[np.int64]

ROUNDS = 16
"""Rounds in which units are dealt out by what ranks have: what comes later is short, and many are even anyway."""

BLOCKS = 32
"""Blocks of neighbours that make up a window: what is read from one place at a time is a 32nd of what is in memory."""


def epoch_order(weights: Ints, *, seed: int, epoch: int, window: int) -> tuple[Ints, Ints]:
    """(the order in which an epoch visits its units: int64 [n], a permutation; where windows begin in it: int64
    [windows + 1], from 0 to n).

    weights [n]: size of each unit, in the order of the snapshot; seed and epoch: integers from 0 to 2^64 - 1, others
    raise ValueError. Blocks of neighbours, of `window` / 32 each, are shuffled first, then all units within windows of
    blocks that together weigh at most `window` (or are one block): a reader that keeps one window in memory reads
    everything about once. A window that holds everything, as of a small store, makes any order possible.

    The numbers are raw Philox4x64-10 words keyed by (seed, epoch), sorted: bit generators are stable over versions of
    numpy, its permutations are not.
    """
    arguments.whole("seed", seed, 0, arguments.WORD)
    arguments.whole("epoch", epoch, 0, arguments.WORD)
    count = len(weights)
    begins = (np.cumsum(weights) - weights) // max(1, window // BLOCKS)
    blocks = np.cumsum(np.diff(begins, prepend=begins[:1]) != 0)
    sizes = np.bincount(blocks, weights=weights).astype(np.int64)
    shuffled = np.argsort(_words(seed, epoch, 0, len(sizes)), kind="stable")
    window_of = np.empty(len(sizes), np.int64)
    window_of[shuffled] = _windows(sizes[shuffled], window)
    order = np.lexsort((_words(seed, epoch, 1, count), window_of[blocks])).astype(np.int64)
    starts = np.flatnonzero(np.diff(window_of[blocks][order], prepend=-1))
    return order, np.append(starts, count)


def _words(seed: int, epoch: int, stream: int, count: int) -> npt.NDArray[np.uint64]:
    key = np.array([seed, epoch], np.uint64)
    counter = np.array([0, 0, 0, stream], np.uint64)
    words: Any = np.random.Philox(key=key, counter=counter).random_raw(count)
    return words


def _windows(sizes: Ints, window: int) -> Ints:
    """The window each block belongs to, blocks in order."""
    ends = np.cumsum(sizes)
    numbers = np.zeros(len(sizes), np.int64)
    start = number = 0
    while start < len(sizes):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + window, side="right")))
        numbers[start:stop] = number
        start, number = stop, number + 1
    return numbers


def cuts(tokens: Ints, *, budget: int | None, most: int | None) -> Ints:
    """Where batches begin and end. int64 [batches + 1], from 0 to n.

    tokens [n]: tokens of each unit, in order, none above the budget. A batch takes the next units while their tokens
    are at most `budget` and they are at most `most`. What is left of an epoch is cut as if nothing had gone before, so
    a resumed reader, even one with other limits, takes up where the last one stopped.
    """
    ends = np.cumsum(tokens)
    budget = None if budget is None else min(budget, int(tokens.sum()))  # so that sums stay within int64
    found = [0]
    while found[-1] < len(tokens):
        start = found[-1]
        stop = len(tokens) if most is None else min(start + most, len(tokens))
        if budget is not None:
            before = ends[start - 1] if start else 0
            stop = min(stop, int(np.searchsorted(ends, before + budget, side="right")))
        if stop == start:
            raise ValueError(f"unit {start}: wanted at most {budget} tokens, got {tokens[start]}")
        found.append(stop)
    return np.array(found, np.int64)


def steps(batches: int, world_size: int) -> int:
    """Steps that every rank makes: batches are dealt out in turn, and the last step is filled up with empty ones."""
    return -(-batches // world_size)


def share(tokens: Ints, bounds: Ints, *, rank: int, world_size: int) -> Ints:
    """The units that one rank takes of a step, as places among the step's units, in their order. int64.

    tokens [n]: tokens of the step's units; bounds [batches + 1]: the cuts among them, at most one batch a rank. Units
    are dealt out from the longest to the shortest, one a rank in each round, so that ranks wait less for one another:
    in the first rounds to the ranks in the order of what they have, the least first, later there and back. None has
    more than the largest cut; where the cuts are as even already, each takes its own. All ranks come to the same
    answer.
    """
    turn = np.arange(len(tokens))
    there = turn % world_size
    longest = np.argsort(-tokens, kind="stable")
    taker = np.where(turn // world_size % 2, world_size - 1 - there, there)
    has = np.zeros(min(world_size, len(tokens)), np.int64)
    for begin in range(0, min(len(tokens), ROUNDS * world_size), world_size) if len(tokens) > world_size else ():
        own = np.argsort(has, kind="stable")[: len(tokens) - begin]
        taker[begin : begin + world_size] = own
        has[own] += tokens[longest[begin : begin + world_size]]
    dealt = np.empty(len(tokens), np.int64)
    dealt[longest] = taker
    largest = np.bincount(dealt, weights=tokens).max(initial=0)
    longest_cut = np.add.reduceat(tokens, bounds[:-1]).max(initial=0) if len(bounds) > 1 else 0
    if largest >= longest_cut:
        return turn[bounds[rank] : bounds[rank + 1]] if rank + 1 < len(bounds) else turn[:0]
    return np.flatnonzero(dealt == rank)
