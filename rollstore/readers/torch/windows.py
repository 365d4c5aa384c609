"""What is in memory: the rows of the window that an epoch is in, taken apart, and of the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import xxhash

from rollstore.batch import TokenBatch
from rollstore.batch.packer import Packer
from rollstore.readers.joined import Column
from rollstore.readers.order import Ints
from rollstore.readers.rows import Reader
from rollstore.schema.lazy import lazy

Pack: TypeAlias = Callable[[pa.Table], Packer]


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """What is read of a row. columns: of the table; fields: of these lists of structs, only some fields; joined: column
    -> what gives it, for columns of other tables; pack: how rows are taken apart, None where tables are wanted."""

    reader: Reader
    columns: Sequence[str]
    fields: Mapping[str, Sequence[str]]
    joined: Mapping[str, Column]
    pack: Pack | None

    def empty(self) -> pa.Table:
        """No rows, in the columns of all others."""
        schema = pa.schema([self.reader.schema.field(name) for name in self.columns])
        return self._with_joined(schema.empty_table(), np.zeros(0, np.int64))

    def load(self, rows: Ints, places: Ints) -> Window:
        """Rows of the selection, which stand at `places` [rows]."""
        by_place = np.argsort(places)
        rows, places = rows[by_place], places[by_place]
        pieces: list[pa.Table] = []
        for batch in self.reader.read(places, self.columns, self.fields):
            begin = sum(piece.num_rows for piece in pieces)
            own = rows[begin : begin + batch.num_rows]
            pieces.append(self._with_joined(pa.Table.from_batches([batch]), own))
        return Window(places, pieces, self.pack)

    def _with_joined(self, table: pa.Table, rows: Ints) -> pa.Table:
        for name, column in self.joined.items():
            values = column(rows)
            place = table.schema.get_field_index(name)
            table = table.append_column(name, values) if place < 0 else table.set_column(place, name, values)
        return table


class Window:
    """Some rows in memory, found by their place."""

    def __init__(self, places: Ints, pieces: list[pa.Table], pack: Pack | None) -> None:
        self._places, self._pieces = places, pieces
        self._starts = np.cumsum([0, *(piece.num_rows for piece in pieces)])
        self._pack = pack

    @lazy
    def _packer(self) -> Packer | None:
        """The rows taken apart: not where they are read, for both threads take their turns at Python."""
        return self._pack(self._pieces[0]) if self._pack is not None and len(self._pieces) == 1 else None

    @property
    def nbytes(self) -> int:
        return sum(piece.get_total_buffer_size() for piece in self._pieces)

    def packed(self, places: Ints) -> TokenBatch | None:
        """The rows at some places as a batch; None where they have to be gathered from several arrays first."""
        return None if self._packer is None else self._packer.batch(np.searchsorted(self._places, places))

    def table(self, places: Ints) -> pa.Table:
        """The rows at some places, in that order."""
        rows = np.searchsorted(self._places, places)
        if len(self._pieces) == 1:
            return self._pieces[0].take(pa.array(rows))
        piece_of = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(piece_of, kind="stable")
        taken = [
            piece.take(pa.array(rows[piece_of == number] - self._starts[number]))
            for number, piece in enumerate(self._pieces)
        ]
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return pa.concat_tables(taken).combine_chunks().take(pa.array(back))


class Windows:
    """Loads each window once, the next one in a thread while one is in use."""

    def __init__(self, load: Callable[[int], Window], count: int, pool: ThreadPoolExecutor | None) -> None:
        self._load, self._count, self._pool = load, count, pool
        self._held: dict[int, Future[Window]] = {}

    def get(self, number: int, oldest: int) -> Window:
        """A window; those before `oldest` are let go."""
        for passed in [held for held in self._held if held < oldest]:
            del self._held[passed]
        own = self._ask(number)
        if self._pool is not None and number + 1 < self._count:
            self._ask(number + 1)
        return own.result()

    def _ask(self, number: int) -> Future[Window]:
        if number not in self._held:
            if self._pool is not None:
                self._held[number] = self._pool.submit(self._load, number)
            else:
                self._held[number] = made = Future[Window]()
                made.set_result(self._load(number))
        return self._held[number]


class Kept:
    """The last window loaded, kept for the next epoch where it holds everything: then it is the same one again."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._last: tuple[str, Window] | None = None

    def load(self, places: Ints, load: Callable[[], Window]) -> Window:
        key = xxhash.xxh3_128_hexdigest(np.sort(places).tobytes())
        last = self._last  # an earlier iteration that is still open may load meanwhile
        if last is not None and last[0] == key:
            return last[1]
        window = load()
        self._last = (key, window) if window.nbytes <= self._most else None
        return window

    def __getstate__(self) -> dict[str, Any]:
        return {"_most": self._most, "_last": None}
