"""Work on many pieces, a few at once: Arrow lets other threads run while it packs, unpacks and checks a batch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")

_THREADS = min(8, os.cpu_count() or 1)


def ahead(work: Callable[[_T], _R], items: Iterable[_T], threads: int = _THREADS) -> Iterator[_R]:
    """`work` of each item, in their order; at most twice as many as there are threads are under way or waiting.

    `items` is advanced by the caller's thread alone. What `work` raises is raised where its result would have stood.
    """
    waiting: deque[Future[_R]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="rollstore-ahead")
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
