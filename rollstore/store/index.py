"""Finding a rollout by id, and rows that repeat: sorted hashes that point into parts. Derived, disposable, checked
against the data.

A segment covers some parts and never changes. Parts that no segment covers are read by their id column into a new
one; segments of like size are merged, so there are few; the larger ones are kept in cache/.

A segment from cache/ says where to look, and the row's own id decides. That it has no place for an id is believed once
it was found to have as many places in every part as the part has rows. One that is wrong is thrown away.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from rollstore.errors import CorruptionError
from rollstore.schema.lazy import lazy
from rollstore.store.derived import load_derived, save_derived
from rollstore.store.distant import expect
from rollstore.store.filesystem import Filesystem
from rollstore.store.journal import JournalView
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot

TABLE, ID, KEY = "rollouts", "rollout_id", ["rollout_id", "segment"]
_KIND, _PARTS_KEY = "index", "rollstore.index.parts"
_WORTH_KEEPING = 10_000
"""Rows, each part counted as many more as opening it costs; less is read again in the time that a file takes."""
_A_PART = 500  # rows
_SCHEMA = pa.schema(
    [("hash", pa.uint64()), ("key", pa.uint64()), ("part", pa.int32()), ("batch", pa.int32()), ("row", pa.int32())]
)
Place = tuple[Part | JournalView, int, int]
"""A file, and in it the numbers of a batch and of a row of that batch."""


@dataclass(frozen=True)
class Segment:
    """Ids of some parts: sorted `hash` uint64 [n], and for each the hash `key` uint64 of id and segment, the part's
    number in `parts`, the batch, the row."""

    parts: tuple[str, ...]
    hash: np.ndarray[Any, np.dtype[np.uint64]]
    key: np.ndarray[Any, np.dtype[np.uint64]]
    part: np.ndarray[Any, np.dtype[np.int32]]
    batch: np.ndarray[Any, np.dtype[np.int32]]
    row: np.ndarray[Any, np.dtype[np.int32]]
    file: str | None = None
    doubted: set[str] = field(default_factory=set[str])
    """Parts whose places came from a file and were not counted yet."""

    def find(self, hash_: int) -> Iterator[tuple[str, int, int]]:
        """The (part, batch, row) places of ids with this hash."""
        key = np.uint64(hash_)
        place = int(np.searchsorted(self.hash, key))
        while place < len(self.hash) and self.hash[place] == key:
            yield self.parts[int(self.part[place])], int(self.batch[place]), int(self.row[place])
            place += 1

    @lazy
    def places(self) -> dict[str, int]:
        """How many rows of each part it has a place for."""
        return dict(zip(self.parts, np.bincount(self.part, minlength=len(self.parts)).tolist(), strict=True))


class _Known(NamedTuple):
    """What an index has read: segments that have no part in common, and the parts that are damaged. `covered` are the
    parts of both, so that what was not read is never taken for read; `live` those of the snapshot looked at last, whose
    list of names is `seen`.
    """

    segments: tuple[Segment, ...]
    damaged: dict[str, tuple[Part, CorruptionError]]
    covered: frozenset[str]
    seen: list[str] | None
    live: frozenset[str]


def _known(
    segments: Sequence[Segment], damaged: dict[str, tuple[Part, CorruptionError]], names: list[str] | None
) -> _Known:
    covered = frozenset(damaged).union(*(segment.parts for segment in segments))
    return _Known(tuple(segments), damaged, covered, names, frozenset(names or ()))


class Index:
    """The id index of one store, as far as this process has built or loaded it. Thread-safe.

    What it knows lies in one attribute, set in one step: where an error or Ctrl-C comes in between, nothing was read. A
    handler of signals may look while we look.
    """

    def __init__(self, filesystem: Filesystem) -> None:
        self._filesystem = filesystem
        self._lock, self._process = threading.RLock(), os.getpid()
        self._known: _Known | None = None
        self._journals: dict[str, _JournalIds] = {}

    def find(self, snapshot: Snapshot, rollout_id: str) -> list[Place]:
        """The rows of a snapshot that may be those of a rollout, each once: the caller compares the row's own id.

        Raises CorruptionError where a part that may hold it cannot be read.
        """
        with self._own_lock():
            known = self._covering(snapshot)
            _refuse_damaged(known, rollout_id)
            hash_ = xxhash.xxh3_64_intdigest(rollout_id.encode())
            while (found := self._places(snapshot, known, hash_)) is None:
                known = self._covering(snapshot)
            for view in snapshot.views(TABLE):
                ids = self._journal(view).places
                found += [(view, *place) for place in ids.get(rollout_id, ()) if place[0] < len(view.messages)]
            return found

    def repeated(self, snapshot: Snapshot) -> list[Place]:
        """The rows of a snapshot whose id and segment may be those of another row, each once, in order of place.

        Raises CorruptionError where a part cannot be read.
        """
        with self._own_lock():
            known = self._covering(snapshot)
            _refuse_damaged(known, None)
            while (found := self._repeated(snapshot, known)) is None:
                known = self._covering(snapshot)
            return sorted(found, key=lambda place: (place[0].name, *place[1:]))

    def _places(self, snapshot: Snapshot, known: _Known, hash_: int) -> list[Place] | None:
        """The places of ids with this hash in parts; None where a segment was wrong and is thrown away."""
        found: dict[tuple[str, int, int], Place] = {}
        for segment in known.segments:
            for name, batch, row in segment.find(hash_):
                if name in known.live:
                    part = snapshot.part(TABLE, name)
                    if not _is_place(part, batch, row) or not _counted(segment, part):
                        return self._throw_away(known, segment)
                    found[name, batch, row] = (part, batch, row)
        if not found and any(segment.doubted & known.live for segment in known.segments):
            parts = snapshot.parts(TABLE)
            for segment in known.segments:
                if not all(_counted(segment, part) for part in parts if part.name in segment.doubted):
                    return self._throw_away(known, segment)
        return [found[place] for place in sorted(found)]

    def _repeated(self, snapshot: Snapshot, known: _Known) -> list[Place] | None:
        """As `repeated`, in any order; None where a segment was wrong and is thrown away.

        Parts are asked how many rows they have as they are known: to read the end of each would take too long.
        """
        keys: list[npt.NDArray[np.uint64]] = []
        for segment in known.segments:
            if segment.doubted and any(
                segment.places[part.name] != part.rows for part in snapshot.parts(TABLE) if part.name in segment.doubted
            ):
                return self._throw_away(known, segment)
            rows = np.flatnonzero(np.array([name in known.live for name in segment.parts], bool)[segment.part])
            keys.append(segment.key[rows])
        views = snapshot.views(TABLE)
        keys += [self._journal(view).keys_of(len(view.messages)) for view in views]
        twice = _twice(keys)
        if not len(twice):
            return []
        places: dict[tuple[str, int, int], Place] = {}
        for segment in known.segments:
            for n in np.flatnonzero(np.isin(segment.key, twice)).tolist():
                name, batch, row = segment.parts[segment.part[n]], int(segment.batch[n]), int(segment.row[n])
                if name in known.live:
                    part = snapshot.part(TABLE, name)
                    if not _is_place(part, batch, row):
                        return self._throw_away(known, segment)
                    places[name, batch, row] = (part, batch, row)
        found = [*places.values()]
        for view in views:
            found += [(view, *place) for place in self._journal(view).among(twice, len(view.messages))]
        return found

    def _throw_away(self, known: _Known, segment: Segment) -> None:
        """Forget a segment, so that its parts are read again."""
        self._delete([segment])
        self._known = _known([other for other in known.segments if other is not segment], known.damaged, None)

    def _own_lock(self) -> threading.RLock:
        """The lock of this process: of a parent's, another thread may have held it at the fork."""
        if self._process != os.getpid():
            self._lock, self._process = threading.RLock(), os.getpid()
        return self._lock

    def _journal(self, view: JournalView) -> _JournalIds:
        return self._journals.setdefault(view.name, _JournalIds()).upto(view)

    def _covering(self, snapshot: Snapshot) -> _Known:
        """What is known once the parts of a snapshot are covered. Raises what reading them does, and then knows no more
        than before."""
        names = snapshot.names[TABLE]
        known = self._loaded() if self._known is None else self._known
        if known.seen is names:
            return known
        if all(name in known.covered for name in names):
            self._known = known._replace(seen=names, live=frozenset(names))
            return self._known
        self._journals = {
            view.name: self._journals[view.name] for view in snapshot.journals if view.name in self._journals
        }
        read: list[tuple[str, list[pa.RecordBatch]]] = []
        damaged: dict[str, tuple[Part, CorruptionError]] = {}
        parts = [part for part in snapshot.parts(TABLE) if part.name not in known.covered]
        expect(self._filesystem, [part.file for part in parts])
        for part in parts:
            try:
                read.append((part.name, list(part.batches(KEY))))
            except CorruptionError as error:
                damaged[part.name] = (part, error)
        segments = self._with(known.segments, read, set(names))
        self._known = _known(segments, known.damaged | damaged, names)
        kept = {segment.file for segment in segments}
        self._delete([segment for segment in known.segments if segment.file not in kept])
        return self._known

    def _loaded(self) -> _Known:
        """The segments in cache/, each without the parts that a larger one covers, as where two processes built one at
        a time: a row that stands in two would count as repeated."""
        kept: list[Segment] = []
        covered: set[str] = set()
        for segment in sorted(_load(self._filesystem), key=lambda segment: -len(segment.hash)):
            new = set(segment.parts) - covered
            if len(new) < len(segment.parts):
                self._delete([segment])
            if new:
                kept.append(segment if len(new) == len(segment.parts) else _merged([segment], new))
            covered |= new
        return _known(kept, {}, None)

    def _with(
        self, known: Sequence[Segment], read: list[tuple[str, list[pa.RecordBatch]]], live: set[str]
    ) -> list[Segment]:
        """The segments with one more of what was read: merged while one is not much larger than the next, the large
        ones kept on disk."""
        if not read:
            return [*known]
        segments = sorted([*known, _segment(read)], key=lambda segment: -len(segment.hash))
        while len(segments) > 1 and len(segments[-2].hash) <= 2 * len(segments[-1].hash):
            small, large = segments.pop(), segments.pop()
            segments.append(_merged([large, small], live))
        with suppress(OSError):  # a folder we may only read: the index lives as long as the process
            for number, segment in enumerate(segments):
                if segment.file is None and len(segment.hash) + _A_PART * len(segment.parts) >= _WORTH_KEEPING:
                    segments[number] = _save(self._filesystem, segment)
        return segments

    def _delete(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            if segment.file is not None:
                with suppress(OSError):
                    self._filesystem.delete(segment.file)


def _refuse_damaged(known: _Known, rollout_id: str | None) -> None:
    for name, (part, error) in known.damaged.items():
        ids = part.statistics.ranges.get(ID)
        if name in known.live and (ids is None or rollout_id is None or ids.min <= rollout_id <= ids.max):
            raise error


class _JournalIds:
    """The ids of one journal as far as it was read."""

    def __init__(self) -> None:
        self.places: dict[str, list[tuple[int, int]]] = {}
        self._keys: list[npt.NDArray[np.uint64]] = []

    def upto(self, view: JournalView) -> _JournalIds:
        for number in range(len(self._keys), len(view.messages)):
            ids, segments = (column.to_pylist() for column in view.batch(number, KEY).columns)
            keys = _hashes(ids, segments)[1]
            for row, id_ in enumerate(ids):
                places = self.places.setdefault(id_, [])
                if not places or places[-1] < (number, row):  # an interrupted call may have noted it
                    places.append((number, row))
            self._keys[number:] = [keys]  # last: the message was read
        return self

    def keys_of(self, messages: int) -> npt.NDArray[np.uint64]:
        return np.concatenate([np.zeros(0, np.uint64), *self._keys[:messages]])

    def among(self, keys: npt.NDArray[np.uint64], messages: int) -> Iterator[tuple[int, int]]:
        for number, own in enumerate(self._keys[:messages]):
            yield from ((number, row) for row in np.flatnonzero(np.isin(own, keys)).tolist())


def _twice(keys: list[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint64]:
    """The values that stand more than once, each once."""
    every = np.sort(np.concatenate([np.zeros(0, np.uint64), *keys]))
    return np.unique(every[1:][every[1:] == every[:-1]])


def _hashes(ids: list[str], segments: list[int]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """uint64 [n] of the ids, and of ids with their segments."""
    texts = [id_.encode() for id_ in ids]
    of_ids = np.fromiter(map(xxhash.xxh3_64_intdigest, texts), np.uint64, len(ids))
    return of_ids, np.fromiter(map(xxhash.xxh3_64_intdigest, texts, (s + 1 for s in segments)), np.uint64, len(ids))


def _segment(read: list[tuple[str, list[pa.RecordBatch]]]) -> Segment:
    hashes: list[npt.NDArray[np.uint64]] = [np.zeros(0, np.uint64)]
    keys = list(hashes)
    places: list[npt.NDArray[np.int32]] = [np.zeros((3, 0), np.int32)]
    for number, (_, batches) in enumerate(read):
        for batch_number, batch in enumerate(batches):
            of_ids, of_keys = _hashes(*(column.to_pylist() for column in batch.columns))
            hashes.append(of_ids)
            keys.append(of_keys)
            rows = np.arange(batch.num_rows, dtype=np.int32)
            places.append(np.stack([np.full_like(rows, number), np.full_like(rows, batch_number), rows]))
    names = tuple(name for name, _ in read)
    return _sorted(names, np.concatenate(hashes), np.concatenate(keys), *np.concatenate(places, axis=1))


def _merged(segments: list[Segment], live: set[str]) -> Segment:
    """One segment of several, without the parts that are no longer live."""
    parts: dict[str, None] = {}  # in order
    columns: list[list[Any]] = [[], [], [], [], []]
    for segment in segments:
        number = np.full(len(segment.parts), -1, np.int32)
        for i, name in enumerate(segment.parts):
            if name in live and name not in parts:
                number[i] = len(parts)
                parts[name] = None
        keep = number[segment.part] >= 0
        for column, values in zip(
            columns, (segment.hash, segment.key, number[segment.part], segment.batch, segment.row), strict=True
        ):
            column.append(values[keep])
    doubted = {name for segment in segments for name in segment.doubted} & parts.keys()
    return _sorted(tuple(parts), *(np.concatenate(column) for column in columns), doubted=doubted)


def _sorted(parts: tuple[str, ...], hash_: Any, *others: Any, doubted: set[str] | None = None) -> Segment:
    order = np.argsort(hash_, kind="stable")
    return Segment(parts, hash_[order], *(column[order] for column in others), doubted=doubted or set())


def _save(filesystem: Filesystem, segment: Segment) -> Segment:
    columns = [pa.array(getattr(segment, name)) for name in _SCHEMA.names]
    rows = pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
    return replace(segment, file=save_derived(filesystem, _KIND, rows, {_PARTS_KEY: json.dumps(segment.parts)}))


def _load(filesystem: Filesystem) -> Iterator[Segment]:
    """Every segment in cache/; another process may delete one meanwhile, having merged it."""
    for path, rows, metadata in load_derived(filesystem, _KIND):
        try:
            yield _read(path, rows, metadata)
        except (KeyError, ValueError, TypeError):
            with suppress(OSError):
                filesystem.delete(path)


def _read(path: str, rows: pa.RecordBatch, metadata: dict[str, str]) -> Segment:
    """Raises ValueError, KeyError or TypeError where the rows are no segment."""
    if not rows.schema.equals(_SCHEMA) or any(column.null_count for column in rows.columns):
        raise ValueError(f"{path}: wanted the columns of an index, none of them null")
    hash_, key, part, batch, row = (column.to_numpy() for column in rows.columns)
    parts = [str(name) for name in json.loads(metadata[_PARTS_KEY])]
    numbers = np.stack([part, batch, row])
    if len(set(parts)) < len(parts) or (len(part) and (numbers.min() < 0 or part.max() >= len(parts))):
        raise ValueError(f"{path}: wanted places in {len(parts)} parts, got others")
    if (hash_[1:] < hash_[:-1]).any():
        raise ValueError(f"{path}: wanted ascending hashes")
    return Segment(tuple(parts), hash_, key, part, batch, row, path, set(parts))


def _is_place(part: Part, batch: int, row: int) -> bool:
    return batch < part.batch_count and row < part.tail.batches[batch].rows


def _counted(segment: Segment, part: Part) -> bool:
    """Whether there is a place for every row of a part, by the part's own end; looked at once."""
    if part.name in segment.doubted:
        if segment.places[part.name] != sum(batch.rows for batch in part.tail.batches):
            return False
        segment.doubted.discard(part.name)
    return True
