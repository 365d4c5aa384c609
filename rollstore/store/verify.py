"""Check a snapshot whole: every byte under its sum, every rule of the schema, every promise between rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Literal

import pyarrow as pa

from rollstore.errors import RemoteError, RollstoreError
from rollstore.schema import TABLES, problems
from rollstore.store import commits, frame
from rollstore.store.ahead import ahead
from rollstore.store.columns import FOLDER, read_types
from rollstore.store.crosscheck import Rows
from rollstore.store.extents import Extents
from rollstore.store.finding import Finding
from rollstore.store.journal import JournalView, journal_file
from rollstore.store.names import PART, stem
from rollstore.store.part import Part
from rollstore.store.recover import orphans
from rollstore.store.snapshot import Snapshot

_RUN, _TOGETHER = 4, 16 << 20
"""Batches that are asked together whether anything is wrong with them, if they take at most so many bytes."""

Progress = Callable[[str, int], None]


def verify(snapshot: Snapshot, progress: Progress | None = None) -> list[Finding]:
    """Everything wrong with a snapshot, in order of table and file; an empty list where it is whole.

    `progress` is called with the file and the number of bytes of each batch read.
    """
    found: list[Finding] = []
    extents = Extents() if any(_any_of(snapshot, table) for table in TABLES if table != "rollouts") else None
    segments = Rows("rollouts", extents=extents)
    for table in TABLES:  # the rollouts first
        rows = segments if table == "rollouts" else Rows(table, extents=extents, segments=segments)
        for source in _sources(snapshot, table, found):
            found += _file(source, rows, progress)
        found += rows.findings()
    found += _rest(snapshot)
    return found


def _any_of(snapshot: Snapshot, table: str) -> bool:
    return bool(snapshot.names[table]) or any(view.table == table for view in snapshot.journals)


def _sources(snapshot: Snapshot, table: str, found: list[Finding]) -> Iterator[Part | JournalView]:
    for name in snapshot.names[table]:
        try:
            part = snapshot.part(table, name)
            part.check_head()
            yield part
        except RemoteError:
            raise  # the way there failed, and says nothing about the part
        except (RollstoreError, OSError) as error:
            if (table, name) not in snapshot.orphans:
                found.append(_error("damaged", table, f"{table}/{name}{PART}", str(error)))
    yield from (view for view in snapshot.journals if view.table == table)


def _file(source: Part | JournalView, rows: Rows, progress: Progress | None) -> Iterator[Finding]:
    """The batches of one file: sums, Arrow's validation, the schema's rules. Good rows go to the checks across rows."""
    table = source.table
    runs = (range(first, min(first + _RUN, source.batch_count)) for first in range(0, source.batch_count, _RUN))
    batches = chain.from_iterable(ahead(lambda run: _batches(source, run), runs))
    for number, (batch, found) in enumerate(batches):
        yield from found
        if batch is not None and (missing := _missing(batch, table)):
            yield _error("null", table, source.file, f"{missing}: wanted a value in every row", batch=number)
        elif batch is not None:
            rows.add(source, number, batch)
        if progress is not None:
            place = source.tail.batches[number] if isinstance(source, Part) else source.messages[number]
            progress(source.file, place.length)


def _batches(source: Part | JournalView, numbers: range) -> list[tuple[pa.RecordBatch | None, list[Finding]]]:
    """Neighbouring batches, None where one is damaged, and what is wrong with each."""
    table = source.table
    read: list[tuple[pa.RecordBatch | None, list[Finding]]] = []
    for number in numbers:
        try:
            read.append((source.batch(number), []))
        except RemoteError:
            raise
        except (RollstoreError, OSError) as error:
            read.append((None, [_error("damaged", table, source.file, str(error), batch=number)]))
    whole = [batch for batch, _ in read if batch is not None]
    # The rules take half as long over few rows as over many: each batch is asked alone only where something is wrong.
    few = sum(batch.get_total_buffer_size() for batch in whole) <= _TOGETHER
    if whole and not (few and not problems(pa.Table.from_batches(whole), table)):
        for number, (batch, found) in zip(numbers, read, strict=True):
            wrong = [] if batch is None else problems(pa.Table.from_batches([batch]), table)
            found += [_error(p.kind, table, source.file, str(p), batch=number, row=p.row) for p in wrong]
    return read


def _missing(batch: pa.RecordBatch, table: str) -> str | None:
    """A column that every row of ours has, and some row here has not: its rows cannot be told apart."""
    wanted = {"written_by": pa.string(), "written_row": pa.int64()}
    wanted |= {"rollout_id": pa.string(), "segment": pa.int32()} if table == "rollouts" else {}
    for name, type_ in wanted.items():
        number = batch.schema.get_field_index(name)
        if number < 0 or batch.column(number).null_count or not batch.column(number).type.equals(type_):
            return name
    return None


def _rest(snapshot: Snapshot) -> Iterator[Finding]:
    """What belongs to no table: the log, the columns' types, unfinished journals, files that are none of ours."""
    try:
        commits.read_log(snapshot.filesystem, whole=True)
        types = read_types(snapshot.filesystem)
    except RemoteError:
        raise
    except RollstoreError as error:
        yield _error("damaged", "", commits.FOLDER, str(error))
        types = {}
    for source in _opened(snapshot):
        for field in source.schema:
            if field.name.startswith("x_") and types.get(field.name) != field.type:
                wanted = types.get(field.name) or f"a file in {FOLDER}/ that says its type"
                message = f"{field.name}: wanted {wanted}, got {field.type}"
                yield _error("wrong_type", source.table, source.file, message)
    for name, error in snapshot.unreadable.items():
        yield _error("damaged", "", journal_file(name), str(error))
    for view in snapshot.journals:
        if view.rest:
            rest = view.handle.read(view.end, view.rest)
            level: Literal["error", "note"] = "note" if frame.is_unfinished(rest) else "error"
            message = f"{view.rest} bytes after the last whole batch"
            yield Finding(level=level, kind="torn", table=view.table, part=journal_file(view.name), message=message)
    for file in orphans(snapshot.filesystem, snapshot.log):
        # A file under one of our names may have been a part once; any other is only in the way.
        level = "error" if stem(file.rpartition("/")[2], PART) else "note"
        yield Finding(
            level=level, kind="orphan", table=file.partition("/")[0], part=file, message="no part; never read"
        )


def _opened(snapshot: Snapshot) -> Iterator[Part | JournalView]:
    for table in TABLES:
        yield from (part for name in snapshot.names[table] if (part := snapshot.cache.parts.get((table, name))))
    yield from snapshot.journals


def _error(kind: str, table: str, part: str, message: str, batch: int | None = None, row: int | None = None) -> Finding:
    return Finding(level="error", kind=kind, table=table, part=part, batch=batch, row=row, message=message)
