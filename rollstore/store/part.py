"""Parts: immutable Arrow files. Seal one, open one, read one batch of it with every byte checked."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rollstore.errors import CorruptionError, RollstoreError, StoreError, VersionError
from rollstore.schema import VERSION
from rollstore.schema.lazy import lazy
from rollstore.schema.upgrade import check as check_schema
from rollstore.schema.upgrade import is_older, read_version
from rollstore.store import claims, frame, statistics, versions
from rollstore.store.batching import BATCH_BYTES, filled
from rollstore.store.filesystem import Filesystem, ReadHandle, read_file
from rollstore.store.names import PART, STAGED, new_id

FORMAT = "1.0"
"""Version of the layout of parts, journals and the log. Apart from the schema's and the library's."""

_FIRST_READ = 1 << 16  # the tail of most parts fits: one read instead of two
FORMAT_KEY, TABLE_KEY, PART_KEY, SOURCE_KEY, STATISTICS_KEY = (
    "rollstore.format", "rollstore.table", "rollstore.part", "rollstore.source", "rollstore.statistics",
)  # fmt: skip


class Orphan(Exception):
    """A file that is no part of ours: empty, cut short, or foreign. Never raised to a user."""


@dataclass(frozen=True)
class Part:
    """One sealed part: its place, size in bytes, columns, and what its end says. Reading checks every byte it uses.

    `held` has the columns physically in the file: all-null ones are left out. `source` is who wrote it, in the
    writer's own words; for people. `summary` is the text of its statistics.
    """

    filesystem: Filesystem
    table: str
    name: str
    size: int
    held: pa.Schema
    format: str
    source: str | None
    summary: str

    @property
    def path(self) -> str:
        """Where the file is, for other programs."""
        return self.filesystem.locate(self.file)

    @property
    def file(self) -> str:
        return f"{self.table}/{self.name}{PART}"

    @lazy
    def tail(self) -> frame.Tail:
        """The end of the file, read when the first of its batches is. Raises CorruptionError, StoreError."""
        return self._read_end()

    def _read_end(self) -> frame.Tail:
        try:
            size, tail = read_tail(self.filesystem, self.file)
        except (FileNotFoundError, Orphan) as error:
            raise StoreError(
                f"{self.file}: wanted a part of the snapshot, got no whole file; open a new one"
            ) from error
        if size != self.size or tail.metadata.get(STATISTICS_KEY) != self.summary or tail.schema != self.held:
            raise CorruptionError(f"{self.file}: wanted the part that was here before, got another file of its name")
        return tail

    @lazy
    def schema(self) -> pa.Schema:
        """The columns in which rows are read: those held, or of an older major version, what it is upgraded to."""
        return versions.newest(self.held, self.table)

    @property
    def schema_version(self) -> str:
        """The version of the schema that the file was written in, as "1.0"."""
        return read_version(self.held.metadata)

    @lazy
    def is_older(self) -> bool:
        """Whether rows are upgraded as they are read: other programs see the columns of an older major version."""
        return is_older(self.schema_version)

    @lazy
    def statistics(self) -> statistics.Statistics:
        return self._read_statistics()

    def _read_statistics(self) -> statistics.Statistics:
        read = statistics.decode(self.summary)
        # Those of an older major version are about columns as they were.
        return statistics.Statistics(read.rows, {}) if self.is_older else read

    @property
    def rows(self) -> int:
        return statistics.row_count(self.summary)

    @property
    def batch_count(self) -> int:
        return len(self.tail.batches)

    @lazy
    def _decoder(self) -> frame.Decoder | versions.Upgrading:
        return versions.decoder(self.held, self.table)

    @lazy
    def first_rows(self) -> tuple[int, ...]:
        """Row number at which each batch begins."""
        return tuple(np.cumsum([0, *(batch.rows for batch in self.tail.batches)])[:-1].tolist())

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Every batch in order, checked; `columns` that the file has, in the file's order."""
        handle = self.open()
        try:
            for number in range(len(self.tail.batches)):
                yield self.batch(number, columns, handle)
        finally:
            handle.close()

    def batch(
        self, number: int, columns: Sequence[str] | None = None, handle: ReadHandle | None = None
    ) -> pa.RecordBatch:
        """One batch, checked. Raises CorruptionError naming part and batch, StoreError if the part is gone."""
        where = f"{self.file}: batch {number}"
        batch = self.tail.batches[number]
        opened = handle or self.open()
        try:
            with reading(self.file):
                message = opened.read(batch.offset, batch.length)
        finally:
            if handle is None:
                opened.close()
        frame.check_message(message, batch, where)
        read = self._decoder.decode(message, where, None if columns is None else places(self.schema, columns))
        if read.num_rows != batch.rows:
            raise CorruptionError(f"{where}: wanted {batch.rows} rows, got {read.num_rows}")
        claims.check_rows(read, self.table, where)
        return read

    def open(self) -> ReadHandle:
        """The file. Raises StoreError where it is gone: a compaction and a vacuum went by, or somebody removed it."""
        with reading(self.file):
            return self.filesystem.open(self.file)

    def check_head(self) -> None:
        """Raises CorruptionError unless the opening of the file holds its sum. Reading rows does not need it."""
        end = self.tail.batches[0].offset if self.tail.batches else self.size
        handle = self.open()
        try:
            with reading(self.file):
                head = handle.read(0, end)
        finally:
            handle.close()
        frame.check_head(head, f"{self.file}: head")


def places(schema: pa.Schema, columns: Sequence[str]) -> list[int]:
    """Where those of some columns that a file has stand in it; where it has none of them, one that is small.

    Never none: rows are counted by the columns they come in, and Arrow takes none for all.
    """
    found = [place for place, name in enumerate(schema.names) if name in columns]
    return found or sorted(range(len(schema)), key=lambda place: pa.types.is_nested(schema.field(place).type))[:1]


@contextmanager
def reading(file: str) -> Generator[None]:
    """What the operating system does not let one read of a part, as a StoreError; what is one stays what it is."""
    try:
        yield
    except RollstoreError:
        raise
    except FileNotFoundError as error:
        raise StoreError(f"{file}: wanted a part of the snapshot, got no file; open a new one") from error
    except OSError as error:
        raise _unreadable(file, error) from error


def open_part(filesystem: Filesystem, table: str, name: str) -> Part:
    """Open a part by its name.

    Raises CorruptionError where it is damaged, VersionError where it is newer than this library or nothing upgrades it,
    Orphan where it never was a whole part of ours, FileNotFoundError where it is gone.
    """
    file = f"{table}/{name}{PART}"
    size, tail = read_tail(filesystem, file)
    metadata = tail.metadata
    check_versions(metadata.get(FORMAT_KEY, ""), tail.schema, file)
    if (metadata.get(PART_KEY), metadata.get(TABLE_KEY)) != (name, table):
        raise CorruptionError(f"{file}: wanted part {name}, got {metadata.get(PART_KEY)}")
    summary = metadata.get(STATISTICS_KEY, "")
    part = Part(filesystem, table, name, size, tail.schema, metadata[FORMAT_KEY], metadata.get(SOURCE_KEY), summary)
    part.__dict__["tail"] = tail
    claims.check_columns(part.schema, table, file)
    try:
        rows = part.statistics.rows
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CorruptionError(f"{file}: tail: the statistics cannot be read") from error
    if rows != sum(batch.rows for batch in tail.batches):
        raise CorruptionError(f"{file}: tail: wanted {rows} rows, the batches hold another number")
    return part


def read_tail(filesystem: Filesystem, file: str) -> tuple[int, frame.Tail]:
    """Bytes of a part, and what its end says. Raises CorruptionError, Orphan, FileNotFoundError as `open_part`."""
    try:
        return _read_tail(filesystem, file)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(file, error) from error


def _read_tail(filesystem: Filesystem, file: str) -> tuple[int, frame.Tail]:
    handle = filesystem.open(file)
    try:
        size = handle.size()
        ending = handle.read(max(0, size - _FIRST_READ), _FIRST_READ)
        length = frame.tail_length(ending[-10:])
        if not 0 < length <= size or (length <= len(ending) and not frame.holds_mark(ending)):
            if frame.holds_mark(handle.read(max(0, size - (1 << 24)), 1 << 24)):
                raise CorruptionError(f"{file}: the end of the file is damaged")
            raise Orphan(file)
        tail = ending[-length:] if length <= len(ending) else handle.read(size - length, length)
    finally:
        handle.close()
    return size, frame.read_tail(tail, size, f"{file}: tail")


def _unreadable(file: str, error: OSError) -> Exception:
    """What the operating system does not let one read, as a typed error; what is one stays what it is."""
    return error if isinstance(error, RollstoreError) else StoreError(f"{file}: {error.strerror or error}")


def check_versions(format_: str, schema: pa.Schema, file: str) -> None:
    """Raises VersionError where the layout or the schema of a part or journal cannot be read by this library."""
    check_version(format_, FORMAT, f"{file}: format")
    check_version((schema.metadata or {}).get(b"rollstore.schema", b"").decode(), VERSION, f"{file}: schema")
    check_schema(read_version(schema.metadata), f"{file}: schema")


def check_version(found: str, known: str, where: str) -> None:
    """Raises VersionError where `found` has a newer major number than `known`, CorruptionError where it is none."""
    major = found.partition(".")[0]
    if not major.isdigit():
        raise CorruptionError(f"{where}: wanted a version like {known}, got {found!r}")
    if int(major) > int(known.partition(".")[0]):
        raise VersionError(
            f"{where}: wanted at most {known.partition('.')[0]}.x, got {found}; a newer rollstore reads it"
        )


def write_part(
    filesystem: Filesystem,
    table: str,
    name: str,
    rows: pa.Table,
    *,
    source: str | None = None,
    codec: frame.Codec = "lz4",
    batch_bytes: int = BATCH_BYTES,
) -> None:
    """Write, sync and publish one part; once this returns it survives power loss. Rows keep their order.

    Raises OSError where the disk refuses, StoreError where another part has the name.
    """
    physical = without_null_columns(rows)
    metadata = {
        FORMAT_KEY: FORMAT,
        TABLE_KEY: table,
        PART_KEY: name,
        STATISTICS_KEY: statistics.encode(statistics.statistics(physical)),
        **({} if source is None else {SOURCE_KEY: source}),
    }
    file = frame.encode_file(physical.schema, list(filled(physical.to_batches(), batch_bytes)), metadata, codec)
    staged, target = f"staging/{name}-{new_id()}{STAGED}", f"{table}/{name}{PART}"
    handle = filesystem.create(staged)
    try:
        handle.write(0, file)
        handle.sync()
        try:
            filesystem.publish(staged, target)
        except FileExistsError:
            # The reply to an earlier try was lost: the same bytes under the name are that try's success.
            if read_file(filesystem, target) != bytes(file):
                raise StoreError(f"{target}: wanted a free name, got another part under it") from None
        filesystem.sync_folder(table)
    finally:
        handle.close()
        filesystem.delete(staged)


def without_null_columns(table: pa.Table) -> pa.Table:
    """The table without the columns in which every row is null, and without what Arrow files cannot carry far."""
    return table.select(
        [
            name
            for name, column in zip(table.column_names, table.columns, strict=True)
            if column.null_count < len(column)
        ]
    )
