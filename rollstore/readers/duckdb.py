"""DuckDB over one snapshot of a store: the four tables, and views of their actions, tokens, spans and groups."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import CorruptionError
from rollstore.readers.arrow import Lease, Rows, Scan, leased
from rollstore.readers.flat import ACTIONS, TOKENS, Flattened
from rollstore.readers.repeats import repeats
from rollstore.schema import TABLES
from rollstore.schema.maps import key_problems
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot

if TYPE_CHECKING:
    from rollstore.store.store import Store

VIEWS = ("rollouts", "tokens", "actions", "spans", "scores", "evaluations", "uses", "groups")

OutOfMemory = duckdb.OutOfMemoryException
"""What a query raises that memory does not hold and that may not go on on disk."""

_ROW = "rollout_id, segment, run_id, group_id, step, environment"

_ACTION_COUNT = "coalesce(len(logprobs), len(list_where(action_mask, action_mask)))"

_SPANS = """
SELECT {row}, span, {fields}
FROM (SELECT {row}, unnest(range(len(spans))) AS span, unnest(spans) AS s FROM rollouts)
"""

# Per rollout first, so that its segments count once; its reward and its ending are those of its last segment, and run,
# step and group those of the first segment that has one (arg_min looks at no null).
_GROUPS = f"""
SELECT run_id, step, group_id,
    max(group_size) AS group_size,
    count(*) AS present,
    greatest(max(group_size) - count(*), 0) AS missing,
    count(reward) AS scored,
    count(*) - count(reward) AS unscored,
    avg(reward) AS reward_mean,
    CASE WHEN bool_and(isfinite(reward)) THEN stddev_samp(reward) FILTER (isfinite(reward)) END AS reward_std,
    min(reward) AS reward_min,
    max(reward) AS reward_max,
    count(reward) > 1 AND min(reward) = max(reward) AS zero_variance,
    avg(actions) AS mean_actions,
    avg(tokens) AS mean_tokens,
    count(*) FILTER (ending = 'truncated') AS truncated,
    count(*) FILTER (ending = 'aborted') AS aborted
FROM (
    SELECT rollout_id,
        arg_min(run_id, segment) AS run_id, arg_min(step, segment) AS step, arg_min(group_id, segment) AS group_id,
        max(group_size) AS group_size,
        arg_max_null(CASE WHEN isnan(reward) THEN NULL ELSE reward END, segment) AS reward,
        arg_max_null(ending, segment) AS ending,
        sum({_ACTION_COUNT}) AS actions,
        sum(len(tokens)) AS tokens
    FROM rollouts
    GROUP BY rollout_id)
WHERE group_id IS NOT NULL
GROUP BY run_id, step, group_id
"""

_USES = """
SELECT u.*, coalesce(u.train_step >= later.resumed_at, false) AS superseded
FROM uses_rows u LEFT JOIN (
    SELECT train_run, "attempt", min(first) OVER (
        PARTITION BY train_run ORDER BY "attempt" ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) AS resumed_at
    FROM (SELECT train_run, coalesce("attempt", 0) AS "attempt", min(train_step) AS first FROM uses_rows GROUP BY ALL)
) later ON u.train_run = later.train_run AND coalesce(u."attempt", 0) = later."attempt"
"""


def connect(store: Store, *, snapshot: Snapshot | None = None) -> duckdb.DuckDBPyConnection:
    """An in-memory DuckDB connection with the views `VIEWS` over one snapshot, which stays what it was.

    The snapshot is the store's own at this moment, kept until the connection is closed; one that is given stays the
    caller's to close. The session's time zone is UTC. A (rollout_id, segment) stored more than once with equal content
    counts once; with different contents every row stays, and a warning says so. Raises CorruptionError.
    """
    source = leased(store, snapshot)
    connection = duckdb.connect()
    try:
        # Without it, dates and times come out in the zone of whoever runs the query.
        connection.execute("SET TimeZone = 'UTC'")
        held, lease = (source.snapshot, source) if isinstance(source, Lease) else (source, None)
        tables = {name: _Mapped(held, name, lease) for name in TABLES}
        for name, table in tables.items():
            connection.register(f"{name}_rows", table)
        found = repeats(held)
        if found.conflicts:
            shown = ", ".join(f"{id_!r} segment {segment}" for id_, segment in found.conflicts[:3])
            warnings.warn(
                f"{store.path}: stored with different contents, every row is shown: {shown}"
                + (f" and {len(found.conflicts) - 3} more" if len(found.conflicts) > 3 else ""),
                stacklevel=2,
            )
        for name, columns in (("actions", ACTIONS), ("tokens", TOKENS)):
            connection.register(f"{name}_rows", Flattened(tables["rollouts"], found.left_out, columns))
        _make_views(connection, tables["rollouts"].schema, found.left_out)
    except BaseException:
        connection.close()
        raise
    return connection


def lock(connection: duckdb.DuckDBPyConnection) -> None:
    """Shut a connection off: no files, no network, no extensions, no Python variables, and no way back.

    The views go on working. For queries of people or models that are only trusted with the store. Nothing is spilled
    to disk from here on: a query that needs more than `memory_limit` ends in duckdb.OutOfMemoryException. Raises
    ValueError where the connection can no longer be shut off: it has spilled, or was shut off before.
    """
    try:
        # DuckDB leaves a query every folder that is named here, and by default its folder of spilled rows is `.tmp` in
        # the working folder. A private one would not do either: a query can ask for its path, and fill the disk.
        connection.execute("SET temp_directory = ''")
        connection.execute("SET allowed_directories = []")
        connection.execute("SET allowed_paths = []")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
    except duckdb.Error as error:
        raise ValueError(f"lock: wanted a connection that can still be shut off, got one that says: {error}") from error


class _Mapped(Rows):
    """The dataset of one table, which names the rows that DuckDB cannot read: those with a key twice in one map.

    DuckDB refuses the whole answer for one such row, without saying which. No append takes one.
    """

    def scanner(
        self, columns: Any = None, filter: pc.Expression | None = None, parts: list[Part] | None = None, **options: Any
    ) -> Scan:
        """As of any dataset. Its batches raise CorruptionError."""
        scan = super().scanner(columns, filter, parts, **options)
        return Scan(scan.projected_schema, self._read(scan.to_batches()))

    def _read(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for name, array in zip(batch.schema.names, batch.columns, strict=True):
                if any(key_problems(array, name, np.arange(len(array)))):
                    raise self._named(name)
            yield batch

    def _named(self, column: str) -> CorruptionError:
        """The error for a column, with the ids of the first rows of the table that it is about."""
        found: list[str] = []
        for batch in super().scanner(columns=["rollout_id", column]).to_batches():
            array = batch.column(column)
            rows = {p.row for p in key_problems(array, column, np.arange(len(array))) if p.row is not None}
            found += [repr(batch.column("rollout_id")[row].as_py()) for row in sorted(rows)]
            if len(found) > 3:
                break
        return CorruptionError(
            f"{column}: wanted each key once in a map, got one twice in {', '.join(found[:3])}"
            f"{' and more' if len(found) > 3 else ''}: verify names all, and a query without the column goes on"
        )


def _make_views(connection: duckdb.DuckDBPyConnection, schema: pa.Schema, left_out: pa.Table) -> None:
    once = ""
    if left_out.num_rows:
        connection.register("rollouts_left_out", left_out)
        once = "ANTI JOIN rollouts_left_out USING (written_by, written_row)"
    fields = schema.field("spans").type.value_type
    names = ", ".join(f's."{field.name}" AS "{field.name}"' for field in fields)
    for name, query in {
        "rollouts": f"SELECT * FROM rollouts_rows {once}",
        "scores": "SELECT * FROM scores_rows",
        "evaluations": "SELECT * FROM evaluations_rows",
        "uses": _USES,
        "actions": "SELECT * FROM actions_rows",
        "tokens": "SELECT * FROM tokens_rows",
        "spans": _SPANS.format(row=_ROW, fields=names),
        "groups": _GROUPS,
    }.items():
        connection.execute(f'CREATE VIEW "{name}" AS {query}')
