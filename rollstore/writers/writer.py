"""The writer: append, flush, seal, close."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import RollstoreError, StoreError, WriteError
from rollstore.schema import SYSTEM_COLUMNS, Rollout, prepare, table_of, to_table
from rollstore.schema.text import as_stored
from rollstore.store import frame
from rollstore.store.batching import filled
from rollstore.store.columns import held_types, publish_types, read_types
from rollstore.store.journal import Cut, Journal
from rollstore.store.names import new_id, part_name
from rollstore.store.part import without_null_columns
from rollstore.store.seal import Job, Sealer
from rollstore.store.store import Store

# Arrow looks for pandas at the first value it makes. Not in a writer's thread, a forked child or at exit, where the
# import of something large may fail or be cut in two: here, where a writer is about to be made.
pa.scalar("", pa.string())

_T = TypeVar("_T")
Appendable = Rollout | Sequence[Rollout] | pa.RecordBatch | pa.Table

SEAL_BYTES = 64 << 20
"""Bytes of a journal after which it becomes a part."""

FRAME_BYTES = 1 << 20
"""Decoded bytes that are written without being asked to."""


class Writer:
    """Appends rows to one table. Threads may share it; a forked child starts afresh and leaves the parent's file alone.

    `append` returns when the rows are in the writer, `flush` when they survive the death of the process,
    `flush(sync=True)` when they survive power loss.
    """

    def __init__(
        self, store: Store, *, table: str = "rollouts", run: str | None = None, source: str | None = None,
        seal_bytes: int = SEAL_BYTES,
    ) -> None:  # fmt: skip
        table_of(table)
        for name, value in (("run", run), ("source", source)):
            if value is not None and not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"writer: {name}: wanted text, got {type(value).__name__}")
        if run == "":  # as from a variable that is not set
            raise ValueError("writer: run: wanted a name, or None, got ''")
        if not seal_bytes > 0:  # a NaN is not
            raise ValueError(f"writer: seal_bytes: wanted more than 0, got {seal_bytes}")
        self.table, self.source, self.seal_bytes = table, source, seal_bytes
        self.run = None if run is None else as_stored(run)
        self._store = store
        self._filesystem = store.filesystem
        self._types = read_types(store.filesystem)
        self._closed = False
        self._start()
        _WRITERS.add(self)

    def _start(self) -> None:
        """State of a writer that has written nothing, under an identity of its own."""
        self._lock = threading.RLock()
        self._id, self._sequence = new_id(), 0
        self._columns: set[str] = set()
        self._pending = _Pending([], 0)
        self._pending_bytes = 0
        self._written = _Written(0)
        self._sealer = Sealer(self._filesystem)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, data: Appendable) -> None:
        """Take rows. All of them or none: SchemaError lists every problem of every row, ValueError names another run.

        Raises WriteError where earlier rows fill the buffer and cannot be written; the rows of this call are then not
        taken, and the writer goes on when there is room.
        """
        table = self._checked(data)
        with self._lock:
            self._open_for_use()
            table = self._guard(lambda: publish_types(self._filesystem, table, self._types, self._held_types))
            if self._pending_bytes >= FRAME_BYTES:
                self._guard(self._write)
            self._pending.tables.append(table)
            self._pending_bytes += table.get_total_buffer_size()  # the parent's, of a slice: an early write, no harm

    def flush(self, *, sync: bool = False) -> None:
        """Rows taken so far survive the death of this process; with `sync`, power loss.

        Raises WriteError; the rows then stay in the writer, and a later flush tries again.
        """
        with self._lock:
            self._open_for_use()
            self._guard(self._write)
            if sync:
                self._guard(self._sync)

    def seal(self) -> None:
        """Rows taken so far become a part. Returns when it is published. Raises WriteError."""
        with self._lock:
            self._open_for_use()
            self._guard(self._write)
            self._rotate()
            self._guard(self._sealer.drain)

    def close(self) -> None:
        """Flush, seal, and let the files go. Raises WriteError; the rows then wait in a journal, or in the writer.

        Closing twice is no error; closing again after an error tries again.
        """
        with self._lock:
            if not self._closed:
                self.seal()
                self._closed = True

    def rollout(self, **fields: Any) -> Any:
        """Record one rollout turn by turn; see `rollstore.writers.recorder.Recorder`."""
        from rollstore.writers.recorder import Recorder  # a sibling that builds on this class

        return Recorder(self, **fields)

    def _checked(self, data: Appendable) -> pa.Table:
        if isinstance(data, Rollout):
            data = [data]
        if isinstance(data, pa.RecordBatch | pa.Table):
            table = _copied(prepare(data, self.table))
        elif self.table == "rollouts":
            table = to_table(list(data))
        else:
            raise TypeError(f"{self.table}: wanted a RecordBatch or Table, got {type(data).__name__}")
        if self.run is not None and "run_id" in table.column_names:
            table = _with_run(table, self.run)
        if "written_at" in table.column_names:
            table = _filled(table, "written_at", pa.scalar(datetime.now(UTC), table.schema.field("written_at").type))
        return table

    def _write(self) -> None:
        """Everything pending goes into the journal; if the last one was abandoned, a new one takes over first."""
        self._settle()
        if self._written.abandoned is not None:
            self._open(self._written.abandoned.schema)
        self._drop_written()  # of a call that was interrupted
        if not self._pending.tables:
            return
        rows = pa.concat_tables(self._pending.tables, promote_options="default")
        self._columns |= set(without_null_columns(rows).column_names)
        journal = self._written.journal
        if journal is not None and not journal.columns >= self._columns:
            self._rotate()  # a journal's columns are fixed: the first value of another column begins the next journal
        schema = _journal_schema(rows.schema, self._columns)
        try:
            kept = rows.select([name for name in rows.column_names if name in self._columns])
            for batch in filled(kept.to_batches(), FRAME_BYTES):
                journal = self._written.journal or self._open(schema)
                self._put(journal, batch)
                if journal.size >= self.seal_bytes:
                    self._rotate()
                    self._sealer.start()
        finally:
            self._drop_written()

    def _drop_written(self) -> None:
        """Rows that are in a journal by now are pending no more."""
        pending, rows = self._pending, self._written.rows
        if rows > pending.after:
            rest = pa.concat_tables(pending.tables, promote_options="default").slice(rows - pending.after)
            self._pending = _Pending([rest] if rest.num_rows else [], rows)
            self._pending_bytes = rest.nbytes if rest.num_rows else 0

    def _put(self, journal: Journal, batch: pa.RecordBatch) -> None:
        numbers = range(journal.rows, journal.rows + batch.num_rows)
        origin = {
            "written_by": pa.array([journal.name] * batch.num_rows, pa.string()),
            "written_row": pa.array(numbers, pa.int64()),
        }
        held = dict(zip(batch.schema.names, batch.columns, strict=True)) | origin
        arrays = [held[f.name] if f.name in held else pa.nulls(batch.num_rows, f.type) for f in journal.schema]
        message = frame.encode_message(pa.RecordBatch.from_arrays(arrays, schema=journal.schema))
        journal.write(message, batch.num_rows)

    def _open(self, schema: pa.Schema) -> Journal:
        """The next journal. It takes over the unsynced rows of an abandoned one, which then keeps only the synced."""
        old = self._written.abandoned
        cut = None if old is None else Cut(old.name, old.synced_rows)
        self._sequence += 1
        name = part_name(self._id, self._sequence)
        journal = Journal(
            self._filesystem, self.table, name, schema, self.source, cut, [] if old is None else old.unsynced
        )
        self._written = self._written._replace(unnamed=journal)
        journal.publish()
        self._begin(journal)
        return journal

    def _begin(self, journal: Journal) -> None:
        """The next journal has its name, so by now what it took over counts there."""
        before, _, old = self._written[:3]
        job = None if old is None else Job(old, old.synced_rows, last=False)
        self._written = _Written(before + (0 if old is None else old.synced_rows), journal, leaving=job)
        self._hand_over()

    def _rotate(self) -> None:
        journal = self._written.journal
        if journal is not None:
            self._written = _Written(self._written.rows, leaving=Job(journal, journal.rows, last=True))
            self._hand_over()

    def _hand_over(self) -> None:
        if self._written.leaving is not None:
            self._sealer.add(self._written.leaving)
            self._written = self._written._replace(leaving=None)

    def _settle(self) -> None:
        """Finish what an earlier call left half done: a journal may have its name by now, be over, or have broken."""
        unnamed = self._written.unnamed
        if unnamed is not None:
            if unnamed.is_published():
                self._begin(unnamed)
            else:
                self._written = self._written._replace(unnamed=None)
                unnamed.close()
        self._hand_over()
        journal = self._written.journal
        if journal is not None and journal.broken:
            self._written = _Written(self._written.before, abandoned=journal)

    def _sync(self) -> None:
        """Rows in the journal, and those in journals being sealed, survive power loss."""
        journal = self._written.journal
        if journal is not None:
            journal.sync()
        self._sealer.drain()

    def _held_types(self) -> dict[str, pa.DataType]:
        """The types of the caller's columns in the rows that can be read."""
        schemas: list[pa.Schema] = []
        with self._store.snapshot() as snapshot:
            for table, names in snapshot.names.items():
                for name in names:
                    with suppress(RollstoreError):  # a damaged part keeps nobody from writing
                        schemas.append(snapshot.part(table, name).schema)
            schemas += [view.schema for view in snapshot.journals]
        return held_types(schemas, {})

    def _open_for_use(self) -> None:
        if self._closed:
            raise StoreError(f"{self._store.path}: the writer is closed")

    def _guard(self, action: Callable[[], _T]) -> _T:
        """An operating system's refusal as a typed error."""
        try:
            return action()
        except RollstoreError:
            raise
        except OSError as error:
            raise WriteError(f"{self._store.path}: {error.strerror or error}; nothing acknowledged is lost") from error

    def after_fork(self) -> None:
        """In a forked child: the file, its lock and the rows under way belong to the parent."""
        journals, sealer = self._written.journals, self._sealer
        self._start()  # first: the lock may be held by a thread that is not here
        for journal in journals:
            journal.close()
        sealer.forget()


def _copied(table: pa.Table) -> pa.Table:
    """The same rows in memory of their own: Arrow may look at arrays of the caller's, who uses them again."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


class _Pending(NamedTuple):
    """Rows that wait to be written, from those on that come `after` so many of this writer's rows."""

    tables: list[pa.Table]
    after: int


class _Written(NamedTuple):
    """Where this writer's rows stand: `before` in journals that are over, the others in the one under way, or in one
    whose file refused and which nothing has taken over yet. `unnamed` is the next one while it gets its name, `leaving`
    one that is over until the sealer has it.

    Set in one step, as is all that a journal counts, so that an interrupt in the middle of a flush (Ctrl-C comes
    between any two steps) neither loses nor doubles a row: what is written is what the journals say.
    """

    before: int
    journal: Journal | None = None
    abandoned: Journal | None = None
    unnamed: Journal | None = None
    leaving: Job | None = None

    @property
    def rows(self) -> int:
        own = self.journal or self.abandoned
        return self.before + (0 if own is None else own.rows)

    @property
    def journals(self) -> list[Journal]:
        """Those whose files are open here."""
        leaving = None if self.leaving is None else self.leaving.journal
        return [own for own in (self.journal, self.abandoned, self.unnamed, leaving) if own is not None]


def _with_run(table: pa.Table, run: str) -> pa.Table:
    value = pa.scalar(run, pa.string())  # typed: Arrow looks for pandas each time it has to guess
    column = table["run_id"]
    if column.null_count < len(column):
        differs = pc.indices_nonzero(pc.fill_null(pc.not_equal(column, value), pa.scalar(False, pa.bool_())))
        if len(differs):
            row = differs[0].as_py()
            raise ValueError(f"run_id: row {row} has {column[row].as_py()!r}, wanted {run!r}, the run of this writer")
    return _filled(table, "run_id", value)


def _filled(table: pa.Table, name: str, value: pa.Scalar) -> pa.Table:
    """The table with the nulls of one column replaced."""
    column, place = table[name], table.schema.get_field_index(name)
    if not column.null_count:
        return table
    whole = column.null_count == len(column)
    filled = pa.repeat(value, len(column)) if whole else pc.fill_null(column, value)
    return table.set_column(place, table.schema.field(place), filled)


def _journal_schema(schema: pa.Schema, columns: set[str]) -> pa.Schema:
    """The fields that have a value so far, in their order, and always the rows' origin at the end."""
    own = [column.field for column in SYSTEM_COLUMNS]
    names = {field.name for field in own}
    return pa.schema([*(f for f in schema if f.name in columns and f.name not in names), *own], schema.metadata)


_WRITERS: weakref.WeakSet[Writer] = weakref.WeakSet()


def _after_fork() -> None:
    for writer in list(_WRITERS):
        writer.after_fork()


os.register_at_fork(after_in_child=_after_fork)
