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
from rollstore.store.statistics import guarantees

_ALWAYS = pc.scalar(True)
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

    Parts stay on disk and are left closed where their statistics rule out the filter. Rows still in journals are
    checked and held in memory. Raises CorruptionError, at once for journals and ends of parts, when scanned for the
    rest.
    """
    snapshot = source.snapshot if isinstance(source, Lease) else source
    return Rows(snapshot, table, source if isinstance(source, Lease) else None)


class Rows(ds.UnionDataset):  # pyright: ignore[reportUntypedBaseClass]  # pyarrow has no types
    """The dataset of one table. Its scans check a part whole, once a process, before they open it, and hand on only
    arrays that Arrow found valid: sums say nothing about who wrote the bytes."""

    def __init__(self, snapshot: Snapshot, table: str, lease: Lease | None) -> None:
        schema = snapshot.schema(table)
        filesystem, format_ = pafs.LocalFileSystem(), ds.IpcFileFormat()
        self._lease = lease
        self._parts: dict[str, Part] = {}
        fragments: list[ds.Fragment] = []
        others: list[Part | JournalView] = [*snapshot.views(table)]
        for part in snapshot.parts(table):
            # Types of an older minor version are cast when read: Arrow's datasets do not fill in children of structs.
            if isinstance(part.filesystem, LocalFilesystem) and _is_newest(part.schema, schema):
                self._parts[part.path] = part
                guarantee = _guarantee(part, schema)
                fragments.append(format_.make_fragment(part.path, filesystem, partition_expression=guarantee))
            else:
                others.append(part)
        self._files = ds.FileSystemDataset(fragments, schema, format_, filesystem)
        held = [fit(batch, schema, table) for other in others for batch in other.batches()]
        # Made even where empty, so that the shape of the dataset does not depend on what happens to be in journals.
        super().__init__(schema, [self._files, ds.dataset(pa.Table.from_batches(held, schema))])

    def scanner(self, columns: Any = None, filter: pc.Expression | None = None, **options: Any) -> Any:
        """As of any dataset: an object with `projected_schema`, `to_reader`, `to_table` and `to_batches`."""
        check(self._parts[fragment.path] for fragment in self._files.get_fragments(filter=filter))
        return _Scan(super().scanner(columns=columns, filter=filter, **options))


class _Scan:
    def __init__(self, scanner: ds.Scanner) -> None:
        self.projected_schema = scanner.projected_schema
        self._scanner = scanner

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        for batch in self._scanner.to_reader():
            batch.validate(full=True)
            yield batch

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.projected_schema, self.to_batches())

    def to_table(self) -> pa.Table:
        return self.to_reader().read_all()


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


def _is_newest(found: pa.Schema, newest: pa.Schema) -> bool:
    return all(newest.field(field.name).type.equals(field.type) for field in found)


def _guarantee(part: Part, schema: pa.Schema) -> pc.Expression:
    """What holds for every row of the part, as far as its statistics say."""
    expression = _ALWAYS
    for column in part.statistics.ranges:
        cases = guarantees(part.statistics, part.schema, schema, column)
        if len(cases) == 1:
            expression = expression & cases[0]
    return expression
