"""Files at a place that fsspec reaches: requests with patience, refusals typed, listings never from a cache."""

from __future__ import annotations

import errno
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import fsspec
from fsspec.dircache import DirCache

from rollstore.errors import RemoteError, StoreError
from rollstore.store import frame
from rollstore.store.names import STAGED

_T = TypeVar("_T")

_CREATES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Protocols whose fsspec implementation hands `mode="create"` on to the server. A probe asks the server itself."""

_ALIASES = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "az": "abfs"}

_WHOLE = _CREATES | {"memory"}
"""Protocols under which a file appears whole or not at all. Elsewhere it is written beside and renamed."""

_UNFIT = frozenset({"http", "https"})
_DOCUMENT = 1 << 20  # bytes asked for without knowing how long a document is
_COMPARED = 1 << 20  # bytes up to which two files are compared whole
_AT_ONCE = 32  # requests of threads
_CONNECTIONS = 64  # of one process: the implementation itself may ask for several files at once
_FINAL = (
    PermissionError, NotImplementedError, IsADirectoryError, NotADirectoryError, ValueError, TypeError, LookupError,
    AttributeError,
)  # fmt: skip
"""What no later try can mend: refusals, and an implementation that does not do what is asked of it."""


class Gone(StoreError, FileNotFoundError):
    """A file that was listed and is there no more."""

    __str__ = Exception.__str__


@dataclass(frozen=True)
class Entry:
    """A file in a listing: its bytes, and where the listing tells, the time of its last change (seconds since 1970, by
    the server's clock) and a tag that is another for other contents."""

    size: int
    modified: float | None = None
    tag: str | None = None


@dataclass(frozen=True)
class Patience:
    """How often a request is tried, and the seconds waited before each further try: doubled, at most `longest`."""

    tries: int = 6
    first: float = 0.1
    longest: float = 5.0
    sleep: Callable[[float], object] = time.sleep

    def turns(self) -> Iterator[int]:
        """The number of each try, from 1, after waiting. Waits are drawn, so that many writers do not come at once."""
        for turn in range(self.tries):
            if turn:
                self.sleep(min(self.longest, self.first * 2 ** (turn - 1)) * random.uniform(0.5, 1.0))
            yield turn + 1


class Objects:
    """The files under one URL. Paths are relative to it. Threads may share it, and a forked child may go on with it.

    What is missing is FileNotFoundError, a name that is taken FileExistsError; all else is RemoteError, once the tries
    ran out.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, patience: Patience | None = None) -> None:
        """Connects where the protocol connects at once. Raises StoreError where no store can be there."""
        scheme, _, rest = url.partition("://")
        self.protocol = scheme.lower()
        # A password may stand in the address; it is handed to fsspec and appears nowhere else.
        shown = re.sub(r"^([^/:@]*):[^/]*@", r"\1@", rest).rstrip("/")
        self.url = f"{scheme}://{shown}"
        if "::" in url:
            raise StoreError(f"{self.url}: wanted one protocol, got a chain of them")
        if self.protocol in _UNFIT:
            raise StoreError(f"{self.url}: wanted a place that can be written and listed, got {self.protocol}")
        self._address, self._options = url, dict(options or {})
        self._patience = patience or Patience()
        self.address = f"{_ALIASES.get(self.protocol, self.protocol)}://{shown} {self._server()}".rstrip()
        """Tells places apart, whoever asks: the URL, and the server where the options or the environment name one."""
        self._whole = self.protocol in _WHOLE
        self._creates: bool | None = None if self.protocol in _CREATES else False
        self._connection: tuple[int, Any, str] | None = None
        if not self._connected()[1].strip("/"):
            raise StoreError(f"{self.url}: wanted a folder in it for the store, got none")

    def _server(self) -> str:
        client = self._options.get("client_kwargs") or {}
        named = self._options.get("endpoint_url") or client.get("endpoint_url")
        if named is None and _ALIASES.get(self.protocol, self.protocol) == "s3":
            named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return str(named or "").rstrip("/")

    def locate(self, path: str) -> str:
        """The address of a file, as fsspec opens it."""
        return f"{self.url}/{path}"

    def puts_if_absent(self) -> bool:
        """Whether the server itself refuses a name that is taken. Asked once, with a file that stays there."""
        if self._creates is None:
            path = f"staging/probe{STAGED}"  # in a copy of the store, which has its staging here, it is swept up
            try:
                self._ask("upload", path, lambda fs, full: fs.pipe_file(full, b"probe", mode="create"))
                self._ask("upload", path, lambda fs, full: fs.pipe_file(full, b"probe", mode="create"))
                self._creates = False  # the second one took the place of the first, and of those of other processes
            except FileExistsError:
                self._creates = True
            except FileNotFoundError as error:
                raise RemoteError(f"{self.url}: wanted a place to write to, got none: {_said(error)}") from error
        return self._creates

    def put(self, path: str, data: bytes) -> None:
        """Store a file whole, if nobody has its name. FileExistsError where another file has it.

        Where the outcome of a try is unknown, the next one finds the name taken, and the file there is compared: the
        same length and the same end, in which the sums of all the rest stand, mean that it was stored.
        """
        creates = self.puts_if_absent()
        try:
            self._ask("upload", path, lambda fs, full: self._put(fs, full, data, creates=creates))
        except FileExistsError:
            if not self._holds(path, data):
                raise
        except FileNotFoundError as error:
            raise RemoteError(f"{self.locate(path)}: upload: no such place: {_said(error)}") from error

    def _put(self, fs: Any, full: str, data: bytes, *, creates: bool) -> None:
        if creates:
            fs.pipe_file(full, data, mode="create")
            return
        with suppress(FileNotFoundError):
            if fs.info(full)["type"] == "file":
                raise FileExistsError(errno.EEXIST, "exists", full)
        if self._whole:
            fs.pipe_file(full, data)
            return
        staged = f"{self._connected()[1]}/staging/{secrets.token_hex(16)}"
        for folder in (staged, full):
            fs.makedirs(folder.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(staged, data)
        fs.mv(staged, full)

    def _holds(self, path: str, data: bytes) -> bool:
        """Whether the file has this content, by its length and its end."""
        try:
            if self.size(path) != len(data):
                return False
            end = len(data) if len(data) <= _COMPARED else frame.tail_length(data[-10:]) or _COMPARED
            start = max(0, len(data) - end)
            return not data or self.read(path, start, len(data)) == data[start:]
        except FileNotFoundError:
            return False

    def size(self, path: str) -> int:
        """Bytes of a file."""
        info = self._ask("look up", path, lambda fs, full: fs.info(full))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "no file", self.locate(path))
        return int(info["size"])

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of a file, all of them."""

        def request(fs: Any, full: str) -> bytes:
            data = bytes(fs.cat_file(full, start=start, end=stop))
            if len(data) != stop - start:  # less of a part's end would look like no part
                raise OSError(errno.EIO, f"wanted {stop - start} bytes at {start}, got {len(data)}")
            return data

        return self._ask("read", path, request)

    def read_each(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        """Ranges (path, start, stop) of several files at once; None where one did not come at the first try."""
        paths, starts, stops = zip(*wanted, strict=True)

        def request(fs: Any, root: str) -> list[Any]:
            return fs.cat_ranges([f"{root}{path}" for path in paths], list(starts), list(stops), on_error="return")

        try:
            got = self._ask("read", "", request, replace(self._patience, tries=1))
        except (RemoteError, FileNotFoundError):
            return [None] * len(wanted)
        lengths = (stop - start for _, start, stop in wanted)
        return [d if isinstance(d, bytes) and len(d) == n else None for d, n in zip(got, lengths, strict=True)]

    def document(self, path: str) -> bytes:
        """The whole of a small file, mostly in one request."""

        def request(fs: Any, full: str) -> bytes:
            try:
                return fs.cat_file(full, start=0, end=_DOCUMENT)
            except OSError as error:
                if error.errno == errno.EINVAL and not fs.info(full)["size"]:
                    return b""  # of an empty file no range can be asked for
                raise

        data = bytes(self._ask("read", path, request))
        if len(data) < _DOCUMENT or (size := self.size(path)) == len(data):
            return data
        return data + self.read(path, len(data), size)

    def list(self, folder: str) -> dict[str, Entry]:
        """The files in a folder, by name, in order of name."""

        def request(fs: Any, full: str) -> dict[str, Entry]:
            try:
                if folder and _is_s3fs(fs):  # its `ls` of a folder without files lists the one above as well
                    entries = [*fs.find(full.removesuffix(f"/{folder}"), prefix=f"{folder}/", detail=True).values()]
                else:
                    entries = fs.ls(full.rstrip("/"), detail=True)
            except FileNotFoundError:
                return {}
            inside = full.strip("/") + "/"
            names = ((str(entry["name"]).lstrip("/"), entry) for entry in entries if entry["type"] == "file")
            found = {name.removeprefix(inside): _entry(e) for name, e in names if name.startswith(inside)}
            return {name: found[name] for name in sorted(found) if name and "/" not in name}

        return self._ask("list", folder, request)

    def modified(self, path: str) -> float:
        """Time of the last change by the server's clock, seconds since 1970."""
        return _seconds(self._ask("look up", path, lambda fs, full: fs.modified(full)))

    def clock(self) -> float:
        """The server's time now, read off a fresh file. Servers tell whole seconds: this is the end of that one."""
        path = f"staging/clock-{secrets.token_hex(16)}"
        self.put(path, b"clock")
        try:
            return self.modified(path) + 1.0
        finally:
            self.delete(path)

    def delete(self, path: str) -> None:
        """Remove a file; one that is gone is no error."""
        with suppress(FileNotFoundError):
            self._ask("delete", path, lambda fs, full: fs.rm_file(full))

    def move(self, path: str, target: str) -> None:
        """Copy to a name that nobody has, then delete. A death between the two leaves both."""

        def request(fs: Any, full: str) -> None:
            new = f"{self._connected()[1]}/{target}"
            if not self._whole:
                fs.makedirs(new.rpartition("/")[0], exist_ok=True)
            fs.cp_file(full, new)

        self._ask("copy", path, request)
        self.delete(path)

    def _ask(self, verb: str, path: str, request: Callable[[Any, str], _T], patience: Patience | None = None) -> _T:
        """One request, tried again while it may yet succeed."""
        failed: Exception | None = None
        patience = patience or self._patience
        try:
            for _ in patience.turns():
                try:
                    fs, root = self._connected()
                    return request(fs, f"{root}/{path}")
                except (FileNotFoundError, FileExistsError, StoreError):
                    raise
                except _FINAL as error:
                    raise RemoteError(f"{self.locate(path)}: {verb}: {_said(error)}") from error
                except Exception as error:
                    failed = error
            raise RemoteError(f"{self.locate(path)}: {verb}: {_said(failed)}; tries: {patience.tries}") from failed
        finally:
            failed = None  # it holds this frame: a circle would keep files of the callers open

    def threads(self) -> int:
        """How many threads may ask at once: one where the implementation may be a conversation over one connection.

        Connects: threads of a forked child that come at once would each make a connection of their own.
        """
        return _AT_ONCE if getattr(self._connected()[0], "async_impl", False) else 1

    def _connected(self) -> tuple[Any, str]:
        """fsspec's file system and the root in it; a process makes its own, since connections cannot be shared."""
        if self._connection is None or self._connection[0] != os.getpid():
            try:
                options: dict[str, Any] = {**self._options, "skip_instance_cache": True}
                if self.protocol in ("s3", "s3a"):  # of itself it keeps ten, and the others wait
                    given = options.get("config_kwargs") or {}
                    options["config_kwargs"] = {"max_pool_connections": _CONNECTIONS, **given}
                fs, root = fsspec.url_to_fs(self._address, **options)
            except ImportError as error:
                extra = "; pip install 'rollstore[s3]'" if self.protocol in ("s3", "s3a") else ""
                raise StoreError(f"{self.url}: wanted what {self.protocol} needs, got {_said(error)}{extra}") from error
            except (ValueError, TypeError) as error:
                raise StoreError(f"{self.url}: wanted an address that fsspec opens, got {_said(error)}") from error
            except Exception as error:  # each implementation has its own
                raise RemoteError(f"{self.url}: connect: {_said(error)}") from error
            fs.dircache = DirCache(use_listings_cache=False)  # a listing that is old leaves rows out
            self._connection = (os.getpid(), fs, str(root).rstrip("/"))
        return self._connection[1:]


def _is_s3fs(fs: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "s3fs" for kind in type(fs).__mro__)


def _entry(found: dict[str, Any]) -> Entry:
    changed = found.get("LastModified")
    return Entry(
        int(found["size"]),
        _seconds(changed) if isinstance(changed, datetime) else None,
        found.get("ETag") or found.get("etag"),
    )


def _seconds(time_: datetime) -> float:
    return (time_ if time_.tzinfo else time_.replace(tzinfo=UTC)).timestamp()


def _said(error: Exception | None) -> str:
    """An error in one line; many servers' errors say nothing without their kind."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
