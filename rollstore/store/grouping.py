"""The order of rows in a compacted part: those of one prompt group next to each other, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from rollstore.store.batching import runs

WINDOW_BYTES = 256 << 20
"""Decoded bytes that are held to bring groups together; rows of a group further apart stay apart."""

_PIECE_BYTES = 16 << 20  # rows that are put in order at once: far too few for 2^31 list elements, even of one bit
_SLICE_BYTES = 32 << 10  # of a run of rows that is worth a slice; Arrow picks smaller ones faster one by one
_GROUP = ("run_id", "step", "group_id")


def in_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, those of one group together; groups, and rows in them, in the order they came.

    Batches of one schema. Rows without a group stay where they are. Holds `WINDOW_BYTES`, or one batch.
    """
    window: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        own = batch.nbytes
        if window and size + own > WINDOW_BYTES:
            yield from _ordered(window)
            window, size = [], 0
        window.append(batch)
        size += own
    yield from _ordered(window)


def _ordered(window: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    order = _order(window)
    if order is None:
        yield from window
        return
    counts = [batch.num_rows for batch in window]
    starts = np.cumsum([0, *counts])
    # A row counts as the mean one of its batch: pieces need only be far from what one array can hold.
    sizes = np.repeat([batch.nbytes / max(batch.num_rows, 1) for batch in window], counts)[order]
    for start, stop in runs(sizes, _PIECE_BYTES):
        yield from _gathered(window, starts, order[start:stop], float(sizes[start:stop].sum()))


def _order(window: list[pa.RecordBatch]) -> Any:
    """int64 [rows]: the rows in order of their groups, or None where they stand so already."""
    if not window or "group_id" not in window[0].schema.names:
        return None
    rows = pa.Table.from_batches(window).select([name for name in _GROUP if name in window[0].schema.names])
    key = np.zeros(rows.num_rows, np.int64)
    for column in rows.columns:
        codes = column.combine_chunks().dictionary_encode(null_encoding="encode").indices.to_numpy()
        key = np.unique(key * (len(codes) + 1) + codes, return_inverse=True)[1]  # small again, so that none overflows
    first = np.unique(key, return_index=True)[1]
    alone = rows["group_id"].is_null().to_numpy()
    ranks = np.where(alone, np.arange(rows.num_rows), first[key])
    return None if (ranks[1:] >= ranks[:-1]).all() else np.argsort(ranks, kind="stable")


def _gathered(window: list[pa.RecordBatch], starts: Any, rows: Any, size: float) -> Iterator[pa.RecordBatch]:
    """Some rows of a window in the order asked for, `size` bytes in all."""
    source = np.searchsorted(starts, rows, side="right") - 1
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(source) != 0)) + 1
    if size / (len(breaks) + 1) >= _SLICE_BYTES or not len(breaks):
        for first, stop in pairwise([0, *breaks.tolist(), len(rows)]):
            yield window[source[first]].slice(int(rows[first] - starts[source[first]]), stop - first)
        return
    pieces: list[pa.RecordBatch] = []
    places: list[Any] = []
    for number in np.unique(source):
        at = np.flatnonzero(source == number)
        pieces.append(window[number].take(pa.array(rows[at] - starts[number])))
        places.append(at)
    yield pa.concat_batches(pieces).take(pa.array(np.argsort(np.concatenate(places))))
