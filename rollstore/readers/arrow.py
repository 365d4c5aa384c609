"""A table of a snapshot as an Arrow dataset: projected and filtered by Arrow, every part checked before it opens."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from rollstore.errors import CorruptionError
from rollstore.readers import arguments
from rollstore.store import frame
from rollstore.store.ahead import ahead
from rollstore.store.batching import BATCH_BYTES, filled
from rollstore.store.claims import check_rows
from rollstore.store.distant import expect
from rollstore.store.filesystem import Filesystem, LocalFilesystem
from rollstore.store.journal import JournalView
from rollstore.store.part import Part, places, reading
from rollstore.store.snapshot import Snapshot, fit

if TYPE_CHECKING:
    from rollstore.store.store import Store

_checked: set[tuple[str, int, float]] = set()
"""(path, bytes, time of change) of the parts whose every byte this process has checked. Parts never change and names
are never used again; size and time catch a file that was changed all the same."""

_RUN, _RUN_OF_SCALARS = 16, 256
"""Batches of a part that are read at one go, by one of several threads."""


class Lease:
    """A snapshot that is closed when nothing refers to this any more: give it to the datasets that read from it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        weakref.finalize(self, snapshot.close)


def leased(store: Store, snapshot: Snapshot | None) -> Snapshot | Lease:
    """The snapshot that is given, or a lease on one of this moment. Raises ValueError on another store's, TypeError."""
    if snapshot is None:
        return Lease(store.snapshot())
    arguments.own("snapshot", snapshot, store)
    return snapshot


def dataset(source: Snapshot | Lease, table: str) -> Rows:
    """All rows of a table, in the newest columns; those that a part or journal does not have are null.

    Parts stay where they are and are left closed where their statistics rule out the filter. Rows still in journals are
    checked and held in memory. Raises CorruptionError, at once for journals and ends of parts, when scanned for the
    rest.
    """
    snapshot = source.snapshot if isinstance(source, Lease) else source
    return Rows(snapshot, table, source if isinstance(source, Lease) else None)


class Rows(ds.UnionDataset):  # pyright: ignore[reportUntypedBaseClass]  # pyarrow has no types
    """The dataset of one table. Its scans read parts themselves, some batches ahead, which takes a third of the time of
    Arrow's own; they hand on only arrays that Arrow found valid, for sums say nothing about who wrote the bytes.

    Of a local part the bytes of the columns asked for are read, after all of it was checked, once a process. Those of a
    remote store, and those at a path that is no UTF-8, which Arrow does not open, are read whole and checked each time.
    """

    def __init__(self, snapshot: Snapshot, table: str, lease: Lease | None) -> None:
        schema = snapshot.schema(table)
        self.snapshot = snapshot
        self._lease, self._table = lease, table
        others: list[Part | JournalView] = [*snapshot.views(table)]
        self._local = opens(snapshot.filesystem)
        self._names: set[str] = set()
        newest: dict[int, bool] = {}  # parts opened through one file share their schema objects
        for part in snapshot.parts(table):
            if id(part.schema) not in newest:
                newest[id(part.schema)] = not part.is_older and _is_newest(part.schema, schema)
            if newest[id(part.schema)] or not self._local:
                self._names.add(part.name)
            else:
                others.append(part)  # types of an older minor version are cast when read
        self._held = [fit(batch, schema, table) for other in others for batch in other.batches()]
        super().__init__(schema, [ds.dataset(pa.Table.from_batches(self._held, schema))])

    def scanner(
        self, columns: Any = None, filter: pc.Expression | None = None, parts: list[Part] | None = None, **options: Any
    ) -> Any:
        """As of any dataset: an object with `projected_schema`, `to_reader`, `to_table` and `to_batches`.

        `parts` where the caller knows which of the snapshot's can match.
        """
        if parts is None:
            parts = self.snapshot.parts(self._table) if filter is None else self.snapshot.matching(self._table, filter)
        parts = [part for part in parts if part.name in self._names]
        if self._local:
            check(parts)
        if columns and not isinstance(columns, dict) and filter is None and not options:
            schema = pa.schema([self.schema.field(name) for name in columns])
            return Scan(schema, self._batches(parts, schema))
        # The text of an expression names every column it looks at; a name found by chance is only read in vain.
        asked = str(filter) + str([*columns.items()] if isinstance(columns, dict) else columns)
        names = [name for name in self.schema.names if columns is None or name in asked] or self.schema.names[:1]
        schema = pa.schema([self.schema.field(name) for name in names], self.schema.metadata)
        batches = self._batches(parts, schema)
        scanner = ds.Scanner.from_batches(batches, schema=schema, columns=columns, filter=filter, **options)
        return scanned(scanner)

    def _batches(self, parts: list[Part], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of some parts, then those held, in these columns."""
        most = _RUN if any(pa.types.is_nested(field.type) for field in schema) else _RUN_OF_SCALARS
        runs = [
            (part, range(first, min(first + most, part.batch_count)))
            for part in parts
            for first in range(0, part.batch_count, most)
        ]
        expect(self.snapshot.filesystem, [part.file for part in parts])
        read = partial(self._run, schema)
        for batches in ahead(read, runs) if len(runs) > 1 else map(read, runs):
            yield from batches
        for batch in self._held:
            yield batch.select(schema.names).replace_schema_metadata(schema.metadata)

    def _run(self, schema: pa.Schema, run: tuple[Part, range]) -> list[pa.RecordBatch]:
        """Neighbouring batches of a part; those of single values joined: each costs as much again with who takes it."""
        part, numbers = run
        if self._local:
            file = opened(part, schema.names)
            batches = [batch_of(file, part, number) for number in numbers]
        else:
            handle = part.open()
            try:
                batches = [part.batch(number, schema.names, handle) for number in numbers]
            finally:
                handle.close()
        if not any(pa.types.is_nested(field.type) for field in schema):
            batches = filled(batches, BATCH_BYTES)
        return [fit(batch, schema, self._table) for batch in batches]


def opened(part: Part, columns: Sequence[str]) -> Any:
    """The file of a local part that was checked, of which only the bytes of these columns are read.

    Raises StoreError where it is gone or cannot be read, CorruptionError where it is not what was checked.
    """
    options = pa.ipc.IpcReadOptions(included_fields=places(part.schema, columns), use_threads=False)
    with reading(part.file):
        file = pa.OSFile(part.path)
    with _by_arrow(part.file, part.file):
        return pa.ipc.open_file(file, options=options)


def batch_of(file: Any, part: Part, number: int) -> pa.RecordBatch:
    """One batch of an opened part. Raises CorruptionError, StoreError where it cannot be read."""
    where = f"{part.file}: batch {number}"
    with _by_arrow(part.file, where):
        batch = file.get_batch(number)
        batch.validate(full=True)
    check_rows(batch, part.table, where)
    return batch


@contextmanager
def _by_arrow(file: str, where: str) -> Generator[None]:
    """What Arrow makes of a file: what the system refuses has a number, and bytes that end too early have none."""
    with reading(file):
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise CorruptionError(f"{where}: Arrow cannot read it: {str(error).splitlines()[0]}") from error


class Scan:
    """Batches of one schema, in the shape of a pyarrow scanner."""

    def __init__(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        self.projected_schema, self._batches = schema, batches

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        return self._batches

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._batches)

    def to_table(self) -> pa.Table:
        return self.to_reader().read_all()


def scanned(scanner: Any) -> Scan:
    """What a scanner of Arrow's gives. It is closed at the end of the program, where somebody left it open: its threads
    ask for batches in Python, and an interpreter that ends meanwhile hangs, or is aborted."""
    reader = scanner.to_reader()
    _open.add(reader)
    return Scan(scanner.projected_schema, iter(reader))


_open: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _close() -> None:
    for reader in list(_open):
        with suppress(Exception):  # of batches that nobody waits for, which threads are no longer started for
            reader.close()


def check(parts: Iterable[Part]) -> None:
    """Check the sum of every byte of some parts, once a process. Raises CorruptionError, StoreError."""
    unknown = [part for part in parts if _state(part) not in _checked]
    if len(unknown) > 1:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(_check, unknown))
    elif unknown:
        _check(unknown[0])


def _check(part: Part) -> None:
    state = _state(part)
    part.check_head()
    handle = part.open()
    try:
        for number, batch in enumerate(part.tail.batches):
            with reading(part.file):
                message = handle.read(batch.offset, batch.length)
            frame.check_message(message, batch, f"{part.file}: batch {number}")
    finally:
        handle.close()
    _checked.add(state)


def _state(part: Part) -> tuple[str, int, float]:
    with reading(part.file):
        return (part.path, part.size, part.filesystem.modified(part.file))


def opens(filesystem: Filesystem) -> bool:
    """Whether Arrow opens the parts of a store itself: of a local one, at a path that is text."""
    try:
        filesystem.locate("").encode()
    except UnicodeEncodeError:  # Python keeps bytes that are no text as lone surrogates
        return False
    return isinstance(filesystem, LocalFilesystem)


def _is_newest(found: pa.Schema, newest: pa.Schema) -> bool:
    return all(newest.field(field.name).type.equals(field.type) for field in found)
