"""Work on many pieces, a few at once: Arrow lets other threads run while it packs, unpacks and checks a batch."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")

THREADS = min(8, os.cpu_count() or 1)


class Pool(ThreadPoolExecutor):
    """Threads; what was not begun when it is left is not done."""

    def __exit__(self, *_: object, ended: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the interpreter, when generators are left, threads have ended, and modules are emptied: this one
        # and those that shutting down needs.
        if not ended():
            self.shutdown(cancel_futures=True)


def ahead(work: Callable[[_T], _R], items: Iterable[_T], threads: int = THREADS) -> Iterator[_R]:
    """`work` of each item, in their order; at most twice as many as there are threads are under way or waiting.

    `items` is advanced by the caller's thread alone. What `work` raises is raised where its result would have stood.
    """
    waiting: deque[Future[_R]] = deque()
    with Pool(threads, thread_name_prefix="rollstore-ahead") as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
