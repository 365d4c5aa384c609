"""Fakes to test against: a file system in memory that loses, at a crash, whatever a real disk may lose.

`MemoryFilesystem` has the verbs of `rollstore.store.filesystem.Filesystem`. Writes are seen at once by every reader
and kept only as far as they were synced: a crash keeps a random subset of the rest, page by page, and of the names
made or removed since their folder was synced. A fault can be put on the n-th verb: an error, once or from then on, or
the death of the machine.
"""

from __future__ import annotations

import errno
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

PAGE = 512
"""Bytes that a disk writes whole or not at all."""


class MachineCrash(BaseException):
    """The power went. Not an Exception, so that no handler of errors goes on after it."""


@dataclass
class Fault:
    """What goes wrong: at the `at`-th verb counted from 1; with `lasting`, at every later one too.

    `crash` raises MachineCrash instead of OSError(`code`). `verbs` limits it to some verbs, all where empty.
    """

    at: int
    code: int = errno.EIO
    lasting: bool = False
    crash: bool = False
    verbs: frozenset[str] = frozenset()
    seen: int = 0
    fired: int = 0

    def check(self, verb: str) -> BaseException | None:
        if self.crash and self.fired:
            return MachineCrash(verb)  # nothing is done after the power went, by no thread
        if self.verbs and verb not in self.verbs:
            return None
        self.seen += 1
        if self.seen == self.at or (self.lasting and self.seen > self.at):
            self.fired += 1
            return MachineCrash(verb) if self.crash else OSError(self.code, f"fault {self.seen} at {verb}")
        return None


@dataclass
class _Inode:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    unsynced: list[Callable[[bytearray], None]] = field(default_factory=list)
    holder: object | None = None
    modified: float = 0.0


def _pages(offset: int, data: bytes) -> list[Callable[[bytearray], None]]:
    """A write as the pages a disk may keep or lose one by one."""

    def page(start: int, stop: int) -> Callable[[bytearray], None]:
        piece = data[start - offset : stop - offset]

        def apply(content: bytearray) -> None:
            content.extend(bytes(max(0, stop - len(content))))
            content[start:stop] = piece

        return apply

    ends = [*range((offset // PAGE + 1) * PAGE, offset + len(data), PAGE), offset + len(data)]
    starts = [offset, *ends[:-1]]
    return [page(start, stop) for start, stop in zip(starts, ends, strict=True)]


class _Handle:
    """An open file; reads and writes go to the inode, whatever became of its name."""

    def __init__(self, machine: MemoryFilesystem, inode: _Inode) -> None:
        self._machine, self._inode = machine, inode

    def size(self) -> int:
        return len(self._inode.data)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._inode.data[offset : offset + length])

    def write(self, offset: int, data: bytes | memoryview) -> None:
        error = self._machine.fault_at("write")
        whole = bytes(data)
        written = whole if error is None else whole[: self._machine.random.randrange(len(whole) + 1)]
        for apply in _pages(offset, written):
            apply(self._inode.data)
            self._inode.unsynced.append(apply)
        if error is not None:
            raise error

    def truncate(self, size: int) -> None:
        self._machine.raise_fault("truncate")

        def apply(content: bytearray) -> None:
            del content[size:]

        apply(self._inode.data)
        self._inode.unsynced.append(apply)

    def sync(self) -> None:
        error = self._machine.fault_at("sync")
        if error is not None:
            # Linux drops what it could not write and calls the pages clean: a later sync says nothing of them.
            self._inode.durable = self._machine.kept(self._inode)
            self._inode.unsynced.clear()
            raise error
        self._inode.durable = bytes(self._inode.data)
        self._inode.unsynced.clear()

    def close(self) -> None:
        if self._inode.holder is self:
            self._inode.holder = None


_Names = dict[str, _Inode]
_Change = dict[str, _Inode | None]
"""Names that change together: one, or the two of a rename."""


def _apply(names: _Names, change: _Change) -> None:
    for path, inode in change.items():
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode


class MemoryFilesystem:
    """A machine's disk. `crash()` gives the disk as the next boot finds it; `kill()` only ends the processes."""

    def __init__(self, seed: int = 0, names: _Names | None = None) -> None:
        self.random = random.Random(seed)
        self.fault: Fault | None = None
        self._names: _Names = dict(names or {})
        self._durable: _Names = dict(names or {})
        self._unsynced: list[_Change] = []
        self._changes = 0
        self._clock = 1_000_000_000.0

    def crash(self) -> MemoryFilesystem:
        """The disk after the power went: synced bytes and names, and a random subset of everything since."""
        names = dict(self._durable)
        lost: set[str] = set()
        for change in self._unsynced:
            # Changes of one name happen in order; those of different names do not wait for each other.
            if lost.isdisjoint(change) and self.random.random() < 0.5:
                _apply(names, change)
            else:
                lost |= change.keys()
        contents = {id(inode): self.kept(inode) for inode in names.values()}
        fresh: dict[int, _Inode] = {key: _Inode(bytearray(content), content) for key, content in contents.items()}
        return MemoryFilesystem(self.random.randrange(1 << 30), {path: fresh[id(i)] for path, i in names.items()})

    def kill(self) -> None:
        """Every process dies: locks go, what was written stays."""
        for inode in self._names.values():
            inode.holder = None
        self.fault = None

    def kept(self, inode: _Inode) -> bytes:
        """What of a file is on the disk: synced bytes, and a random subset of the pages written since."""
        content = bytearray(inode.durable)
        for apply in inode.unsynced:
            if self.random.random() < 0.5:
                apply(content)
        return bytes(content)

    def fault_at(self, verb: str) -> BaseException | None:
        return self.fault.check(verb) if self.fault is not None else None

    def raise_fault(self, verb: str) -> None:
        error = self.fault_at(verb)
        if error is not None:
            raise error

    def make_folder(self, folder: str) -> None:
        del folder  # folders are there as soon as a file is

    def list(self, folder: str) -> list[str]:
        prefix = f"{folder}/" if folder else ""
        return sorted(p[len(prefix) :] for p in self._names if p.startswith(prefix) and "/" not in p[len(prefix) :])

    def open(self, path: str) -> _Handle:
        return _Handle(self, self._inode(path))

    def create(self, path: str) -> _Handle:
        self.raise_fault("create")
        if path in self._names:
            raise FileExistsError(errno.EEXIST, "exists", path)
        self._change({path: _Inode(modified=self._clock)})
        return self._hold(self._names[path])

    def lock(self, path: str) -> _Handle | None:
        inode = self._inode(path)
        return self._hold(inode) if inode.holder is None else None

    def publish(self, source: str, target: str) -> None:
        self.raise_fault("publish")
        if target in self._names:
            raise FileExistsError(errno.EEXIST, "exists", target)
        self._change({target: self._inode(source)})

    def sync_folder(self, folder: str) -> None:
        self.raise_fault("sync_folder")
        inside = [c for c in self._unsynced if any(path.rpartition("/")[0] == folder for path in c)]
        for change in inside:
            _apply(self._durable, change)
        self._unsynced = [change for change in self._unsynced if change not in inside]

    def delete(self, path: str) -> None:
        self.raise_fault("delete")
        if path in self._names:
            self._change({path: None})

    def move(self, path: str, folder: str) -> str:
        self.raise_fault("move")
        target = f"{folder}/{secrets.token_hex(4)}-{path.rpartition('/')[2]}"
        self._change({target: self._inode(path), path: None})
        return target

    def modified(self, path: str) -> float:
        return self._inode(path).modified

    def age(self, seconds: float) -> None:
        """Let time pass: every file is so much older."""
        for inode in self._names.values():
            inode.modified -= seconds

    def stamp(self, folder: str) -> int | None:
        del folder
        return self._changes

    def locate(self, path: str) -> str:
        return f"memory/{path}"

    def _change(self, change: _Change) -> None:
        self._changes += 1
        _apply(self._names, change)
        self._unsynced.append(change)

    def _hold(self, inode: _Inode) -> _Handle:
        handle = _Handle(self, inode)
        inode.holder = handle
        return handle

    def _inode(self, path: str) -> _Inode:
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return self._names[path]
