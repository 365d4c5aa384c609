"""Finding a rollout by id: sorted hashes of ids that point into parts. Derived, disposable, checked against the data.

A segment covers some parts and never changes. Parts that no segment covers are read by their id column into a new
one; segments of like size are merged, so there are few; the larger ones are kept in cache/.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from rollstore.errors import CorruptionError
from rollstore.store import frame
from rollstore.store.filesystem import Filesystem, read_file
from rollstore.store.journal import JournalView
from rollstore.store.names import STAGED, new_id
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot

TABLE, ID = "rollouts", "rollout_id"
_PREFIX, _SUFFIX = "index-", ".index"
_PARTS_KEY = "rollstore.index.parts"
_WORTH_KEEPING = 10_000  # rows; a smaller segment is read again in less time than a file takes to write
_SCHEMA = pa.schema([("hash", pa.uint64()), ("part", pa.int32()), ("batch", pa.int32()), ("row", pa.int32())])
Place = tuple[Part | JournalView, int, int]
"""A file, and in it the numbers of a batch and of a row of that batch."""


@dataclass(frozen=True)
class Segment:
    """Ids of some parts: sorted `hash` uint64 [n], and for each the part's number in `parts`, the batch, the row."""

    parts: tuple[str, ...]
    hash: np.ndarray[Any, np.dtype[np.uint64]]
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
        self._journals: dict[str, tuple[int, dict[str, list[tuple[int, int]]]]] = {}

    def find(self, snapshot: Snapshot, rollout_id: str) -> list[Place]:
        """The rows of a snapshot that may be those of a rollout, each once: the caller compares the row's own id.

        Raises CorruptionError where a part that may hold it cannot be read.
        """
        if self._process != os.getpid():
            self._lock, self._process = threading.Lock(), os.getpid()  # a thread of the parent may have held it
        with self._lock:
            if self._seen is not snapshot.names[TABLE]:
                self._cover(snapshot)
                self._seen, self._live = snapshot.names[TABLE], frozenset(snapshot.names[TABLE])
            live = self._live
            for name, (part, error) in self._damaged.items():
                ids = part.statistics.ranges.get(ID)
                if name in live and (ids is None or ids.min <= rollout_id <= ids.max):
                    raise error
            hash_ = xxhash.xxh3_64_intdigest(rollout_id.encode())
            places = {place for segment in self._segments or () for place in segment.find(hash_) if place[0] in live}
            found: list[Place] = [(snapshot.part(TABLE, name), batch, row) for name, batch, row in sorted(places)]
            for view in snapshot.views(TABLE):
                found += [(view, batch, row) for batch, row in self._in_journal(view, rollout_id)]
            return found

    def _in_journal(self, view: JournalView, rollout_id: str) -> list[tuple[int, int]]:
        done, ids = self._journals.get(view.name, (0, {}))
        for number in range(done, len(view.messages)):
            for row, id_ in enumerate(view.batch(number, [ID]).column(0).to_pylist()):
                ids.setdefault(id_, []).append((number, row))
        self._journals[view.name] = (max(done, len(view.messages)), ids)
        return [place for place in ids.get(rollout_id, ()) if place[0] < len(view.messages)]

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
                read.append((part.name, list(part.batches([ID]))))
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
                if segment.file is None and len(segment.hash) >= _WORTH_KEEPING:
                    segments[number] = _save(self._filesystem, segment)


def _segment(read: list[tuple[str, list[pa.RecordBatch]]]) -> Segment:
    hashes: list[int] = []
    places: list[tuple[int, int, int]] = []
    for number, (_, batches) in enumerate(read):
        for batch_number, batch in enumerate(batches):
            ids: list[str] = batch.column(0).to_pylist()
            hashes += [xxhash.xxh3_64_intdigest(id_.encode()) for id_ in ids]
            places += [(number, batch_number, row) for row in range(len(ids))]
    part, batch, row = np.array(places, np.int32).reshape(-1, 3).T
    return _sorted(tuple(name for name, _ in read), np.array(hashes, np.uint64), part, batch, row)


def _merged(segments: list[Segment], live: set[str]) -> Segment:
    """One segment of several, without the parts that are no longer live."""
    parts: list[str] = []
    columns: list[list[Any]] = [[], [], [], []]
    for segment in segments:
        number = np.full(len(segment.parts), -1, np.int32)
        for i, name in enumerate(segment.parts):
            if name in live and name not in parts:
                number[i] = len(parts)
                parts.append(name)
        keep = number[segment.part] >= 0
        for column, values in zip(
            columns, (segment.hash, number[segment.part], segment.batch, segment.row), strict=True
        ):
            column.append(values[keep])
    return _sorted(tuple(parts), *(np.concatenate(column) for column in columns))


def _sorted(parts: tuple[str, ...], hash_: Any, part: Any, batch: Any, row: Any) -> Segment:
    order = np.argsort(hash_, kind="stable")
    return Segment(parts, hash_[order], part[order], batch[order], row[order])


def _save(filesystem: Filesystem, segment: Segment) -> Segment:
    """The segment as a summed Arrow file in cache/. Not synced: what is torn is thrown away and built again."""
    columns = [pa.array(column) for column in (segment.hash, segment.part, segment.batch, segment.row)]
    batch = pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
    file = frame.encode_file(_SCHEMA, [batch], {_PARTS_KEY: json.dumps(segment.parts)}, None)
    staged, target = f"staging/{new_id()}{STAGED}", f"cache/{_PREFIX}{new_id()}{_SUFFIX}"
    handle = filesystem.create(staged)
    try:
        handle.write(0, file)
        filesystem.publish(staged, target)
    finally:
        handle.close()
        filesystem.delete(staged)
    return Segment(segment.parts, segment.hash, segment.part, segment.batch, segment.row, target)


def _load(filesystem: Filesystem) -> Iterator[Segment]:
    """Every segment in cache/ that can be read; another process may delete one meanwhile, having merged it."""
    for name in filesystem.list("cache"):
        if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
            continue
        path = f"cache/{name}"
        try:
            data = read_file(filesystem, path)
            length = frame.tail_length(data[-10:])
            tail = frame.read_tail(data[len(data) - length :] if 0 < length <= len(data) else b"", len(data), path)
            message = data[tail.batches[0].offset :][: tail.batches[0].length]
            frame.check_message(message, tail.batches[0], path)
            columns = [column.to_numpy() for column in frame.decode(tail.schema, message, path).columns]
            hash_, part, batch, row = columns
            yield Segment(tuple(json.loads(tail.metadata[_PARTS_KEY])), hash_, part, batch, row, path)
        except FileNotFoundError:
            continue
        except (CorruptionError, KeyError, IndexError, ValueError):
            with suppress(OSError):
                filesystem.delete(path)
