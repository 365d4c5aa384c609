"""Columns of other tables for rows of the rollouts table, joined by the keys that are named and by nothing else."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rollstore.errors import DuplicateError, UnsupportedRecordError
from rollstore.readers.filters import check_named, rows_where
from rollstore.readers.order import Ints
from rollstore.readers.rows import PLACE, Reader
from rollstore.readers.selection import ORIGIN, identity
from rollstore.store.snapshot import Snapshot

_KEY = ["rollout_id", "segment"]


class Column(Protocol):
    """A value for each row of a selection, given for the rows with some numbers. digest: of all that it can give; none
    where that follows from another column."""

    digest: str | None

    def __call__(self, rows: Ints) -> pa.Array: ...


class Logprobs:
    """The action log-probs that one evaluation gave to some rows. They stay on disk until rows are asked for."""

    def __init__(self, snapshot: Snapshot, rows: pa.Table, evaluation_id: str) -> None:
        """rows: rollout_id and segment. Raises UnsupportedRecordError where a row has no such evaluation,
        DuplicateError where it has two."""
        self._reader = Reader(snapshot, "evaluations")
        found = self._reader.index(["evaluation_id", *_KEY, *ORIGIN], lengths=None)
        found = found.filter(pc.field("evaluation_id") == evaluation_id)
        what = f"evaluation {evaluation_id!r}"
        row = matches(rows, found.select(_KEY), what)
        if len(missing := np.flatnonzero(row < 0)):
            id_, segment = (rows[name][int(missing[0])].as_py() for name in _KEY)
            raise UnsupportedRecordError(
                f"{what}: wanted log-probs of all {rows.num_rows} rows, {len(missing)} have none, "
                f"{id_!r} segment {segment} first"
            )
        found = found.take(pa.array(row))
        self._places: Ints = found[PLACE].to_numpy()
        self.digest: str | None = identity(found)

    def __call__(self, rows: Ints) -> pa.Array:
        """list<float32> [n] of the rows with these numbers."""
        places, back = np.unique(self._places[rows], return_inverse=True)
        batches = self._reader.read(places, ["logprobs"])
        if not batches:
            return pa.array([], pa.list_(pa.float32()))
        return pa.concat_arrays([batch.column(0) for batch in batches]).take(pa.array(back.reshape(-1)))


class Rewards:
    """The outcome that some scores gave to the rollouts of some rows; null where there is none."""

    def __init__(self, snapshot: Snapshot, rows: pa.Table, which: pc.Expression) -> None:
        """rows: rollout_id and segment; the reward stands on each row of its rollout. which: the scores that count, of
        those of whole rollouts (no segment, span or position). Raises DuplicateError where a rollout has two of them:
        which of several repeats or versions is the reward is for the caller to say."""
        check_named("rewards", which, snapshot, "scores")
        whole = pc.field("segment").is_null() & pc.field("span").is_null() & pc.field("position").is_null()
        found = rows_where(snapshot, "scores", ["rollout_id", "value"], which & whole, "rewards")
        place = matches(rows.select(["rollout_id"]), found.select(["rollout_id"]), f"scores with {which}")
        if rows.num_rows and (place < 0).all():
            raise UnsupportedRecordError(f"scores with {which}: wanted one for some of {rows.num_rows} rows, got none")
        self._values: pa.Array = found["value"].combine_chunks().take(pa.array(place, mask=place < 0))
        known = pc.is_valid(self._values).to_numpy(zero_copy_only=False)
        values = pc.fill_null(self._values, 0).to_numpy()
        self.digest: str | None = xxhash.xxh3_128_hexdigest(known.tobytes() + values.tobytes())

    def __call__(self, rows: Ints) -> pa.Array:
        """double [n] of the rows with these numbers."""
        return self._values.take(pa.array(rows))


class Statuses:
    """The reward_status of rows with such rewards."""

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards
        self.digest: str | None = None

    def __call__(self, rows: Ints) -> pa.Array:
        """string [n] of the rows with these numbers."""
        return pc.if_else(pc.is_valid(self._rewards(rows)), "scored", "unscored")


def matches(rows: pa.Table, others: pa.Table, what: str) -> Ints:
    """For each row the number of the one row of `others` with the same key; -1 where there is none. int64 [rows].

    Both have the same columns, the key. Raises DuplicateError where a key stands twice in `others`.
    """
    keys = others.column_names
    repeated = others.group_by(keys).aggregate([([], "count_all")]).filter(pc.field("count_all") > 1)
    if repeated.num_rows:
        key = ", ".join(str(repeated[name][0].as_py()) for name in keys)
        raise DuplicateError(f"{what}: wanted one row for each {', '.join(keys)}, got {repeated.num_rows} twice: {key}")
    numbered = others.append_column("other", pa.array(np.arange(others.num_rows)))
    joined = rows.append_column("row", pa.array(np.arange(rows.num_rows))).join(numbered, keys, join_type="left outer")
    place = np.full(rows.num_rows, -1, np.int64)
    place[joined["row"].to_numpy()] = pc.fill_null(joined["other"], -1).to_numpy()
    return place
