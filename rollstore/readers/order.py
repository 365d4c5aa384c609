"""The order of an epoch and its cut into batches: pure functions, the same on every machine and in every process."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]

BLOCK = 64
"""Neighbouring units that are moved together before they are mixed within a window."""


def epoch_order(weights: Ints, *, seed: int, epoch: int, window: int) -> Ints:
    """The order in which an epoch visits its units. int64 [n], a permutation.

    weights [n]: size of each unit, in the order of the snapshot; seed and epoch: integers of at most 64 bits. Blocks of
    neighbours are shuffled first, then all units within windows of blocks that together weigh at most `window` (or are
    one block): a reader that keeps one window in memory reads everything once. A window that holds everything, as of
    a small store, makes any order possible.

    The numbers are raw Philox4x64-10 words keyed by (seed, epoch), sorted: bit generators are stable over versions of
    numpy, its permutations are not.
    """
    count = len(weights)
    blocks = np.arange(count) // BLOCK
    sizes = np.bincount(blocks, weights=weights).astype(np.int64)
    shuffled = np.argsort(_words(seed, epoch, 0, len(sizes)), kind="stable")
    window_of = np.empty(len(sizes), np.int64)
    window_of[shuffled] = _windows(sizes[shuffled], window)
    return np.lexsort((_words(seed, epoch, 1, count), window_of[blocks])).astype(np.int64)


def _words(seed: int, epoch: int, stream: int, count: int) -> npt.NDArray[np.uint64]:
    key = np.array([seed % 2**64, epoch % 2**64], np.uint64)
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


def batch_of(step: int, rank: int, world_size: int) -> int:
    """The batch a rank takes at a step; none, where it is not below the number of batches."""
    return step * world_size + rank
