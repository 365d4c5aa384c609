"""The removal of what no reader can need any more: retired parts, and what dead compactions and writers left."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress

from rollstore.schema import TABLES
from rollstore.store import commits
from rollstore.store.filesystem import Filesystem
from rollstore.store.names import PART, STAGED, new_id, stem
from rollstore.store.snapshot import LEASES


def vacuum(filesystem: Filesystem, *, grace: float, dry_run: bool = False) -> list[str]:
    """Delete retired parts, outputs of compactions that died, and what the dead left in staging; returns the files.

    Only what is older than `grace` seconds by the store's own clock, and what no open snapshot on this machine needs.
    Retired names stay in the log: none of them ever counts again. With `dry_run` nothing is deleted. Raises OSError,
    ValueError for a `grace` that is no number of seconds from 0.
    """
    if not grace >= 0:  # a NaN is not
        raise ValueError(f"vacuum: grace: wanted seconds, 0 or more, got {grace}")
    log = commits.read_log(filesystem)
    oldest = _oldest_lease(filesystem, log.number)
    before = now(filesystem) - grace
    if log.replaced and not dry_run:
        filesystem.sync_folder(commits.FOLDER)  # power loss must not take back an entry whose old parts are gone
    deleted: list[str] = []

    def delete(file: str) -> None:
        deleted.append(file)
        if not dry_run:
            filesystem.delete(file)

    for table in TABLES:
        for file in filesystem.list(table):
            name, path = stem(file, PART), f"{table}/{file}"
            if name is None:
                continue
            with suppress(FileNotFoundError):
                retired = log.replaced.get((table, name))
                if retired is not None:
                    if retired <= oldest and filesystem.modified(commits.entry(retired)) <= before:
                        delete(path)
                elif name.startswith("c-") and not log.knows(table, name) and filesystem.modified(path) <= before:
                    with _free(filesystem, path) as free:
                        # Its compaction may have ended, and added it, since the log was read.
                        if free and not commits.read_log(filesystem, log).knows(table, name):
                            delete(path)
    for file in filesystem.list("staging"):
        path = f"staging/{file}"
        with suppress(FileNotFoundError):
            if file.endswith(STAGED) and filesystem.modified(path) <= before:
                with _free(filesystem, path) as free:
                    if free:
                        delete(path)
    return deleted


@contextmanager
def _free(filesystem: Filesystem, path: str) -> Generator[bool]:
    """Whether nobody who lives is writing a file; true while its lock is ours."""
    try:
        lock = filesystem.lock(path)
    except FileNotFoundError:
        yield True  # gone by now, or at a remote place, where only the grace period tells the dead from the living
        return
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.close()


def _oldest_lease(filesystem: Filesystem, number: int) -> int:
    """The entry of the log that every open snapshot has read; leases of the dead are removed on the way."""
    oldest = number
    for file in filesystem.list("cache"):
        held = file.removeprefix(LEASES).partition("-")[0]
        if not file.startswith(LEASES) or not held.isdecimal():
            continue
        with suppress(FileNotFoundError):
            lock = filesystem.lock(f"cache/{file}")
            if lock is None:
                oldest = min(oldest, int(held))
            else:
                filesystem.delete(f"cache/{file}")
                lock.close()
    return oldest


def now(filesystem: Filesystem) -> float:
    """The store's clock, read off a fresh file: ages never compare two machines' clocks."""
    path = f"staging/{new_id()}{STAGED}"
    handle = filesystem.create(path)
    try:
        return filesystem.modified(path)
    finally:
        handle.close()
        filesystem.delete(path)
