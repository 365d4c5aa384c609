"""The rest of an epoch as batches: what an iteration began with, whatever the loader is told while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from rollstore.batch import TokenBatch
from rollstore.readers.filters import Filters
from rollstore.readers.order import Ints
from rollstore.readers.plan import Plan
from rollstore.readers.selection import Selection
from rollstore.readers.torch.ahead import Pool, in_order, pieces
from rollstore.readers.torch.windows import Kept, Source, Window, Windows
from rollstore.schema.lazy import lazy


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """What filters leave of a snapshot, which units of it are within the budget (bool [units]), and what is read."""

    filters: Filters
    selection: Selection
    fits: npt.NDArray[np.bool_]
    source: Source

    @lazy
    def digest(self) -> str:
        """What a state is of: the selection, and what is joined to it."""
        of = self.selection.digest
        return xxhash.xxh3_128_hexdigest("\n".join([of, *self.joined]).encode()) if self.joined else of

    @property
    def joined(self) -> list[str]:
        """Of each column of another table its name and digest."""
        return [f"{name} {column.digest}" for name, column in self.source.joined.items() if column.digest is not None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Iteration:
    """One rank's batches of a plan, over what was chosen when it began. make: rows -> batch."""

    plan: Plan
    chosen: Chosen
    rank: int
    make: Callable[[pa.Table], Any]
    kept: Kept
    pinned: bool

    def batches(self, steps: range, prefetch: int) -> Generator[tuple[int, Any]]:
        """(step, batch) of each of the steps; up to `prefetch` pieces are made ahead in a thread."""
        with ExitStack() as stack:
            # The thread that makes batches ends before the one it waits for.
            reads, makes = (
                stack.enter_context(Pool(thread_name_prefix=f"rollstore-{name}")) if prefetch else None
                for name in ("reads", "makes")
            )
            numbers = np.unique(self.plan.windows)
            windows = Windows(lambda number: self._load(int(numbers[number])), len(numbers), reads)
            work = partial(self._made, numbers, windows)
            yield from in_order(work, pieces(self.plan, steps), makes, prefetch)

    def _made(self, numbers: Ints, windows: Windows, steps: list[int]) -> list[Any]:
        return [self._finished(self._batch(numbers, windows, self.plan.share(step, self.rank))) for step in steps]

    def _batch(self, numbers: Ints, windows: Windows, share: Ints) -> Any:
        """The rows of some units, in that order, as a batch."""
        if not len(share):
            return self.make(self.chosen.source.empty())
        units, selection = self.plan.units[share], self.chosen.selection
        places = selection.places[selection.rows(units)]
        held = np.searchsorted(numbers, self.plan.windows[share])
        if held[0] == held[-1]:
            window = windows.get(int(held[0]), int(held[0]))
            packed = window.packed(places)
            return self.make(window.table(places)) if packed is None else packed
        owner, needed = np.repeat(held, selection.sizes[units]), np.unique(held).tolist()
        # An epoch goes from window to window, so what is of the first comes first.
        tables = [windows.get(number, needed[0]).table(places[owner == number]) for number in needed]
        return self.make(pa.concat_tables(tables).combine_chunks())

    def _finished(self, batch: Any) -> Any:
        return batch.pin_memory() if self.pinned and isinstance(batch, TokenBatch) else batch

    def _load(self, number: int) -> Window:
        selection = self.chosen.selection
        rows = selection.rows(self.plan.units[self.plan.windows == number])
        places = selection.places[rows]
        everything = len(rows) == int(selection.sizes[self.chosen.fits].sum())
        load = partial(self.chosen.source.load, rows, places)
        return self.kept.load(places, load) if everything else load()
