"""Finish what the dead left: seal their journals, move aside what is no part of ours. Nothing else changes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from rollstore.errors import CorruptionError, RollstoreError
from rollstore.schema import TABLES
from rollstore.store import columns, commits, frame
from rollstore.store.filesystem import Filesystem, WriteHandle
from rollstore.store.journal import FOLDER as JOURNALS
from rollstore.store.journal import JournalView, journal_file, view_journal
from rollstore.store.names import JOURNAL, ORPHANS, PART, STAGED, stem, writer_of
from rollstore.store.part import Orphan, open_part
from rollstore.store.seal import discard, is_published, publish


@dataclass
class Report:
    """What recover did. `kept` are journals left alone, with the reason: its writer lives, or it cannot be read."""

    sealed: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)


def recover(filesystem: Filesystem, *, force: bool = False) -> Report:
    """Seal the journals nobody holds, delete those published before, move orphans aside, sweep staging.

    `force` treats held journals as free, for file systems whose locks do not work; no writer may be alive. Raises
    OSError where the disk refuses; running it again goes on.
    """
    report = Report()
    for names in _by_writer(filesystem).values():
        _recover_writer(filesystem, names, report, force=force)
    for file in orphans(filesystem, commits.read_log(filesystem)):
        folder, _, _ = file.partition("/")
        if folder != JOURNALS or not stem(file.rpartition("/")[2], JOURNAL):
            with suppress(FileNotFoundError):  # another recovery has moved it
                report.moved.append(filesystem.move(file, f"{ORPHANS}/{folder}"))
    for file in filesystem.list("staging"):
        if not file.endswith(STAGED):
            with suppress(FileNotFoundError):
                report.moved.append(filesystem.move(f"staging/{file}", f"{ORPHANS}/staging"))
            continue
        with suppress(FileNotFoundError):
            lock = filesystem.lock(f"staging/{file}")
            if lock is not None or force:
                filesystem.delete(f"staging/{file}")
            if lock is not None:
                lock.close()
    return report


def orphans(filesystem: Filesystem, log: commits.Log) -> list[str]:
    """Files that are none of ours, foreign, empty or cut short, in every folder whose files count. They are never read.

    A compacted part that no entry of the log has added is none: its compaction may be under way. Nor is a damaged file
    under one of our names: that is an error, and nobody moves it.
    """
    found: list[str] = []
    for table in TABLES:
        for file in filesystem.list(table):
            name = stem(file, PART)
            try:
                if name is None:
                    raise Orphan(file)
                open_part(filesystem, table, name)
            except Orphan:
                found.append(f"{table}/{file}")
            except (FileNotFoundError, RollstoreError):
                continue  # gone by now, or damaged: verify names it, and nobody may move it
    for file in filesystem.list(JOURNALS):
        name = stem(file, JOURNAL)
        with suppress(RollstoreError, FileNotFoundError):
            if name is None or view_journal(filesystem, name) is None:
                found.append(f"{JOURNALS}/{file}")
    for folder, is_ours in ((commits.FOLDER, commits.is_ours), (columns.FOLDER, columns.is_ours)):
        found += [f"{folder}/{file}" for file in filesystem.list(folder) if not is_ours(file)]
    return found


def _by_writer(filesystem: Filesystem) -> dict[str, list[str]]:
    """The journals of each writer, in the order it wrote them."""
    found: dict[str, list[str]] = {}
    for file in filesystem.list(JOURNALS):
        if name := stem(file, JOURNAL):
            found.setdefault(writer_of(name)[0], []).append(name)
    return {writer: sorted(names, key=lambda name: writer_of(name)[1]) for writer, names in found.items()}


def _recover_writer(filesystem: Filesystem, names: list[str], report: Report, *, force: bool) -> None:
    """All journals of one dead writer, oldest first; a cut counts before the journal it cuts becomes a part."""
    locks: dict[str, WriteHandle] = {}
    try:
        for name in names:
            try:
                lock = filesystem.lock(journal_file(name))
            except FileNotFoundError:
                continue
            if lock is not None:
                locks[name] = lock
            elif not force:
                report.kept[name] = "its writer holds it"
        if report.kept.keys() & set(names):
            return  # one writer, one process: while it lives, all its journals are its own
        cuts: dict[str, int] = {}
        views: dict[str, JournalView | None] = {}
        for name in names:
            try:
                views[name] = view = view_journal(filesystem, name)
            except FileNotFoundError:
                continue
            except CorruptionError:
                # Without its head no row of it can be read, here or elsewhere; a person may still want the bytes.
                report.moved.append(filesystem.move(journal_file(name), f"{ORPHANS}/{JOURNALS}"))
                continue
            except RollstoreError as error:
                report.kept[name] = str(error)
                continue
            if view is not None and view.cut is not None:
                cuts[view.cut.name] = view.cut.rows
        for name, view in views.items():
            if report.kept.keys() & set(names):
                return  # an older journal that cannot be read may hold rows that a younger one has taken over
            _recover_journal(filesystem, name, view, cuts.get(name), report)
    finally:
        for lock in locks.values():
            lock.close()


def _recover_journal(
    filesystem: Filesystem, name: str, view: JournalView | None, cut: int | None, report: Report
) -> None:
    """One journal under its lock: published before, sealed now, empty, or no journal."""
    if view is None:
        # Its head is not whole: no row of it was ever acknowledged under a name that lasts.
        report.moved.append(filesystem.move(journal_file(name), f"{ORPHANS}/{JOURNALS}"))
        return
    if view.table not in TABLES:
        report.kept[name] = f"it has rows of {view.table!r}, which this version does not know"
        return
    log = commits.read_log(filesystem)
    if log.knows(view.table, name):
        discard(filesystem, name, durably=False)
        report.deleted.append(name)
        return
    try:
        published = is_published(filesystem, view.table, name)
    except Orphan:
        # Half a part under the journal's name hides the rows that are whole in the journal.
        report.moved.append(filesystem.move(f"{view.table}/{name}{PART}", f"{ORPHANS}/{view.table}"))
        published = False
    if published:
        filesystem.sync_folder(view.table)  # the writer may have died between publishing and this
        discard(filesystem, name, durably=False)
        report.deleted.append(name)
        return
    kept = view if cut is None else view.first(cut)
    if cut is not None and kept.rows != cut:
        report.kept[name] = f"wanted {cut} rows, got {kept.rows}"
        return
    if kept.rows:
        publish(filesystem, kept)
        report.sealed.append(name)
    rest = view.handle.read(view.end, view.rest)
    if cut is None and rest and not frame.is_unfinished(rest):
        # More than a write cut short: something was lost here, and what follows may be worth a person's look.
        report.moved.append(filesystem.move(journal_file(name), f"{ORPHANS}/{JOURNALS}"))
        return
    discard(filesystem, name, durably=cut is not None and not kept.rows)
    if not kept.rows:
        report.deleted.append(name)
