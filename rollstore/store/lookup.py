"""The rows of one rollout in a snapshot, each segment once."""

from __future__ import annotations

from itertools import groupby

import pyarrow as pa

from rollstore.errors import DuplicateError, NotFoundError
from rollstore.store.index import ID, TABLE, Index
from rollstore.store.snapshot import Snapshot

# Two appends of the same record differ in these, and in nothing that was recorded.
_OWN = ("written_by", "written_row", "written_at")


def lookup(snapshot: Snapshot, index: Index, rollout_id: str, segment: int | None) -> list[pa.RecordBatch]:
    """The rows of a rollout in order of segment, one a batch, in the newest types; absent columns are left out.

    Raises NotFoundError, DuplicateError where a segment is stored twice and not equal, CorruptionError.
    """
    found: list[pa.RecordBatch] = []
    for (source, number), places in groupby(index.find(snapshot, rollout_id), key=lambda place: place[:2]):
        batch = source.batch(number)
        for _, _, row in places:
            one = batch.slice(row, 1)
            if (one.column(ID)[0].as_py(), segment) in (
                (rollout_id, None),
                (rollout_id, one.column("segment")[0].as_py()),
            ):
                found.append(snapshot.newest(one, TABLE, source))
    if not found:
        which = "" if segment is None else f", segment {segment}"
        raise NotFoundError(f"{rollout_id!r}{which}: no such rollout in {snapshot.filesystem.locate('').rstrip('/')}")
    found.sort(key=lambda row: row.column("segment")[0].as_py())
    kept: list[pa.RecordBatch] = []
    for row in found:
        if kept and row.column("segment") == kept[-1].column("segment"):
            if content(row) != content(kept[-1]):
                raise DuplicateError(
                    f"{rollout_id!r}, segment {row.column('segment')[0]}: wanted one content, got different ones from "
                    f"{origin(kept[-1])} and {origin(row)}"
                )
        else:
            kept.append(row)
    return kept


def content(row: pa.RecordBatch) -> str:
    """What a row records, as text that is equal exactly where the values are; NaN equals NaN, 0.0 is not -0.0."""
    values = {name: row.column(name)[0].as_py() for name in sorted(row.schema.names) if name not in _OWN}
    return repr({name: value for name, value in values.items() if value is not None})


def origin(row: pa.RecordBatch) -> str:
    """Where a row was first written, as text."""
    return f"{row.column('written_by')[0]} row {row.column('written_row')[0]}"
