"""From the store to packed torch batches: one epoch, groups shuffled and kept whole, at most 16,384 tokens a batch.

Every contestant opens what it has, and gives for each batch the same tensors (`benchmarks.packing.Packed`); ours gives
more, a `TokenBatch` with what samplers, spans and endings say. Peers are handed the plan of an epoch, groups by batch,
for nothing. Row formats keep a rollout (JSONL, pickle) or a group (Streaming, LitData) a sample; columnar ones read the
columns that are needed. With two workers each is a process of its own that loads half of the batches. `raw` is pyarrow
reading the same columns of the same parts and copying every buffer once into a tensor: no order, no batches.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from benchmarks import data, formats, place
from benchmarks.contest import OURS, Contestant, Result, fastest, interleaved
from benchmarks.formats import Plan
from benchmarks.get import drop
from benchmarks.settings import Settings, installed

BUDGET = 16_384
HEAD = 32
BLOCK = 2_000
ROWS_UP_TO = 300_000
"""Actions with heads up to which the formats by row take part: beyond it they take minutes."""


def results(settings: Settings) -> Iterator[Result]:
    if not installed("torch"):
        return
    for tokens in settings.tokens:
        yield from at(data.count(tokens), 0, f"{tokens / 1e6:g} M tokens", settings.runs, tokens == settings.tokens[-1])
    for actions in settings.actions:
        by_row = actions <= ROWS_UP_TO
        yield from at(data.of_actions(actions), HEAD, f"{actions / 1e6:g} M actions", settings.runs, False, by_row)


def at(rollouts: int, head_size: int, size: str, runs: int, largest: bool, by_row: bool = True) -> Iterator[Result]:
    folder, plan = made(rollouts, head_size, by_row)
    names = [name for name in formats.names() if by_row or name not in formats.BY_ROW]
    peers = tuple(name for name in names if name not in (OURS, "raw"))
    marks = [fastest(*peers, times=3), fastest("raw", times=0.5)]
    if head_size:
        marks = [fastest("parquet", times=5)]
    case = f"load, heads of {head_size}" if head_size else "load"

    def one(name: str) -> Contestant:
        return lambda _: load(name, folder, plan, bool(head_size))

    times, cpu = interleaved({name: one(name) for name in names}, runs)
    yield Result(case=case, size=size, unit="s", runs=times, marks=marks, details={"cpu": cpu})
    if largest:
        cold = {name: partial(_cold, folder, one(name)) for name in names}
        times, cpu = interleaved(cold, runs)
        yield Result(case=f"{case}, cold", size=size, unit="s", runs=times, marks=marks, details={"cpu": cpu})
        yield two_workers(folder, plan, case, size, runs, peers)


def load(name: str, folder: Path, plan: Plan, heads: bool, rank: int = 0, world_size: int = 1) -> float:
    """Seconds of one epoch, or one rank's share. Raises ValueError where not every token came."""
    began = time.perf_counter()
    tokens = formats.load(name, folder, plan, heads, rank, world_size)
    taken = time.perf_counter() - began
    if world_size == 1 and tokens != plan.tokens:
        raise ValueError(f"{name}: wanted {plan.tokens} tokens, got {tokens}")
    return taken


def two_workers(folder: Path, plan: Plan, case: str, size: str, runs: int, peers: tuple[str, ...]) -> Result:
    with multiprocessing.get_context("spawn").Pool(2) as pool:

        def both(name: str) -> Contestant:
            def run(_: Path) -> float:
                began = time.perf_counter()
                pool.starmap(load, [(name, folder, plan, False, rank, 2) for rank in range(2)], chunksize=1)
                return time.perf_counter() - began

            return run

        times, _ = interleaved({name: both(name) for name in (OURS, *peers)}, runs)
    marks = [fastest(*peers, times=3)]
    return Result(case=f"{case}, 2 workers", size=size, unit="s", runs=times, marks=marks)


def _cold(folder: Path, run: Contestant, _: Path) -> float | None:
    drop(folder)
    return run(folder)


def made(rollouts: int, head_size: int, by_row: bool) -> tuple[Path, Plan]:
    """The rows in every format, made unless they are there, and the plan of an epoch."""
    folder = place.folder() / f"load-{rollouts}-{head_size}-{'all' if by_row else 'columns'}"
    kept = folder / "lengths.npy"
    if not kept.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        lengths: list[np.ndarray] = []
        with contextlib.ExitStack() as stack:
            writers = formats.writers(folder, stack, by_row)
            for table in data.tables(rollouts, block=BLOCK, head_size=head_size):
                lengths.append(pc.list_value_length(table["tokens"]).to_numpy())
                for write in writers:
                    write(table)
        os.sync()
        np.save(kept, np.concatenate(lengths))
    return folder, Plan.of(np.load(kept), BUDGET)
