"""A table of a snapshot as an Arrow dataset: projected and filtered by Arrow, every part checked before it opens."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from rollstore.store import frame
from rollstore.store.filesystem import LocalFilesystem
from rollstore.store.journal import JournalView
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot, fit

_checked: set[tuple[str, int, float]] = set()
"""(path, bytes, time of change) of the parts whose every byte this process has checked. Parts never change and names
are never used again; size and time catch a file that was changed all the same."""


class Lease:
    """A snapshot that is closed when nothing refers to this any more: give it to the datasets that read from it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        weakref.finalize(self, snapshot.close)


def dataset(source: Snapshot | Lease, table: str) -> Rows:
    """All rows of a table, in the newest columns; those that a part or journal does not have are null.

    Parts stay where they are and are left closed where their statistics rule out the filter. Rows still in journals are
    checked and held in memory. Raises CorruptionError, at once for journals and ends of parts, when scanned for the
    rest.
    """
    snapshot = source.snapshot if isinstance(source, Lease) else source
    return Rows(snapshot, table, source if isinstance(source, Lease) else None)


class Rows(ds.UnionDataset):  # pyright: ignore[reportUntypedBaseClass]  # pyarrow has no types
    """The dataset of one table. Its scans check a part whole, once a process, before they open it, and hand on only
    arrays that Arrow found valid: sums say nothing about who wrote the bytes.

    Parts of a remote store are read by us, batch by batch and checked each time: Arrow would fetch them once more.
    So are those at a path that is no UTF-8, which Arrow does not open.
    """

    def __init__(self, snapshot: Snapshot, table: str, lease: Lease | None) -> None:
        schema = snapshot.schema(table)
        self.snapshot = snapshot
        self._lease, self._table = lease, table
        others: list[Part | JournalView] = [*snapshot.views(table)]
        self._near: set[str] = set()
        self._far: set[str] = set()
        arrow_opens = isinstance(snapshot.filesystem, LocalFilesystem) and _is_utf8(snapshot.filesystem.locate(""))
        newest: dict[int, bool] = {}  # parts opened through one file share their schema objects
        for part in snapshot.parts(table):
            if id(part.schema) not in newest:
                newest[id(part.schema)] = not part.is_older and _is_newest(part.schema, schema)
            if not arrow_opens:
                self._far.add(part.name)
            elif newest[id(part.schema)]:
                self._near.add(part.name)
            else:
                # Types of an older minor version are cast when read: Arrow does not fill in children of structs.
                others.append(part)
        held = [fit(batch, schema, table) for other in others for batch in other.batches()]
        self._held = ds.dataset(pa.Table.from_batches(held, schema))
        super().__init__(schema, [self._held])

    def scanner(
        self, columns: Any = None, filter: pc.Expression | None = None, parts: list[Part] | None = None, **options: Any
    ) -> Any:
        """As of any dataset: an object with `projected_schema`, `to_reader`, `to_table` and `to_batches`.

        `parts` where the caller knows which of the snapshot's can match.
        """
        if parts is None:
            parts = self.snapshot.parts(self._table) if filter is None else self.snapshot.matching(self._table, filter)
        near = [part for part in parts if part.name in self._near]
        check(near)
        filesystem, format_ = pafs.LocalFileSystem(), ds.IpcFileFormat()
        fragments = [format_.make_fragment(part.path, filesystem) for part in near]
        files = ds.FileSystemDataset(fragments, self.schema, format_, filesystem)
        # A union even where one side is empty, so that it does not matter what happens to be in journals.
        local = ds.UnionDataset(self.schema, [files, self._held])
        scanners = [local.scanner(columns=columns, filter=filter, **options)]
        far = [part for part in parts if part.name in self._far]
        if far:
            # The text of an expression names every column it looks at; a name found by chance is only read in vain.
            asked = str(filter) + str([*columns.items()] if isinstance(columns, dict) else columns)
            names = [name for name in self.schema.names if columns is None or name in asked] or self.schema.names[:1]
            schema = pa.schema([self.schema.field(name) for name in names], self.schema.metadata)
            rows = (fit(batch, schema, self._table) for part in far for batch in part.batches(schema.names))
            fetched = ds.Scanner.from_batches(rows, schema=schema, columns=columns, filter=filter, **options)
            scanners.insert(0, fetched)
        return Scan(scanners[-1].projected_schema, _valid(scanners))


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


def _valid(scanners: list[ds.Scanner]) -> Iterator[pa.RecordBatch]:
    """What several scanners give, one after the other, every batch validated."""
    for scanner in scanners:
        for batch in scanner.to_reader():
            batch.validate(full=True)
            yield batch


def check(parts: Iterable[Part]) -> None:
    """Check the sum of every byte of some parts, once a process. Raises CorruptionError, FileNotFoundError."""
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
            message = handle.read(batch.offset, batch.length)
            frame.check_message(message, batch, f"{part.file}: batch {number}")
    finally:
        handle.close()
    _checked.add(state)


def _state(part: Part) -> tuple[str, int, float]:
    return (part.path, part.size, part.filesystem.modified(part.file))


def _is_utf8(path: str) -> bool:
    """Whether a path is text; bytes that are none, Python keeps as lone surrogates."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_newest(found: pa.Schema, newest: pa.Schema) -> bool:
    return all(newest.field(field.name).type.equals(field.type) for field in found)
