"""Rows of a snapshot's rollouts by number: what there is, which rollouts they make up, and reading any of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import StoreError
from rollstore.readers.arrow import check
from rollstore.readers.order import Ints
from rollstore.store.filesystem import LocalFilesystem
from rollstore.store.frame import Batch
from rollstore.store.journal import JournalView
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot, fit

TABLE = "rollouts"
_OPEN = 64  # files held open
_SLAB_BYTES, _SLAB_BATCHES = 1 << 25, 128  # as encoded; lists of so many bytes stay far below 2^31 items
_LENGTH, _PLACE = "tokens_length", "place"


class Reader:
    """Rows of the rollouts table, each known by its place: (file, batch, row in the batch).

    Parts are checked whole, once a process, before Arrow opens them; what was decoded is kept while it fits
    `cache_bytes`. Not thread-safe.
    """

    def __init__(self, snapshot: Snapshot, cache_bytes: int) -> None:
        self._sources: list[Part | JournalView] = [*snapshot.parts(TABLE), *snapshot.views(TABLE)]
        self.schema = snapshot.schema(TABLE)
        self._first = np.cumsum([0, *(source.batch_count for source in self._sources)])
        """number of the first batch of each source, counted over all"""
        self._slabs = _slabs([batch.length for source in self._sources for batch in _batches(source)])
        """number of the first batch of each slab"""
        self._files: OrderedDict[tuple[int, tuple[str, ...]], Any] = OrderedDict()
        self._cache: OrderedDict[tuple[int, tuple[str, ...]], tuple[pa.RecordBatch, Ints]] = OrderedDict()
        self._cache_bytes, self._cached = cache_bytes, 0

    def index(self, columns: Sequence[str]) -> pa.Table:
        """Every row: the columns named, `tokens_length` int64, and `place` int64 (batch, of all files, and row)."""
        check(source for source in self._sources if isinstance(source, Part))
        wanted = list(dict.fromkeys(columns))
        schema = pa.schema([self.schema.field(name) for name in wanted])
        read = tuple(dict.fromkeys([*wanted, "action_mask"]))  # of the columns with a value a token, the smallest
        found: list[pa.Table] = []
        for number in range(int(self._first[-1])):
            batch = self._decode(number, read)
            lengths = pc.list_value_length(batch.column("action_mask")).cast(pa.int64())
            places = pa.array((np.int64(number) << 32) + np.arange(batch.num_rows))
            table = pa.Table.from_batches([batch.select(wanted)], schema)
            found.append(table.append_column(_LENGTH, lengths).append_column(_PLACE, places))
        if found:
            return pa.concat_tables(found).combine_chunks()
        return schema.append(pa.field(_LENGTH, pa.int64())).append(pa.field(_PLACE, pa.int64())).empty_table()

    def take(self, places: Ints, columns: Sequence[str]) -> pa.Table:
        """Rows in the order given, in the newest columns. Raises CorruptionError, StoreError where a part is gone."""
        names = tuple(columns)
        schema = pa.schema([self.schema.field(name) for name in names])
        if not len(places):
            return schema.empty_table()
        slabs = np.searchsorted(self._slabs, places >> 32, side="right") - 1
        order = np.argsort(slabs, kind="stable")
        numbers, starts = np.unique(slabs[order], return_index=True)
        pieces: list[pa.RecordBatch] = []
        for number, start, stop in zip(numbers, starts, [*starts[1:], len(order)], strict=True):
            slab, first_rows = self._slab(int(number), names)
            wanted = places[order[start:stop]]
            rows = first_rows[(wanted >> 32) - self._slabs[number]] + (wanted & 0xFFFFFFFF)
            pieces.append(slab.take(pa.array(rows)))
        table = pa.Table.from_batches(pieces, schema)
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return table if len(pieces) < 2 else table.combine_chunks().take(pa.array(back))

    def _slab(self, number: int, columns: tuple[str, ...]) -> tuple[pa.RecordBatch, Ints]:
        """Neighbouring batches as one, and the row at which each begins. To take from one array what was in many is
        ten times as fast as to take from each: most of the time of a nested column goes into setting up."""
        key = (number, columns)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        first, last = int(self._slabs[number]), int(self._slabs[number + 1])
        batches = [self._decode(batch, columns) for batch in range(first, last)]
        slab = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        rows = np.cumsum([0, *(batch.num_rows for batch in batches)], dtype=np.int64)
        self._cache[key] = slab, rows
        self._cached += slab.get_total_buffer_size()
        while self._cached > self._cache_bytes and len(self._cache) > 1:
            self._cached -= self._cache.popitem(last=False)[1][0].get_total_buffer_size()
        return self._cache[key]

    def _decode(self, number: int, columns: tuple[str, ...]) -> pa.RecordBatch:
        place = int(np.searchsorted(self._first, number, side="right")) - 1
        source, own = self._sources[place], number - int(self._first[place])
        if isinstance(source, Part) and isinstance(source.filesystem, LocalFilesystem):
            batch = self._opened(place, source, columns).get_batch(own)
            batch.validate(full=True)
        else:
            batch = source.batch(own, columns)
        return fit(batch, pa.schema([self.schema.field(name) for name in columns]), TABLE)

    def _opened(self, place: int, part: Part, columns: tuple[str, ...]) -> Any:
        """An open file that decodes only these columns, and reads only their bytes."""
        key = (place, columns)
        if key not in self._files:
            check([part])
            fields = [i for i, name in enumerate(part.schema.names) if name in columns]
            options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            try:
                self._files[key] = pa.ipc.open_file(pa.OSFile(part.path), options=options)
            except FileNotFoundError as error:
                raise StoreError(f"{part.path}: wanted a part of the snapshot, got no file; open a new one") from error
            if len(self._files) > _OPEN:
                self._files.popitem(last=False)
        self._files.move_to_end(key)
        return self._files[key]


def _batches(source: Part | JournalView) -> Sequence[Batch]:
    return source.tail.batches if isinstance(source, Part) else source.messages


def _slabs(lengths: list[int]) -> Ints:
    """Where slabs of neighbouring batches begin, from 0 to the number of batches; a large batch is one of its own."""
    begins, size = [0], 0
    for number, length in enumerate(lengths):
        if number > begins[-1] and (size + length > _SLAB_BYTES or number - begins[-1] == _SLAB_BATCHES):
            begins.append(number)
            size = 0
        size += length
    return np.array([*begins, len(lengths)] if lengths else [0], np.int64)
