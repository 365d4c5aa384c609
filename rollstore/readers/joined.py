"""Columns of other tables for rows of the rollouts table, joined by the keys that are named and by nothing else."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import DuplicateError, UnsupportedRecordError
from rollstore.readers.arrow import dataset
from rollstore.store.snapshot import Snapshot

_KEY = ["rollout_id", "segment"]


def logprobs_of(snapshot: Snapshot, rows: pa.Table, evaluation_id: str) -> pa.Array:
    """The action log-probs that one evaluation gave to some rows; list<float32> [rows].

    rows: rollout_id and segment. Raises UnsupportedRecordError where a row has no such evaluation, DuplicateError where
    it has two.
    """
    where = pc.field("evaluation_id") == evaluation_id
    found = dataset(snapshot, "evaluations").to_table(columns=[*_KEY, "logprobs"], filter=where)
    what = f"evaluation {evaluation_id!r}"
    place = matches(rows, found.select(_KEY), what)
    if len(missing := np.flatnonzero(place < 0)):
        id_, segment = (rows[name][int(missing[0])].as_py() for name in _KEY)
        raise UnsupportedRecordError(
            f"{what}: wanted log-probs of all {rows.num_rows} rows, {len(missing)} have none, "
            f"{id_!r} segment {segment} first"
        )
    return found["logprobs"].combine_chunks().take(pa.array(place))


def matches(rows: pa.Table, others: pa.Table, what: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
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


def rewards_of(snapshot: Snapshot, rows: pa.Table, which: pc.Expression) -> pa.Array:
    """The outcome that some scores gave to the rollouts of some rows; double [rows], null where there is none.

    rows: rollout_id and segment; the reward stands on each row of its rollout. which: the scores that count, of those
    of whole rollouts (no segment, span or position). Raises DuplicateError where a rollout has two of them: which of
    several repeats or versions is the reward is for the caller to say.
    """
    whole = pc.field("segment").is_null() & pc.field("span").is_null() & pc.field("position").is_null()
    found = dataset(snapshot, "scores").to_table(columns=["rollout_id", "value"], filter=which & whole)
    place = matches(rows.select(["rollout_id"]), found.select(["rollout_id"]), f"scores with {which}")
    return found["value"].combine_chunks().take(pa.array(place, mask=place < 0))
