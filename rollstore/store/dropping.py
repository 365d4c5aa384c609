"""Parts replaced by copies without some of their rows: how rows go, since no part ever changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollstore.errors import StoreError
from rollstore.store import commits
from rollstore.store.ahead import ahead
from rollstore.store.batching import BATCH_BYTES, filled
from rollstore.store.compact import PART_BYTES, Progress, bins, physical, read
from rollstore.store.grouping import in_groups
from rollstore.store.names import PART, new_id, part_name
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot
from rollstore.store.streamed import PartWriter

Dropped = Mapping[str, Mapping[str, npt.NDArray[np.bool_]]]
"""By table and part: which of its rows go."""

Origin = tuple[str, int]
"""`written_by` and `written_row`: where a row was first written."""

_ID = ("rollout_id", "segment")


def without(snapshot: Snapshot, dropped: Dropped, *, reason: str, note: str, progress: Progress | None = None) -> bool:
    """Retire parts of a snapshot and add copies without the dropped rows, all in one entry of the log.

    False where another compaction has replaced one of the parts: nothing is changed then. Raises CorruptionError
    where a part is damaged, OSError where the disk refuses; nothing is changed then either.
    """
    filesystem, writer_id, sequence = snapshot.filesystem, new_id(), 0
    add: dict[str, list[str]] = {}
    replace = {table: list(masks) for table, masks in dropped.items() if masks}
    with ExitStack() as held:
        unnamed = held.enter_context(ExitStack())  # outputs, until an entry may name them
        for table, masks in dropped.items():
            parts = [snapshot.part(table, name) for name in masks if not masks[name].all()]
            for inputs in bins(parts, PART_BYTES):
                sequence += 1
                name = part_name(writer_id, sequence, compacted=True)
                schema = physical(snapshot, table, inputs)
                writer = PartWriter(filesystem, table, name, schema, "zstd")
                held.callback(writer.close)  # with the lock that keeps vacuum from the output
                rows = in_groups(_kept(inputs, masks, schema, progress))
                for message in ahead(writer.encode, filled(rows, BATCH_BYTES)):
                    writer.write(message)
                unnamed.callback(_delete, snapshot, f"{table}/{name}{PART}")
                writer.publish()
                add.setdefault(table, []).append(name)
        outputs = unnamed.pop_all()
        if commits.append(filesystem, snapshot.log, commits.Commit(add, replace, reason, note)) is None:
            outputs.close()
            return False
    return True


def drop_rows(snapshot: Snapshot, origins: Sequence[Origin]) -> bool | None:
    """Retire rows of the rollouts table by their origin, each a second writing of its rollout and segment.

    The choice which of two contents counts is a person's, and the log keeps it. None where another compaction was
    faster. Raises StoreError where an origin is no sealed row, or the row is the last of its rollout and segment;
    nothing is changed then.
    """
    wanted = set(origins)
    found: dict[Origin, tuple[str, int]] = {}
    dropped: dict[str, npt.NDArray[np.bool_]] = {}
    for part in snapshot.parts("rollouts"):
        held = part.statistics.ranges.get("written_by")
        if held is not None and not any(held.min <= by <= held.max for by, _ in wanted):
            continue
        keys = _columns(part, ("written_by", "written_row"))
        places = [place for place, origin in enumerate(keys) if origin in wanted]
        if places:
            ids = _columns(part, _ID)
            found |= {keys[place]: ids[place] for place in places}
            dropped[part.name] = np.isin(np.arange(part.rows), places)
    if missing := sorted(wanted - found.keys()):
        raise StoreError(f"{_said(missing[0])}: wanted a row of a sealed part, got none with this origin")
    staying = _staying(snapshot, dropped, set(found.values()))
    for origin in sorted(wanted):
        if found[origin] not in staying:
            what = f"{found[origin][0]!r}, segment {found[origin][1]}"
            raise StoreError(f"{_said(origin)}: wanted a row that another one replaces, got the last one of {what}")
    note = " ".join(map(_said, sorted(wanted)))
    return without(snapshot, {"rollouts": dropped}, reason="drop", note=note) or None


def _staying(snapshot: Snapshot, dropped: Mapping[str, Any], ids: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """Those of some (rollout_id, segment) that have a row which is not dropped."""
    staying: set[tuple[str, int]] = set()
    for source in (*snapshot.parts("rollouts"), *snapshot.views("rollouts")):
        held = source.statistics.ranges.get("rollout_id") if isinstance(source, Part) else None
        if held is not None and not any(held.min <= rollout_id <= held.max for rollout_id, _ in ids):
            continue
        gone = dropped.get(source.name)
        keys = _columns(source, _ID)
        staying |= {key for place, key in enumerate(keys) if key in ids and (gone is None or not gone[place])}
    return staying


def _columns(source: Any, names: Sequence[str]) -> list[Any]:
    """The rows of some columns of a part or journal, as tuples in the order of `names`."""
    rows: list[Any] = []
    for batch in source.batches(names):
        rows += zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    return rows


def _kept(
    inputs: list[Part], masks: Mapping[str, npt.NDArray[np.bool_]], schema: pa.Schema, progress: Progress | None
) -> Iterator[pa.RecordBatch]:
    for part in inputs:
        first = 0
        for place, batch in zip(part.tail.batches, read(part, schema), strict=True):
            keep = ~masks[part.name][first : first + batch.num_rows]
            first += batch.num_rows
            if keep.all():
                yield batch
            elif keep.any():
                yield batch.filter(pa.array(keep))
            if progress is not None:
                progress(part.file, place.length)


def _delete(snapshot: Snapshot, file: str) -> None:
    with suppress(OSError):  # what stays of it, vacuum removes: no entry names it
        snapshot.filesystem.delete(file)


def _said(origin: Origin) -> str:
    return f"{origin[0]}:{origin[1]}"
