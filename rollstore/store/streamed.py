"""A part written batch by batch, so that no more than one batch of it is ever held."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from rollstore.errors import StoreError
from rollstore.store import frame, statistics
from rollstore.store.filesystem import Filesystem
from rollstore.store.names import PART, STAGED, new_id
from rollstore.store.part import FORMAT, FORMAT_KEY, PART_KEY, STATISTICS_KEY, TABLE_KEY
from rollstore.store.statistics import Range, Statistics

_TOLD = 64  # batches whose ids and versions wait to be summed up


@dataclass(frozen=True)
class Message:
    """One encoded batch, its place counted from its own beginning, and what statistics are made of."""

    data: bytes
    place: frame.Batch
    told: pa.RecordBatch


class PartWriter:
    """One part under way in staging. `close` it, whatever comes; it has its name only after `publish`.

    The bytes are those that `write_part` writes for the same batches. Every method raises OSError where the disk
    refuses.
    """

    def __init__(self, filesystem: Filesystem, table: str, name: str, schema: pa.Schema, codec: frame.Codec) -> None:
        self.table, self.name = table, name
        self._filesystem, self._schema = filesystem, schema
        self._codec: frame.Codec = codec
        self._batches: list[frame.Batch] = []
        self._lengths: list[int] = []
        self._told: list[pa.RecordBatch] = []
        self._statistics: Statistics | None = None
        self._staged = f"staging/{name}-{new_id()}{STAGED}"
        self._handle = filesystem.create(self._staged)
        self._end = 0
        try:
            self._put(frame.encode_file_head(schema))
        except OSError:
            self.close()
            raise

    def encode(self, batch: pa.RecordBatch) -> Message:
        """One batch, in the schema of the part and in buffers of its own, as it will stand there.

        Changes nothing: several threads may do it.
        """
        data = frame.encode_message(batch, self._codec)
        place = frame.next_message(data, 0)
        if place is None:
            raise StoreError(f"{self.table}/{self.name}{PART}: a batch was encoded that cannot be read")
        return Message(data, place, batch.select([name for name in statistics.COLUMNS if name in batch.schema.names]))

    def write(self, message: Message) -> None:
        """The next batch."""
        place = message.place
        self._batches.append(frame.Batch(self._end, place.length, place.rows, place.sum))
        self._lengths.append(8 + int.from_bytes(message.data[4:8], "little"))
        self._put(message.data)
        self._told.append(message.told)
        if len(self._told) == _TOLD:
            self._tell()

    def publish(self) -> None:
        """Write the end, sync, and give the part its name; once this returns it survives power loss.

        Raises StoreError where another part has the name.
        """
        metadata = {
            FORMAT_KEY: FORMAT,
            TABLE_KEY: self.table,
            PART_KEY: self.name,
            STATISTICS_KEY: statistics.encode(self._tell()),
        }
        tail = frame.encode_tail(self._schema, self._batches, self._lengths, metadata)
        self._put(tail)
        self._handle.sync()
        target = f"{self.table}/{self.name}{PART}"
        try:
            self._filesystem.publish(self._staged, target)
        except FileExistsError:
            # The reply to an earlier try was lost: the same length and tail, which sums the rest, are its success.
            other = self._filesystem.open(target)
            try:
                same = other.size() == self._end and other.read(self._end - len(tail), len(tail)) == tail
            finally:
                other.close()
            if not same:
                raise StoreError(f"{target}: wanted a free name, got another part under it") from None
        self._filesystem.sync_folder(self.table)

    def close(self) -> None:
        """Let the staged file go. What stays of it, vacuum and recovery sweep up."""
        self._handle.close()
        with suppress(OSError):
            self._filesystem.delete(self._staged)

    def _tell(self) -> Statistics:
        """Statistics of all rows so far. Of many batches at once: each call of Arrow costs more than their few rows."""
        if self._told:
            new = statistics.statistics(pa.Table.from_batches(self._told))
            self._statistics = new if self._statistics is None else _joined(self._statistics, new)
            self._told = []
        return self._statistics or Statistics(0, {})

    def _put(self, data: bytes) -> None:
        self._handle.write(self._end, data)
        self._end += len(data)


def _joined(one: Statistics, other: Statistics) -> Statistics:
    """Statistics of both batches' rows; a column keeps its range where both have one."""
    ranges = {name: _wider(found, other.ranges[name]) for name, found in one.ranges.items() if name in other.ranges}
    return Statistics(one.rows + other.rows, ranges)


def _wider(one: Range, other: Range) -> Range:
    ends = [(r.min, r.max) for r in (one, other) if r.min is not None]
    low, high = (min(low for low, _ in ends), max(high for _, high in ends)) if ends else (None, None)
    return Range(low, high, one.nulls + other.nulls)
