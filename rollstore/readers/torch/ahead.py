"""Work done ahead of the step: in threads, a piece at a time, handed out in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from rollstore.readers.plan import Plan
from rollstore.store import ahead

PIECE, BATCHES = 1 << 17, 64
"""Tokens that are made into batches at one go, and the most batches, so that the first does not wait for thousands:
handing work from thread to thread costs as much as a small batch."""


class Pool(ahead.Pool):
    """One thread."""

    def __init__(self, **options: Any) -> None:
        super().__init__(1, **options)


def pieces(plan: Plan, steps: range) -> Iterator[list[int]]:
    """Neighbouring steps whose batches have at least PIECE tokens a rank, or that are BATCHES, or what is left."""
    together: list[int] = []
    size = 0.0
    bounds = [*plan.cuts[:: plan.world_size].tolist(), len(plan.units)]
    ends = np.concatenate([[0], np.cumsum(plan.tokens)])
    for step in steps:
        together.append(step)
        size += (ends[bounds[step + 1]] - ends[bounds[step]]) / plan.world_size
        if size >= PIECE or len(together) == BATCHES:
            yield together
            together, size = [], 0.0
    if together:
        yield together


def in_order(
    work: Callable[[list[int]], list[Any]], parts: Iterator[list[int]], pool: ThreadPoolExecutor | None, most: int
) -> Iterator[tuple[int, Any]]:
    """(step, batch) of each step in order; parts are made up to `most` ahead."""
    if pool is None:
        for steps in parts:
            for step in steps:
                yield step, work([step])[0]
        return
    waiting: deque[tuple[list[int], Future[list[Any]]]] = deque()
    for steps in parts:
        waiting.append((steps, pool.submit(work, steps)))
        if len(waiting) > most:
            first, made = waiting.popleft()
            yield from zip(first, made.result(), strict=True)
    while waiting:
        first, made = waiting.popleft()
        yield from zip(first, made.result(), strict=True)
