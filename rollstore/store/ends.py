"""Reading remote files in few requests: the ends of many parts at once, and batches in large ranges.

To open a part is to read its end. Parts are opened one after the other, in the order of their listing: from the second
on, the ends of those that follow are fetched together, 2, 4, up to 64 of them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from rollstore.store.objects import Gone, Objects

END = 1 << 16
"""Bytes of a file's end that are read at once; that of most parts is shorter."""

_RANGE = 8 << 20  # bytes fetched by a read that goes on where the last one stopped
_MOST = 64


@dataclass
class _Folder:
    names: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    fetched: dict[str, bytes] = field(default_factory=dict)
    last: str = ""
    together: int = 1


class Ends:
    """What listings said of the sizes of files, and the ends of files that were fetched ahead."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._folders: dict[str, _Folder] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For another process: without what was fetched ahead here."""
        return {**self.__dict__, "_folders": {}}

    def listed(self, folder: str, sizes: dict[str, int]) -> None:
        """Take a new listing, in order of name. What was fetched ahead for the one before is forgotten."""
        before = self._folders.get(folder, _Folder())
        self._folders[folder] = _Folder([*sizes], sizes, {}, before.last, before.together)

    def size(self, path: str) -> int:
        """Bytes of a file, from the last listing: parts never change. FileNotFoundError where it is not there."""
        folder, _, name = path.rpartition("/")
        size = self._folders.get(folder, _Folder()).sizes.get(name)
        return self._objects.size(path) if size is None else size

    def read(self, path: str, start: int, stop: int) -> bytes:
        """A range of a file. Raises Gone where the file was listed and is there no more."""
        try:
            return self._objects.read(path, start, stop)
        except FileNotFoundError as error:
            raise Gone(f"{self._objects.locate(path)}: wanted a file that was listed, got none") from error

    def end(self, path: str, size: int) -> bytes:
        """The last bytes of a file, `END` or all; those of the files after it are fetched along."""
        folder, _, name = path.rpartition("/")
        known = self._folders.get(folder, _Folder())
        fetched = known.fetched.pop(name, None)
        if fetched is None:
            place, last = bisect_left(known.names, name), bisect_left(known.names, known.last)
            follows = known.last and 0 < place - last <= known.together + 1
            known.together = min(_MOST, 2 * known.together) if follows else 1
            fetched = self._fetch(folder, known, name, known.names[place : place + known.together])
        known.last = name
        return self.read(path, max(0, size - END), size) if fetched is None else fetched

    def _fetch(self, folder: str, known: _Folder, name: str, names: list[str]) -> bytes | None:
        """Ends of several files; returns that of the first, and keeps the others."""
        if len(names) < 2 or names[0] != name or not known.sizes[name]:
            return None
        filled = [(n, known.sizes[n]) for n in names if known.sizes[n]]
        got = self._objects.read_each([(f"{folder}/{n}", max(0, size - END), size) for n, size in filled])
        known.fetched |= {n: data for (n, _), data in zip(filled, got, strict=True) if data is not None}
        return known.fetched.pop(name, None)


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
                ahead = offset + _RANGE if offset == self._next else stop
                self._start = offset
                self._held = self._ends.read(self._path, offset, min(self._size, max(stop, ahead)))
        self._next = stop
        return self._held[offset - self._start : stop - self._start]

    def close(self) -> None:
        self._held = b""
