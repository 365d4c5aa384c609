"""Rollouts that were written more than once: which rows to leave out, and which cannot both be right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rollstore.readers.arrow import Rows
from rollstore.store.lookup import content
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot

_KEY, _ORIGIN = ["rollout_id", "segment"], ["written_by", "written_row"]


@dataclass(frozen=True)
class Repeats:
    """`left_out`: origins (written_by, written_row) of rows that equal one that counts. `conflicts`: the (rollout_id,
    segment) that are stored with different contents; of these every row stays."""

    left_out: pa.Table
    conflicts: list[tuple[str, int]]


def repeats(snapshot: Snapshot) -> Repeats:
    """Find the repeated (rollout_id, segment) of a snapshot's rollouts. Raises CorruptionError.

    The id index names the rows that may repeat; only those are read. Of equal rows the first by origin counts.
    """
    found: dict[tuple[str, int], list[tuple[str, int, str]]] = {}
    for (source, number), places in groupby(snapshot.repeated(), key=lambda place: place[:2]):
        batch = source.batch(number)
        for _, _, place in places:
            row = snapshot.newest(batch.slice(place, 1), "rollouts", source)
            id_, segment, written_by, written_row = (row.column(name)[0].as_py() for name in (*_KEY, *_ORIGIN))
            text = content(row).encode(errors="surrogatepass")
            found.setdefault((id_, segment), []).append((written_by, written_row, xxhash.xxh3_128_hexdigest(text)))
    dropped: list[tuple[str, int]] = []
    conflicts: list[tuple[str, int]] = []
    for key, rows in sorted(found.items()):
        first, *rest = sorted(rows)
        if all(row[2] == first[2] for row in rest):
            dropped += [row[:2] for row in rest]
        else:
            conflicts.append(key)
    schema = pa.schema([snapshot.schema("rollouts").field(name) for name in _ORIGIN])
    left_out = pa.table([[row[0] for row in dropped], [row[1] for row in dropped]], schema=schema)
    return Repeats(left_out, conflicts)


def without(
    rollouts: Rows, columns: Sequence[str], left_out: pa.Table | None, parts: list[Part] | None = None
) -> Iterator[pa.RecordBatch]:
    """The columns of a dataset batch by batch, in its order, less the rows that `Repeats.left_out` names.

    `parts` where only some of the snapshot's are wanted.
    """
    if left_out is None or not left_out.num_rows:
        yield from rollouts.scanner(columns=list(columns), parts=parts).to_batches()
        return
    read = list(dict.fromkeys([*columns, *_ORIGIN]))
    gone = set(zip(*(left_out[name].to_pylist() for name in _ORIGIN), strict=True))
    holders = pa.array(sorted({name for name, _ in gone}))
    for batch in rollouts.scanner(columns=read, parts=parts).to_batches():
        suspect = pc.is_in(batch.column("written_by"), value_set=holders).to_numpy(zero_copy_only=False)
        keep = ~suspect
        for row in suspect.nonzero()[0].tolist():
            keep[row] = tuple(batch.column(name)[row].as_py() for name in _ORIGIN) not in gone
        yield batch.filter(pa.array(keep)).select(list(columns))
