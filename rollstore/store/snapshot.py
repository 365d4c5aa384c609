"""A snapshot: which rows are live at one moment, and how they are read."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import CorruptionError, SchemaError, StoreError
from rollstore.schema import SYSTEM_COLUMNS, TABLES, conform
from rollstore.schema.lazy import lazy
from rollstore.schema.upgrade import is_newer, parse, read_version, widened
from rollstore.store import commits
from rollstore.store.columns import held_types, read_types
from rollstore.store.distant import at_once, both, expect
from rollstore.store.filesystem import Filesystem, WriteHandle
from rollstore.store.footers import WORTH_KEEPING, load_footers, save_footers
from rollstore.store.journal import FOLDER as JOURNALS
from rollstore.store.journal import JournalView, view_journal
from rollstore.store.names import JOURNAL, PART, new_id, stem
from rollstore.store.part import Orphan, Part, open_part
from rollstore.store.statistics import Range, bounds, guarantees, union
from rollstore.store.where import check_names, check_where, kept

if TYPE_CHECKING:
    from rollstore.store.index import Index

_TRIES = 10
_BLOCK = 32
_VERSION = b"rollstore.schema"
LEASES = "lease-"


@dataclass
class Cache:
    """What a store remembers between snapshots. Parts never change; journals only grow."""

    index: Index
    parts: dict[tuple[str, str], Part] = field(default_factory=dict)
    journals: dict[str, JournalView] = field(default_factory=dict)
    log: commits.Log | None = None
    loaded: bool = False

    def load(self, filesystem: Filesystem) -> bool:
        """Take in what other processes kept of the ends of parts, once. Whether anything may have been learned."""
        if self.loaded:
            return False
        self.loaded = True
        self.parts = load_footers(filesystem) | self.parts
        return True


@dataclass
class Snapshot:
    """The rows of one moment, fixed. Close it, or use it as a context manager, to give its lease back.

    `names` are the live parts by table, `journals` the live journals with what was whole in them.
    """

    filesystem: Filesystem
    log: commits.Log
    names: dict[str, list[str]]
    journals: list[JournalView]
    types: dict[str, pa.DataType]
    cache: Cache
    unreadable: dict[str, CorruptionError] = field(default_factory=dict)
    lease: WriteHandle | None = None
    lease_file: str = ""
    orphans: set[tuple[str, str]] = field(default_factory=set)
    """Names of parts under which there was no whole part: a copy may be under way, so the next snapshot looks again."""

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.lease is not None:
            self.lease.close()
            self.lease = None
            with suppress(OSError):  # what stays behind, vacuum removes
                lock = self.filesystem.lock(self.lease_file)  # a forked child that still reads holds it too
                if lock is not None:
                    self.filesystem.delete(self.lease_file)
                    lock.close()

    def parts(self, table: str) -> list[Part]:
        """The live parts of a table, in order of name. Files that are no part of ours are left out, with a warning.

        Raises CorruptionError where one is damaged, StoreError where one is gone.
        """
        _known(table)
        unseen = self._unseen(table)
        if len(unseen) >= WORTH_KEEPING and self.cache.load(self.filesystem):
            unseen = self._unseen(table)
        expect(self.filesystem, [f"{table}/{name}{PART}" for name in unseen])
        found = [part for name in self.names[table] if (part := self._open(table, name)) is not None]
        if len(unseen) >= WORTH_KEEPING:
            fresh = set(unseen)
            save_footers(self.filesystem, [part for part in found if part.name in fresh], found)
        return found

    def _unseen(self, table: str) -> list[str]:
        """The names under which nothing was looked at yet."""
        return [
            name
            for name in self.names[table]
            if (table, name) not in self.cache.parts and (table, name) not in self.orphans
        ]

    def part(self, table: str, name: str) -> Part:
        """One live part by its name. Raises as `parts`, and StoreError where the name is no part of the snapshot."""
        part = self._open(table, name) if name in self.names[table] else None
        if part is None:
            raise StoreError(f"{table}/{name}{PART}: no part of the snapshot")
        return part

    def _open(self, table: str, name: str) -> Part | None:
        key = (table, name)
        if key in self.orphans:
            return None
        if key not in self.cache.parts:
            try:
                self.cache.parts[key] = open_part(self.filesystem, table, name)
            except Orphan:
                self.orphans.add(key)
                # No crash leaves half a part under its name, so rows may be missing from every answer: say so.
                warnings.warn(f"{table}/{name}{PART}: no whole part, nothing of it is read: see verify", stacklevel=2)
                return None
            except FileNotFoundError as error:
                raise StoreError(
                    f"{table}/{name}{PART}: wanted a part of the snapshot, got no file; open a new one"
                ) from error
        return self.cache.parts[key]

    def views(self, table: str) -> list[JournalView]:
        """The live journals of a table. Raises CorruptionError where one cannot be read: it may hold rows of it."""
        _known(table)
        for error in self.unreadable.values():
            raise error
        return [view for view in self.journals if view.table == table]

    def repeated(self) -> list[tuple[Part | JournalView, int, int]]:
        """The rollouts whose id and segment another row may have too: (file, batch, row), in order of place.

        Raises CorruptionError where a part cannot be read.
        """
        return self.cache.index.repeated(self)

    def count(self, table: str) -> int:
        """Rows of a table, from the parts' own statistics."""
        return sum(part.rows for part in self.parts(table)) + sum(view.rows for view in self.views(table))

    @lazy
    def _schemas(self) -> dict[str, pa.Schema]:
        return {}

    def schema(self, table: str) -> pa.Schema:
        """The newest columns: the declared ones, unknown ones of a newer minor version, `x_`, the store's own.

        Its metadata names the newest version among this library's and the rows': what it is when written anew.
        """
        _known(table)
        if table not in self._schemas:
            newest = TABLES[table].arrow_schema
            own = {column.name for column in SYSTEM_COLUMNS}
            fields = {f.name: f for f in newest if f.name not in own}
            # Parts opened through one file share their schema objects: each is looked at once.
            schemas = {id(source.schema): source.schema for source in (*self.parts(table), *self.views(table))}
            held = [f for schema in schemas.values() for f in schema]
            fields |= {
                f.name: f for f in held if f.name not in fields and f.name not in own and not f.name.startswith("x_")
            }
            metadata = dict(newest.metadata)
            for schema in (schema for schema in schemas.values() if is_newer(read_version(schema.metadata))):
                for name in fields.keys() & set(schema.names):
                    fields[name] = fields[name].with_type(widened(fields[name].type, schema.field(name).type))
                metadata[_VERSION] = max(metadata[_VERSION], schema.metadata[_VERSION], key=lambda v: parse(v.decode()))
            used = {f.name for f in held}
            types = {**self.types, **held_types(schemas.values(), self.types)}
            fields |= {name: pa.field(name, type_) for name, type_ in types.items() if name in used}
            self._schemas[table] = pa.schema(
                [*fields.values(), *(newest.field(n) for n in newest.names if n in own)], metadata
            )
        return self._schemas[table]

    def newest(self, row: pa.RecordBatch, table: str, source: Part | JournalView) -> pa.RecordBatch:
        """Rows of one part or journal in the newest types of the columns they have."""
        schema = self.schema(table)
        if source.name not in self._current:
            self._current[source.name] = all(f.type.equals(schema.field(f.name).type) for f in source.schema)
        if self._current[source.name]:
            return row
        return fit(row, pa.schema([schema.field(name) for name in row.schema.names], schema.metadata), table)

    @lazy
    def _current(self) -> dict[str, bool]:
        """Of parts and journals: whether their types are the newest."""
        return {}

    def scan(
        self, table: str, columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pa.RecordBatchReader:
        """Rows as batches, parts first, in a fixed order; `where` skips parts by their statistics.

        Raises ValueError on an unknown column, TypeError where `where` is no filter over the columns, and while reading
        CorruptionError, and ValueError where the filter fails on rows.
        """
        full = self.schema(table)
        names = check_names(columns, full.names, table)
        # The text of an expression names every column it looks at; a name found by chance is only read in vain.
        tested = [] if where is None else [name for name in full.names if name in str(where) and name not in names]
        wide = pa.schema([full.field(name) for name in [*names, *tested]], full.metadata)
        if where is not None:
            check_where(where, wide, table)
        narrow = pa.schema([full.field(name) for name in names], full.metadata)
        parts = self.parts(table) if where is None else self.matching(table, where)

        def rows() -> Iterator[pa.RecordBatch]:
            expect(self.filesystem, [part.file for part in parts])
            for source in (*parts, *self.views(table)):
                for batch in source.batches(wide.names):
                    fitted = fit(batch, wide, table)
                    if where is None:
                        yield fitted
                    else:
                        found = kept(pa.Table.from_batches([fitted], wide), where, table).select(names)
                        yield from (piece for piece in found.combine_chunks().to_batches() if piece.num_rows)

        return pa.RecordBatchReader.from_batches(narrow, rows())

    def matching(
        self, table: str, where: pc.Expression, schema: pa.Schema | None = None, named: Mapping[str, str] | None = None
    ) -> list[Part]:
        """The parts whose statistics do not rule out a row for which `where` is true.

        `where` is over the columns of `schema`, the table's own by default; `named` says which statistics bound them.
        """
        over = self.schema(table) if schema is None else schema
        text, kept = str(where), self.parts(table)
        for column, statistic in ({name: name for name in over.names} if named is None else named).items():
            if column in text:
                kept = _possible(kept, where, over, column, statistic)
        expect(self.filesystem, [part.file for part in kept])
        return kept


def _possible(parts: list[Part], where: pc.Expression, schema: pa.Schema, column: str, statistic: str) -> list[Part]:
    """Parts with a row that can be true, by one column alone: first of blocks of parts, then within those left."""
    known = [bounds(part.statistics, part.schema, statistic) for part in parts]
    if statistic != column:  # a value inside a list: that some are null, the statistics of lists do not say
        known = [None if found is None else replace(found, nulls=1) for found in known]
    blocks = [range(start, min(start + _BLOCK, len(parts))) for start in range(0, len(parts), _BLOCK)]
    if len(blocks) > 1:
        left = _allowed([union(known[block.start : block.stop]) for block in blocks], where, schema, column)
        places = [place for number in left for place in blocks[number]]
    else:
        places = list(range(len(parts)))
    return [parts[places[n]] for n in _allowed([known[place] for place in places], where, schema, column)]


def _allowed(known: list[Range | None], where: pc.Expression, schema: pa.Schema, column: str) -> list[int]:
    """The places of bounds under which a row can be true: Arrow simplifies the filter under what each guarantees."""
    import pyarrow.dataset as ds  # slow to load, and only a filtered scan needs it
    import pyarrow.fs as pafs

    alike: dict[Range | None, list[int]] = {}  # parts of one run, or of one step, are judged together
    for place, found in enumerate(known):
        alike.setdefault(found, []).append(place)
    format_, nowhere = ds.IpcFileFormat(), pafs.LocalFileSystem()
    fragments: list[ds.Fragment] = []
    allowed: list[int] = []
    groups = list(alike.items())
    for number, (found, places) in enumerate(groups):
        cases = guarantees(found, schema, column)
        if not cases:
            allowed += places
        fragments += [format_.make_fragment(str(number), nowhere, partition_expression=case) for case in cases]
    possible = (
        ds.FileSystemDataset(fragments, schema, format_, nowhere).get_fragments(filter=where) if fragments else ()
    )
    for number in {int(fragment.path) for fragment in possible}:
        allowed += groups[number][1]
    return sorted(allowed)


def fit(batch: pa.RecordBatch, schema: pa.Schema, table: str) -> pa.RecordBatch:
    """A batch in the columns of `schema`, absent ones null. Types of an older minor version are cast."""
    if batch.schema.equals(schema):
        as_it_is = batch.replace_schema_metadata(schema.metadata)
        if as_it_is.schema.equals(schema, check_metadata=True):
            return as_it_is
    held = {name: number for number, name in enumerate(batch.schema.names)}
    arrays: list[pa.Array] = []
    for target in schema:
        number = held.get(target.name)
        if number is None:
            arrays.append(pa.nulls(batch.num_rows, target.type))
        elif batch.column(number).type.equals(target.type):
            arrays.append(batch.column(number))
        else:
            try:
                whole = conform(batch.select([target.name]), table, unknown="keep")
                arrays.append(whole[target.name].cast(target.type).combine_chunks())
            except (SchemaError, pa.ArrowException) as error:
                got = batch.column(number).type
                raise CorruptionError(f"{table}: {target.name}: wanted {target.type}, got {got}") from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def open_snapshot(filesystem: Filesystem, cache: Cache, *, lease: bool) -> Snapshot:
    """Fix what is live now: open the journals listed, list the parts, read the log to its end, in this order.

    So a journal sealed meanwhile is seen as journal or as part, never as neither; by name it counts once. A part that
    is gone when it is looked for means that a compaction and a vacuum went by: start again.
    """
    held, lease_file, entries = None, "", None
    if lease:
        cache.log, number, entries = commits.reached(filesystem, cache.log)
        held, lease_file = _lease(filesystem, number)
    for _ in range(_TRIES):
        views, unreadable = _journals(filesystem, cache)
        whole = entries is None and not (cache.log and cache.log.number)  # the log from its beginning: see read_log
        folders = [*TABLES, *((commits.FOLDER,) if whole else ())]
        files = dict(zip(folders, at_once(filesystem, filesystem.list, folders), strict=True))
        listed = {table: [s for f in files[table] if (s := stem(f, PART))] for table in TABLES}
        log, types = both(
            filesystem,
            partial(commits.read_log, filesystem, cache.log, files.get(commits.FOLDER, entries)),
            partial(read_types, filesystem),
        )
        cache.log = log
        names = {table: log.live(table, listed[table]) for table in TABLES}
        if all(set(names[table]) <= set(listed[table]) for table in TABLES):
            break
    else:
        raise StoreError(f"{filesystem.locate('')}: the log names parts that are not there")
    cuts = {view.cut.name: view.cut.rows for view in views if view.cut is not None}
    live = [
        view.first(cuts[view.name]) if view.name in cuts else view
        for view in views
        if view.name not in listed[view.table] and not log.knows(view.table, view.name)
    ]
    return Snapshot(filesystem, log, names, live, types, cache, unreadable, held, lease_file)


def _journals(filesystem: Filesystem, cache: Cache) -> tuple[list[JournalView], dict[str, CorruptionError]]:
    found: dict[str, JournalView] = {}
    unreadable: dict[str, CorruptionError] = {}
    for name in (stem(file, JOURNAL) for file in filesystem.list(JOURNALS)):
        if name is None:
            continue
        try:
            view = view_journal(filesystem, name, cache.journals.get(name))
        except FileNotFoundError:
            continue  # sealed since the listing
        except CorruptionError as error:
            unreadable[name] = error
        except OSError as error:
            if error.errno == errno.EMFILE:  # each stays open, so that it can be read when it is sealed meanwhile
                raise StoreError(
                    f"{filesystem.locate(JOURNALS)}: wanted to open every journal, got {error.strerror} after "
                    f"{len(found)}: `rollstore recover` makes parts of those that the dead left"
                ) from error
            raise
        else:
            found |= {} if view is None else {name: view}
    cache.journals = found
    return [view for view in found.values() if view.table in TABLES], unreadable


def _lease(filesystem: Filesystem, number: int) -> tuple[WriteHandle | None, str]:
    """A locked file that says up to which entry of the log this reader has read; vacuum leaves it what it needs."""
    path = f"cache/{LEASES}{number:010d}-{new_id()}"
    try:
        return filesystem.create(path), path
    except OSError:
        return None, ""  # a folder we may only read: vacuum's grace period is the protection


def _known(table: str) -> None:
    if table not in TABLES:
        raise ValueError(f"table: wanted one of {', '.join(TABLES)}, got {table!r}")
