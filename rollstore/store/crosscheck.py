"""What no single row can show: origins and ids that stand twice, a continuation that is missing, noise used again, and
lists of another length than the segment that they speak of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.schema.flat import Flat
from rollstore.store.extents import ALIGNED, Extents, hashes_of
from rollstore.store.finding import Finding
from rollstore.store.journal import JournalView
from rollstore.store.lookup import content
from rollstore.store.part import Part

_Source = Part | JournalView
_Draw = tuple[str | None, int | None, int, int, int]
"""Run, step, key, sample and segment: within one such no position is drawn by two rollouts."""

_HELD = 16  # decoded batches kept while rows are looked at again


class Rows:
    """The rows of one table as far as they were read: 16 bytes each, and 16 more for each keyed draw.

    `extents`: the segments' own, of the rollouts table, for the rows of other tables to fit. `segments`: for another
    table, the rows of that one, all of which were added.
    """

    def __init__(self, table: str, *, extents: Extents | None = None, segments: Rows | None = None) -> None:
        self.table = table
        self._extents = extents
        self._segments = segments
        self._misfits: list[Finding] = []
        self._batches: list[tuple[_Source, int]] = []
        self._ends: list[int] = []
        self._names: dict[str | None, int] = {}
        self._origins: list[Any] = []
        self._ids: list[Any] = []
        self._promised: list[tuple[int, int]] = []
        self._drawn: list[tuple[int, int]] = []
        self._held: dict[int, pa.RecordBatch] = {}

    @property
    def count(self) -> int:
        """Rows taken so far."""
        return self._ends[-1] if self._ends else 0

    def add(self, source: _Source, number: int, batch: pa.RecordBatch) -> None:
        """Take the rows of batch `number` of a file, whose own columns have the schema's types and no null."""
        first = self.count
        self._batches.append((source, number))
        self._ends.append(first + batch.num_rows)
        by = batch.column("written_by").dictionary_encode()
        names = [self._names.setdefault(name, len(self._names)) for name in by.dictionary.to_pylist()]
        writers = np.array(names, np.int64)[by.indices.to_numpy()] if names else np.zeros(0, np.int64)
        self._origins.append((writers << 40) ^ batch.column("written_row").to_numpy())
        if self.table == "rollouts":
            self._add_rollouts(first, batch)
        else:
            self._misfits += self._other_lengths(first, batch)

    def _add_rollouts(self, first: int, batch: pa.RecordBatch) -> None:
        ids: list[str] = batch.column("rollout_id").to_pylist()
        segments: list[int] = batch.column("segment").to_pylist()
        self._ids.append(hashes_of(ids, segments))
        if self._extents is not None:
            self._extents.take(self._ids[-1], batch)
        if "ending" in batch.schema.names:
            rows: list[int] = pc.indices_nonzero(pc.equal(batch.column("ending"), "continued")).to_pylist()
            promised = hashes_of([ids[row] for row in rows], [segments[row] + 1 for row in rows]).tolist()
            self._promised += zip(promised, (first + row for row in rows), strict=True)
        for row in _keyed(batch):
            self._drawn += [(hash(draw), first + row) for draw in _draws(batch.slice(row, 1))]

    def findings(self) -> Iterator[Finding]:
        """What is wrong between the rows taken."""
        yield from self._misfits
        if not self.count:
            return
        for group in _repeated(np.concatenate(self._origins)):
            message = f"the same origin as {self._say(group[0])}"
            yield from (self._finding("error", "repeated_origin", row, message) for row in group[1:])
        if self.table != "rollouts":
            return
        ids = np.concatenate(self._ids)
        for group in _repeated(ids):
            yield from self._duplicates(group)
        there = np.isin(np.array([hash_ for hash_, _ in self._promised], np.uint64), ids)
        for (_, row), found in zip(self._promised, there.tolist(), strict=True):
            if not found:
                message = f"{_id(self._row(row))} is continued, and its next segment is not there"
                yield self._finding("error", "missing_continuation", row, message)
        for group in _repeated(np.array([hash_ for hash_, _ in self._drawn], np.int64)):
            yield from self._reused(sorted({self._drawn[place][1] for place in group}))

    def _other_lengths(self, first: int, batch: pa.RecordBatch) -> Iterator[Finding]:
        """Rows of a batch of another table whose lists have another length than their segment's."""
        if self._extents is None or self._segments is None:
            return
        for row, column, got, align, segments in self._extents.misfits(self.table, batch):
            named = _id(batch.slice(row, 1))
            for number, wanted in segments:
                if _id(self._segments._row(number)) == named:
                    what = f"{column}: got {got} values, wanted {wanted}: {named} has {wanted} {ALIGNED[align]}"
                    message = f"{what} in {self._segments._say(number)}"
                    yield self._finding("error", "wrong_length", first + row, message)
                    break

    def _duplicates(self, group: list[int]) -> Iterator[Finding]:
        first = self._row(group[0])
        for number in group[1:]:
            row = self._row(number)
            if _id(row) != _id(first):
                continue  # two ids with one hash
            if content(row) == content(first):
                yield self._finding("note", "repeated_row", number, f"{_id(row)} equals {self._say(group[0])}")
            else:
                origins = f"origins {_origin(row)} and {_origin(first)}"
                message = f"{_id(row)} differs from {self._say(group[0])}; {origins}"
                yield self._finding("error", "duplicate_id", number, message)

    def _reused(self, group: list[int]) -> Iterator[Finding]:
        """Rows that share a draw, by its hash: other rollouts that drew the same positions of it."""
        drawn: dict[tuple[_Draw, int], tuple[str, int]] = {}
        for number in group:
            row = self._row(number)
            for draw, positions in _draws(row).items():
                others = ((p, drawn.setdefault((draw, p), (_id(row), number))) for p in positions)
                position, other = next(((p, other) for p, other in others if other[0] != _id(row)), (0, None))
                if other is not None:
                    drawing = f"key {draw[2]}, sample {draw[3]}, segment {draw[4]}, position {position}"
                    message = f"{drawing} was drawn in {self._say(other[1])} too"
                    yield self._finding("error", "noise_reused", number, message)

    def _row(self, row: int) -> pa.RecordBatch:
        place, inside = self._place(row)
        if place not in self._held:
            if len(self._held) == _HELD:
                del self._held[next(iter(self._held))]
            source, number = self._batches[place]
            self._held[place] = source.batch(number)
        return self._held[place].slice(inside, 1)

    def _place(self, row: int) -> tuple[int, int]:
        """The batch of a row, and the row's number in it."""
        place = int(np.searchsorted(self._ends, row, side="right"))
        return place, row - (self._ends[place - 1] if place else 0)

    def _say(self, row: int) -> str:
        place, inside = self._place(row)
        source, number = self._batches[place]
        return f"{source.file}, batch {number}, row {inside}"

    def _finding(self, level: Any, kind: str, row: int, message: str) -> Finding:
        place, inside = self._place(row)
        source, number = self._batches[place]
        return Finding(
            level=level, kind=kind, table=self.table, part=source.file, batch=number, row=inside, message=message
        )


def _repeated(values: Any) -> Iterator[list[int]]:
    """The places of each value that stands more than once, in the order read."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    lengths = np.diff(np.append(starts, len(ordered)))
    for start, length in zip(starts[lengths > 1].tolist(), lengths[lengths > 1].tolist(), strict=True):
        yield order[start : start + length].tolist()


def _value(row: pa.RecordBatch, name: str) -> Any:
    return row.column(name)[0].as_py() if name in row.schema.names else None


def _id(row: pa.RecordBatch) -> str:
    return f"{row.column('rollout_id')[0].as_py()!r}, segment {row.column('segment')[0]}"


def _origin(row: pa.RecordBatch) -> str:
    """As `rollstore compact --drop-row` takes it."""
    return f"{row.column('written_by')[0]}:{row.column('written_row')[0]}"


def _keyed(batch: pa.RecordBatch) -> list[int]:
    """Rows that were drawn under a key, their own or one of a span."""
    found: list[Any] = []
    if "replay_key" in batch.schema.names:
        found.append(np.flatnonzero(batch.column("replay_key").is_valid()))
    if "spans" in batch.schema.names:
        spans = Flat(batch.column("spans"))
        keys = spans.values.field("replay_key") if spans.values.type.get_field_index("replay_key") >= 0 else None
        if keys is not None and keys.null_count < len(keys):
            found.append(np.unique(spans.row_of(np.flatnonzero(keys.is_valid()))))
    return np.unique(np.concatenate(found)).tolist() if found else []


def _draws(row: pa.RecordBatch) -> dict[_Draw, list[int]]:
    """Positions of the actions of one row by what their noise was computed from; unkeyed ones are left out."""
    run, step, segment = _value(row, "run_id"), _value(row, "step"), _value(row, "segment")
    mask: list[bool] = _value(row, "action_mask") or []
    own = _value(row, "replay_key"), _value(row, "replay_sample")
    used = [own] * len(mask)
    for span in _value(row, "spans") or ():
        key, sample = span.get("replay_key"), span.get("replay_sample")
        start, stop = span["start"], span["start"] + span["length"]
        if (key is not None or sample is not None) and 0 <= start <= stop <= len(mask):  # others were found before
            draw = own[0] if key is None else key, own[1] if sample is None else sample
            used[start:stop] = [draw] * (stop - start)
    draws: dict[_Draw, list[int]] = {}
    for position, drawn in enumerate(mask):
        key, sample = used[position]
        if drawn and key is not None:
            draws.setdefault((run, step, key, sample or 0, segment), []).append(position)
    return draws
