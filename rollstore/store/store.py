"""A store: open, append, get, scan, and its upkeep."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import CorruptionError, RollstoreError, StoreError, WriteError
from rollstore.schema import TABLES, Rollout, from_table
from rollstore.schema.text import as_stored
from rollstore.store import document
from rollstore.store.filesystem import MARK, Filesystem, LocalFilesystem, read_file
from rollstore.store.index import Index
from rollstore.store.lookup import lookup
from rollstore.store.names import FOLDERS, new_id
from rollstore.store.part import FORMAT, Part, check_version
from rollstore.store.snapshot import Cache, Snapshot, open_snapshot

if TYPE_CHECKING:
    from rollstore.store.compact import Progress
    from rollstore.store.compact import Report as CompactReport
    from rollstore.store.finding import Finding
    from rollstore.store.migrate import Report as MigrateReport
    from rollstore.store.recover import Report as RecoverReport
    from rollstore.store.retention import Keep
    from rollstore.store.retention import Report as Retained
    from rollstore.writers.writer import Appendable, Writer

_T = TypeVar("_T")
ABOUT = MARK
_TRIES = 10  # of what another compaction may undercut
_TICK = 50_000_000  # nanoseconds, above the clock tick of any file system in use


@dataclass(frozen=True, kw_only=True)
class Info:
    """What a store holds: rows, parts and bytes by table, live journals, orphans, and the end of the log."""

    path: str
    store_id: str
    format: str
    created_at: datetime
    commits: int
    tables: dict[str, TableInfo]
    journals: int
    orphans: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TableInfo:
    rows: int
    parts: int
    bytes: int
    rows_in_journals: int


class Store:
    """One store. Safe to share between threads; after a fork the child may go on using it."""

    def __init__(self, filesystem: Filesystem, about: dict[str, Any]) -> None:
        """Use `open`."""
        self.filesystem = filesystem
        self.store_id: str = about["store_id"]
        self.created_at = datetime.fromisoformat(about["created_at"])
        self.format: str = about["format"]
        self._index = Index(filesystem)
        self._cache = Cache(self._index)
        self._last: tuple[tuple[int | None, ...], Snapshot] | None = None

    @property
    def path(self) -> str:
        return self.filesystem.locate("").rstrip("/")

    def __repr__(self) -> str:
        return f"Store({self.path!r})"

    def writer(
        self, run: str | None = None, source: str | None = None, table: str = "rollouts", **options: Any
    ) -> Writer:
        """A writer for one table. `run` fills run_id where it is null; `source` says who writes, for people.

        `options`: seal_bytes, bytes of a journal after which it becomes a part.
        """
        from rollstore.writers.writer import Writer  # writers stand on the store: the store knows them only here

        return _reading(self.path, lambda: Writer(self, table=table, run=run, source=source, **options))

    def append(self, table: str, data: Appendable) -> None:
        """Rows of any table, as one sealed part that survives power loss. Raises SchemaError, WriteError."""
        with self.writer(table=table) as writer:
            writer.append(data)

    def snapshot(self) -> Snapshot:
        """The rows of this moment, fixed; holds a lease until closed. Raises CorruptionError, StoreError."""
        return _reading(self.path, lambda: open_snapshot(self.filesystem, self._cache, lease=True))

    def get(self, rollout_id: str, segment: int | None = None) -> Any:
        """The segments of a rollout as list[Rollout], or with `segment` that one Rollout.

        Raises NotFoundError, and DuplicateError where one segment is stored with different contents.
        """
        if not isinstance(rollout_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]  callers are not all checked
            raise TypeError(f"get: wanted a rollout_id as text, got {type(rollout_id).__name__}")
        rollout_id = as_stored(rollout_id)
        try:
            rows = self._rows_of(rollout_id, segment)
        except StoreError:
            # A part went, by a compaction and a vacuum, between two looks: no lease is held for so short a read.
            self._last = None
            rows = self._rows_of(rollout_id, segment)
        found: list[Rollout] = [from_table(row)[0] for row in rows]
        return found if segment is None else found[0]

    def _rows_of(self, rollout_id: str, segment: int | None) -> list[pa.RecordBatch]:
        return _reading(self.path, lambda: lookup(self._current(), self._index, rollout_id, segment))

    def _current(self) -> Snapshot:
        """A snapshot of this moment without a lease; the last one, where nothing can have changed since."""
        before = self._stamps()
        if self._last is None or self._last[0] != before or None in before or not _unchanged(self._last[1]):
            snapshot = open_snapshot(self.filesystem, self._cache, lease=False)
            # A change in the same tick of the file system's clock leaves the same stamp: trust only older ones.
            settled = all(stamp is not None and time.time_ns() - stamp > _TICK for stamp in before)
            self._last = (before if settled else (), snapshot)
        return self._last[1]

    def _stamps(self) -> tuple[int | None, ...]:
        return tuple(self.filesystem.stamp(folder) for folder in ("rollouts", "journal", "commits", "columns"))

    def scan(
        self, table: str, columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pa.RecordBatchReader:
        """Rows of a table as they are now, batch by batch. Raises ValueError on an unknown column, CorruptionError."""
        snapshot = self.snapshot()
        reader = snapshot.scan(table, columns, where)

        def rows() -> Any:
            with snapshot:
                yield from reader

        return pa.RecordBatchReader.from_batches(reader.schema, rows())

    def parts(self, table: str) -> list[Part]:
        """The live parts of a table."""
        return _reading(self.path, lambda: open_snapshot(self.filesystem, self._cache, lease=False).parts(table))

    def compact(self, **options: Any) -> CompactReport:
        """Merge small parts into bigger ones, groups together. `options`: part_bytes, codec ("zstd", "lz4"), progress.

        Raises CorruptionError, WriteError.
        """
        from rollstore.store.compact import compact  # upkeep is loaded when it is done: engines never need it

        with self.snapshot() as snapshot:
            return _guard(self.path, lambda: compact(snapshot, **options))

    def migrate(self, **options: Any) -> MigrateReport:
        """Rewrite the parts of older schema versions in this one. `options`: dry_run, codec, progress.

        Raises CorruptionError, VersionError, WriteError.
        """
        from rollstore.store.migrate import migrate

        with self.snapshot() as snapshot:
            return _guard(self.path, lambda: migrate(snapshot, **options))

    def drop_rows(self, origins: Sequence[tuple[str, int]]) -> None:
        """Retire rollouts rows by (written_by, written_row): the remedy for an id that stands with two contents.

        A row is dropped only where another one of its rollout and segment stays. Raises StoreError, CorruptionError,
        WriteError; nothing is changed then.
        """
        from rollstore.store.dropping import drop_rows

        self._rewrite(lambda snapshot: drop_rows(snapshot, origins))

    def retain(self, keep: Keep, *, dry_run: bool = False, progress: Progress | None = None) -> Retained:
        """Retire the rollouts that `keep` does not want, with the scores, evaluations and uses of their ids.

        `vacuum` then frees the room. With `dry_run` only says what would go. Raises StoreError, CorruptionError,
        WriteError; nothing is changed then.
        """
        from rollstore.store.retention import retain

        return self._rewrite(lambda snapshot: retain(snapshot, keep, dry_run=dry_run, progress=progress))

    def _rewrite(self, action: Callable[[Snapshot], _T | None]) -> _T:
        """What replaces parts, again on a new snapshot where another compaction was faster."""
        for _ in range(_TRIES):
            with self.snapshot() as snapshot:
                done: _T | None = _guard(self.path, lambda snapshot=snapshot: action(snapshot))
            if done is not None:
                return done
        raise StoreError(f"{self.path}: wanted parts that stay as they are, got other compactions {_TRIES} times")

    def vacuum(self, grace: float = 7 * 24 * 3600.0, *, dry_run: bool = False) -> list[str]:
        """Delete what was retired more than `grace` seconds ago and no open snapshot needs; returns the files.

        With `dry_run` only says which. Raises WriteError.
        """
        from rollstore.store.vacuum import vacuum

        return _guard(self.path, lambda: vacuum(self.filesystem, grace=grace, dry_run=dry_run))

    def recover(self, *, force: bool = False) -> RecoverReport:
        """Seal what dead writers left, move aside what is no part. `force` goes past locks, where they do not work."""
        from rollstore.store.recover import recover

        return _guard(self.path, lambda: recover(self.filesystem, force=force))

    def verify(self, progress: Progress | None = None) -> list[Finding]:
        """Check every byte and every row; what is wrong, as data. `progress` gets each file and its bytes read."""
        from rollstore.store.verify import verify

        with self.snapshot() as snapshot:
            return _reading(self.path, lambda: verify(snapshot, progress))

    def info(self) -> Info:
        """Counts from the parts' own statistics. Raises CorruptionError where a part is damaged."""
        from rollstore.store.recover import orphans

        with self.snapshot() as snapshot:
            for part in (part for name in TABLES for part in snapshot.parts(name)):
                _ = part.tail  # what a file in cache/ says of it is not counted before its own end was read
            tables = {
                name: TableInfo(
                    rows=snapshot.count(name),
                    parts=len(snapshot.parts(name)),
                    bytes=sum(part.size for part in snapshot.parts(name)),
                    rows_in_journals=sum(view.rows for view in snapshot.views(name)),
                )
                for name in TABLES
            }
            return Info(
                path=self.path,
                store_id=self.store_id,
                format=self.format,
                created_at=self.created_at,
                commits=snapshot.log.number,
                tables=tables,
                journals=len(snapshot.journals),
                orphans=tuple(_reading(self.path, lambda: orphans(self.filesystem, snapshot.log))),
            )


def open(
    path: str | os.PathLike[str],
    create: bool = False,
    *,
    storage_options: Mapping[str, Any] | None = None,
    spool: str | os.PathLike[str] | None = None,
    single_compactor: bool = False,
) -> Store:
    """Open the store in a folder, or at an fsspec URL; with `create`, make it where there is none.

    For a URL only: `storage_options` go to fsspec and nowhere else; `spool` is the local folder in which rows wait to
    be uploaded (ROLLSTORE_SPOOL, or one under XDG_STATE_HOME, where not given); `single_compactor` is the caller's
    word that no other compaction ever runs, which compacting needs where the place has no put-if-absent.

    Raises StoreError where there is no store, or the place cannot hold one, and VersionError where it is newer than
    this library.
    """
    local = _local(path)
    if local is not None:
        if storage_options is not None or spool is not None or single_compactor:
            raise ValueError(f"open: {local}: storage_options, spool, single_compactor: wanted a URL, got a local path")
        return open_on(_on_disk(local), create=create)
    from rollstore.store.remote import open_remote  # fsspec is loaded for remote stores only

    return open_remote(
        os.fspath(path), create=create, options=storage_options, spool=spool, single_compactor=single_compactor
    )


def open_on(filesystem: Filesystem, *, create: bool = False) -> Store:
    """As `open`, on any implementation of the file verbs."""
    try:
        data = read_file(filesystem, ABOUT)
    except IsADirectoryError:
        raise StoreError(f"{filesystem.locate(ABOUT)}: wanted what a store says of itself, got a folder") from None
    except (FileNotFoundError, NotADirectoryError):
        if not create:
            raise StoreError(f"{filesystem.locate('')}: wanted a store, found no {ABOUT} there") from None
        _guard(filesystem.locate(""), lambda: _create(filesystem))
        data = read_file(filesystem, ABOUT)
    where = filesystem.locate(ABOUT)
    check_version(str(document.parse(data, where).get("format", "")), FORMAT, f"{where}: format")
    about = document.decode(data, where)
    try:
        return Store(filesystem, about)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{where}: wanted store_id, format and created_at, got {error}") from error


def _unchanged(snapshot: Snapshot) -> bool:
    return not snapshot.orphans and all(view.handle.size() == view.end + view.rest for view in snapshot.journals)


def _create(filesystem: Filesystem) -> None:
    if foreign := [name for name in filesystem.list("") if not name.startswith(".")]:
        raise StoreError(f"{filesystem.locate('')}: wanted an empty folder for a new store, found {foreign[0]}")
    for folder in (*TABLES, *FOLDERS):
        filesystem.make_folder(folder)
    about = {"format": FORMAT, "store_id": new_id(), "created_at": datetime.now(UTC).isoformat(timespec="microseconds")}
    with contextlib.suppress(FileExistsError):  # another process made it at the same time
        document.publish(filesystem, ABOUT, about)


def _local(path: str | os.PathLike[str]) -> str | None:
    """The local path, or None where it is an address of another place."""
    text = os.fspath(path)
    address = re.match(r"(\w[\w+.-]*)(?:://|::)", text)  # one letter before ":/" is a drive, not a protocol
    if address is None:
        return text
    if address[1] not in ("file", "local"):
        return None
    return text.removeprefix("file://").removeprefix("local://")


def _on_disk(path: str) -> LocalFilesystem:
    try:
        return LocalFilesystem(path)
    except FileNotFoundError:
        raise StoreError(f"{path}: wanted a working folder to start from, got one that is gone") from None


def _reading(where: str, action: Callable[[], _T]) -> _T:
    """What the operating system does not let one read as a typed error."""
    try:
        return action()
    except RollstoreError:
        raise
    except OSError as error:
        raise StoreError(f"{error.filename or where}: {error.strerror or error}") from error


def _guard(where: str, action: Any) -> Any:
    """An operating system's refusal as a typed error."""
    try:
        return action()
    except (StoreError, CorruptionError):
        raise
    except OSError as error:
        raise WriteError(f"{where}: {error.strerror or error}") from error
