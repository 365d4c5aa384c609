"""A file of summed records that one process appends to: what it took survives the death of that process.

A record is a header and its payload. The header, little-endian: 4 bytes `RSGL`, the payload's length (uint32), the
record's number (uint64), XXH3 of the payload (uint64), XXH32 of the 24 bytes before (uint32). Numbers rise through the
file. The first record, the head, is the state at its number: the records kept for it come first, and what has a higher
number came later. Files are called `calls-<n, 10 digits>.log`; the one with the highest n counts.
"""

from __future__ import annotations

import contextlib
import logging
import re
import struct
import threading
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

import xxhash

from rollstore.errors import CorruptionError, StoreError, WriteError
from rollstore.store.filesystem import Filesystem, WriteHandle, read_file

LOG = logging.getLogger("rollstore")

REWRITE_BYTES = 16 << 20
"""A file that has grown by so much, and to twice its first size, is replaced by one without what is over."""

SLOW_SECONDS = 1.0
"""A write that takes longer is mentioned: the calls of all clients wait for it."""

_MAGIC = b"RSGL"
_HEADER = struct.Struct("<4sIQQI")
_NAME = re.compile(r"calls-(\d{10})\.log")
_OWNER, _DAMAGED = "owner", "damaged"


class Record(NamedTuple):
    """One record that holds its sums."""

    number: int
    payload: bytes


class Damage(NamedTuple):
    """Bytes of a file that are no record and do not lie at its torn end."""

    offset: int
    length: int


class Log:
    """The newest file in a folder, under a lock of its own. Read it first, then `rewrite`, then append.

    Raises StoreError where another process has the folder. One thread may append while another one rewrites.
    """

    def __init__(self, filesystem: Filesystem, *, rewrite_bytes: int = REWRITE_BYTES) -> None:
        self.where = filesystem.locate("").rstrip("/")
        self.damages: list[Damage] = []
        self._filesystem, self._rewrite_bytes = filesystem, rewrite_bytes
        self._lock = threading.Lock()
        self._handle: WriteHandle | None = None
        self._places: dict[int, tuple[int, int]] = {}  # number -> offset, length of the whole record
        self._end = self._due_at = self._last = 0
        filesystem.make_folder("")
        self._owner = self._own()
        found = [int(match[1]) for name in filesystem.list("") if (match := _NAME.fullmatch(name))]
        self._file = max(found, default=0)
        for name in filesystem.list(""):
            if name.endswith(".part") or (_NAME.fullmatch(name) and name != self._name()):
                filesystem.delete(name)

    def _own(self) -> WriteHandle:
        try:
            owner = self._filesystem.create(_OWNER)
        except FileExistsError:
            owner = self._filesystem.lock(_OWNER)
        if owner is None:
            raise StoreError(
                f"{self.where}: wanted a state that no other gateway uses, got one in use; --state names another"
            )
        return owner

    @property
    def due(self) -> bool:
        """Whether a new file would be worth its while."""
        return self._end >= self._due_at

    def read(self) -> list[Record]:
        """The records of the newest file, the head first; none where there is no file.

        A record that was cut off at the end is dropped. One that does not hold its sums otherwise is left out and
        stands in `damages`. Raises CorruptionError where the head itself is damaged: nothing can stand on it.
        """
        if not self._file:
            return []
        where = self._filesystem.locate(self._name())
        data = read_file(self._filesystem, self._name())
        records: list[Record] = []
        for offset, found in _records(data):
            if isinstance(found, Damage):
                self.damages.append(found)
                LOG.error("%s: %d bytes at %d hold no sum: what stood there is lost", where, found.length, offset)
                continue
            if records:  # the head has the number of the last event before it, which may be a record too
                self._places[found.number] = (offset, _HEADER.size + len(found.payload))
            records.append(found)
        if not records or min(self.damages, default=Damage(1, 0)).offset == 0:
            raise CorruptionError(f"{where}: wanted a head that holds its sum, got another; move the file away")
        self._last = max(record.number for record in records)
        return records

    def append(self, payload: bytes) -> int:
        """The number of a new record, which survives the death of this process. Raises WriteError, and took nothing."""
        with self._lock:
            if self._handle is None:
                raise StoreError(f"{self.where}: wanted an open log, got one that is closed")
            began = time.monotonic()
            number = self._last + 1
            record = _record(number, payload)
            try:
                self._handle.write(self._end, record)
            except OSError as error:
                with contextlib.suppress(OSError):
                    self._handle.truncate(self._end)  # what could not be cut off is overwritten by the next
                raise WriteError(f"{self.where}: {error.strerror or error}") from error
            self._places[number] = (self._end, len(record))
            self._end += len(record)
            self._last = number
        if (took := time.monotonic() - began) > SLOW_SECONDS:
            LOG.warning("%s: a call waited %.1f seconds for the disk", self.where, took)
        return number

    def rewrite(self, head: bytes, number: int, keep: Collection[int]) -> None:
        """Begin a new file: the head at its number, the records of `keep`, and all of higher numbers.

        Raises WriteError, with the old file as it was.
        """
        old = self._filesystem.open(self._name()) if self._file else None
        name = f"calls-{self._file + 1:010d}"
        handle: WriteHandle | None = None
        places: dict[int, tuple[int, int]] = {}
        damaged = bool(self.damages)
        try:
            self._filesystem.delete(f"{name}.part")
            handle = self._filesystem.create(f"{name}.part")
            first = _record(number, head)
            handle.write(0, first)
            end = len(first)

            def copy(numbers: list[int]) -> bool:
                nonlocal end
                whole = True
                for one in numbers:
                    offset, length = self._places[one]
                    record = b"" if old is None else old.read(offset, length)
                    if not _is_whole(record):
                        LOG.error("%s: record %d no longer holds its sum: it is left out", self.where, one)
                        whole = False
                        continue
                    handle.write(end, record)
                    places[one] = (end, length)
                    end += length
                return whole

            with self._lock:
                chosen = [one for one in self._places if one in keep or one > number]
                last = self._last
            damaged |= not copy(chosen)
            handle.sync()  # the old file may have reached the disk by now
            with self._lock:
                damaged |= not copy([one for one in self._places if one > last])
                self._filesystem.publish(f"{name}.part", f"{name}.log")
                before, self._handle = self._handle, handle
                self._places, self._end, self._last = places, end, max(self._last, number)
                self._due_at = max(self._rewrite_bytes + end, 2 * end)
                earlier, self._file = self._file, self._file + 1
        except OSError as error:
            if handle is not None:
                handle.close()
            self._due_at = self._end + self._rewrite_bytes
            raise WriteError(f"{self.where}: {error.strerror or error}") from error
        finally:
            if old is not None:
                old.close()
        if before is not None:
            before.close()
        with contextlib.suppress(OSError):  # leftovers go when the log is opened next
            self._filesystem.sync_folder("")
            self._filesystem.delete(f"{name}.part")
            if earlier and damaged:
                self._filesystem.move(self._name(earlier), _DAMAGED)
            elif earlier:
                self._filesystem.delete(self._name(earlier))
        self.damages = []

    def close(self) -> None:
        """Let the files go. Closing twice is no error."""
        with self._lock:
            for handle in (self._handle, self._owner):
                if handle is not None:
                    handle.close()
            self._handle = None

    def _name(self, number: int | None = None) -> str:
        return f"calls-{self._file if number is None else number:010d}.log"


def _record(number: int, payload: bytes) -> bytes:
    sum_ = xxhash.xxh3_64_intdigest(payload)
    header = _HEADER.pack(_MAGIC, len(payload), number, sum_, 0)[:-4]
    return header + struct.pack("<I", xxhash.xxh32_intdigest(header)) + payload


def _is_whole(record: bytes) -> bool:
    return isinstance(_record_at(record, 0), Record)


def _record_at(data: bytes, at: int) -> Record | int | None:
    """The record at an offset; its length where it is longer than the file, or does not hold its sum; else None."""
    header = data[at : at + _HEADER.size]
    if len(header) < _HEADER.size:
        return None
    magic, length, number, sum_, check = _HEADER.unpack(header)
    if magic != _MAGIC or check != xxhash.xxh32_intdigest(header[:-4]):
        return None
    payload = data[at + _HEADER.size : at + _HEADER.size + length]
    if len(payload) < length or xxhash.xxh3_64_intdigest(payload) != sum_:
        return _HEADER.size + length
    return Record(number, payload)


def _records(data: bytes) -> Iterator[tuple[int, Record | Damage]]:
    """Each record with its offset, and what is damaged between. The torn end of a file is neither."""
    at = 0
    while at < len(data):
        found = _record_at(data, at)
        if isinstance(found, Record):
            yield at, found
            at += _HEADER.size + len(found.payload)
            continue
        following = data.find(_MAGIC, at + 1)
        while following >= 0 and not isinstance(_record_at(data, following), Record):
            following = data.find(_MAGIC, following + 1)
        end = len(data) if following < 0 else following
        if following < 0 and _is_torn(data, at, found):
            return
        yield at, Damage(at, end - at)
        at = end


def _is_torn(data: bytes, at: int, found: int | Record | None) -> bool:
    """Whether what stands at the end of a file is the beginning of a record, or room that was never filled."""
    rest = data[at:]
    if isinstance(found, int):
        return at + found > len(data) or not any(rest[_HEADER.size :])
    return len(rest) < _HEADER.size or not any(rest)
