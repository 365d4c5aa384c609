"""A writer behind a bounded queue, so that a slow or full disk never holds a sampling thread up without a word."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections import deque
from typing import Any, Literal, Protocol

from rollstore.errors import SchemaError, StoreError, WriteError
from rollstore.writers.apart import Apart

LOG = logging.getLogger("rollstore")

BATCH = 64
"""Appends that one flush covers at most."""

PATIENCE_SECONDS = 1.0
"""A caller that has waited this long for room is mentioned in the log, and a writer that failed is tried again."""


class Sink(Protocol):
    """What stands behind the queue: a `Writer`, or anything that takes, flushes and closes as one does."""

    def append(self, data: Any) -> None: ...

    def flush(self, *, sync: bool = False) -> None: ...

    def close(self) -> None: ...


class Queued:
    """Takes appends at once and hands them, in order, to a thread that writes and flushes them.

    At most `limit` appends wait; the one after them waits too (`when_full="block"`, said in the log) or raises
    WriteError with nothing taken (`"fail"`). Nothing is ever dropped: what the disk refuses stays in the queue and is
    tried again. What the schema refuses is logged as it happens and raised by the next `flush` or `close`. Threads may
    share it, and coroutines, which use `append_async`. A forked child starts with an empty queue: what waited is the
    parent's.
    """

    def __init__(self, writer: Sink, *, limit: int = 1024, when_full: Literal["block", "fail"] = "block") -> None:
        if limit < 1:
            raise ValueError(f"queued: limit: wanted at least 1, got {limit}")
        if when_full not in ("block", "fail"):
            raise ValueError(f"queued: when_full: wanted block or fail, got {when_full!r}")
        self.limit, self.when_full = limit, when_full
        self._writer = writer
        self._closed = False
        self._start()
        _QUEUED.add(self)

    def _start(self) -> None:
        """State of a queue that nothing was put in; the thread starts with the first append."""
        self._turn = threading.Condition()
        self._items: deque[Any] = deque()
        self._apart: Apart | None = None  # what is left of the first item, once it was refused as a whole
        self._waiters: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._used = self._put_count = self._written = self._failures = 0
        self._error: WriteError | None = None
        self._refused: list[Exception] = []
        self._thread: threading.Thread | None = None
        self._ending = False

    @property
    def waiting(self) -> int:
        """Places in use: appends that wait or are being written, and reservations."""
        return self._used

    @property
    def error(self) -> WriteError | None:
        """What the writer met when it was last tried; None where it went well."""
        return self._error

    def append(self, data: Any) -> None:
        """Put rows in the queue. Raises WriteError where it is full under `fail`, StoreError after `close`."""
        self.reserve()
        self.put(data)

    async def append_async(self, data: Any) -> None:
        """`append` for coroutines: where it waits for room, the event loop goes on."""
        await self.reserve_async()
        self.put(data)

    def reserve(self) -> None:
        """Take a place without knowing yet what goes there: `put` fills it, `release` gives it back."""
        with self._turn:
            told = False
            while not self._has_room():
                if not self._turn.wait(PATIENCE_SECONDS) and not told:
                    told = True
                    self._say_full()
                self._open_for_use()
            self._used += 1

    async def reserve_async(self) -> None:
        """`reserve` for coroutines."""
        with self._turn:
            if self._has_room():
                self._used += 1
                return
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self._waiters.append((loop, future))
        said = loop.call_later(PATIENCE_SECONDS, self._say_full)
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():
                self.release()  # the place came just before the cancellation
            raise
        finally:
            said.cancel()

    def release(self) -> None:
        """Give a reserved place back."""
        with self._turn:
            self._free(1)

    def put(self, data: Any) -> None:
        """Fill a reserved place. Raises StoreError after `close`."""
        with self._turn:
            self._open_for_use()
            self._items.append(data)
            self._put_count += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rollstore-queued", daemon=True)
                self._thread.start()
            self._turn.notify_all()

    def flush(self, *, sync: bool = False) -> None:
        """What was put before this call survives the death of the process; with `sync`, power loss.

        Raises WriteError where the disk refuses, with everything still in the queue, and what the schema refused.
        """
        with self._turn:
            self._open_for_use()
            self._settle()
        if sync:
            self._writer.flush(sync=True)
        self._raise_refused()

    async def flush_async(self, *, sync: bool = False) -> None:
        """`flush` for coroutines."""
        await asyncio.to_thread(self.flush, sync=sync)

    def close(self) -> None:
        """Flush, and close the writer. Closing twice is no error; closing again after a WriteError tries again."""
        with self._turn:
            if self._closed:
                return
            self._settle()
            self._ending = True
            self._turn.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._writer.close()
        with self._turn:
            self._closed = True
            for loop, future in self._waiters:
                _tell(loop, future.cancel)
            self._waiters.clear()
        self._raise_refused()

    def after_fork(self) -> None:
        """In a forked child: the rows that wait, and the thread, are the parent's."""
        self._start()

    def __enter__(self) -> Queued:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_for_use(self) -> None:
        if self._closed or self._ending:
            raise StoreError("queued: the writer is closed")

    def _has_room(self) -> bool:
        self._open_for_use()
        if self._used < self.limit and not self._waiters:
            return True
        if self.when_full == "fail":
            why = "" if self._error is None else f": {self._error}"
            raise WriteError(
                f"queued: wanted room, got {self._used} of {self.limit} places taken{why}"
            ) from self._error
        return False

    def _say_full(self) -> None:
        why = "the disk is slower than what comes" if self._error is None else self._error
        LOG.warning("append waits: %d of %d places of the queue are taken: %s", self._used, self.limit, why)

    def _settle(self) -> None:
        """Wait, holding the lock, until all that was put is written, or raise what the next attempt meets."""
        wanted, failures = self._put_count, self._failures
        self._turn.notify_all()  # a thread that waits after a failure tries again now
        while self._written < wanted:
            if self._failures > failures and self._error is not None:
                raise self._error
            if self._thread is not None and not self._thread.is_alive():
                raise WriteError(f"queued: the writing thread ended; {wanted - self._written} appends are not written")
            self._turn.wait(PATIENCE_SECONDS)

    def _raise_refused(self) -> None:
        refused, self._refused = self._refused, []
        if refused:
            raise refused[0]

    def _free(self, count: int) -> None:
        """Give places back, holding the lock: first to the coroutines that wait, in their order."""
        self._used -= count
        while self._waiters and self._used < self.limit:
            loop, future = self._waiters.popleft()
            self._used += 1
            if not _tell(loop, self._hand, future):
                self._used -= 1
        self._turn.notify_all()

    def _hand(self, future: asyncio.Future[None]) -> None:
        if future.cancelled():
            self.release()
        else:
            future.set_result(None)

    def _run(self) -> None:
        """The thread: append what waits, flush, free the places."""
        while True:
            with self._turn:
                while not self._items:
                    if self._ending:
                        return
                    self._turn.wait()
            taken = 0
            while taken < BATCH and self._items:
                self._try(self._append_first)
                self._items.popleft()
                taken += 1
            self._try(self._writer.flush)
            with self._turn:
                self._written += taken
                self._free(taken)

    def _append_first(self) -> None:
        try:
            if self._apart is None:
                self._append_whole(self._items[0])
            if self._apart is not None:
                self._apart.append(self._writer.append)
        except WriteError:
            raise  # and what was taken of the item stays taken
        except Exception as error:  # a row that is refused would be refused again
            LOG.error("append refused: %s", error)
            self._refused.append(error)
        self._apart = None

    def _append_whole(self, item: Any) -> None:
        try:
            self._writer.append(item)
        except SchemaError as error:
            self._apart = Apart(item if isinstance(item, list) else (), error)

    def _try(self, action: Any) -> None:
        """Until the disk takes it."""
        while True:
            try:
                action()
            except WriteError as error:
                with self._turn:
                    if self._error is None:
                        LOG.warning("the writer waits and tries again: %s", error)
                    self._error = error
                    self._failures += 1
                    self._turn.notify_all()
                    self._turn.wait(PATIENCE_SECONDS)
            else:
                self._error = None
                return


def _tell(loop: asyncio.AbstractEventLoop, action: Any, *arguments: Any) -> bool:
    """Run something in an event loop of another thread; False where that loop is gone."""
    try:
        loop.call_soon_threadsafe(action, *arguments)
    except RuntimeError:
        return False
    return True


_QUEUED: weakref.WeakSet[Queued] = weakref.WeakSet()


def _after_fork() -> None:
    for queued in list(_QUEUED):
        queued.after_fork()


def _at_exit() -> None:
    """A program that ends without `close` still writes what waits."""
    for queued in list(_QUEUED):
        try:
            queued.flush()
        except StoreError:
            continue  # closed
        except Exception as error:
            LOG.error("at exit %d appends were not written: %s", queued.waiting, error)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
