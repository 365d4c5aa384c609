"""Ray Data over one snapshot of a store: tasks read its parts through the store, so that every byte is checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.data import Dataset, Datasource, ReadTask
from ray.data.block import BlockMetadata

from rollstore.readers import arguments, arrow
from rollstore.readers.repeats import repeats
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot, fit
from rollstore.store.store import Store
from rollstore.store.where import check_where

PIECE_BYTES = 32 << 20
"""Bytes on disk above which a part is read by several tasks."""

_DECODED = 4  # bytes in memory for one on disk, about: Ray asks before anything is read
_ORIGIN = ("written_by", "written_row")


def dataset(
    store: Store,
    table: str = "rollouts",
    columns: Sequence[str] | None = None,
    where: pc.Expression | None = None,
    *,
    snapshot: Snapshot | None = None,
    **options: Any,
) -> Dataset:
    """A table of one snapshot as a Ray dataset, in the newest columns, which every task sees alike.

    `where`: Arrow expression over any scalar column; parts whose statistics rule it out are not opened. A
    (rollout_id, segment) stored more than once with equal content counts once; with different contents every row is
    there, and a warning says so. Rows still in journals are held in Ray's object store. The snapshot is the store's own
    at this moment, kept on this machine until the dataset is gone; one that is given stays the caller's to close.
    Machines of a cluster must reach the store under the same path or URL. `options`: as `ray.data.read_datasource`
    takes, among them override_num_blocks.

    Raises ValueError on an unknown table or column, or one named twice, TypeError where `where` is no filter over the
    columns. CorruptionError, and ValueError where the filter fails on a row, are raised here, or in a task: Ray then
    reports them.
    """
    arguments.kind("store", store, Store, "a store, as rollstore.open gives")
    source = arrow.leased(store, snapshot)
    return ray.data.read_datasource(RollstoreDatasource(store.path, source, table, columns, where), **options)


@dataclass(frozen=True)
class Piece:
    """The batches of a part from `number` / `of` of them to (`number` + 1) / `of`."""

    part: Part
    number: int
    of: int

    @property
    def size(self) -> int:
        return self.part.size // self.of


@dataclass(frozen=True)
class Wanted:
    """Which rows and columns are read: what every task is told."""

    table: str
    wide: pa.Schema
    columns: list[str]
    where: pc.Expression | None
    left_out: dict[str, list[int]]
    """part's name -> numbers of the rows, by origin, that say again what another row says"""

    @property
    def schema(self) -> pa.Schema:
        """Of the wanted columns."""
        return pa.schema([self.wide.field(name) for name in self.columns])

    @property
    def everything(self) -> bool:
        """Whether all rows of a part are wanted."""
        return self.where is None and not self.left_out

    def rows(self, batch: pa.RecordBatch, file: str) -> pa.Table:
        """The wanted ones of a batch of a file. Raises ValueError where the filter fails."""
        table = pa.Table.from_batches([fit(batch, self.wide, self.table)], self.wide)
        if self.left_out:
            origins = zip(*(table[name].to_pylist() for name in _ORIGIN), strict=True)
            kept = [row not in self.left_out.get(name, ()) for name, row in origins]
            table = table.filter(pa.array(kept, pa.bool_()))
        if self.where is not None:
            try:
                table = table.filter(self.where)
            except MemoryError:
                raise
            except Exception as error:  # a function of the caller's in the filter raises anything
                said = str(error).partition("\n")[0]
                raise ValueError(f"where: {self.where} fails on rows of {file}: {said}") from None
        return table.select(self.columns)


class RollstoreDatasource(Datasource):
    """What Ray asks for tasks. Made here, sent anywhere: the lease stays with the one that made it."""

    def __init__(
        self, where_it_is: str, source: Snapshot | arrow.Lease, table: str, columns: Sequence[str] | None,
        where: pc.Expression | None,
    ) -> None:  # fmt: skip
        super().__init__()
        snapshot = source.snapshot if isinstance(source, arrow.Lease) else source
        self._lease: arrow.Lease | None = source if isinstance(source, arrow.Lease) else None
        self._wanted = _wanted(where_it_is, snapshot, table, columns, where)
        parts = snapshot.parts(table) if where is None else snapshot.matching(table, where)
        # Copies: what a part remembers of its file is not sent along.
        self._pieces = [piece for part in parts for piece in _pieces(replace(part))]
        held = [self._wanted.rows(batch, view.file) for view in snapshot.views(table) for batch in view.batches()]
        self._in_journals = ray.put(pa.concat_tables(held)) if held else None
        self._rows_in_journals = sum(rows.num_rows for rows in held)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lease": None}

    def get_name(self) -> str:
        """As Ray shows it."""
        return "Rollstore"

    def estimate_inmemory_data_size(self) -> int:
        """Bytes, about."""
        return _DECODED * sum(piece.size for piece in self._pieces)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """About `parallelism` tasks of like size, in the order of the parts."""
        wanted = self._wanted
        tasks = [
            _task(partial(_read, pieces, wanted), wanted.schema, _rows(pieces, wanted), pieces, per_task_row_limit)
            for pieces in _shares(self._pieces, parallelism)
        ]
        if self._in_journals is not None:
            held = partial(_held, self._in_journals)
            tasks.append(_task(held, wanted.schema, self._rows_in_journals, [], per_task_row_limit))
        if not tasks:  # Ray learns the columns from one
            tasks.append(_task(partial(_read, [], wanted), wanted.schema, 0, [], per_task_row_limit))
        return tasks


def _wanted(
    path: str, snapshot: Snapshot, table: str, columns: Sequence[str] | None, where: pc.Expression | None
) -> Wanted:
    full = snapshot.schema(table)
    names = [*arguments.names("columns", full.names if columns is None else columns)]
    if unknown := [name for name in names if name not in full.names]:
        raise ValueError(f"columns: {table} has no column {', '.join(map(repr, unknown))}")
    if len(set(names)) < len(names):
        raise ValueError(f"columns: wanted each name once, got {max(names, key=names.count)!r} twice")
    # The text of an expression names every column it looks at; a name found by chance is only read in vain.
    tested = [name for name in full.names if where is not None and name in str(where)]
    if where is not None:
        check_where(where, pa.schema([full.field(name) for name in dict.fromkeys([*names, *tested])]), table)
    left_out: dict[str, list[int]] = {}
    if table == "rollouts":
        found = repeats(snapshot)
        if found.conflicts:
            shown = ", ".join(f"{id_!r} segment {segment}" for id_, segment in found.conflicts[:3])
            warnings.warn(f"{path}: stored with different contents, every row is there: {shown}", stacklevel=4)
        for row in found.left_out.to_pylist():
            left_out.setdefault(row["written_by"], []).append(row["written_row"])
    wide = dict.fromkeys([*names, *tested, *(_ORIGIN if left_out else ())])
    return Wanted(table, pa.schema([full.field(name) for name in wide]), names, where, left_out)


def _pieces(part: Part) -> Iterable[Piece]:
    of = max(1, round(part.size / PIECE_BYTES))
    return (Piece(part, number, of) for number in range(of))


def _shares(pieces: list[Piece], parallelism: int) -> list[list[Piece]]:
    """Consecutive pieces, so that about `parallelism` tasks have about the same number of bytes."""
    total, before = sum(piece.size for piece in pieces), 0
    shares: dict[int, list[Piece]] = {}
    for piece in pieces:
        middle = before + piece.size / 2
        shares.setdefault(int(middle * max(1, parallelism) / total), []).append(piece)
        before += piece.size
    return list(shares.values())


def _rows(pieces: list[Piece], wanted: Wanted) -> int | None:
    """Rows of some pieces, where that is known before they are read."""
    whole = wanted.everything and all(piece.of == 1 for piece in pieces)
    return sum(piece.part.rows for piece in pieces) if whole else None


def _task(
    read: Callable[[], Iterable[pa.Table]], schema: pa.Schema, rows: int | None, pieces: list[Piece], limit: int | None
) -> ReadTask:
    metadata = BlockMetadata(
        num_rows=rows,
        size_bytes=_DECODED * sum(piece.size for piece in pieces) if pieces else None,
        exec_stats=None,
        input_files=tuple(piece.part.path for piece in pieces),
    )
    return ReadTask(read, metadata, schema, limit)


def _read(pieces: list[Piece], wanted: Wanted) -> Iterator[pa.Table]:
    """What a task does: the rows of some pieces, batch by batch; no rows, with their columns, where there are none."""
    empty = True
    for piece in pieces:
        part, count = piece.part, piece.part.batch_count
        handle = part.open()
        try:
            for number in range(count * piece.number // piece.of, count * (piece.number + 1) // piece.of):
                rows = wanted.rows(part.batch(number, wanted.wide.names, handle), part.file)
                if rows.num_rows:
                    empty = False
                    yield rows
        finally:
            handle.close()
    if empty:
        yield wanted.schema.empty_table()


def _held(rows: Any) -> list[pa.Table]:
    return [ray.get(rows)]
