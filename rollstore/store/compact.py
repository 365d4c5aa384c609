"""Fewer, bigger parts, the rows of a group together. Rows stream through: memory does not grow with the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from rollstore.schema import TABLES
from rollstore.store import commits, frame
from rollstore.store.ahead import ahead
from rollstore.store.batching import BATCH_BYTES, filled
from rollstore.store.grouping import in_groups
from rollstore.store.names import PART, new_id, part_name
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot, fit
from rollstore.store.streamed import PartWriter

PART_BYTES = 256 << 20
"""Size on disk that compaction aims at."""

Progress = Callable[[str, int], None]
"""Called with a file and the number of its bytes that are done with."""


@dataclass
class Report:
    """Names by table: parts written, parts they replaced."""

    added: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    replaced: dict[str, list[str]] = field(default_factory=dict[str, list[str]])


def compact(
    snapshot: Snapshot,
    *,
    part_bytes: int = PART_BYTES,
    codec: frame.Codec = "zstd",
    progress: Progress | None = None,
) -> Report:
    """Merge parts of a snapshot into parts of up to `part_bytes`, the rows of a group together.

    Each output is one entry of the log; another compaction that was faster makes this one drop its output. Raises
    CorruptionError where an input is damaged, OSError where the disk refuses; nothing is lost then. ValueError for
    `part_bytes` of 0 or less.
    """
    if not part_bytes > 0:  # a NaN is not
        raise ValueError(f"compact: part_bytes: wanted more than 0, got {part_bytes}")
    report = Report()
    compactor, sequence, log = new_id(), 0, snapshot.log
    for table in TABLES:
        for inputs in bins([part for part in snapshot.parts(table) if part.size < part_bytes], part_bytes):
            if len(inputs) < 2 or any((table, part.name) in log.replaced for part in inputs):
                continue  # nothing to merge, or another compaction was here: do not write what nobody will add
            sequence += 1
            name = part_name(compactor, sequence, compacted=True)
            after = rewrite(snapshot, log, inputs, name, codec=codec, progress=progress, reason="compact")
            log = after or commits.read_log(snapshot.filesystem, log)
            if after is not None:
                report.added.setdefault(table, []).append(name)
                report.replaced.setdefault(table, []).extend(part.name for part in inputs)
    return report


def rewrite(
    snapshot: Snapshot, log: commits.Log, inputs: list[Part], name: str, *, codec: frame.Codec,
    progress: Progress | None, reason: str,
) -> commits.Log | None:  # fmt: skip
    """Write the rows of some parts of one table as the part `name`, and make it replace them.

    The log then, or None where one of them was replaced meanwhile: nothing is changed then. Raises as `compact`.
    """
    table, filesystem = inputs[0].table, snapshot.filesystem
    schema = physical(snapshot, table, inputs)
    writer = PartWriter(filesystem, table, name, schema, codec)
    try:
        for message in ahead(writer.encode, filled(in_groups(_batches(inputs, schema, progress)), BATCH_BYTES)):
            writer.write(message)
        writer.publish()
        commit = commits.Commit(add={table: [name]}, replace={table: [part.name for part in inputs]}, reason=reason)
        after = commits.append(filesystem, log, commit)
        if after is None:
            filesystem.delete(f"{table}/{name}{PART}")  # no entry names it: nobody has read it
        return after
    finally:
        writer.close()  # its lock only now: to vacuum, an output that no entry names and nobody holds is a dead one's


def bins(parts: Iterable[Part], part_bytes: int) -> Iterator[list[Part]]:
    """Runs of parts that together are at most as large as one should be, or one part."""
    inputs: list[Part] = []
    size = 0
    for part in parts:
        if inputs and size + part.size > part_bytes:
            yield inputs
            inputs, size = [], 0
        inputs.append(part)
        size += part.size
    if inputs:
        yield inputs


def physical(snapshot: Snapshot, table: str, inputs: Iterable[Part]) -> pa.Schema:
    """The newest columns of those that some input has: the others are null in every row, and left out."""
    newest = snapshot.schema(table)
    held = {name for part in inputs for name in part.schema.names}
    return pa.schema([newest.field(name) for name in newest.names if name in held], newest.metadata)


def _batches(inputs: list[Part], schema: pa.Schema, progress: Progress | None) -> Iterator[pa.RecordBatch]:
    for part in inputs:
        for place, batch in zip(part.tail.batches, read(part, schema), strict=True):
            yield batch
            if progress is not None:
                progress(part.file, place.length)


def read(part: Part, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Every batch of a part in the columns of `schema`, checked. Raises CorruptionError, StoreError."""
    return ahead(lambda number: fit(part.batch(number, schema.names), schema, part.table), range(part.batch_count))
