"""Rows of a snapshot's table by number: what there is, and reading any of them, a part's batches in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.readers.arrow import batch_of, check, opened, opens
from rollstore.readers.order import Ints
from rollstore.store.ahead import THREADS, ahead
from rollstore.store.batching import items_of
from rollstore.store.distant import expect
from rollstore.store.journal import JournalView
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot, fit

TABLE = "rollouts"
_RUN = 16  # the fewest batches of a file that a thread reads at one go: each opens it anew
_FEW = 64  # batches that are read sooner than threads are awake
_ITEMS = 1 << 30  # of a list column in one array: its offsets have 32 bits
_LENGTH, PLACE = "tokens_length", "place"


class Reader:
    """Rows of one table, each known by its place: (batch, of all files, and row in the batch) in one integer.

    Parts are checked whole, once a process, before Arrow opens them. Not thread-safe. Sent to another process it takes
    along what stands in journals, and opens the parts there again.
    """

    def __init__(self, snapshot: Snapshot, table: str = TABLE) -> None:
        self.table = table
        self.schema = snapshot.schema(table)
        self._filesystem = snapshot.filesystem
        self._by_arrow = opens(snapshot.filesystem)
        self._sources: list[Part | JournalView | Held] = [*snapshot.parts(table), *snapshot.views(table)]
        self._first = np.cumsum([0, *(source.batch_count for source in self._sources)])
        """number of the first batch of each source, counted over all"""

    def __getstate__(self) -> dict[str, Any]:
        sent: list[Part | Held] = []
        for source in self._sources:
            if isinstance(source, JournalView):
                sent.append(Held([fit(batch, self.schema, self.table) for batch in source.batches()]))
            else:  # a part without what it has read and opened so far
                sent.append(replace(source) if isinstance(source, Part) else source)
        return {**self.__dict__, "_sources": sent}

    def index(self, columns: Sequence[str], lengths: str | None = "action_mask") -> pa.Table:
        """Every row: the columns named, `place` int64, and `tokens_length` int64: how long the list `lengths` is."""
        parts = [source for source in self._sources if isinstance(source, Part)]
        if self._by_arrow:
            check(parts)
        else:  # read whole, and each batch checked as it is
            expect(self._filesystem, [part.file for part in parts])
        wanted = list(dict.fromkeys(columns))
        read = [*wanted, *([] if lengths is None or lengths in wanted else [lengths])]
        batches = list(self._decoded([(number, None) for number in range(int(self._first[-1]))], read))
        rows = self._table(batches, read)
        table = rows.select(wanted)
        if lengths is not None:
            table = table.append_column(_LENGTH, pc.list_value_length(rows[lengths]).cast(pa.int64()))
        places = [(np.int64(number) << 32) + np.arange(batch.num_rows) for number, batch in batches]
        return table.append_column(PLACE, pa.array(np.concatenate([np.zeros(0, np.int64), *places]))).combine_chunks()

    def acting(self, places: Ints) -> npt.NDArray[np.bool_]:
        """bool [n]: which of the rollouts' rows at some places, each once, have actions."""
        order = np.argsort(places)
        found: list[npt.NDArray[np.bool_]] = [np.zeros(0, bool)]
        for batch in self.read(places[order], ["action_mask"]):
            masks = batch.column(0)
            ends = np.cumsum(pc.fill_null(pc.list_value_length(masks), 0).to_numpy())
            before = np.concatenate([[0], np.cumsum(masks.flatten().to_numpy(zero_copy_only=False))])
            found.append(np.diff(before[ends], prepend=0) > 0)
        acting = np.empty(len(places), bool)
        acting[order] = np.concatenate(found)
        return acting

    def read(
        self, places: Ints, columns: Sequence[str], fields: Mapping[str, Sequence[str]] | None = None
    ) -> list[pa.RecordBatch]:
        """The rows at some places, ascending, each once, as few batches as 32-bit offsets allow.

        fields: of these lists of structs only some of the fields. Raises CorruptionError, StoreError where a part is
        gone.
        """
        pieces = list(self._pieces(places, tuple(columns)))
        tables = [self._table(pieces, columns)] if pieces else []
        if any(_most_items(column) > _ITEMS for table in tables for column in table.columns):
            tables = [self._table(together, columns) for together in _bounded(pieces)]
        return [_whole(table, fields or {}) for table in tables]

    def _pieces(self, places: Ints, columns: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(number, rows of it) of each batch that has some of the places."""
        if not len(places):
            return iter(())
        numbers, starts = np.unique(places >> 32, return_index=True)
        rows = np.split(places & 0xFFFFFFFF, starts[1:])
        return self._decoded(list(zip(numbers.tolist(), rows, strict=True)), columns)

    def _decoded(
        self, wanted: Sequence[tuple[int, Ints | None]], columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Some batches by number, in their order, of each these rows, or all; a file's neighbours by one thread."""
        most = max(_RUN, len(wanted) // (4 * THREADS))
        runs = [
            (place, own[first : first + most])
            for place, own in ((place, list(own)) for place, own in groupby(wanted, lambda one: self._place(one[0])))
            for first in range(0, len(own), most)
        ]
        read = partial(self._run, tuple(columns))
        return chain.from_iterable(ahead(read, runs) if len(wanted) > _FEW else map(read, runs))

    def _run(
        self, columns: tuple[str, ...], run: tuple[int, list[tuple[int, Ints | None]]]
    ) -> list[tuple[int, pa.RecordBatch]]:
        """Batches of one source, with those of the columns that it has."""
        place, wanted = run
        source, file = self._sources[place], self._opened(place, columns)
        found: list[tuple[int, pa.RecordBatch]] = []
        for number, rows in wanted:
            own = number - int(self._first[place])
            if file is None or not isinstance(source, Part):
                batch = source.batch(own, columns)
            else:
                batch = batch_of(file, source, own)
            found.append((number, batch if rows is None else _picked(batch, rows)))
        return found

    def _table(self, batches: Iterable[tuple[int, pa.RecordBatch]], columns: Sequence[str]) -> pa.Table:
        """Numbered batches as one table, nothing copied: a file's at one go, for all of them lack the same columns."""
        schema = pa.schema([self.schema.field(name) for name in columns])
        tables = [
            _fitted([batch for _, batch in own], schema, self.table)
            for _, own in groupby(batches, lambda numbered: self._place(numbered[0]))
        ]
        return pa.concat_tables(tables) if tables else schema.empty_table()

    def _place(self, number: int) -> int:
        """The place of the source that a batch is of."""
        return int(np.searchsorted(self._first, number, side="right")) - 1

    def _opened(self, place: int, columns: tuple[str, ...]) -> Any:
        """A part opened so that only the bytes of these columns are read: worth its many small reads where lists are
        left out. None where a batch is better read whole."""
        part = self._sources[place]
        if not self._by_arrow or not isinstance(part, Part) or not _leaves_out_lists(part, columns):
            return None
        check([part])
        return opened(part, columns)


class Held:
    """What stood in a journal, in memory: a journal is gone once it is sealed, and another process cannot reopen it."""

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self._batches = batches

    @property
    def batch_count(self) -> int:
        return len(self._batches)

    def batch(self, number: int, columns: Sequence[str]) -> pa.RecordBatch:
        return self._batches[number].select(list(columns))


def _picked(batch: pa.RecordBatch, rows: Ints) -> pa.RecordBatch:
    """Some rows, ascending."""
    first, count = int(rows[0]), int(rows[-1]) + 1 - int(rows[0])
    return batch.slice(first, len(rows)) if count == len(rows) else batch.take(pa.array(rows))


def _leaves_out_lists(part: Part, columns: tuple[str, ...]) -> bool:
    return not part.is_older and any(
        pa.types.is_list(field.type) and field.name not in columns for field in part.schema
    )


def _bounded(pieces: list[tuple[int, pa.RecordBatch]]) -> Iterator[list[tuple[int, pa.RecordBatch]]]:
    """Neighbours that one array a column can hold."""
    together: list[tuple[int, pa.RecordBatch]] = []
    items: dict[str, int] = {}
    for number, batch in pieces:
        own = {name: _items(batch.column(name)) for name in batch.schema.names}
        if together and max((items.get(name, 0) + count for name, count in own.items()), default=0) > _ITEMS:
            yield together
            together, items = [], {}
        together.append((number, batch))
        items = {name: items.get(name, 0) + own.get(name, 0) for name in {*items, *own}}
    yield together


def _fitted(batches: list[pa.RecordBatch], schema: pa.Schema, table: str) -> pa.Table:
    """Batches of one file in the columns of `schema`, absent ones null."""
    held = batches[0].schema
    known = {*schema.names} & {*held.names}  # a file that has none of them is read for another one
    if any(not held.field(name).type.equals(schema.field(name).type) for name in known):
        return pa.Table.from_batches([fit(batch, schema, table) for batch in batches], schema)
    rows = pa.Table.from_batches(batches)
    return pa.Table.from_arrays(
        [rows[field.name] if field.name in known else pa.nulls(rows.num_rows, field.type) for field in schema],
        schema=schema,
    )


def _whole(table: pa.Table, fields: Mapping[str, Sequence[str]]) -> pa.RecordBatch:
    """As one batch, of these lists of structs only some of the fields."""
    (batch,) = table.combine_chunks().to_batches()
    for name in fields.keys() & set(batch.schema.names):
        place = batch.schema.get_field_index(name)
        lists = _with_fields(batch.column(place), fields[name])
        batch = batch.set_column(place, pa.field(name, lists.type), lists)
    return batch


def _most_items(column: pa.ChunkedArray) -> int:
    """At least what `_items` counts, told by the bytes alone: counting takes as long as reading does."""
    return 8 * column.get_total_buffer_size() // _fewest_bits(column.type)


def _fewest_bits(type_: pa.DataType) -> int:
    """What the smallest thing takes that an offset in a column counts: a value, a list, a byte of a text."""
    if type_.num_fields:
        return min(32, *(_fewest_bits(type_.field(place).type) for place in range(type_.num_fields)))
    return type_.bit_width if pa.types.is_primitive(type_) else 8


def _items(column: pa.Array) -> int:
    """The most that an offset in a column can count: values, items of lists in any depth, bytes of texts."""
    type_ = column.type
    if pa.types.is_struct(type_):
        return max((_items(column.field(place)) for place in range(type_.num_fields)), default=0)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_map(type_):
        return max(len(column), *map(_items, items_of(column)))
    if pa.types.is_fixed_size_list(type_):
        return _items(column.flatten())
    return len(column) if pa.types.is_primitive(type_) else max(len(column), int(column.nbytes))


def _with_fields(lists: pa.Array, names: Sequence[str]) -> pa.Array:
    """A list of structs with only some of the structs' fields; the lists and their nulls as they were."""
    structs = lists.values
    places = [place for place, field in enumerate(structs.type) if field.name in names]
    mask = structs.is_null() if structs.null_count else None
    kept = pa.StructArray.from_arrays(
        [structs.field(place) for place in places], fields=[structs.type.field(place) for place in places], mask=mask
    )
    offsets = pa.array(lists.offsets.to_numpy().copy())  # Arrow takes no mask beside offsets that are a slice
    return pa.ListArray.from_arrays(offsets, kept, mask=lists.is_null() if lists.null_count else None)
