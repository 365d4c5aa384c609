"""Rollouts that were written more than once: which rows to leave out, and which cannot both be right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import xxhash

from rollstore.store.lookup import content

_KEY, _ORIGIN = ["rollout_id", "segment"], ["written_by", "written_row"]


@dataclass(frozen=True)
class Repeats:
    """`left_out`: origins (written_by, written_row) of rows that equal one that counts. `conflicts`: the (rollout_id,
    segment) that are stored with different contents; of these every row stays."""

    left_out: pa.Table
    conflicts: list[tuple[str, int]]


def repeats(rollouts: ds.Dataset) -> Repeats:
    """Find the repeated (rollout_id, segment) of a snapshot's rollouts.

    Reads the two columns of the key; whole rows only of those that repeat. Of equal rows the first by origin counts.
    """
    keys = rollouts.to_table(columns=_KEY)
    counted = keys.group_by(_KEY).aggregate([([], "count_all")])
    twice = counted.filter(pc.field("count_all") > 1).select(_KEY)
    dropped: list[tuple[str, int]] = []
    conflicts: list[tuple[str, int]] = []
    if twice.num_rows:
        ids = twice["rollout_id"].combine_chunks().unique()
        found: dict[tuple[str, int], list[tuple[str, int, str]]] = {}
        for batch in rollouts.to_batches(filter=pc.field("rollout_id").isin(ids)):
            for number in range(batch.num_rows):
                row = batch.slice(number, 1)
                id_, segment, part, place = (row.column(name)[0].as_py() for name in (*_KEY, *_ORIGIN))
                text = content(row).encode(errors="surrogatepass")
                found.setdefault((id_, segment), []).append((part, place, xxhash.xxh3_128_hexdigest(text)))
        for key, rows in sorted(found.items()):
            first, *rest = sorted(rows)
            if all(row[2] == first[2] for row in rest):
                dropped += [row[:2] for row in rest]
            else:
                conflicts.append(key)
    schema = pa.schema([rollouts.schema.field(name) for name in _ORIGIN])
    left_out = pa.table([[row[0] for row in dropped], [row[1] for row in dropped]], schema=schema)
    return Repeats(left_out, conflicts)


def without(rollouts: ds.Dataset, columns: Sequence[str], left_out: pa.Table | None) -> Iterator[pa.RecordBatch]:
    """The columns of a dataset batch by batch, in its order, less the rows that `Repeats.left_out` names."""
    if left_out is None or not left_out.num_rows:
        yield from rollouts.to_batches(columns=list(columns))
        return
    read = list(dict.fromkeys([*columns, *_ORIGIN]))
    gone = set(zip(*(left_out[name].to_pylist() for name in _ORIGIN), strict=True))
    parts = pa.array(sorted({name for name, _ in gone}))
    for batch in rollouts.to_batches(columns=read):
        suspect = pc.is_in(batch.column("written_by"), value_set=parts).to_numpy(zero_copy_only=False)
        keep = ~suspect
        for row in suspect.nonzero()[0].tolist():
            keep[row] = tuple(batch.column(name)[row].as_py() for name in _ORIGIN) not in gone
        yield batch.filter(pa.array(keep)).select(list(columns))
