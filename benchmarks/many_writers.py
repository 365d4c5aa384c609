"""Sixteen processes that append at once, 32 rollouts a batch, each flushed: until all is acknowledged.

Processes are started, and their rows made, before the clock runs. Afterwards every row must be there once. What meets
another transaction is tried again by each library's own rules, and above that by us until it succeeds; counted is how
often. SQLite is one database in WAL mode with `synchronous = NORMAL`, a blob a rollout.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sqlite3
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pyarrow as pa

import rollstore
from benchmarks import data
from benchmarks.contest import OURS, Contestant, Result, fastest, interleaved
from benchmarks.settings import Settings, installed

WRITERS, EACH, SCALE = 16, 32, 0.3
NEEDS = {"lance": "lance", "delta-rs": "deltalake"}
PATIENCE = 120.0


def results(settings: Settings) -> Iterator[Result]:
    names = [name for name in WAYS if name not in NEEDS or installed(NEEDS[name])]
    peers = [name for name in names if name != OURS]
    with Crew(max(settings.writes)) as crew:
        for writes in settings.writes:
            crew.retries.clear()
            times, _ = interleaved({name: crew.contestant(name, writes) for name in names}, settings.runs)
            yield Result(
                case=f"{WRITERS} writers",
                size=f"{writes} appends each",
                unit="s",
                runs=times,
                marks=[fastest(*peers, times=2)],
                notes=[f"tried again: {name} {count}" for name, count in crew.retries.items() if count],
            )


class Crew:
    """Processes that wait, with rows in hand, to be told where to write and how."""

    def __init__(self, most: int) -> None:
        """`most`: appends that a process can be asked for."""
        context = multiprocessing.get_context("spawn")
        self.retries: dict[str, int] = {}
        self._barrier = context.Barrier(WRITERS + 1)
        self._answers: Any = context.Queue()
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for number in range(WRITERS):
            mine, theirs = context.Pipe()
            process = context.Process(target=work, args=(number, most, theirs, self._barrier, self._answers))
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # one that died has said why
                pipe.send(None)
        for process in self._processes:
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()

    def contestant(self, name: str, writes: int) -> Contestant:
        def run(folder: Path) -> float:
            prepare, _, ids = WAYS[name]
            prepare(folder)
            for pipe in self._pipes:
                pipe.send((name, str(folder), writes))
            self._barrier.wait(PATIENCE)  # every process has imported what it needs and opened the store
            began = time.perf_counter()
            again = [self._answers.get(timeout=PATIENCE) for _ in range(WRITERS)]
            taken = time.perf_counter() - began
            self._barrier.wait(PATIENCE)  # everyone may close now, which is not timed
            self._barrier.wait(PATIENCE)
            if failed := [one for one in again if isinstance(one, str)]:
                raise RuntimeError(f"{name}: {failed[0]}")
            self.retries[name] = self.retries.get(name, 0) + sum(again)
            found, wanted = ids(folder), WRITERS * writes * EACH
            if len(found) != wanted or len(set(found)) != wanted:
                raise ValueError(f"{name}: wanted {wanted} rows once, got {len(found)}, {len(set(found))} distinct")
            return taken

        return run


def work(number: int, most: int, orders: Any, barrier: Barrier, answers: Any) -> None:
    """One process: for each order, open, wait for the others, append, and say how often it had to try again."""
    first = number * most * EACH
    tables = [data.table(EACH, first=first + n * EACH, scale=SCALE) for n in range(most)]
    while (order := orders.recv()) is not None:
        name, folder, writes = order
        append, close = WAYS[name][1](Path(folder))
        barrier.wait(PATIENCE)
        try:
            answers.put(sum(append(table) for table in tables[:writes]))
        except Exception as error:  # handed to the process that waits for the answer
            answers.put(f"{type(error).__name__}: {error}")
        barrier.wait(PATIENCE)
        close()
        barrier.wait(PATIENCE)


Append = Callable[[pa.Table], int]
Close = Callable[[], Any]


def _make_ours(folder: Path) -> None:
    rollstore.open(folder / "store", create=True)


def _ours(folder: Path) -> tuple[Append, Close]:
    writer = rollstore.open(folder / "store").writer()

    def append(table: pa.Table) -> int:
        writer.append(table)
        writer.flush()
        return 0

    return append, writer.close


def _ours_ids(folder: Path) -> list[str]:
    rows = rollstore.open(folder / "store").scan("rollouts", columns=["rollout_id"]).read_all()
    return rows["rollout_id"].to_pylist()


def _make_lance(folder: Path) -> None:
    import lance

    lance.write_dataset(data.table(8, scale=SCALE).slice(0, 0), str(folder / "lance"))


def _lance(folder: Path) -> tuple[Append, Close]:
    import lance

    def append(table: pa.Table) -> int:
        return _until_done(lambda: lance.write_dataset(table, str(folder / "lance"), mode="append"))

    return append, lambda: None


def _lance_ids(folder: Path) -> list[str]:
    import lance

    return lance.dataset(str(folder / "lance")).to_table(columns=["rollout_id"])["rollout_id"].to_pylist()


def _make_delta(folder: Path) -> None:
    import deltalake

    deltalake.DeltaTable.create(folder / "delta", data.table(8, scale=SCALE).schema)


def _delta(folder: Path) -> tuple[Append, Close]:
    import deltalake

    # An append conflicts with no other append, so the library may try its commit as often as it must.
    properties = deltalake.CommitProperties(max_commit_retries=10_000)

    def append(table: pa.Table) -> int:
        return _until_done(
            lambda: deltalake.write_deltalake(str(folder / "delta"), table, mode="append", commit_properties=properties)
        )

    return append, lambda: None


def _delta_ids(folder: Path) -> list[str]:
    import deltalake

    reader = deltalake.QueryBuilder().register("rows", deltalake.DeltaTable(folder / "delta"))
    return pa.table(reader.execute("SELECT rollout_id FROM rows").read_all())["rollout_id"].to_pylist()


def _make_sqlite(folder: Path) -> None:
    connection = sqlite3.connect(folder / "rows.sqlite")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE rows (id TEXT PRIMARY KEY, row BLOB) WITHOUT ROWID")
    connection.close()


def _sqlite(folder: Path) -> tuple[Append, Close]:
    from benchmarks.get import blobs

    connection = sqlite3.connect(folder / "rows.sqlite", timeout=60)
    connection.execute("PRAGMA synchronous = NORMAL")

    def append(table: pa.Table) -> int:
        rows = list(blobs(table))

        def insert() -> None:
            with connection:
                connection.executemany("INSERT INTO rows VALUES (?, ?)", rows)

        return _until_done(insert)

    return append, connection.close


def _sqlite_ids(folder: Path) -> list[str]:
    connection = sqlite3.connect(folder / "rows.sqlite")
    try:
        return [row[0] for row in connection.execute("SELECT id FROM rows")]
    finally:
        connection.close()


def _until_done(action: Callable[[], Any]) -> int:
    """How often it had to be tried again."""
    deadline = time.monotonic() + PATIENCE
    tries = 0
    while True:
        try:
            action()
        except (OSError, sqlite3.OperationalError, RuntimeError):
            tries += 1
            if time.monotonic() > deadline:
                raise
        else:
            return tries


WAYS: dict[str, tuple[Callable[[Path], None], Callable[[Path], tuple[Append, Close]], Callable[[Path], list[str]]]] = {
    OURS: (_make_ours, _ours, _ours_ids),
    "lance": (_make_lance, _lance, _lance_ids),
    "delta-rs": (_make_delta, _delta, _delta_ids),
    "sqlite": (_make_sqlite, _sqlite, _sqlite_ids),
}
