"""From a journal to a part: read, re-batch, publish, and only then delete the journal."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from rollstore.errors import CorruptionError, RollstoreError, StoreError
from rollstore.store.commits import read_log
from rollstore.store.filesystem import Filesystem
from rollstore.store.journal import FOLDER, Journal, JournalView, journal_file, view_journal
from rollstore.store.part import open_part, write_part


def seal(filesystem: Filesystem, table: str, name: str, rows: int, *, last: bool = True) -> None:
    """Publish the first `rows` rows of a journal under its name and delete it; the caller holds its lock.

    `last=False` where the journal holds more rows, which a successor has taken over. Raises OSError where the disk
    refuses, CorruptionError where the journal no longer holds its rows; the journal then stays.
    """
    if rows:
        try:
            view = view_journal(filesystem, name)
        except FileNotFoundError:
            # By a call that was interrupted at its very end; since then a compaction may have retired the part.
            if is_published(filesystem, table, name) or read_log(filesystem).knows(table, name):
                return
            view = None
        found = 0 if view is None else view.first(rows).rows
        if view is None or found != rows:
            raise CorruptionError(f"{journal_file(name)}: wanted {rows} rows, got {found}")
        publish(filesystem, view.first(rows))
    discard(filesystem, name, durably=not last and not rows)


def publish(filesystem: Filesystem, view: JournalView) -> None:
    """Re-batch the rows of a journal into a part of the same name. Raises OSError, CorruptionError."""
    write_part(filesystem, view.table, view.name, table_of(view), source=view.source)


def discard(filesystem: Filesystem, name: str, *, durably: bool) -> None:
    """Delete a journal. `durably` where nothing else would keep its rows from counting, should the name come back."""
    filesystem.delete(journal_file(name))
    if durably:
        filesystem.sync_folder(FOLDER)


def table_of(view: JournalView) -> pa.Table:
    """A journal's rows as a table, in order, without what only the journal's own schema says."""
    schema = view.schema.with_metadata(
        {key: value for key, value in view.schema.metadata.items() if key in (b"rollstore.schema", b"rollstore.table")}
    )
    try:
        batches = [batch.replace_schema_metadata(schema.metadata) for batch in view.batches()]
    except StoreError as error:  # to whoever writes, what the system refused is a file system's error
        raise error.__cause__ if isinstance(error.__cause__, OSError) else error from None
    return pa.Table.from_batches(batches, schema)


def is_published(filesystem: Filesystem, table: str, name: str) -> bool:
    """Whether a journal's part is there and every byte of it can be trusted, so that the journal may go."""
    try:
        part = open_part(filesystem, table, name)
    except FileNotFoundError:
        return False
    for _ in part.batches():
        pass
    return True


@dataclass(frozen=True, eq=False)
class Job:
    """A journal to seal, with its lock: its first `rows` rows; not `last` where a successor has the others."""

    journal: Journal
    rows: int
    last: bool


class Sealer:
    """Seals the journals of one writer in their order, off its thread; a failure stops it until it is asked again.

    The order matters: a journal that took rows over may become a part only when its predecessor has lost them. An
    interrupt at the start of a thread leaves it running unknown to us, so two may do one job at once, which is no harm.
    """

    def __init__(self, filesystem: Filesystem) -> None:
        self._filesystem = filesystem
        self._jobs: deque[Job] = deque()
        self._thread: threading.Thread | None = None

    def add(self, job: Job) -> None:
        """Take over a journal. Twice is no harm: what is sealed is sealed."""
        self._jobs.append(job)

    def start(self) -> None:
        """Begin, or try again, in the background."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._background, name="rollstore-seal")
            self._thread.start()

    def drain(self) -> None:
        """Return when every journal is a part. Raises OSError, CorruptionError; what is left stays for the next try."""
        if self._thread is not None and self._thread.ident is not None:  # None where `start` was interrupted
            self._thread.join()
        self._work()

    def forget(self) -> None:
        """In a forked child: the journals are the parent's."""
        for job in self._jobs:
            job.journal.close()

    def _background(self) -> None:
        with suppress(OSError, RollstoreError):  # the journals stay, and the next drain says what is wrong
            self._work()

    def _work(self) -> None:
        while jobs := [*self._jobs]:
            job = jobs[0]
            seal(self._filesystem, job.journal.table, job.journal.name, job.rows, last=job.last)
            job.journal.close()
            with suppress(ValueError):  # another thread has done it too
                self._jobs.remove(job)
