"""Which rollouts of a snapshot are loaded, and what stays together: decided once, before the first batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rollstore.errors import DuplicateError
from rollstore.readers.filters import NUMBER, Filters, by_others, check_scalar, failing, outcome
from rollstore.readers.order import Ints
from rollstore.readers.repeats import repeats
from rollstore.readers.rows import PLACE, Reader
from rollstore.schema.lazy import lazy
from rollstore.store.snapshot import Snapshot

_GROUP = ("run_id", "step", "group_id")
ORIGIN = ("written_by", "written_row")
_VERSIONS = ("weight_version_min", "weight_version_max")
_MEMBERS = ("group_size", "ending")
_NAMED = 8
"""The most rollouts that an error names."""
Incomplete: TypeAlias = Literal["take", "leave_out"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """The rows to load. A unit is what is never cut apart: a rollout with all its segments, or a group of rollouts.

    `places` int64 [rows]: rows of a `Reader`, by unit, rollout and segment; `keys`: rollout_id and segment of each;
    `starts` int64 [units + 1]: where each unit begins among them; `tokens`, `rollouts` int64 [units]: how many it has;
    `names` [units]: the id of its first rollout. Units stand in the order in which they were first written, whatever
    has been sealed or compacted since. `snapshot` and `digest` identify all rows that there were, and those selected.
    `late`: rollouts left out because segments of theirs, or members of their group, are missing.
    """

    places: Ints
    keys: pa.Table
    starts: Ints
    tokens: Ints
    rollouts: Ints
    names: pa.Array
    snapshot: str
    digest: str
    late: int

    @lazy
    def sizes(self) -> Ints:
        """int64 [units]: how many rows each has."""
        return np.diff(self.starts)

    def rows(self, units: Ints) -> Ints:
        """int64: the rows of some units, in that order."""
        sizes = self.sizes[units]
        ends = np.cumsum(sizes)
        return np.repeat(self.starts[units] - (ends - sizes), sizes) + np.arange(int(sizes.sum()))


def select(
    snapshot: Snapshot,
    reader: Reader,
    filters: Filters,
    *,
    whole_groups: bool = False,
    incomplete: Incomplete = "take",
) -> Selection:
    """Select rollouts by their last segment, on which reward and ending stand.

    The condition looks at any scalar column; there, weight_version_min and weight_version_max are those of all
    segments, unknown where one with actions has none. incomplete: rollouts of which a segment is missing or yet to
    come, and groups of which fewer than group_size finished rollouts are there, whatever the filters say of those that
    are: load what there is, or nothing of them. Raises
    DuplicateError where one (rollout_id, segment) is stored with different contents, ValueError or TypeError where the
    condition is none over scalar columns.
    """
    if filters.where is not None:
        check_scalar(filters.where, reader.schema)
    where = filters.condition
    text = "" if where is None else str(where)
    # The text of an expression names every column it looks at; a name found by chance is only read in vain.
    tested = [f.name for f in reader.schema if f.name in text and not pa.types.is_list(f.type)]
    members = _MEMBERS if incomplete == "leave_out" else ()
    rows = reader.index(
        [
            "rollout_id",
            "segment",
            *_GROUP,
            *ORIGIN,
            *(_VERSIONS if {*_VERSIONS} & {*tested} else ()),
            *tested,
            *members,
        ]
    )
    rows, rollout = _once(snapshot, _as_written(rows))
    last = _last(rollout, rows["segment"].to_numpy())
    kept = np.ones(len(last), bool) if where is None else _kept(reader, rows, rollout, last, where)
    ends = rows.take(pa.array(last))
    kept &= by_others(snapshot, ends["rollout_id"].combine_chunks(), filters)
    own = _placed(rows, rollout, last) if whole_groups else ends
    unit = _groups(own) if whole_groups else np.arange(len(last))
    late = np.zeros(len(last), bool)
    if incomplete == "leave_out":
        finished = _finished(rows, rollout, last)
        late = ~finished | (_late(own, unit, finished) if whole_groups else False)
    missing = int((kept & late).sum())
    kept &= ~late

    chosen = np.flatnonzero(kept[rollout])
    order = chosen[np.lexsort((rows["segment"].to_numpy()[chosen], rollout[chosen], unit[rollout[chosen]]))]
    owner = unit[rollout[order]]
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    new_rollout = np.diff(rollout[order], prepend=-1) != 0
    everything = identity(rows)
    return Selection(
        places=rows[PLACE].to_numpy()[order],
        keys=rows.select(["rollout_id", "segment"]).take(pa.array(order)),
        starts=np.append(starts, len(order)),
        tokens=_sums(rows["tokens_length"].to_numpy()[order], starts),
        rollouts=_sums(new_rollout.astype(np.int64), starts),
        names=rows["rollout_id"].combine_chunks().take(pa.array(order[starts])),
        snapshot=everything,
        digest=xxhash.xxh3_128_hexdigest(everything.encode() + owner.tobytes() + order.tobytes()),
        late=missing,
    )


def _as_written(rows: pa.Table) -> pa.Table:
    """The rows by writer and, of each, in the order in which it wrote them."""
    encoded: Any = rows["written_by"].combine_chunks().dictionary_encode()
    rank = np.argsort(np.argsort(np.array([*encoded.dictionary.to_pylist(), ""], object)[:-1]))
    order = np.lexsort((rows["written_row"].to_numpy(), rank[encoded.indices.to_numpy()]))
    return rows if (np.diff(order) == 1).all() else rows.take(pa.array(order))


def _once(snapshot: Snapshot, rows: pa.Table) -> tuple[pa.Table, Ints]:
    """(the rows without those that repeat another, the rollout of each)."""
    rollout, segment = _codes(rows["rollout_id"]), rows["segment"].to_numpy().astype(np.int64)
    if _numbered(rollout * (segment.max(initial=0) + 1) + segment).max(initial=-1) + 1 == rows.num_rows:
        return rows, rollout
    found = repeats(snapshot)
    if found.conflicts:
        id_, segment = found.conflicts[0]
        raise DuplicateError(
            f"{id_!r}, segment {segment}: wanted one content, got different ones; "
            f"{len(found.conflicts)} in all, which `verify` lists"
        )
    # Arrow joins no table that holds a map, as metadata is one: only numbers of rows.
    numbered = rows.select(ORIGIN).append_column("row", pa.array(np.arange(rows.num_rows)))
    kept = np.ones(rows.num_rows, bool)
    kept[numbered.join(found.left_out, keys=list(ORIGIN), join_type="inner")["row"].to_numpy()] = False
    rows = rows.filter(pa.array(kept))
    return rows, _codes(rows["rollout_id"])


def _numbered(values: Ints) -> Ints:
    """Equal values -> one number, numbers in order of first appearance."""
    encoded: Any = pa.array(values).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64)


def _codes(column: pa.ChunkedArray) -> Ints:
    """Equal values -> one number, numbers in order of first appearance; null is a value."""
    encoded: Any = column.combine_chunks().dictionary_encode(null_encoding="encode")
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def _last(rollout: Ints, segment: npt.NDArray[Any]) -> Ints:
    """The row of the last segment of each rollout."""
    order = np.lexsort((segment, rollout))
    ends = np.flatnonzero(np.diff(rollout[order], append=-1))
    return order[ends]


def _kept(reader: Reader, rows: pa.Table, rollout: Ints, last: Ints, where: pc.Expression) -> npt.NDArray[np.bool_]:
    """Which rollouts the filter keeps."""
    table = rows.take(pa.array(last))
    for name in [name for name in _VERSIONS if name in rows.column_names]:
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, _of_all_segments(reader, rows, rollout, len(last), name))
    numbered = table.append_column(NUMBER, pa.array(np.arange(len(last))))
    chosen = outcome(numbered, where)
    if not isinstance(chosen, Exception):
        kept = np.zeros(len(last), bool)
        kept[chosen] = True
        return kept
    wrong = failing(numbered, where, _NAMED + 1)
    named = ", ".join(repr(table["rollout_id"][row].as_py()) for row in wrong[:_NAMED])
    more = " and more" if len(wrong) > _NAMED else ""
    raise ValueError(f"where: {where} fails on rollouts {named}{more}: {chosen}") from chosen


def _of_all_segments(reader: Reader, rows: pa.Table, rollout: Ints, count: int, name: str) -> pa.Array:
    """int64 [count]: the oldest or newest version of each rollout; null where that of some action is not known."""
    known, values = pc.is_valid(rows[name]).to_numpy(), pc.fill_null(rows[name], 0).to_numpy()
    some = np.bincount(rollout, weights=known, minlength=count) > 0
    missing = ~some
    open_ = np.flatnonzero(~known & some[rollout])
    missing[rollout[open_[reader.acting(rows[PLACE].to_numpy()[open_])]]] = True
    low = name == _VERSIONS[0]
    bound = np.full(count, np.iinfo(np.int64).max if low else np.iinfo(np.int64).min)
    (np.minimum if low else np.maximum).at(bound, rollout[known], values[known])
    return pa.array(bound, pa.int64(), mask=missing)


def _placed(rows: pa.Table, rollout: Ints, last: Ints) -> pa.Table:
    """The last segment of each rollout, with the group of the first segment that says one, field by field."""
    table, segment = rows.take(pa.array(last)), rows["segment"].to_numpy()
    for name in {*_GROUP, "group_size"} & {*rows.column_names}:
        having = np.flatnonzero(pc.is_valid(rows[name]).to_numpy())
        having = having[np.lexsort((-segment[having], rollout[having]))]
        place = last.copy()
        place[rollout[having]] = having  # the last write wins: the lowest of the segments that have a value
        table = table.set_column(table.schema.get_field_index(name), name, rows[name].take(pa.array(place)))
    return table


def _groups(rollouts: pa.Table) -> Ints:
    """The group of each rollout, numbered by first appearance; a rollout without a group is one of its own."""
    parts = [_codes(rollouts[name]) for name in _GROUP]
    alone = pc.is_null(rollouts["group_id"]).to_numpy()
    parts.append(np.where(alone, np.arange(len(alone)), -1))
    group = np.zeros(len(alone), np.int64)
    for part in parts:  # each below the number of rows, and so is what becomes of them
        group = _numbered(group * (len(alone) + 1) + part + 1)
    return group


def _finished(rows: pa.Table, rollout: Ints, last: Ints) -> npt.NDArray[np.bool_]:
    """Which rollouts are there from the first segment to one that none is to follow."""
    ended = pc.fill_null(pc.not_equal(rows["ending"].take(pa.array(last)), "continued"), True).to_numpy()
    return ended & (np.bincount(rollout) == rows["segment"].to_numpy()[last] + 1)


def _late(rollouts: pa.Table, group: Ints, finished: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which rollouts are in a group that lacks finished members. A group that says no size is as large as it is."""
    size = np.zeros(int(group.max(initial=-1)) + 1, np.int64)
    np.maximum.at(size, group, pc.fill_null(rollouts["group_size"], 0).to_numpy())
    there = np.bincount(group, weights=finished, minlength=len(size))
    return (there < size)[group]


def _sums(values: Ints, starts: Ints) -> Ints:
    return np.add.reduceat(values, starts).astype(np.int64) if len(starts) else np.zeros(0, np.int64)


def identity(rows: pa.Table) -> str:
    """The identity of a set of rows: their origins, which neither sealing nor compaction changes."""
    encoded: Any = rows["written_by"].combine_chunks().dictionary_encode()
    state = xxhash.xxh3_128("\n".join(encoded.dictionary.to_pylist()).encode())
    state.update(encoded.indices.to_numpy().tobytes())
    state.update(rows["written_row"].to_numpy().tobytes())
    return state.hexdigest()
