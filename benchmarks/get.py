"""One rollout by its id, all its columns, among a thousand to a million in parts of 2,000; warm and cold.

Warm: ids drawn at random from all, one call each, the store or connection open, its files read just before. Cold: the
page cache of every file is dropped before each call (SQLite has one of its own besides). SQLite keeps each rollout as
one blob (msgpack of its columns) under a primary key: it is the floor, printed beside and held to no mark, for it can
answer nothing else.
`raw` is pyarrow decoding a batch at random out of the same parts. Everything is made once and kept.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import numpy as np
import pyarrow as pa

import rollstore
from benchmarks import data, place
from benchmarks.contest import OURS, Mark, Result
from benchmarks.settings import Settings, installed
from rollstore.schema import from_table

PART = 2_000
CALLS, COLD_CALLS = 200, 20
ENOUGH = 2.0
RAW = "raw"
Get = Callable[[str], Any]


def results(settings: Settings) -> Iterator[Result]:
    found: list[float] = []
    for rollouts in settings.rollouts:
        result, cold = at(rollouts, settings.runs)
        found.append(result.middle(OURS))
        yield result
        yield cold
    yield Result(
        case="get, growth",
        size=f"{settings.rollouts[0]:,} to {settings.rollouts[-1]:,} rollouts",
        unit="x",
        runs={OURS: [found[-1] / found[0]]},
        marks=[Mark(limit=2.0)],
    )


def at(rollouts: int, runs: int) -> tuple[Result, Result]:
    folder = made(rollouts)
    with contextlib.ExitStack() as stack:
        ways = opened(folder, stack)
        firsts = {name: _timed(get, data.ids(np.array([rollouts // 2]))[0].as_py()) for name, get in ways.items()}
        rng = np.random.default_rng(1)
        warm: dict[str, list[float]] = {name: [] for name in ways}
        cold: dict[str, list[float]] = {name: [] for name in ways}
        spread: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(runs + 1):
            ids = data.ids(rng.integers(0, rollouts, CALLS)).to_pylist()
            for name, get in ways.items():
                fill(folder / (OURS if name == RAW else name))
                taken = _calls(get, ids)
                if number:
                    warm[name].append(float(np.median(taken)) * 1e3)
                    spread[name] += taken
        for _ in range(runs):
            ids = data.ids(rng.integers(0, rollouts, COLD_CALLS)).to_pylist()
            for name, get in ways.items():
                taken = []
                for one in ids:
                    drop(folder / (OURS if name == RAW else name))
                    taken.append(_timed(get, one))
                cold[name].append(float(np.median(taken)) * 1e3)
    peers = tuple(name for name in ways if name not in (OURS, RAW, "sqlite"))
    size = f"{rollouts:,} rollouts, {-(-rollouts // PART)} parts"
    tails = {name: [float(q) * 1e3 for q in np.quantile(taken, [0.5, 0.9, 0.99])] for name, taken in spread.items()}
    first = ", ".join(f"{name} {seconds * 1e3:,.0f} ms" for name, seconds in firsts.items())
    # "No peer faster than 1.5x ours": ours takes at most 1.5 times as long as the fastest of them.
    marks = [Mark(limit=1.0, name="<= 1 ms"), Mark(limit=1.5, against=peers)]
    return (
        Result(
            case="get, warm", size=size, unit="ms", runs=warm, marks=marks,
            notes=[f"first call after opening: {first}"], details={"p50, p90, p99 in ms": tails},
        ),
        Result(case="get, cold", size=size, unit="ms", runs=cold, marks=[Mark(limit=1.5, against=peers)]),
    )  # fmt: skip


def opened(folder: Path, stack: contextlib.ExitStack) -> dict[str, Get]:
    """The ways to get a rollout; each must give the row asked for, and all of its columns."""
    store = rollstore.open(folder / OURS)
    ways: dict[str, Get] = {OURS: lambda one: store.get(one)[0].rollout_id, RAW: _raw(store)}
    connection = stack.enter_context(contextlib.closing(sqlite3.connect(folder / "sqlite" / "rows.sqlite")))
    blob = "SELECT row FROM rows WHERE id = ?"
    ways["sqlite"] = lambda one: msgspec.msgpack.decode(connection.execute(blob, (one,)).fetchone()[0])["rollout_id"]
    duck = stack.enter_context(contextlib.closing(duckdb.connect()))
    duck.execute("SET enable_object_cache = true")
    duck.execute(f"CREATE VIEW rows AS SELECT * FROM '{folder / 'duckdb-parquet'}/*.parquet'")
    parquet = "SELECT * FROM rows WHERE rollout_id = ?"
    ways["duckdb-parquet"] = lambda one: duck.execute(parquet, [one]).to_arrow_table()["rollout_id"][0].as_py()
    if installed("lance"):
        import lance

        dataset = lance.dataset(str(folder / "lance"))
        ways["lance"] = lambda one: dataset.to_table(filter=f"rollout_id = '{one}'")["rollout_id"][0].as_py()
    return ways


def _raw(store: rollstore.Store) -> Get:
    """pyarrow, from files that are open and mapped: a batch at random, decoded; no look-up, no check, no record."""
    files = [pa.ipc.open_file(pa.memory_map(part.path)) for part in store.parts("rollouts")]
    rng = np.random.default_rng(2)

    def get(one: str) -> str:
        file = files[int(rng.integers(len(files)))]
        file.get_batch(int(rng.integers(file.num_record_batches)))
        return one

    return get


def made(rollouts: int) -> Path:
    """The stores of that many rollouts, made unless they are there."""
    folder = place.folder() / f"get-{rollouts}"
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    for name in (OURS, "sqlite", "duckdb-parquet", "lance"):
        (folder / name).mkdir(parents=True)
    store = rollstore.open(folder / OURS, create=True)
    connection = sqlite3.connect(folder / "sqlite" / "rows.sqlite")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE rows (id TEXT PRIMARY KEY, row BLOB) WITHOUT ROWID")
    for number, table in enumerate(data.tables(rollouts, block=PART)):
        store.append("rollouts", table)
        with connection:
            connection.executemany("INSERT INTO rows VALUES (?, ?)", blobs(table))
        _to_parquet(table, folder / "duckdb-parquet" / f"{number:05d}.parquet")
        if installed("lance"):
            import lance

            lance.write_dataset(table, str(folder / "lance"), mode="append" if number else "overwrite")
    connection.close()
    if installed("lance"):
        import lance

        # As their guide has it for point look-ups: a BTREE index over the id, after the data.
        lance.dataset(str(folder / "lance")).create_scalar_index("rollout_id", "BTREE")
    os.sync()  # only clean pages can be dropped from the cache
    (folder / "done").touch()
    return folder


def blobs(table: pa.Table) -> Iterator[tuple[str, bytes]]:
    from benchmarks import peers

    for row in from_table(table):
        held = peers.arrays(row)
        packed = {name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in held.items()}
        yield row.rollout_id, msgspec.msgpack.encode(packed)


def _to_parquet(table: pa.Table, path: Path) -> None:
    """By DuckDB, which writes bloom filters for columns that it keeps in a dictionary: hence the limit's size."""
    with contextlib.closing(duckdb.connect()) as connection:
        connection.register("rows", table)
        connection.execute(
            f"COPY rows TO '{path}' (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 2048, "
            f"DICTIONARY_SIZE_LIMIT {2 * PART}, STRING_DICTIONARY_PAGE_SIZE_LIMIT 1048576)"
        )


def _calls(get: Get, ids: list[str]) -> list[float]:
    """Seconds of each call; a slow way stops after some seconds, with fewer."""
    taken: list[float] = []
    for one in ids:
        taken.append(_timed(get, one))
        if sum(taken) > ENOUGH:
            break
    return taken


def _timed(get: Get, one: str) -> float:
    began = time.perf_counter()
    found = get(one)
    taken = time.perf_counter() - began
    if found != one:
        raise ValueError(f"get: wanted {one}, got {found}")
    return taken


def fill(folder: Path) -> None:
    """Read every file of a folder: a system may give up pages that nobody asked for in a while."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 22):
                    pass


def drop(folder: Path) -> None:
    """Drop the page cache of every file in a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
