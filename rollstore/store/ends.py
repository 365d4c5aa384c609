"""Reading remote files in few requests: the ends of many parts at once, and rows in large ranges, over many files where
they are small.

To open a part is to read its end. Parts are opened and read one after the other, in order of name: what follows is
fetched along, more of it with every turn. Nothing that was fetched outlives the next listing of its folder.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from rollstore.store.objects import Entry, Gone, Objects

END = 1 << 16
"""Bytes of a file's end that are read at once; that of most parts is shorter."""

_RANGE = 8 << 20  # bytes of rows fetched ahead, of one file or of several
_MOST = 64  # files of which something is fetched at once
_NEAR = 16  # files within which several threads read at a time


@dataclass
class _Folder:
    """What a listing said of a folder, and what was fetched of its files since then and may be asked for next.

    `ends` are the ends of files, `files` whole ones, each for one reading. `held` is what was last fetched ahead of
    rows, as (file, first byte, bytes): batches are read one by one, and each reader opens the file again. `stops` says
    of files how far their rows were read. Who is about to fetch for others holds the lock: they wait for it.
    """

    names: list[str] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    expected: list[str] = field(default_factory=list)
    opened: str = ""
    opened_together: int = 1
    ends: dict[str, bytes] = field(default_factory=dict)
    read_together: int = 1
    files: dict[str, bytes] = field(default_factory=dict)
    held: tuple[str, int, bytes] = ("", 0, b"")
    stops: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def size(self, name: str) -> int:
        return self.entries[name].size if name in self.entries else 0

    def to_open(self, name: str) -> list[str]:
        """Files whose ends are fetched now: this one and those expected, else more of them with every turn."""
        found = self._expected(name)
        if not found:
            place, last = bisect_left(self.names, name), bisect_left(self.names, self.opened)
            follows = self.opened and 0 < place - last <= self.opened_together + 1
            self.opened_together = min(_MOST, 2 * self.opened_together) if follows else 1
            found = self.names[place : place + self.opened_together]
        self.opened = name
        return [name, *(other for other in found if other > name and self.size(other))]

    def to_read(self, name: str) -> list[str]:
        """Files whose rows are fetched now: this one and those expected, else more of them with every turn, where those
        of the one before it were read to their end, or nearly: what is left may be no rows."""
        if found := self._expected(name):
            return found
        place = bisect_left(self.names, name)
        before = self.names[max(0, place - _NEAR) : place]
        if not before or self.size(before[-1]) - self.stops.get(before[-1], -END) > END:
            if not any(each in self.stops for each in before):  # else one of several threads was faster than another
                self.read_together = 1
            return [name]
        self.read_together = min(_MOST, 2 * self.read_together)
        after = self.names[place + 1 : place + self.read_together + _NEAR]
        new = [each for each in after if each not in self.stops and each not in self.files]
        return [name, *new[: self.read_together - 1]]

    def _expected(self, name: str) -> list[str]:
        place = bisect_left(self.expected, name)
        return self.expected[place : place + _MOST] if self.expected[place : place + 1] == [name] else []

    def passed(self, name: str) -> None:
        """What was expected up to this file is expected no more."""
        self.expected = self.expected[bisect_right(self.expected, name) :]


class Ends:
    """What listings said of the sizes of files, and what was fetched of them ahead. Threads may share it: what they
    take from each other is at most what was fetched ahead."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._folders: dict[str, _Folder] = {}
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        """For another process: without what was fetched ahead here."""
        return {**self.__dict__, "_folders": {}}

    def listed(self, folder: str, entries: dict[str, Entry]) -> None:
        """Take a new listing, in order of name. What was fetched ahead for the one before is forgotten."""
        before = self.folder(folder)
        self._folders[folder] = _Folder(
            [*entries], entries, opened=before.opened, opened_together=before.opened_together
        )

    def expect(self, folder: str, names: Sequence[str]) -> None:
        """Files, in order of name, that are read next."""
        known = self.folder(folder)
        known.expected = [name for name in names if name in known.entries]

    def folder(self, folder: str) -> _Folder:
        """What is known of a folder. In a forked child without what may be under way in a thread of its parent."""
        if self._process != os.getpid():
            self._folders = {name: _Folder(known.names, known.entries) for name, known in self._folders.items()}
            self._process = os.getpid()
        return self._folders.setdefault(folder, _Folder())

    def size(self, path: str) -> int:
        """Bytes of a file, from the last listing, or asked for once: parts never change. FileNotFoundError where it is
        not there."""
        folder, _, name = path.rpartition("/")
        known = self.folder(folder).entries
        if name not in known:
            known[name] = Entry(self._objects.size(path))
        return known[name].size

    def modified(self, path: str) -> float | None:
        """Time of a file's last change, where the last listing told it."""
        folder, _, name = path.rpartition("/")
        entry = self.folder(folder).entries.get(name)
        return None if entry is None else entry.modified

    def read(self, path: str, start: int, stop: int) -> bytes:
        """A range of a file. Raises Gone where the file was listed and is there no more."""
        try:
            return self._objects.read(path, start, stop)
        except FileNotFoundError as error:
            raise Gone(f"{self._objects.locate(path)}: wanted a file that was listed, got none") from error

    def end(self, path: str, size: int) -> bytes:
        """The last bytes of a file, `END` or all; those of the files after it are fetched along."""
        folder, _, name = path.rpartition("/")
        known = self.folder(folder)
        with known.lock:
            whole = known.files.get(name)  # its rows are asked for next
            found = known.ends.pop(name, None) if whole is None else whole[-END:]
            if found is None:
                names = known.to_open(name)
                known.passed(names[-1])
                found = self._fetch(folder, names, known, known.ends, END)
            known.opened = name
        return self.read(path, max(0, size - END), size) if found is None else found

    def rows(self, path: str, size: int, start: int, stop: int, *, goes_on: bool) -> tuple[int, bytes]:
        """(first byte, bytes) with those from `start` to `stop`, and more of them where reading goes on from one batch,
        or one file, to the next."""
        folder, _, name = path.rpartition("/")
        known = self.folder(folder)
        with known.lock:
            file, first, held = known.held
            if file == name and first <= start and stop <= first + len(held):
                return first, held
            goes_on = goes_on or known.stops.get(name) == start
            if not goes_on and start <= END:
                whole = known.files.pop(name, None)
                if name in known.stops:  # all is read once more
                    known.stops.clear()
                names = [name] if whole is not None else known.to_read(name)
                known.stops[name] = stop
                if len(names) > 1:
                    sums = accumulate(known.size(each) for each in names)
                    small = [each for each, total in zip(names, sums, strict=True) if total <= _RANGE]
                    known.passed(small[-1] if small else name)
                    whole = self._fetch(folder, small, known, known.files, _RANGE)
                    goes_on = True
                if whole is not None:
                    known.held = (name, 0, whole)
                    return 0, whole
        if not goes_on and start:  # who begins with the head of a file checks all of it
            return start, self.read(path, start, stop)
        data = self.read(path, start, min(size, max(stop, start + _RANGE)))
        known.held = (name, start, data)
        return start, data

    def stopped(self, path: str, stop: int) -> None:
        """Note how far the rows of a file were read."""
        folder, _, name = path.rpartition("/")
        self.folder(folder).stops[name] = stop

    def _fetch(self, folder: str, names: list[str], known: _Folder, kept: dict[str, bytes], most: int) -> bytes | None:
        """The last `most` bytes of several files; returns those of the first, and keeps the others'."""
        if len(names) < 2 or not known.size(names[0]):
            return None
        sizes = [(name, known.size(name)) for name in names]
        got = self._objects.read_each([(f"{folder}/{name}", max(0, size - most), size) for name, size in sizes])
        first, *others = zip(names, got, strict=True)
        kept.update((name, data) for name, data in others if data is not None)
        while sum(map(len, kept.values())) > 2 * _RANGE:  # nobody came for the oldest
            del kept[next(iter(kept))]
        return first[1]


class RemoteReadHandle:
    """A file at a remote place. A read that goes on where the last one stopped fetches a large range."""

    def __init__(self, ends: Ends, path: str, size: int, held: bytes = b"") -> None:
        self._ends, self._path, self._size = ends, path, size
        self._start, self._held, self._next = 0, held, -1

    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        stop = min(self._size, offset + length)
        if stop <= offset:
            return b""
        if not self._start <= offset <= stop <= self._start + len(self._held):
            if stop == self._size and stop - offset <= END:
                self._start, self._held = max(0, self._size - END), self._ends.end(self._path, self._size)
            else:
                goes_on = offset == self._next
                self._start, self._held = self._ends.rows(self._path, self._size, offset, stop, goes_on=goes_on)
        self._next = stop
        if stop < self._size:  # rows: the end of a file is no part of them
            self._ends.stopped(self._path, stop)
        return self._held[offset - self._start : stop - self._start]

    def close(self) -> None:
        self._held = b""
