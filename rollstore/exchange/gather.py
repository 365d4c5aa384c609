"""Rows of one table of a snapshot in an order of their own: which rows there are, and reading them by place."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.readers.repeats import repeats
from rollstore.store.journal import JournalView
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot, fit

if TYPE_CHECKING:
    from rollstore.store.store import Store

Ints = npt.NDArray[np.int64]
Runs = list[tuple[str | None, Iterator[pa.Table]]]

CACHE_BYTES = 256 << 20
"""Decoded batches that are kept, for rows that lie apart in the store and together in the order."""

RUN = {"rollouts": "run_id", "evaluations": "run_id", "uses": "train_run", "actions": "run_id", "tokens": "run_id"}
"""Table -> the column whose value names the folder. The others are not partitioned."""

_TOGETHER: dict[str, list[list[str]]] = {
    "rollouts": [["run_id", "step", "group_id"], ["rollout_id"]],
    "evaluations": [["run_id", "evaluation_id"], ["rollout_id"]],
    "scores": [["rollout_id"]],
    "uses": [],
}
"""Table -> keys of rows that stand together. Rows of one group share their prompt: apart they take twice the bytes."""

_CHUNK_BYTES, _CHUNK_ROWS = 32 << 20, 4096
_BATCH_BYTES = 1 << 20  # decoded: the most that the layout allows a batch, or one row
_PLACE = "place"


class Rows:
    """Rows by place: the number of a batch over all files of the table, and the row in it, in one int64."""

    def __init__(self, snapshot: Snapshot, table: str) -> None:
        self.schema = snapshot.schema(table)
        self._table = table
        self._batches: list[tuple[Part | JournalView, int]] = [
            (source, number)
            for source in (*snapshot.parts(table), *snapshot.views(table))
            for number in range(source.batch_count)
        ]
        self._row_bytes = np.array([_row_bytes(source, number) for source, number in self._batches], np.float64)
        self._cache: OrderedDict[int, pa.RecordBatch] = OrderedDict()
        self._cached = 0

    def index(self, columns: Sequence[str]) -> pa.Table:
        """Every row: the columns named, and `place` int64. Raises CorruptionError, StoreError where a part is gone."""
        schema = pa.schema([self.schema.field(name) for name in columns])
        found = [self._read(number, schema) for number in range(len(self._batches))]
        places = [(np.int64(number) << 32) + np.arange(batch.num_rows) for number, batch in enumerate(found)]
        table = pa.Table.from_batches(found, schema)
        return table.append_column(_PLACE, pa.array(np.concatenate(places) if places else np.zeros(0, np.int64)))

    def chunks(self, places: Ints) -> Iterator[pa.Table]:
        """Whole rows at int64 places [n], in that order, in the newest columns, a bounded number of bytes at a time.

        Raises as `index`.
        """
        ends = np.cumsum(self._row_bytes[places >> 32])
        start = 0
        while start < len(places):
            before = ends[start - 1] if start else 0.0
            stop = max(start + 1, int(np.searchsorted(ends, before + _CHUNK_BYTES, side="right")))
            stop = min(stop, start + _CHUNK_ROWS)
            yield self._take(places[start:stop])
            start = stop

    def _take(self, places: Ints) -> pa.Table:
        order = np.argsort(places, kind="stable")
        placed = places[order]
        # Places that follow each other are one slice, which copies nothing.
        breaks = np.flatnonzero(np.diff(placed) != 1) + 1
        pieces: list[pa.RecordBatch] = []
        for start, stop in zip([0, *breaks], [*breaks, len(placed)], strict=True):
            first = int(placed[start])
            pieces.append(self._whole(first >> 32).slice(first & 0xFFFFFFFF, int(stop - start)))
        table = pa.Table.from_batches(pieces, self.schema).combine_chunks()
        if (order[1:] > order[:-1]).all():
            return table
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return table.take(pa.array(back))

    def _whole(self, number: int) -> pa.RecordBatch:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        batch = self._cache[number] = self._read(number, self.schema)
        self._cached += batch.nbytes
        while self._cached > CACHE_BYTES and len(self._cache) > 1:
            self._cached -= self._cache.popitem(last=False)[1].nbytes
        return batch

    def _read(self, number: int, schema: pa.Schema) -> pa.RecordBatch:
        source, own = self._batches[number]
        return fit(source.batch(own, schema.names), schema, self._table)


def _row_bytes(source: Part | JournalView, number: int) -> float:
    """At most so many decoded bytes a row has, about."""
    batch = source.tail.batches[number] if isinstance(source, Part) else source.messages[number]
    return max(batch.length * (8.0 if batch.rows == 1 else 1.0), _BATCH_BYTES) / max(batch.rows, 1)


def places(index: pa.Table) -> Ints:
    """int64 [n]: the places of an index."""
    return index[_PLACE].to_numpy()


def together(index: pa.Table, keys: Sequence[Sequence[str]], last: str | None = None) -> Ints:
    """int64 [n]: an order of the rows of an index in which rows that agree in `keys[0]` stand together, among them
    those that agree in `keys[1]`, and so on; each lot where its first row was. At the end by the number `last`.

    A null in the last column of a key is a lot of its own.
    """
    ranks = [_ranks(index, names) for names in keys]
    tail = [] if last is None else [index[last].to_numpy()]
    return np.lexsort((np.arange(index.num_rows), *tail, *reversed(ranks)))


def _ranks(index: pa.Table, names: Sequence[str]) -> Ints:
    """int64 [n]: the first row that has the same values."""
    codes = [_codes(index[name]) for name in names]
    alone = pc.is_null(index[names[-1]]).to_numpy()
    codes.append(np.where(alone, np.arange(len(alone)), -1))
    _, first, inverse = np.unique(np.stack(codes), axis=1, return_index=True, return_inverse=True)
    return first[inverse.reshape(-1)]


def _codes(column: pa.ChunkedArray) -> Ints:
    encoded: Any = column.combine_chunks().dictionary_encode(null_encoding="encode")
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def runs_of(store: Store, snapshot: Snapshot, table: str) -> tuple[pa.Schema, int, Runs]:
    """The schema of a table, how many rows it has, and those of each run, chunk by chunk."""
    rows = Rows(snapshot, table)
    run = RUN.get(table)
    wanted = {name for key in _TOGETHER[table] for name in key} | {run or "rollout_id"}
    if table == "rollouts":
        index = _once(store, snapshot, rows.index(sorted(wanted | {"segment", "written_by", "written_row"})))
    else:
        index = rows.index(sorted(wanted))
    order = together(index, _TOGETHER[table], "segment" if table == "rollouts" else None)
    found = places(index)[order]
    if run is None:
        return rows.schema, len(found), [(None, rows.chunks(found))]
    lots: Any = index[run].combine_chunks().take(pa.array(order)).dictionary_encode(null_encoding="encode")
    codes = lots.indices.to_numpy(zero_copy_only=False)
    names = lots.dictionary.to_pylist()
    ends = np.cumsum(np.bincount(codes, minlength=len(names)))[:-1]
    each = np.split(found[np.argsort(codes, kind="stable")], ends) if names else []
    return rows.schema, len(found), [(name, rows.chunks(one)) for name, one in zip(names, each, strict=True)]


def _once(store: Store, snapshot: Snapshot, index: pa.Table) -> pa.Table:
    """The index without rows that say again what another says."""
    found = repeats(snapshot)
    if found.conflicts:
        shown = ", ".join(f"{id_!r} segment {segment}" for id_, segment in found.conflicts[:3])
        more = f" and {len(found.conflicts) - 3} more" if len(found.conflicts) > 3 else ""
        warnings.warn(
            f"{store.path}: stored with different contents, every row is written: {shown}{more}", stacklevel=2
        )
    if not found.left_out.num_rows:
        return index
    gone = set(zip(*(found.left_out[name].to_pylist() for name in ("written_by", "written_row")), strict=True))
    origins = zip(index["written_by"].to_pylist(), index["written_row"].to_pylist(), strict=True)
    return index.filter(pa.array(np.array([origin not in gone for origin in origins], bool)))
