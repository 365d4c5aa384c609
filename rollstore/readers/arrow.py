"""A table of a snapshot as an Arrow dataset: projected and filtered by Arrow, every part checked before Arrow sees it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from rollstore.store import frame
from rollstore.store.filesystem import LocalFilesystem
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot, fit
from rollstore.store.statistics import guarantees

_FORMAT = ds.IpcFileFormat()
_checked: set[tuple[str, int, float]] = set()
"""(path, bytes, time of change) of the parts whose every byte this process has checked. Parts never change and names
are never used again; size and time catch a file that was changed all the same."""


class Lease:
    """A snapshot that is closed when nothing refers to this any more: give it to the datasets that read from it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        weakref.finalize(self, snapshot.close)


def dataset(snapshot: Snapshot | Lease, table: str) -> ds.Dataset:
    """All rows of a table, in the newest columns; those that a part or journal does not have are null.

    Parts stay on disk and are left closed where their statistics rule out the filter; a part is checked whole, once a
    process, when it is first opened. Rows still in journals are checked and held in memory. Raises CorruptionError, at
    once for journals and ends of parts, while reading for the rest.
    """
    lease, snapshot = (snapshot, snapshot.snapshot) if isinstance(snapshot, Lease) else (None, snapshot)
    schema = snapshot.schema(table)
    parts = snapshot.parts(table)
    plain = [part for part in parts if all(schema.field(f.name).type.equals(f.type) for f in part.schema)]
    handler = _Checked({part.file: part for part in plain}, lease)
    filesystem = pafs.PyFileSystem(handler)
    fragments = [
        _FORMAT.make_fragment(part.file, filesystem, partition_expression=_guarantee(part, schema)) for part in plain
    ]
    files = ds.FileSystemDataset(fragments, schema, _FORMAT, filesystem)
    # Types of an older minor version are cast when read: Arrow's datasets do not fill in children of structs.
    older = [part for part in parts if part.file not in handler.parts]
    batches = [fit(batch, schema, table) for source in (*older, *snapshot.views(table)) for batch in source.batches()]
    # Kept even where empty, so that the shape of the dataset does not depend on what happens to be in journals.
    return _Validated(schema, [files, ds.dataset(pa.Table.from_batches(batches, schema))])


class _Validated(ds.UnionDataset):
    """A union whose scans hand on only arrays that Arrow found whole: sums say nothing about who wrote the bytes."""

    def scanner(self, columns: Any = None, filter: pc.Expression | None = None, **options: Any) -> ds.Scanner:
        scanner = super().scanner(columns=columns, filter=filter, **options)

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in scanner.to_reader():
                batch.validate(full=True)
                yield batch

        return ds.Scanner.from_batches(batches(), schema=scanner.projected_schema)


def check(part: Part) -> None:
    """Check the sum of every byte of a part, once a process. Raises CorruptionError, FileNotFoundError."""
    known = (part.path, part.size, part.filesystem.modified(part.file))
    if known in _checked:
        return
    part.check_head()
    handle = part.open()
    try:
        for number, batch in enumerate(part.tail.batches):
            message = handle.read(batch.offset, batch.length)
            frame.check_message(message, batch, f"{part.file}: batch {number}")
    finally:
        handle.close()
    _checked.add(known)


def _guarantee(part: Part, schema: pa.Schema) -> pc.Expression:
    """What holds for every row of the part, as far as its statistics say."""
    expression = pc.scalar(True)
    for column in part.statistics.ranges:
        cases = guarantees(part.statistics, schema, column)
        if len(cases) == 1:
            expression = expression & cases[0]
    return expression


class _Checked(pafs.FileSystemHandler):
    """The files of some parts, read only; a part is checked when it is opened."""

    def __init__(self, parts: dict[str, Part], lease: Lease | None) -> None:
        self.parts = parts
        self.lease = lease
        self._lock = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}

    def open_input_file(self, path: str) -> pa.NativeFile:
        part = self.parts[path]
        with self._lock:
            busy = self._busy.setdefault(path, threading.Lock())
        with busy:  # two scans of a part that is not yet checked: one checks, the other waits
            check(part)
        if isinstance(part.filesystem, LocalFilesystem):
            return pa.OSFile(part.path)
        handle = part.open()
        try:
            return pa.BufferReader(handle.read(0, handle.size()))
        finally:
            handle.close()

    open_input_stream = open_input_file

    def get_type_name(self) -> str:
        return "rollstore"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: Sequence[str]) -> list[pafs.FileInfo]:
        return [
            pafs.FileInfo(path, pafs.FileType.File, size=self.parts[path].size)
            if path in self.parts
            else pafs.FileInfo(path, pafs.FileType.NotFound)
            for path in paths
        ]

    def _refused(self, *_: Any, **__: Any) -> NoReturn:
        raise OSError("parts of a store are only read here")

    get_file_info_selector = create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _refused
    delete_file = move = copy_file = open_output_stream = open_append_stream = _refused
