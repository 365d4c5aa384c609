"""All rollouts of a store in a table of one row each, and what the lists and the trend ask of it, a page at a time."""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rollstore.readers.duckdb import connect
from rollstore.readers.repeats import repeats
from rollstore.schema import ROLLOUTS
from rollstore.schema.flat import Flat
from rollstore.store.snapshot import Snapshot, fit
from rollstore.store.store import Store

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MEMORY = "512MB"
"""What DuckDB may hold before it writes to disk."""

PAGE = 50
"""Rollouts on a page of a list."""

STRETCHES = 200
"""Points of a trend: more steps than that are put together."""

_KEPT = (
    "rollout_id", "segment", "run_id", "environment", "group_id", "sample_index", "step", "weight_version_min",
    "weight_version_max", "ending", "ending_reason", "reward", "reward_status", "written_at", "written_by",
    "written_row",
)  # fmt: skip

# A rollout's reward and ending are those of its last segment; its run, environment, group and step each of the first
# segment that has one. The oldest version is known where each segment that drew anything knows its own.
_LISTED = """
CREATE OR REPLACE TABLE listed AS
SELECT rollout_id,
    arg_min(run_id, segment) AS run_id, arg_min(environment, segment) AS environment,
    arg_min(group_id, segment) AS group_id, arg_min(sample_index, segment) AS sample_index,
    arg_min(step, segment) AS step, count(*) AS segments,
    sum(tokens)::BIGINT AS tokens, sum(actions)::BIGINT AS actions,
    CASE WHEN bool_and(weight_version_min IS NOT NULL OR actions = 0) THEN min(weight_version_min) END AS version_min,
    max(weight_version_max) AS version_max,
    arg_max_null(ending, segment) AS ending, arg_max_null(ending_reason, segment) AS ending_reason,
    arg_max_null(reward, segment) AS reward, arg_max_null(reward_status, segment) AS reward_status,
    max(written_at) AS written_at, max(written_row) AS written_row
FROM segments_stream {once} GROUP BY rollout_id
"""

ORDERS = {
    "newest": "written_at DESC, written_row DESC, rollout_id",
    "step": "step, group_id, sample_index, rollout_id",
    "reward, low first": "reward ASC NULLS LAST, rollout_id",
    "reward, high first": "reward DESC NULLS LAST, rollout_id",
    "longest": "actions DESC, rollout_id",
}


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which rollouts: all conditions that are not None. A rollout has a version when it lies between its oldest and its
    newest; `reward` says whether there shall be one."""

    run: str | None = None
    environment: str | None = None
    ending: str | None = None
    scored: bool | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    version: int | None = None
    step_min: int | None = None
    step_max: int | None = None
    stepless: bool | None = None

    def where(self) -> tuple[str, list[Any]]:
        """The condition in SQL, and what fills its marks."""
        conditions = {
            "run": "run_id = ?", "environment": "environment = ?", "ending": "ending = ?", "reward_min": "reward >= ?",
            "reward_max": "reward <= ?", "step_min": "step >= ?", "step_max": "step <= ?",
            "version": "? BETWEEN coalesce(version_min, version_max) AND version_max",
        }  # fmt: skip
        chosen = [(sql, getattr(self, name)) for name, sql in conditions.items() if getattr(self, name) is not None]
        parts = [sql for sql, _ in chosen]
        if self.scored is not None:
            parts.append("reward IS NOT NULL" if self.scored else "reward IS NULL")
        if self.stepless:
            parts.append("step IS NULL")
        return " AND ".join(parts) or "true", [value for _, value in chosen]

    def query(self) -> dict[str, Any]:
        """As the query of an address."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: int(value) if isinstance(value, bool) else value for name, value in told.items()}


def read_filter(given: Mapping[str, str]) -> Filter:
    """A filter from the query of an address. Raises ValueError for what is no number."""
    found = Filter()
    for name, kind in (
        ("run", str), ("environment", str), ("ending", str), ("scored", int), ("reward_min", float),
        ("reward_max", float), ("version", int), ("step_min", int), ("step_max", int), ("stepless", int),
    ):  # fmt: skip
        value = given.get(name, "").strip() if kind is not str else given.get(name, "")
        if not value:
            continue
        try:
            read: Any = kind(value)
        except ValueError:
            raise ValueError(f"{name}: wanted a number, got {value!r}") from None
        if kind is int and not -(2**63) <= read < 2**63:
            raise ValueError(f"{name}: wanted a number of 64 bits, got {value!r}")
        found = replace(found, **{name: bool(read) if name in ("scored", "stepless") else read})
    return found


class Listing:
    """The table, as the store was when it was read. Safe to share between threads."""

    def __init__(self, store: Store) -> None:
        """Reads the store. Raises CorruptionError."""
        self.store = store
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._spill = tempfile.TemporaryDirectory(prefix="rollstore-")
        self._connection: DuckDBPyConnection | None = None
        self._state: Any = None
        self.read()

    def close(self) -> None:
        """Let go of memory and disk."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._spill.cleanup()

    def read(self) -> None:
        """Read the store again."""
        with self._reading, self.store.snapshot() as snapshot, warnings.catch_warnings():
            # Both contents of an id are listed; its own page says what is wrong.
            warnings.filterwarnings("ignore", message=".*stored with different contents")
            connection = connect(self.store, snapshot=snapshot)
            connection.execute(f"SET memory_limit = '{MEMORY}'")
            connection.execute("SET temp_directory = $1", [self._spill.name])
            connection.execute("SET preserve_insertion_order = false")
            left_out = repeats(snapshot).left_out
            if left_out.num_rows:
                connection.register("copies", left_out)
            stream = pa.RecordBatchReader.from_batches(_SCHEMA, _segments(snapshot))
            connection.register("segments_stream", stream)
            once = "ANTI JOIN copies USING (written_by, written_row)" if left_out.num_rows else ""
            connection.execute(_LISTED.format(once=once))
            connection.unregister("segments_stream")
            state = _state(snapshot)
        with self._lock:
            before, self._connection, self._state = self._connection, connection, state
            if before is not None:
                before.close()

    def grown(self) -> bool:
        """Whether the store is another than when it was read."""
        with self.store.snapshot() as snapshot:
            return _state(snapshot) != self._state

    def rows(self, query: str, given: list[Any]) -> list[dict[str, Any]]:
        """All rows of a query that has few, by column name."""
        with self._lock:
            if self._connection is None:
                raise ValueError("listing: wanted one that is open, got one that was closed")
            found = self._connection.execute(query, given)
            names = [column[0] for column in found.description or ()]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def totals(self, chosen: Filter) -> dict[str, Any]:
        """Counts over the chosen rollouts."""
        where, given = chosen.where()
        query = (
            "SELECT count(*) AS rollouts, count(*) FILTER (step IS NULL) AS stepless, count(reward) AS scored, "
            f"sum(tokens) AS tokens, min(step) AS first, max(step) AS last FROM listed WHERE {where}"
        )
        return self.rows(query, given)[0]

    def trend(self, chosen: Filter) -> list[dict[str, Any]]:
        """Rewards and lengths by step, at most about `STRETCHES` rows: steps next to each other are put together."""
        where, given = chosen.where()
        total = self.totals(chosen)
        if total["first"] is None:
            return []
        width = (total["last"] - total["first"]) // STRETCHES + 1
        query = (
            f"SELECT (step - {total['first']}) // {width} AS stretch, min(step) AS first, max(step) AS last, "
            "count(*) AS rollouts, count(reward) AS scored, avg(reward) FILTER (isfinite(reward)) AS reward, "
            "avg(actions) AS length, quantile_cont(actions, 0.1) AS short, quantile_cont(actions, 0.9) AS long, "
            "count(*) FILTER (ending = 'truncated') AS truncated, count(DISTINCT group_id) AS groups "
            f"FROM listed WHERE {where} AND step IS NOT NULL GROUP BY stretch ORDER BY stretch"
        )
        return self.rows(query, given)

    def rollouts(self, chosen: Filter, *, order: str = "newest", page: int = 0) -> list[dict[str, Any]]:
        """One page of the chosen rollouts."""
        where, given = chosen.where()
        query = f"SELECT * FROM listed WHERE {where} ORDER BY {ORDERS[order]} LIMIT {PAGE} OFFSET {PAGE * page}"
        return self.rows(query, given)

    def words(self, column: str, most: int = 100) -> list[str]:
        """The values of a column of texts, those of most rollouts first."""
        query = (
            f"SELECT {column} AS word FROM listed WHERE {column} IS NOT NULL "
            f"GROUP BY word ORDER BY count(*) DESC, word LIMIT {most}"
        )
        return [row["word"] for row in self.rows(query, [])]


_SCHEMA = pa.schema(
    [
        *(ROLLOUTS.arrow_schema.field(name).remove_metadata() for name in _KEPT),
        pa.field("tokens", pa.int64()),
        pa.field("actions", pa.int64()),
    ]
)


def _segments(snapshot: Snapshot) -> Iterator[pa.RecordBatch]:
    """What the table needs of each segment, one batch in memory at a time."""
    full = snapshot.schema("rollouts")
    names = (*_KEPT, "action_mask")
    wide = pa.schema([full.field(name) for name in names], full.metadata)
    for source in (*snapshot.parts("rollouts"), *snapshot.views("rollouts")):
        for read in source.batches(names):
            if not read.num_rows:
                continue
            batch = fit(read, wide, "rollouts")
            mask = Flat(batch.column("action_mask"))
            counts = [pa.array(mask.lengths), pa.array(mask.totals(mask.numpy(False)).astype(np.int64))]
            kept = [batch.column(name) for name in _KEPT]
            yield pa.RecordBatch.from_arrays([*kept, *counts], schema=_SCHEMA)


def _state(snapshot: Snapshot) -> Any:
    return snapshot.names, [(view.name, view.rows) for view in snapshot.journals]
