"""Journals: the growing file of one writer, and what a reader finds in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import pyarrow as pa

from rollstore.errors import CorruptionError
from rollstore.schema import TABLES
from rollstore.schema.lazy import lazy
from rollstore.store import claims, frame, versions
from rollstore.store.filesystem import Filesystem, ReadHandle, WriteHandle
from rollstore.store.names import JOURNAL, STAGED, stem
from rollstore.store.part import FORMAT, FORMAT_KEY, PART_KEY, SOURCE_KEY, TABLE_KEY, check_versions, places, reading

FOLDER = "journal"
CUT_KEY = "rollstore.cut"


def journal_file(name: str) -> str:
    return f"{FOLDER}/{name}{JOURNAL}"


@dataclass(frozen=True)
class Cut:
    """What a journal's successor says of it: only its first rows count, the later ones stand in the successor."""

    name: str
    rows: int

    def __str__(self) -> str:
        return f"{self.name}:{self.rows}"


class _Extent(NamedTuple):
    """How far a journal was written: bytes, rows, rows that were synced, and messages since then."""

    size: int
    rows: int
    synced_rows: int
    unsynced: int


class Journal:
    """A journal being written. Not thread-safe: its writer holds a lock.

    `rows` and `size` count what was written whole, `synced_rows` what survives power loss. `unsynced` are the
    messages since, for a successor. Where `broken` is set nothing may be written or synced here again.

    All that counts lies in one attribute, set in one step: an interrupt (Ctrl-C comes between any two) finds a message
    counted or not. One that is not counted may be whole and known to a reader, so nothing is written over it: the
    journal is broken until each write or sync is done.
    """

    def __init__(
        self, filesystem: Filesystem, table: str, name: str, schema: pa.Schema, source: str | None,
        cut: Cut | None, carried: Sequence[tuple[bytes, int]],
    ) -> None:  # fmt: skip
        """Makes the file, locked and synced, with its head and the messages it takes over from an abandoned journal.

        It stands in staging until `publish`: the rows change from one journal to the other at once, and a head that
        does not hold its sum is damage, never a crash. Raises OSError.
        """
        self.table, self.name = table, name
        self.schema, self.columns = schema, frozenset(schema.names)
        self._messages: list[tuple[bytes, int]] = []
        self.broken = False
        self._filesystem = filesystem
        self._folder_synced = False
        metadata = {FORMAT_KEY: FORMAT, TABLE_KEY: table, PART_KEY: name}
        if source is not None:
            metadata[SOURCE_KEY] = source
        if cut is not None:
            metadata[CUT_KEY] = str(cut)
        head = frame.encode_head(schema.with_metadata({**(schema.metadata or {}), **metadata}))
        content = b"".join((head, *(message for message, _ in carried)))
        rows = sum(rows for _, rows in carried)
        self._extent = _Extent(len(content), rows, rows, 0)
        self._staged = f"staging/{name}{STAGED}"
        self._handle: WriteHandle = filesystem.create(self._staged)
        try:
            self._handle.write(0, content)
            self._handle.sync()
        except BaseException:
            self._handle.close()
            self._sweep()
            raise

    def publish(self) -> None:
        """Give it its name. Where this raises, OSError or an interrupt, only `is_published` knows whether it has it."""
        try:
            self._filesystem.publish(self._staged, journal_file(self.name))
        finally:
            self._sweep()

    def is_published(self) -> bool:
        """Whether the name is there: nobody else makes files of it. Raises OSError where that cannot be told."""
        try:
            self._filesystem.open(journal_file(self.name)).close()
        except FileNotFoundError:
            return False
        return True

    def _sweep(self) -> None:
        with suppress(OSError):  # a staged file that stays is swept up by recover
            self._filesystem.delete(self._staged)

    @property
    def size(self) -> int:
        return self._extent.size

    @property
    def rows(self) -> int:
        return self._extent.rows

    @property
    def synced_rows(self) -> int:
        return self._extent.synced_rows

    @property
    def unsynced(self) -> list[tuple[bytes, int]]:
        return self._messages[: self._extent.unsynced]

    def write(self, message: bytes, rows: int) -> None:
        """One message at the end. On OSError nothing of it counts; the journal is `broken` unless it was cut back."""
        self.broken = True
        extent = self._extent
        del self._messages[extent.unsynced :]
        try:
            self._handle.write(extent.size, message)
        except OSError:
            with suppress(OSError):
                self._handle.truncate(extent.size)
                self.broken = False
            raise
        self._messages.append((message, rows))
        self._extent = _Extent(extent.size + len(message), extent.rows + rows, extent.synced_rows, len(self._messages))
        self.broken = False

    def sync(self) -> None:
        """All rows written survive power loss. After an error the journal is `broken`: a second sync would lie."""
        self.broken = True
        if not self._folder_synced:
            self._filesystem.sync_folder(FOLDER)
            self._folder_synced = True
        self._handle.sync()
        extent = self._extent
        self._extent = _Extent(extent.size, extent.rows, extent.rows, 0)
        self.broken = False

    def close(self) -> None:
        """Let the file and its lock go. The file stays."""
        self._handle.close()


@dataclass(frozen=True)
class JournalView:
    """What a reader found in a journal when it looked: its whole messages, up to the byte `end`.

    `rest` counts the bytes after them: a write under way, or a torn one. `held` are the columns physically in it,
    `schema` those of its rows: others where it is older by a major version.
    """

    name: str
    table: str
    held: pa.Schema
    schema: pa.Schema
    source: str | None
    cut: Cut | None
    handle: ReadHandle
    messages: tuple[frame.Batch, ...]
    end: int
    rest: int

    @property
    def rows(self) -> int:
        return sum(message.rows for message in self.messages)

    @property
    def file(self) -> str:
        return journal_file(self.name)

    @property
    def size(self) -> int:
        return self.end

    @lazy
    def _decoder(self) -> frame.Decoder | versions.Upgrading:
        return versions.decoder(self.held, self.table)

    @property
    def batch_count(self) -> int:
        return len(self.messages)

    def first(self, rows: int) -> JournalView:
        """The same journal with only its first rows, as its successor's cut asks. Cuts fall between messages."""
        kept = 0
        messages: list[frame.Batch] = []
        for message in self.messages:
            if kept + message.rows > rows:
                break
            kept += message.rows
            messages.append(message)
        return replace(self, messages=tuple(messages))

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Every batch in order, checked; `columns` that the file has, in the file's order."""
        for number in range(len(self.messages)):
            yield self.batch(number, columns)

    def batch(self, number: int, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """One batch, checked again: the file may have been damaged since it was opened."""
        message = self.messages[number]
        where = f"{journal_file(self.name)}: batch {number}"
        with reading(self.file):
            data = self.handle.read(message.offset, message.length)
        frame.check_message(data, message, where)
        batch = self._decoder.decode(data, where, None if columns is None else places(self.schema, columns))
        if batch.num_rows != message.rows:
            raise CorruptionError(f"{where}: wanted {message.rows} rows, got {batch.num_rows}")
        claims.check_rows(batch, self.table, where)
        return batch


def view_journal(filesystem: Filesystem, name: str, known: JournalView | None = None) -> JournalView | None:
    """What stands in a journal now; None where its head was never written whole.

    `known`, an earlier view, saves reading again what was whole then. Journals are read, never mapped: a writer may
    cut its file back, and a mapped page beyond the end kills the reader. Raises CorruptionError where a whole head
    does not hold its sum, VersionError where it is newer than this library, FileNotFoundError where it is gone.
    """
    if known is not None and not known.rest:
        data = known.handle.read(known.end, max(0, known.handle.size() - known.end))
        return _extended(known, data)
    file = journal_file(name)
    handle = filesystem.open(file)
    data = handle.read(0, handle.size())
    head = frame.read_head(data, f"{file}: head")
    if head is None:
        return None
    schema, length = head
    try:
        metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
        check_versions(metadata.get(FORMAT_KEY, ""), schema, file)
        cut = _cut(metadata[CUT_KEY]) if CUT_KEY in metadata else None
    except ValueError as error:
        raise CorruptionError(f"{file}: head: {error}") from error
    if metadata.get(PART_KEY) != name:
        raise CorruptionError(f"{file}: wanted the journal of {name}, got that of {metadata.get(PART_KEY)}")
    table = metadata.get(TABLE_KEY)
    if table is None:
        raise CorruptionError(f"{file}: head: wanted the name of a table, got none")
    rows = schema
    if table in TABLES:  # a newer minor version may know more
        rows = versions.newest(schema, table)
        claims.check_columns(rows, table, file)
    view = JournalView(name, table, schema, rows, metadata.get(SOURCE_KEY), cut, handle, (), length, 0)
    return _extended(view, data[length:])


def _cut(text: str) -> Cut:
    name, _, rows = text.rpartition(":")
    if stem(name + JOURNAL, JOURNAL) is None or not rows.isdecimal():
        raise ValueError(f"wanted a journal and a number of rows to cut it to, got {text!r}")
    return Cut(name, int(rows))


def _extended(view: JournalView, data: bytes) -> JournalView:
    messages: list[frame.Batch] = []
    offset = 0
    while (message := frame.next_message(data, offset)) is not None:
        offset += message.length
        messages.append(replace(message, offset=view.end + message.offset))
    return replace(view, messages=(*view.messages, *messages), end=view.end + offset, rest=len(data) - offset)
