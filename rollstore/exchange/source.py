"""Files to import, wherever they are: opened, decompressed by what they hold, read line by line, in bounded memory."""

from __future__ import annotations

import io
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
import zstandard

from rollstore.errors import CorruptionError, StoreError
from rollstore.exchange.folder import ABOUT

Advance = Callable[[int], object]

LINE_BYTES = 256 << 20
"""The longest line that is read. A longer one is refused, and the lines after it are read."""

FINGERPRINT_BYTES = 1 << 20
"""What a file is known by: its first bytes, decompressed, so that it may move, grow or be packed otherwise."""

BOM = b"\xef\xbb\xbf"
"""What some programs put before UTF-8. It is no JSON, and left out where a file begins."""

_READ = 1 << 16
_SLICE = 1 << 12  # compressed bytes handed to zstd at a time: it may make 30,000 times as many of them
_ZSTD, _GZIP = (
    re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    b"\x1f\x8b",
)  # zstd may begin with a frame to skip
_OTHERS = {
    b"\xfd7zXZ\0": "one packed with xz", b"BZh": "one packed with bzip2", b"\x04\x22\x4d\x18": "one packed with lz4",
    b"PK\x03\x04": "a zip archive", b"7z\xbc\xaf\x27\x1c": "a 7z archive", b"PAR1": "Parquet",
    b"ARROW1": "an Arrow file", b"\xff\xfe": "text in UTF-16", b"\xfe\xff": "text in UTF-16",
}  # fmt: skip
"""How files begin that hold no lines, whatever they are called."""
_URL = re.compile(r"\w[\w+.-]+(://|::)")
_NUMBERS = re.compile(r"(\d+)")


def is_url(path: str) -> bool:
    """Whether a path is an address that fsspec opens."""
    return _URL.match(path) is not None


def expand(paths: Sequence[str | os.PathLike[str]], suffixes: Sequence[str]) -> list[str]:
    """The files meant: a folder stands for the files below with one of the suffixes, 2 before 10; a URL may have `*`.

    Raises StoreError where there is none, FileNotFoundError where a path is not there.
    """
    found: list[str] = []
    for path in (os.fspath(path) for path in paths):
        here = [path]
        if is_url(path):
            if "*" in path:
                here = _matching(path)
        elif Path(path).is_dir():
            files = [file for file in Path(path).rglob("*") if file.is_file() and file.name != ABOUT]
            here = [str(file) for file in files if file.name.endswith(tuple(suffixes))]
        else:
            os.stat(path)
        if not here:
            raise StoreError(f"{path}: wanted files ending in {' or '.join(suffixes)}, found none")
        found += here if len(here) == 1 else sorted(here, key=_natural)
    return found


def _natural(path: str) -> list[Any]:
    return [int(piece) if piece.isdigit() else piece for piece in _NUMBERS.split(path)]


def _matching(url: str) -> list[str]:
    import fsspec  # loaded for addresses only

    return [file.full_name for file in fsspec.open_files(url, "rb")]


@contextmanager
def opened(path: str, advance: Advance | None = None) -> Generator[io.BufferedReader]:
    """A file of a local path or URL as it lies there. `advance` is called with the number of bytes of each read."""
    if is_url(path):
        import fsspec

        with fsspec.open(path, "rb") as file:
            yield _counted(file, advance)
    else:
        with Path(path).open("rb") as file:
            yield _counted(file, advance)


def size_of(path: str) -> int:
    """Bytes of a local file; 0 where that takes a request."""
    return 0 if is_url(path) else os.stat(path).st_size


class _Counting(io.RawIOBase):
    def __init__(self, file: Any, advance: Advance | None) -> None:
        self._file, self._advance = file, advance

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        if self._advance is not None:
            self._advance(len(data))
        return len(data)


def _counted(file: Any, advance: Advance | None) -> io.BufferedReader:
    return io.BufferedReader(_Counting(file, advance), 1 << 20)


def fingerprint(file: io.BufferedReader) -> str:
    """16 hexadecimal digits over the beginning of a file as it lies there, which is then read from its start again."""
    sum_ = xxhash.xxh3_64_hexdigest(file.read(FINGERPRINT_BYTES))
    file.seek(0)
    return sum_


def chunks(file: io.BufferedReader, name: str) -> Iterator[bytes]:
    """What a file holds, decompressed if it is zstd or gzip.

    Raises CorruptionError where it ends too early, or is packed in another way or in UTF-16.
    """
    head = file.peek(8)
    if _ZSTD.match(head):
        yield from _unpacked(file, name, _SLICE, lambda: zstandard.ZstdDecompressor().decompressobj())
    elif head.startswith(_GZIP):
        yield from _unpacked(file, name, _SLICE, lambda: zlib.decompressobj(wbits=31), padding=b"\0")
    elif other := next((what for magic, what in _OTHERS.items() if head.startswith(magic)), None):
        raise CorruptionError(f"{name}: wanted lines of UTF-8, plain or packed with zstd or gzip, got {other}")
    else:
        while data := file.read(_READ):
            yield data


def _unpacked(
    file: io.BufferedReader, name: str, size: int, begin: Callable[[], Any], padding: bytes = b""
) -> Iterator[bytes]:
    """Frames one after the other; the last must be whole. `padding` may stand behind one: tapes fill up with zeros."""
    frame: Any = None
    try:
        while data := file.read(size):
            while data := data if frame is not None or not padding else data.lstrip(padding):
                frame = begin() if frame is None else frame
                if made := frame.decompress(data):
                    yield made
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except (zstandard.ZstdError, zlib.error) as error:
        raise CorruptionError(f"{name}: wanted a whole compressed file, got: {error}") from error
    if frame is not None:
        raise CorruptionError(f"{name}: wanted a whole compressed file, but it ends in the middle")


class Lines:
    """The lines of a file. `fingerprint`: 16 hexadecimal digits over its beginning."""

    def __init__(self, file: io.BufferedReader, name: str) -> None:
        """Raises CorruptionError where the beginning cannot be decompressed."""
        self._chunks = chunks(file, name)
        self._first: list[bytes] = []
        size = 0
        self._broken: CorruptionError | None = None
        try:
            while size < FINGERPRINT_BYTES and (data := next(self._chunks, None)) is not None:
                self._first.append(data)
                size += len(data)
        except CorruptionError as error:  # what stands before the break is read first
            self._broken = error
        self.fingerprint = xxhash.xxh3_64_hexdigest(b"".join(self._first)[:FINGERPRINT_BYTES])

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        """(number from 1, line); None for a line that is too long. Empty lines are counted and left out.

        Raises CorruptionError where the file ends too early; what follows its last line end is not given out then.
        """
        number, pieces, size = 0, list[bytes](), 0
        for chunk in self._all():
            first, *rest = chunk.split(b"\n")
            if not rest:
                size += len(first)
                if size <= LINE_BYTES:
                    pieces.append(first)
                continue
            for line in (None if size > LINE_BYTES else b"".join([*pieces, first]), *rest[:-1]):
                number += 1
                if line is None or line.strip():
                    yield number, line
            pieces, size = [rest[-1]], len(rest[-1])
        last = b"".join(pieces)
        if size > LINE_BYTES or last.strip():
            yield number + 1, None if size > LINE_BYTES else last

    def _all(self) -> Iterator[bytes]:
        first, self._first = self._first, []
        for n, data in enumerate(first):
            yield data.removeprefix(BOM) if n == 0 else data
        if self._broken is not None:
            raise self._broken
        yield from self._chunks
