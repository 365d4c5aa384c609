"""How many tokens and actions each segment has, and which lists of other tables' rows have another number of items."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from rollstore.schema import TABLES
from rollstore.schema.flat import Ints, Rows, is_known
from rollstore.schema.lazy import lazy
from rollstore.schema.rules.lengths import own_lengths

ALIGNED = {"A": "actions", "T": "tokens"}
"""What a list has one item for each of."""


_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio: multiples of it lie far apart


class Misfit(NamedTuple):
    """A list of one row of another table that is as long as none of the segments that stand under the name it gives."""

    row: int
    column: str
    got: int
    align: str
    """"A" or "T"."""
    segments: list[tuple[int, int]]
    """Number of the row in the rollouts table, its tokens or actions. Found by hash; compare the name."""


class Extents:
    """The hash and two numbers of each segment, in the order taken: 16 bytes, and 16 more once another table asks."""

    def __init__(self) -> None:
        self._taken: list[tuple[Any, Any, Any]] = []

    def take(self, ids: Any, batch: pa.RecordBatch) -> None:
        """The segments of one batch of the rollouts table, with their hashes; -1 where no list says a number."""
        rows = _lists(batch, ("tokens", *_aligned("rollouts", "A")))
        tokens = rows.list("tokens")
        actions = own_lengths(rows, _aligned("rollouts", "A"))  # no mask is unpacked where another list says it
        mask = batch.schema.get_field_index("action_mask")
        unsaid = np.flatnonzero(actions < 0)
        if mask >= 0 and batch.column(mask).type.equals(pa.list_(pa.bool_())) and len(unsaid):
            masks = batch.column(mask).take(pa.array(unsaid))
            actions[unsaid] = np.where(masks.is_valid(), Rows({"action_mask": masks}, len(unsaid)).actions, -1)
        lengths = np.full(rows.count, -1) if tokens is None else np.where(tokens.valid, tokens.lengths, -1)
        self._taken.append((ids, lengths.astype(np.int32), actions.astype(np.int32)))

    def misfits(self, table: str, batch: pa.RecordBatch) -> Iterator[Misfit]:
        """What in a batch of another table does not fit the segments taken; what names none of those is left alone."""
        said = list(_claims(batch, table)) if self._taken else []
        rows = _named(batch) if said else np.zeros(0, np.int64)
        if not len(rows):
            return
        ids, segments = (batch.column(name).take(pa.array(rows)) for name in ("rollout_id", "segment"))
        hashes = hashes_of(ids.to_pylist(), segments.to_numpy())
        ordered = self._ordered
        first, last = (np.searchsorted(ordered["ids"], hashes, side) for side in ("left", "right"))
        there = np.flatnonzero(first < last)
        for column, align, lengths in said:
            wanted, got = ordered[align][first[there]], lengths[rows[there]]
            for place in there[(got >= 0) & (wanted >= 0) & (wanted != got)].tolist():
                under = slice(first[place], last[place])
                segments = list(zip(ordered["rows"][under].tolist(), ordered[align][under].tolist(), strict=True))
                row = int(rows[place])
                if all(length not in (-1, lengths[row]) for _, length in segments):
                    yield Misfit(row, column, int(lengths[row]), align, segments)

    @lazy
    def _ordered(self) -> dict[str, Any]:
        ids, tokens, actions = (np.concatenate(pieces) for pieces in zip(*self._taken, strict=True))
        order = np.argsort(ids, kind="stable")
        return {"ids": ids[order], "rows": order, "T": tokens[order], "A": actions[order]}


def hashes_of(ids: list[str], segments: Any) -> Any:
    """uint64 [n] that stand for segments. Two may share one: who finds that compares the names.

    The segment is no seed of the hash: under XXH3 another seed and another short id often make the same number.
    """
    texts = map(str.encode, ids)
    of_ids = np.fromiter(map(xxhash.xxh3_64_intdigest, texts), np.uint64, len(ids))
    return of_ids + np.asarray(segments, np.int64).view(np.uint64) * _ODD


@cache
def _aligned(table: str, align: str) -> tuple[str, ...]:
    """The columns of a table with one item an action ("A") or a token ("T")."""
    return tuple(column.name for column in TABLES[table].columns if column.align == align)


def _claims(batch: pa.RecordBatch, table: str) -> Iterator[tuple[str, str, Ints]]:
    """What the rows of another table say of their segments: (column, "A" or "T", int64 [rows] of items, -1: nothing).

    One column speaks for all of its alignment where they agree within the row, which the rules of the row say.
    """
    names = {align: _aligned(table, align) for align in ALIGNED}
    rows = _lists(batch, (*names["A"], *names["T"], "head_tokens"))
    for align in ALIGNED:
        said = np.full(rows.count, -1, np.int64)
        for name in (name for name in names[align] if rows.list(name) is not None):
            own = np.where(said < 0, own_lengths(rows, (name,)), -1)
            if (own >= 0).any():
                yield name, align, own
            said = np.maximum(said, own)
    heads, size = rows.list("head_tokens"), batch.schema.get_field_index("head_size")
    if heads is not None and size >= 0 and pa.types.is_integer(batch.column(size).type):
        sizes = batch.column(size).fill_null(0).to_numpy()
        alone = heads.valid & (sizes > 0) & np.all([~rows.known(name) for name in names["A"]], axis=0)
        if alone.any():
            yield "head_tokens", "A", np.where(alone, heads.lengths // np.maximum(sizes, 1), -1)


def _lists(batch: pa.RecordBatch, names: tuple[str, ...]) -> Rows:
    """The list columns of these names. A column of another type, or one that stands twice, was found before."""
    places = {name: batch.schema.get_field_index(name) for name in names}
    found = {name: batch.column(place) for name, place in places.items() if place >= 0}
    return Rows({name: column for name, column in found.items() if pa.types.is_list(column.type)}, batch.num_rows)


def _named(batch: pa.RecordBatch) -> Ints:
    """The rows that speak of one whole segment, by number: a judgement of a span or a token has lengths of its own."""
    types = {"rollout_id": pa.string(), "segment": pa.int32()}
    places = {name: batch.schema.get_field_index(name) for name in types}
    if any(place < 0 or not batch.column(place).type.equals(types[name]) for name, place in places.items()):
        return np.zeros(0, np.int64)
    whole = np.logical_and.reduce([is_known(batch.column(place)) for place in places.values()])
    for name in ("span", "position"):
        place = batch.schema.get_field_index(name)
        whole &= True if place < 0 else ~is_known(batch.column(place))
    return np.flatnonzero(whole)
