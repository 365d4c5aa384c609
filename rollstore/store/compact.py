"""Fewer, bigger parts; and the removal of what no reader can need any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from rollstore.schema import TABLES
from rollstore.store import commits, frame
from rollstore.store.filesystem import Filesystem
from rollstore.store.names import PART, STAGED, new_id, part_name, stem
from rollstore.store.part import Part, write_part
from rollstore.store.snapshot import LEASES, Snapshot, fit

PART_BYTES = 256 << 20
"""Size on disk that compaction aims at."""

DECODED_BYTES = 1 << 30
"""Decoded bytes that one output may hold, however well they compress: it is built in memory."""

_GROUP = ("run_id", "step", "group_id")
Progress = Callable[[str, int], None]


@dataclass
class Report:
    """Names by table: parts written, parts they replaced."""

    added: dict[str, list[str]] = field(default_factory=dict)
    replaced: dict[str, list[str]] = field(default_factory=dict)


def compact(
    snapshot: Snapshot,
    *,
    part_bytes: int = PART_BYTES,
    codec: frame.Codec = "zstd",
    progress: Progress | None = None,
) -> Report:
    """Merge the parts of a snapshot that are smaller than `part_bytes`, the rows of a group together.

    Each output is one entry of the log; another compaction that was faster makes this one drop its output. Raises
    CorruptionError where an input is damaged, OSError where the disk refuses; nothing is lost then.
    """
    report = Report()
    writer, sequence, log = new_id(), 0, snapshot.log
    for table in TABLES:
        for inputs, rows in _bins(snapshot, table, part_bytes, progress):
            sequence += 1
            name = part_name(writer, sequence, compacted=True)
            write_part(snapshot.filesystem, table, name, _grouped(rows), codec=codec)
            replaced = [part.name for part in inputs]
            after = commits.append(
                snapshot.filesystem, log, commits.Commit(add={table: [name]}, replace={table: replaced})
            )
            if after is None:
                snapshot.filesystem.delete(f"{table}/{name}{PART}")  # no entry names it: nobody has read it
                log = commits.read_log(snapshot.filesystem, log)
                continue
            log = after
            report.added.setdefault(table, []).append(name)
            report.replaced.setdefault(table, []).extend(replaced)
    return report


def _bins(
    snapshot: Snapshot, table: str, part_bytes: int, progress: Progress | None
) -> Iterator[tuple[list[Part], pa.Table]]:
    """Parts to merge into one, with their rows; never a single part."""
    small = [part for part in snapshot.parts(table) if part.size < part_bytes]
    schema = snapshot.schema(table)
    inputs: list[Part] = []
    batches: list[pa.RecordBatch] = []
    size = decoded = 0
    for part in small if len(small) > 1 else []:
        rows = [fit(batch, schema, table) for batch in part.batches()]
        bytes_ = sum(batch.nbytes for batch in rows)
        if inputs and (size + part.size > part_bytes or decoded + bytes_ > DECODED_BYTES):
            if len(inputs) > 1:
                yield inputs, pa.Table.from_batches(batches, schema)
            inputs, batches, size, decoded = [], [], 0, 0
        inputs.append(part)
        batches += rows
        size, decoded = size + part.size, decoded + bytes_
        if progress is not None:
            progress(part.file, part.size)
    if len(inputs) > 1:
        yield inputs, pa.Table.from_batches(batches, schema)


def _grouped(rows: pa.Table) -> pa.Table:
    """The rows, those of one prompt group next to each other; groups, and rows in them, in the order they came."""
    if "group_id" not in rows.column_names:
        return rows
    keys = rows.select(list(_GROUP)).to_pylist()
    first: dict[tuple[object, ...], int] = {}
    order = [
        number if key["group_id"] is None else first.setdefault(tuple(key[name] for name in _GROUP), number)
        for number, key in enumerate(keys)
    ]
    if order == sorted(order):
        return rows
    return rows.take(pa.array(np.argsort(np.array(order), kind="stable")))


def vacuum(filesystem: Filesystem, *, grace: float) -> list[str]:
    """Delete retired parts, outputs of compactions that died, and what the dead left in staging; returns the files.

    Only what is older than `grace` seconds by the store's own clock, and what no open snapshot on this machine needs.
    Retired names stay in the log: none of them ever counts again. Raises OSError.
    """
    log = commits.read_log(filesystem)
    oldest = _oldest_lease(filesystem, log.number)
    before = _now(filesystem) - grace
    deleted: list[str] = []

    def delete(file: str) -> None:
        filesystem.delete(file)
        deleted.append(file)

    for table in TABLES:
        for file in filesystem.list(table):
            name, path = stem(file, PART), f"{table}/{file}"
            if name is None:
                continue
            with suppress(FileNotFoundError):
                retired = log.replaced.get((table, name))
                if retired is not None:
                    if retired <= oldest and filesystem.modified(commits.entry(retired)) <= before:
                        delete(path)
                elif name.startswith("c-") and not log.knows(table, name) and filesystem.modified(path) <= before:
                    delete(path)
    for file in filesystem.list("staging"):
        with suppress(FileNotFoundError):
            if file.endswith(STAGED) and filesystem.modified(f"staging/{file}") <= before:
                lock = filesystem.lock(f"staging/{file}")
                if lock is not None:
                    delete(f"staging/{file}")
                    lock.close()
    return deleted


def _oldest_lease(filesystem: Filesystem, number: int) -> int:
    """The entry of the log that every open snapshot has read; leases of the dead are removed on the way."""
    oldest = number
    for file in filesystem.list("cache"):
        if not file.startswith(LEASES):
            continue
        with suppress(FileNotFoundError):
            lock = filesystem.lock(f"cache/{file}")
            if lock is None:
                oldest = min(oldest, int(file.removeprefix(LEASES).partition("-")[0]))
            else:
                filesystem.delete(f"cache/{file}")
                lock.close()
    return oldest


def _now(filesystem: Filesystem) -> float:
    """The store's clock, read off a fresh file: ages never compare two machines' clocks."""
    path = f"staging/{new_id()}{STAGED}"
    handle = filesystem.create(path)
    try:
        return filesystem.modified(path)
    finally:
        handle.close()
        filesystem.delete(path)
