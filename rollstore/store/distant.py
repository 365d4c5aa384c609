"""A place where every look at a file is a request and its reply: what can be asked at once is asked at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rollstore.store.filesystem import Filesystem

_T = TypeVar("_T")
_R = TypeVar("_R")
_Other = TypeVar("_Other")


class Distant:
    """A file system whose verbs wait for replies most of their time."""

    def threads(self) -> int:
        """How many threads may call the verbs at once; what they share is there when this returns."""
        raise NotImplementedError

    def expect(self, files: Sequence[str]) -> None:
        """Files, in order of name, that are read next, from their ends or whole: several may be fetched together."""
        raise NotImplementedError


def at_once(filesystem: Filesystem, work: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
    """`work` of each item, in their order: one when it is asked for, or at a distant place many at a time."""
    threads = filesystem.threads() if isinstance(filesystem, Distant) else 1
    if threads == 1:
        return map(work, items)
    from rollstore.store.ahead import ahead  # what makes threads is loaded where it is used

    return ahead(work, items, threads)


def both(filesystem: Filesystem, first: Callable[[], _R], second: Callable[[], _Other]) -> tuple[_R, _Other]:
    """The results of both, one after the other, or at a distant place at once."""
    if not isinstance(filesystem, Distant) or filesystem.threads() == 1:
        return first(), second()
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1, thread_name_prefix="rollstore-ahead") as pool:
        meanwhile = pool.submit(second)
        return first(), meanwhile.result()


def expect(filesystem: Filesystem, files: Sequence[str]) -> None:
    """Tell a distant place what is read next; see `Distant.expect`."""
    if isinstance(filesystem, Distant):
        filesystem.expect(files)
