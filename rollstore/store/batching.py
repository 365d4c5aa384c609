"""How many rows make a batch: sizes of rows, and cutting them into batches of at most so many bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

Sizes = np.ndarray[Any, np.dtype[np.float64]]

BATCH_BYTES = 1 << 19
"""Decoded bytes of one batch of a sealed or compacted part; a single larger row is a batch of its own."""


def filled(pieces: Iterable[pa.RecordBatch], limit: int) -> Iterator[pa.RecordBatch]:
    """The same rows in the same order, in batches of at most `limit` decoded bytes, or of one row.

    Where rows are of like size, all batches but the last are as full as that allows. Each is in buffers of its own: of
    a slice, Arrow writes some of what its neighbours hold.

    A list element takes at least a bit, so a limit of 1 MiB also keeps every batch under 2^27 list elements.
    """
    together: list[pa.RecordBatch] = []
    room = limit
    for whole in pieces:
        piece = whole
        while piece.num_rows:
            own = piece.nbytes  # of the rows alone, not of what they are a slice of
            if own <= room:
                together.append(piece)
                room -= own
                break
            rows = max(_fitting(piece, own, room), int(not together))
            if rows:
                together.append(piece.slice(0, rows))
            yield _joined(together)
            together, room, piece = [], limit, piece.slice(rows)
    if together:
        yield _joined(together)


def _fitting(piece: pa.RecordBatch, own: int, room: int) -> int:
    """How many of its first rows take at most `room` bytes: guessed as if all took the same, less where they do not."""
    rows = piece.num_rows * room // own
    while rows > 0 and (taken := piece.slice(0, rows).nbytes) > room:
        rows = min(rows - 1, rows * room // taken)
    return max(rows, 0)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    # Of a single batch, Arrow gives back its buffers.
    return pa.concat_batches(batches if len(batches) > 1 else [batches[0], batches[0].slice(0, 0)])


def runs(sizes: Sizes, limit: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive rows of at most `limit` bytes together, or of one row."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(ends):
        before = ends[start - 1] if start else 0.0
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield start, stop
        start = stop


def row_bytes(array: pa.Array) -> Sizes:
    """Decoded bytes of each value [rows], children included."""
    type_, count = array.type, len(array)
    if not count:
        return np.zeros(0)
    each = _fixed_bytes(type_, array.null_count == count)
    if each is not None:
        return np.full(count, each)
    if pa.types.is_struct(type_):
        children = [row_bytes(array.field(i)) for i in range(type_.num_fields)]
        return np.sum([np.full(count, 0.125), *children], axis=0)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_map(type_):
        offsets = array.offsets.to_numpy()
        return np.sum([_between(items, offsets - offsets[0]) for items in items_of(array)], axis=0) + 4.125
    if pa.types.is_fixed_size_list(type_):
        # Not flattened: that leaves out the items of nulls, which are there all the same.
        items = array.values.slice(array.offset * type_.list_size, count * type_.list_size)
        return row_bytes(items).reshape(count, type_.list_size).sum(axis=1) + 0.125
    lengths = pa.compute.binary_length(array).fill_null(0)
    return lengths.to_numpy(zero_copy_only=False).astype(np.float64) + 4.125


def items_of(lists: pa.Array) -> list[pa.Array]:
    """The items of lists, of maps their keys and values: of these rows alone, however many their parent has."""
    if not len(lists):
        return [lists.keys[:0], lists.items[:0]] if pa.types.is_map(lists.type) else [lists.values[:0]]
    first, last = lists.offsets[0].as_py(), lists.offsets[-1].as_py()
    children = (lists.keys, lists.items) if pa.types.is_map(lists.type) else (lists.values,)
    return [child.slice(first, last - first) for child in children]


def _between(items: pa.Array, offsets: np.ndarray[Any, Any]) -> Sizes:
    """Bytes of the items from each offset to the next."""
    each = _fixed_bytes(items.type, False)
    if each is not None:
        return np.diff(offsets) * each
    sums = np.concatenate([[0.0], np.cumsum(row_bytes(items))])
    return sums[offsets[1:]] - sums[offsets[:-1]]


def _fixed_bytes(type_: pa.DataType, all_null: bool) -> float | None:
    """Decoded bytes of a value where all values of the type take the same; None where they do not."""
    if pa.types.is_nested(type_):
        return None
    try:
        return type_.bit_width / 8 + 0.125
    except ValueError:  # texts and bytes
        return 4.125 if all_null else None
