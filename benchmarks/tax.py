"""What appending takes from an engine's thread, beside an in-memory deque.

A generation step of 1,000 tokens at 10,000 tokens a second is 100 ms. The tax is the time of one append over the time
in which its tokens are generated at that rate; batches of one rollout, of one group, and of 64. On a machine that
others use, what the thread itself was busy says more than the clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import rollstore
from benchmarks import data
from benchmarks.contest import OURS, Contestant, Mark, Result, interleaved
from benchmarks.settings import Settings
from rollstore import Rollout

RATE = 10_000
"""Tokens a second that the engine generates, all its requests together."""

PATIENCE = 0.005
CPU = "rollstore, CPU of the thread"


def results(settings: Settings) -> Iterator[Result]:
    rows = data.rows(data.count(settings.tokens[0]))
    generated = sum(int(row.action_mask.sum()) for row in rows) / len(rows)
    for size in (1, 8, 64):
        batches = [rows[at : at + size] for at in range(0, len(rows), size)]
        yield from at(batches, size, size * generated, settings.runs)


def at(batches: list[list[Rollout]], size: int, generated: float, runs: int) -> Iterator[Result]:
    appends: list[float] = []
    both: list[float] = []
    busy: list[float] = []

    def ours(folder: Path) -> float:
        took: list[float] = []
        with rollstore.open(folder / "store", create=True).writer() as writer:
            for batch in batches:
                began, own = time.perf_counter(), time.thread_time()
                writer.append(batch)
                appended = time.perf_counter()
                busy.append(time.thread_time() - own)
                writer.flush()
                took.append(appended - began)
                both.append(time.perf_counter() - began)
        appends.extend(took)
        return float(np.median(took)) * 1e3

    def kept(_: Path) -> float:
        took: list[float] = []
        held: deque[list[Rollout]] = deque()
        for batch in batches:
            began = time.perf_counter()
            held.append(batch)
            took.append(time.perf_counter() - began)
        return float(np.median(took)) * 1e3

    contestants: dict[str, Contestant] = {OURS: ours, "deque": kept}
    medians, _ = interleaved(contestants, runs)
    budget = generated / RATE
    p50, p99 = np.quantile(appends, 0.5), np.quantile(both, 0.99)
    yield Result(
        case="writer's tax",
        size=f"append of {size}",
        unit="ms",
        runs=medians | {CPU: [float(np.median(busy)) * 1e3]},
        marks=[Mark(limit=budget * 10, name=f"<= 1% of the step, {budget * 10:.2f} ms")],
        notes=[
            f"{generated:,.0f} tokens are generated in {budget * 1e3:,.0f} ms: an append is {p50 / budget:.2%} of it, "
            f"{np.median(busy) / budget:.2%} by its own CPU"
        ],
    )
    yield Result(
        case="append and flush, p99",
        size=f"append of {size}",
        unit="ms",
        runs={OURS: [float(p99) * 1e3]},
        marks=[Mark(limit=PATIENCE * 1e3, name="<= 5 ms")],
    )
