"""The order of rows in a compacted part: those of one prompt group next to each other, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from rollstore.store.ahead import ahead
from rollstore.store.batching import runs

WINDOW_BYTES = 128 << 20
"""Decoded bytes that are held, twice, to bring groups together: far too few for 2^31 list elements, even of one bit.
Rows of a group further apart stay apart."""

_PIECE_BYTES = 4 << 20  # rows that are put in order at once
_SLICE_BYTES = 32 << 10  # of a run of rows that is worth a slice; Arrow picks smaller ones faster one by one
_GROUP = ("run_id", "step", "group_id")


def in_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, those of one group together; groups, and rows in them, in the order they came.

    Batches of one schema. Rows without a group stay where they are. Holds twice `WINDOW_BYTES`, or one batch.
    """
    window: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        own = batch.nbytes
        if window and size + own > WINDOW_BYTES:
            full, window, size = window, [], 0
            yield from _ordered(full)
        window.append(batch)
        size += own
    yield from _ordered(window)


def _ordered(window: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Takes the window: it is emptied once its rows are copied."""
    order = _order(window)
    if order is None:
        yield from window
        return
    # A row counts as the mean one of its batch: pieces need only be of about that size.
    counts = [batch.num_rows for batch in window]
    sizes = np.repeat([batch.nbytes / max(batch.num_rows, 1) for batch in window], counts)[order]
    whole = window[0] if len(window) == 1 else pa.concat_batches(window)
    window.clear()
    pieces = [(order[start:stop], float(sizes[start:stop].sum())) for start, stop in runs(sizes, _PIECE_BYTES)]
    for gathered in ahead(lambda piece: _gathered(whole, *piece), pieces):
        yield from gathered


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


def _gathered(whole: pa.RecordBatch, rows: Any, size: float) -> list[pa.RecordBatch]:
    """Some rows in the order asked for, `size` bytes in all."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    if size / (len(breaks) + 1) < _SLICE_BYTES and len(breaks):
        return [whole.take(pa.array(rows))]
    bounds = pairwise([0, *breaks.tolist(), len(rows)])
    return [whole.slice(int(rows[first]), stop - first) for first, stop in bounds]
