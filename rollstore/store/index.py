"""Finding a rollout by id, and rows that repeat: sorted hashes that point into parts. Derived, disposable, checked
against the data.

A segment covers some parts and never changes. Parts that no segment covers are read by their id column into a new
one; segments of like size are merged, so there are few; the larger ones are kept in cache/.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from rollstore.errors import CorruptionError
from rollstore.store.derived import load_derived, save_derived
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

    def find(self, hash_: int) -> Iterator[tuple[str, int, int]]:
        """The (part, batch, row) places of ids with this hash."""
        key = np.uint64(hash_)
        place = int(np.searchsorted(self.hash, key))
        while place < len(self.hash) and self.hash[place] == key:
            yield self.parts[int(self.part[place])], int(self.batch[place]), int(self.row[place])
            place += 1


class Index:
    """The id index of one store, as far as this process has built or loaded it. Thread-safe."""

    def __init__(self, filesystem: Filesystem) -> None:
        self._filesystem = filesystem
        self._lock, self._process = threading.Lock(), os.getpid()
        self._segments: list[Segment] | None = None
        self._covered: set[str] = set()
        self._seen: list[str] | None = None
        self._live: frozenset[str] = frozenset()
        self._damaged: dict[str, tuple[Part, CorruptionError]] = {}
        self._journals: dict[str, _JournalIds] = {}

    def find(self, snapshot: Snapshot, rollout_id: str) -> list[Place]:
        """The rows of a snapshot that may be those of a rollout, each once: the caller compares the row's own id.

        Raises CorruptionError where a part that may hold it cannot be read.
        """
        with self._covering(snapshot) as live:
            self._refuse_damaged(live, rollout_id)
            hash_ = xxhash.xxh3_64_intdigest(rollout_id.encode())
            places = {place for segment in self._segments or () for place in segment.find(hash_) if place[0] in live}
            found: list[Place] = [(snapshot.part(TABLE, name), batch, row) for name, batch, row in sorted(places)]
            for view in snapshot.views(TABLE):
                ids = self._journal(view).places
                found += [(view, *place) for place in ids.get(rollout_id, ()) if place[0] < len(view.messages)]
            return found

    def repeated(self, snapshot: Snapshot) -> list[Place]:
        """The rows of a snapshot whose id and segment may be those of another row, each once, in order of place.

        Raises CorruptionError where a part cannot be read.
        """
        with self._covering(snapshot) as live:
            self._refuse_damaged(live, None)
            places: list[Place] = []
            keys: list[npt.NDArray[np.uint64]] = []
            for segment in self._segments or ():
                rows = np.flatnonzero(np.array([name in live for name in segment.parts], bool)[segment.part])
                keys.append(segment.key[rows])
            views = snapshot.views(TABLE)
            keys += [self._journal(view).keys_of(len(view.messages)) for view in views]
            twice = _twice(keys)
            if not len(twice):
                return []
            for segment in self._segments or ():
                for n in np.flatnonzero(np.isin(segment.key, twice)).tolist():
                    name = segment.parts[segment.part[n]]
                    if name in live:
                        places.append((snapshot.part(TABLE, name), int(segment.batch[n]), int(segment.row[n])))
            for view in views:
                places += [(view, *place) for place in self._journal(view).among(twice, len(view.messages))]
            return sorted(places, key=lambda place: (place[0].name, *place[1:]))

    @contextmanager
    def _covering(self, snapshot: Snapshot) -> Generator[frozenset[str]]:
        """Hold the index while it knows the parts of a snapshot, whose names are handed out."""
        if self._process != os.getpid():
            self._lock, self._process = threading.Lock(), os.getpid()  # a thread of the parent may have held it
        with self._lock:
            if self._seen is not snapshot.names[TABLE]:
                self._cover(snapshot)
                self._seen, self._live = snapshot.names[TABLE], frozenset(snapshot.names[TABLE])
            yield self._live

    def _refuse_damaged(self, live: frozenset[str], rollout_id: str | None) -> None:
        for name, (part, error) in self._damaged.items():
            ids = part.statistics.ranges.get(ID)
            if name in live and (ids is None or rollout_id is None or ids.min <= rollout_id <= ids.max):
                raise error

    def _journal(self, view: JournalView) -> _JournalIds:
        return self._journals.setdefault(view.name, _JournalIds()).upto(view)

    def _cover(self, snapshot: Snapshot) -> None:
        if self._segments is None:
            self._segments = list(_load(self._filesystem))
            self._covered = {name for segment in self._segments for name in segment.parts}
        missing = [name for name in snapshot.names[TABLE] if name not in self._covered]
        if not missing:
            return
        self._journals = {
            view.name: self._journals[view.name] for view in snapshot.journals if view.name in self._journals
        }
        read: list[tuple[str, list[pa.RecordBatch]]] = []
        for part in snapshot.parts(TABLE):
            if part.name in self._covered:
                continue
            try:
                read.append((part.name, list(part.batches(KEY))))
            except CorruptionError as error:
                self._damaged[part.name] = (part, error)
        self._covered |= set(missing)
        self._segments.append(_segment(read))
        self._merge(self._segments, set(snapshot.names[TABLE]))

    def _merge(self, segments: list[Segment], live: set[str]) -> None:
        """Merge while a segment is not much larger than the next; then keep the large ones on disk."""
        segments.sort(key=lambda segment: -len(segment.hash))
        while len(segments) > 1 and len(segments[-2].hash) <= 2 * len(segments[-1].hash):
            small, large = segments.pop(), segments.pop()
            segments.append(_merged([large, small], live))
            for old in (small, large):
                if old.file is not None:
                    with suppress(OSError):
                        self._filesystem.delete(old.file)
        with suppress(OSError):  # a folder we may only read: the index lives as long as the process
            for number, segment in enumerate(segments):
                if segment.file is None and len(segment.hash) + _A_PART * len(segment.parts) >= _WORTH_KEEPING:
                    segments[number] = _save(self._filesystem, segment)


class _JournalIds:
    """The ids of one journal as far as it was read."""

    def __init__(self) -> None:
        self.places: dict[str, list[tuple[int, int]]] = {}
        self._keys: list[npt.NDArray[np.uint64]] = []

    def upto(self, view: JournalView) -> _JournalIds:
        for number in range(len(self._keys), len(view.messages)):
            ids, segments = (column.to_pylist() for column in view.batch(number, KEY).columns)
            self._keys.append(_hashes(ids, segments)[1])
            for row, id_ in enumerate(ids):
                self.places.setdefault(id_, []).append((number, row))
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
    parts: list[str] = []
    columns: list[list[Any]] = [[], [], [], [], []]
    for segment in segments:
        number = np.full(len(segment.parts), -1, np.int32)
        for i, name in enumerate(segment.parts):
            if name in live and name not in parts:
                number[i] = len(parts)
                parts.append(name)
        keep = number[segment.part] >= 0
        for column, values in zip(
            columns, (segment.hash, segment.key, number[segment.part], segment.batch, segment.row), strict=True
        ):
            column.append(values[keep])
    return _sorted(tuple(parts), *(np.concatenate(column) for column in columns))


def _sorted(parts: tuple[str, ...], hash_: Any, *others: Any) -> Segment:
    order = np.argsort(hash_, kind="stable")
    return Segment(parts, hash_[order], *(column[order] for column in others))


def _save(filesystem: Filesystem, segment: Segment) -> Segment:
    columns = [pa.array(getattr(segment, name)) for name in _SCHEMA.names]
    rows = pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
    return replace(segment, file=save_derived(filesystem, _KIND, rows, {_PARTS_KEY: json.dumps(segment.parts)}))


def _load(filesystem: Filesystem) -> Iterator[Segment]:
    """Every segment in cache/; another process may delete one meanwhile, having merged it."""
    for path, rows, metadata in load_derived(filesystem, _KIND):
        with suppress(KeyError, ValueError):
            columns = {name: rows.column(name).to_numpy() for name in _SCHEMA.names}
            yield Segment(tuple(json.loads(metadata[_PARTS_KEY])), **columns, file=path)
