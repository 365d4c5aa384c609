"""A remote place in this process that fails on demand: fsspec's memory file system, with faults on its requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

from fsspec.implementations.memory import MemoryFileSystem

from rollstore.testing import Fault

_T = TypeVar("_T")
_INSIDE = threading.local()


class Flaky(MemoryFileSystem):
    """`fault` hits the n-th request; with `when` after, what was asked for has happened by then.

    Requests of `pipe_file` with mode "create" are atomic, as S3's are. `seen` are the requests so far.
    """

    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False
    fault: ClassVar[Fault | None] = None
    when: ClassVar[Literal["before", "after"]] = "before"
    seen: ClassVar[list[tuple[str, str]]] = []

    @classmethod
    def forget(cls) -> None:
        """A new place, without files and faults."""
        cls.store, cls.pseudo_dirs, cls.seen, cls.fault = {}, [""], [], None

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/" + str(path).rpartition("://")[2].strip("/")

    def _request(self, verb: str, path: str, act: Callable[[], _T]) -> _T:
        if getattr(_INSIDE, "busy", False):  # the implementation calls itself; a client sends one request
            return act()
        _INSIDE.busy = True
        self.seen.append((verb, path))
        error = self.fault.check(verb) if self.fault is not None else None
        try:
            if error is not None and self.when == "before":
                raise error
            answer = act()
            if error is not None:
                raise error
            return answer
        finally:
            _INSIDE.busy = False
            error = None  # it holds this frame: a circle would keep files of the callers open

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._request("pipe_file", path, lambda: super(Flaky, self).pipe_file(path, value, mode=mode, **kwargs))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        return self._request("cat_file", path, lambda: super(Flaky, self).cat_file(path, start, end, **kwargs))

    def cat_ranges(self, paths: list[str], *args: Any, **kwargs: Any) -> list[Any]:
        return self._request("cat_ranges", paths[0], lambda: super(Flaky, self).cat_ranges(paths, *args, **kwargs))

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return self._request("info", path, lambda: super(Flaky, self).info(path, **kwargs))

    def modified(self, path: str) -> Any:
        return self._request("modified", path, lambda: super(Flaky, self).modified(path))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        return self._request("ls", path, lambda: super(Flaky, self).ls(path, detail, **kwargs))

    def rm_file(self, path: str) -> None:
        self._request("rm_file", path, lambda: super(Flaky, self).rm_file(path))

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self._request("cp_file", path1, lambda: super(Flaky, self).cp_file(path1, path2, **kwargs))
