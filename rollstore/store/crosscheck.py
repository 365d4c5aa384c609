"""What no single row can show: origins and ids that stand twice, a continuation that is missing, noise used again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from rollstore.store.finding import Finding
from rollstore.store.journal import JournalView
from rollstore.store.lookup import content
from rollstore.store.part import Part

_Source = Part | JournalView
_Key = tuple[int, int, int]


class Rows:
    """The rows of one table as far as they were read: 28 bytes each, and one entry for each keyed draw."""

    def __init__(self, table: str) -> None:
        self.table = table
        self._sources: list[_Source] = []
        self._names: dict[str, int] = {}
        self._batches: list[tuple[int, int]] = []
        self._origins: list[Any] = []
        self._ids: list[Any] = []
        self._next: list[Any] = []
        self._places: list[Any] = []
        self._noise: dict[_Key, list[tuple[int, int]]] = {}

    def add(self, source: _Source, number: int, batch: pa.RecordBatch) -> None:
        """Take the rows of batch `number` of a file."""
        if not self._sources or self._sources[-1] is not source:
            self._sources.append(source)
        place = len(self._batches)
        self._batches.append((len(self._sources) - 1, number))
        self._places.append(np.stack([np.full(batch.num_rows, place), np.arange(batch.num_rows)], axis=1))
        if "written_by" in batch.schema.names and "written_row" in batch.schema.names:
            names = [
                self._names.setdefault(str(name), len(self._names)) for name in batch.column("written_by").to_pylist()
            ]
            rows = batch.column("written_row").fill_null(-1).to_numpy()
            self._origins.append(np.array(names, np.int64) << 40 | rows)
        else:
            self._origins.append(np.full(batch.num_rows, -1))
        if self.table == "rollouts":
            self._add_rollouts(place, batch)

    def _add_rollouts(self, place: int, batch: pa.RecordBatch) -> None:
        ids: list[str] = batch.column("rollout_id").to_pylist()
        segments: list[int] = batch.column("segment").to_pylist()
        endings = _values(batch, "ending")
        self._ids.append(np.array([_hash(i, s) for i, s in zip(ids, segments, strict=True)], np.uint64))
        # Where a next segment is promised, the hash it must have; a row's own hash where none is.
        self._next.append(
            np.array(
                [_hash(i, s + (e == "continued")) for i, s, e in zip(ids, segments, endings, strict=True)], np.uint64
            )
        )
        keys, samples, spans = (_values(batch, name) for name in ("replay_key", "replay_sample", "spans"))
        for row, segment in enumerate(segments):
            for key in _keys(keys[row], samples[row], segment, spans[row]):
                self._noise.setdefault(key, []).append((place, row))

    def findings(self) -> Iterator[Finding]:
        """What is wrong between the rows taken."""
        if not self._places:
            return
        places = np.concatenate(self._places)
        for group in _repeated(np.concatenate(self._origins), places):
            message = f"the same origin as {self._say(group[0])}"
            yield from (self._finding("error", "repeated_origin", place, message) for place in group[1:])
        if self.table != "rollouts":
            return
        ids = np.concatenate(self._ids)
        for group in _repeated(ids, places):
            yield from self._duplicates(group)
        promised = np.concatenate(self._next)
        for place in places[~np.isin(promised, ids)].tolist():
            row = self._row(place)
            message = f"{_id(row)} is continued, and its next segment is not there"
            yield self._finding("error", "missing_continuation", place, message)
        yield from self._reused()

    def _duplicates(self, group: list[list[int]]) -> Iterator[Finding]:
        rows = [self._row(place) for place in group]
        for place, row in zip(group[1:], rows[1:], strict=True):
            if _id(row) != _id(rows[0]):
                continue  # two ids with one hash
            if content(row) == content(rows[0]):
                yield self._finding("note", "repeated_row", place, f"{_id(row)} equals {self._say(group[0])}")
            else:
                yield self._finding("error", "duplicate_id", place, f"{_id(row)} differs from {self._say(group[0])}")

    def _reused(self) -> Iterator[Finding]:
        for key, places in self._noise.items():
            if len(places) < 2:
                continue
            drawn: dict[int, tuple[str, list[int]]] = {}
            for place in map(list, places):
                row = self._row(place)
                for position in _positions(row, key):
                    id_, first = drawn.setdefault(position, (_id(row), place))
                    if id_ != _id(row):
                        drawing = f"key {key[0]}, sample {key[1]}, segment {key[2]}, position {position}"
                        message = f"{drawing} was drawn in {self._say(first)} too"
                        yield self._finding("error", "noise_reused", place, message)
                        break

    def _row(self, place: list[int]) -> pa.RecordBatch:
        source, number = self._batches[place[0]]
        return self._sources[source].batch(number).slice(place[1], 1)

    def _say(self, place: list[int]) -> str:
        source, number = self._batches[place[0]]
        return f"{self._sources[source].file}, batch {number}, row {place[1]}"

    def _finding(self, level: Any, kind: str, place: list[int], message: str) -> Finding:
        source, number = self._batches[place[0]]
        file = self._sources[source].file
        return Finding(level=level, kind=kind, table=self.table, part=file, batch=number, row=place[1], message=message)


def _repeated(values: Any, places: Any) -> Iterator[list[list[int]]]:
    """The places of each value that stands more than once, in the order read."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    for start, stop in zip(starts, [*starts[1:], len(ordered)], strict=True):
        if stop - start > 1:
            yield places[order[start:stop]].tolist()


def _hash(rollout_id: str, segment: int) -> int:
    return xxhash.xxh3_64_intdigest(rollout_id.encode(), seed=segment)


def _values(batch: pa.RecordBatch, name: str) -> list[Any]:
    if name not in batch.schema.names:
        return [None] * batch.num_rows
    return batch.column(name).to_pylist()


def _id(row: pa.RecordBatch) -> str:
    return f"{row.column('rollout_id')[0].as_py()!r}, segment {row.column('segment')[0]}"


def _keys(key: int | None, sample: int | None, segment: int, spans: list[dict[str, Any]] | None) -> set[_Key]:
    """The keys, samples and segment that the noise of a row was computed from."""
    found = set() if key is None else {(key, sample or 0, segment)}
    for span in spans or ():
        if span.get("replay_key") is not None:
            found.add((span["replay_key"], span.get("replay_sample") or 0, segment))
    return found


def _positions(row: pa.RecordBatch, key: _Key) -> list[int]:
    """Positions of the actions of a row that were drawn with this key and sample."""
    mask: list[bool] = row.column("action_mask")[0].as_py()
    own = _values(row, "replay_key")[0], _values(row, "replay_sample")[0] or 0
    used = [own] * len(mask)
    for span in _values(row, "spans")[0] or ():
        if span.get("replay_key") is not None:
            stop = span["start"] + span["length"]
            used[span["start"] : stop] = [(span["replay_key"], span.get("replay_sample") or 0)] * span["length"]
    return [position for position, drawn in enumerate(mask) if drawn and used[position] == key[:2]]
