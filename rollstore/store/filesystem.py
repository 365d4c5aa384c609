"""The durable verbs the store is built on, and their local implementation.

Everything that touches a disk goes through `Filesystem`, so that a fake can stand in its place and lose, at a
simulated crash, whatever a real disk may lose (`rollstore.testing.MemoryFilesystem`). Paths are relative to the
store and use `/`. Every verb raises OSError, as the operating system does; the callers make it a typed error.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_TRIES, _MOMENT = 100, 0.002
"""How often, and after how many seconds, a new file is locked that somebody sweeping looks at."""


MARK = "rollstore.json"
"""The file that makes a folder a store."""


class ReadHandle(Protocol):
    """A file open for reading. It stays readable after the file's name is gone."""

    def size(self) -> int: ...
    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset`; fewer only at the end of the file."""
        ...

    def close(self) -> None: ...


class WriteHandle(Protocol):
    """A file that one process writes, under its lock until it is closed."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """All of `data` at `offset`, or OSError with any part of it written."""
        ...

    def truncate(self, size: int) -> None: ...
    def sync(self) -> None:
        """The file's bytes and length survive power loss. After an OSError they may not, whatever a retry says."""
        ...

    def close(self) -> None:
        """Close, and let the lock go."""
        ...


class Filesystem(Protocol):
    """What the store asks of a place that keeps files."""

    def make_folder(self, folder: str) -> None: ...
    def list(self, folder: str) -> list[str]:
        """Names of the files in a folder, sorted; none where there is no such folder."""
        ...

    def open(self, path: str) -> ReadHandle: ...
    def create(self, path: str) -> WriteHandle:
        """A new, empty, locked file. FileExistsError where the name is taken, or was taken while locking."""
        ...

    def lock(self, path: str) -> WriteHandle | None:
        """An existing file under its lock; None while another process, or handle, holds it."""
        ...

    def publish(self, source: str, target: str) -> None:
        """Give a finished file its final name, if nobody has it: FileExistsError otherwise. The source stays."""
        ...

    def sync_folder(self, folder: str) -> None:
        """The names in a folder survive power loss."""
        ...

    def delete(self, path: str) -> None:
        """Remove a name. A name that is already gone is no error."""
        ...

    def move(self, path: str, folder: str) -> str:
        """Rename into another folder, under a name nobody has; returns the new path."""
        ...

    def modified(self, path: str) -> float:
        """Time of the last change by the store's clock, seconds since 1970."""
        ...

    def stamp(self, folder: str) -> int | None:
        """A number that changes when names in the folder change; None where that cannot be told."""
        ...

    def locate(self, path: str) -> str:
        """The path as other programs open it."""
        ...


class _LocalReadHandle:
    _fd = -1  # an interrupt may come before the first line of __init__, and close still follows

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        if len(data) == length or not data:
            return data
        pieces = [data]  # Linux reads at most 2 GiB a call
        while data:
            done = sum(map(len, pieces))
            data = os.pread(self._fd, length - done, offset + done)
            pieces.append(data)
        return b"".join(pieces)

    def close(self, close: Callable[[int], None] = os.close) -> None:
        # Forgotten first: a child forked while the system closes it must not close that number again. Kept as a
        # default: at the end of the interpreter, when generators are left, `os` is gone.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd)

    __del__ = close


class _LocalWriteHandle:
    _fd = -1  # as above

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, offset: int, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._fd, rest, offset)
            if not written:
                raise OSError(errno.EIO, "the file takes no more bytes")
            offset += written
            rest = rest[written:]

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self, close: Callable[[int], None] = os.close) -> None:
        # Closing, never unlocking: after a fork the lock belongs to parent and child together, and an unlock by the
        # child would take it from the parent. Forgotten first, and a default, for the same reasons as above.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd)

    __del__ = close


class LocalFilesystem:
    """A folder of a local file system: POSIX calls, hard links as put-if-absent, flock as the lock."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()

    def make_folder(self, folder: str) -> None:
        (self.root / folder).mkdir(parents=True, exist_ok=True)

    def list(self, folder: str) -> list[str]:
        try:
            with os.scandir(self.root / folder) as entries:
                return sorted(entry.name for entry in entries if _is_file(entry))
        except FileNotFoundError:
            return []

    def open(self, path: str) -> ReadHandle:
        return _LocalReadHandle(os.open(self.locate(path), os.O_RDONLY | os.O_CLOEXEC))

    def create(self, path: str) -> WriteHandle:
        try:
            fd = os.open(self.locate(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            if not self._made_again(path.rpartition("/")[0]):
                raise
            fd = os.open(self.locate(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        for _ in range(_TRIES):
            handle = self._locked(fd, path)
            if handle is not None:
                return handle
            # Between creating and locking, a vacuum or recovery may have taken it for a file of the dead: it deletes it
            # or lets it go. It is empty, and nobody else makes a file of this name once it was ours.
            time.sleep(_MOMENT)
            fd = os.open(self.locate(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.close(fd)
        raise FileExistsError(errno.EEXIST, "another process took the new file", self.locate(path))

    def lock(self, path: str) -> WriteHandle | None:
        return self._locked(os.open(self.locate(path), os.O_RDWR | os.O_CLOEXEC), path)

    def _locked(self, fd: int, path: str) -> WriteHandle | None:
        handle = _LocalWriteHandle(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The name may have been given away between opening and locking: the lock must be on the file it names.
            if os.path.samestat(os.fstat(fd), os.stat(self.locate(path))):
                return handle
        except (BlockingIOError, FileNotFoundError):
            pass
        handle.close()
        return None

    def publish(self, source: str, target: str) -> None:
        try:
            os.link(self.locate(source), self.locate(target))  # rename would overwrite
        except FileNotFoundError:
            if not self._made_again(target.rpartition("/")[0]):
                raise
            os.link(self.locate(source), self.locate(target))

    def sync_folder(self, folder: str) -> None:
        self._made_again(folder)
        fd = os.open(self.root / folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _made_again(self, folder: str) -> bool:
        """Make a folder of a store that went, as `cache/` may and empty ones do in many copies; whether it was gone.

        Not in a folder that is no store any more: nobody wants half of a store that was deleted to come back.
        """
        if not folder or (self.root / folder).is_dir() or not (self.root / MARK).exists():
            return False
        self.make_folder(folder)
        return True

    def delete(self, path: str) -> None:
        (self.root / path).unlink(missing_ok=True)

    def move(self, path: str, folder: str) -> str:
        target = f"{folder}/{secrets.token_hex(4)}-{path.rpartition('/')[2]}"
        self.make_folder(folder)
        os.rename(self.locate(path), self.locate(target))
        return target

    def modified(self, path: str) -> float:
        return os.stat(self.locate(path)).st_mtime

    def stamp(self, folder: str) -> int | None:
        try:
            return os.stat(self.locate(folder)).st_mtime_ns
        except FileNotFoundError:
            return 0

    def locate(self, path: str) -> str:
        return f"{self.root}/{path}"


def _is_file(entry: os.DirEntry[str]) -> bool:
    """A file, or a link to one; also a link to nothing, which whoever opens it will name."""
    return entry.is_file() or (entry.is_symlink() and not entry.is_dir())


def read_file(filesystem: Filesystem, path: str) -> bytes:
    """The whole of one file. Raises FileNotFoundError."""
    handle = filesystem.open(path)
    try:
        return handle.read(0, handle.size())
    finally:
        handle.close()
