"""DuckDB over one snapshot of a store: the four tables, and views of their actions, tokens, spans and groups."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa

from rollstore.readers.arrow import Lease, dataset
from rollstore.readers.repeats import repeats
from rollstore.schema import TABLES
from rollstore.store.snapshot import Snapshot

if TYPE_CHECKING:
    from rollstore.store.store import Store

VIEWS = ("rollouts", "tokens", "actions", "spans", "scores", "evaluations", "uses", "groups")

# One row stands for many here: each list is opened by an index that runs over it, not by unnesting it beside others, so
# that a query reads the lists it names and no more. The lists of indices are made in the innermost SELECT, once a row.
_ROW = "rollout_id, segment, run_id, group_id, step, environment, policy"

_ACTION_COUNT = "coalesce(len(logprobs), len(list_where(action_mask, action_mask)))"

_ACTIONS = f"""
SELECT {_ROW},
    i - 1 AS "action",
    positions[i] AS position,
    tokens[positions[i] + 1] AS token,
    logprobs[i] AS logprob,
    coalesce(span_kinds[span_of[i] + 1], logprob_kind) AS logprob_kind,
    weight_versions[i] AS weight_version,
    coalesce(trainable[i], true) AS trainable,
    ranks[i] AS rank,
    entropies[i] AS entropy,
    batch_rows[i] AS batch_rows,
    CASE WHEN head_tokens IS NOT NULL THEN coalesce(head_counts[i], head_size) END AS head_count,
    support_counts[i] AS support_count,
    span_of[i] AS span,
    turns[span_of[i] + 1] AS turn,
    cache_states[span_of[i] + 1] AS cache_state,
    temperatures[coalesce(span_samplers[span_of[i] + 1], only_sampler) + 1] AS temperature,
    top_ps[coalesce(span_samplers[span_of[i] + 1], only_sampler) + 1] AS top_p,
    top_ks[coalesce(span_samplers[span_of[i] + 1], only_sampler) + 1] AS top_k,
    min_ps[coalesce(span_samplers[span_of[i] + 1], only_sampler) + 1] AS min_p
FROM (SELECT *, unnest(range(1, action_count + 1)) AS i FROM (SELECT *,
    {_ACTION_COUNT} AS action_count,
    list_where(range(len(action_mask)), action_mask) AS positions,
    flatten(list_transform(spans, lambda s, n: CASE WHEN s.is_action THEN repeat([n - 1], s.length) ELSE [] END))
        AS span_of,
    list_transform(spans, lambda s: s.logprob_kind) AS span_kinds,
    list_transform(spans, lambda s: s.turn) AS turns,
    list_transform(spans, lambda s: s.cache_state) AS cache_states,
    list_transform(spans, lambda s: s.sampler) AS span_samplers,
    CASE WHEN len(samplers) = 1 THEN 0 END AS only_sampler,
    list_transform(samplers, lambda s: s.temperature) AS temperatures,
    list_transform(samplers, lambda s: s.top_p) AS top_ps,
    list_transform(samplers, lambda s: s.top_k) AS top_ks,
    list_transform(samplers, lambda s: s.min_p) AS min_ps
FROM rollouts))
"""

# The positions of all actions, then those of all observations: where a position stands among them, sorted, is the
# number of its action plus one.
_TOKENS = f"""
SELECT {_ROW},
    i - 1 AS position,
    tokens[i] AS token,
    token_bytes[i] AS bytes,
    action_mask[i] AS is_action,
    CASE WHEN action_mask[i] THEN place[i] - 1 END AS "action",
    CASE WHEN action_mask[i] THEN logprobs[place[i]] END AS logprob,
    span_of[i] AS span,
    roles[span_of[i] + 1] AS role,
    origins[span_of[i] + 1] AS origin,
    turns[span_of[i] + 1] AS turn
FROM (SELECT *, unnest(range(1, len(tokens) + 1)) AS i FROM (SELECT *,
    list_grade_up(list_concat(
        list_where(range(len(action_mask)), action_mask),
        list_where(range(len(action_mask)), list_transform(action_mask, lambda drawn: NOT drawn))
    )) AS place,
    flatten(list_transform(spans, lambda s, n: repeat([n - 1], s.length))) AS span_of,
    list_transform(spans, lambda s: s.role) AS roles,
    list_transform(spans, lambda s: s.origin) AS origins,
    list_transform(spans, lambda s: s.turn) AS turns
FROM rollouts))
"""

_SPANS = """
SELECT {row}, span, {fields}
FROM (SELECT {row}, unnest(range(len(spans))) AS span, unnest(spans) AS s FROM rollouts)
"""

# Per rollout first, so that its segments count once; its reward and its ending are those of its last segment.
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
    SELECT run_id, step, group_id, rollout_id,
        max(group_size) AS group_size,
        arg_max_null(CASE WHEN isnan(reward) THEN NULL ELSE reward END, segment) AS reward,
        arg_max_null(ending, segment) AS ending,
        sum({_ACTION_COUNT}) AS actions,
        sum(len(tokens)) AS tokens
    FROM rollouts WHERE group_id IS NOT NULL
    GROUP BY run_id, step, group_id, rollout_id)
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
    source = Lease(store.snapshot()) if snapshot is None else snapshot
    connection = duckdb.connect()
    try:
        # Without it, dates and times come out in the zone of whoever runs the query.
        connection.execute("SET TimeZone = 'UTC'")
        tables = {name: dataset(source, name) for name in TABLES}
        for name, table in tables.items():
            connection.register(f"{name}_rows", table)
        found = repeats(tables["rollouts"])
        if found.conflicts:
            shown = ", ".join(f"{id_!r} segment {segment}" for id_, segment in found.conflicts[:3])
            warnings.warn(
                f"{store.path}: stored with different contents, every row is shown: {shown}"
                + (f" and {len(found.conflicts) - 3} more" if len(found.conflicts) > 3 else ""),
                stacklevel=2,
            )
        _make_views(connection, tables["rollouts"].schema, found.left_out)
    except BaseException:
        connection.close()
        raise
    return connection


def lock(connection: duckdb.DuckDBPyConnection) -> None:
    """Shut a connection off: no files, no network, no extensions, no Python variables, and no way back.

    The views go on working. For queries of people or models that are only trusted with the store.
    """
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


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
        "actions": _ACTIONS,
        "tokens": _TOKENS,
        "spans": _SPANS.format(row=_ROW.removesuffix(", policy"), fields=names),
        "groups": _GROUPS,
    }.items():
        connection.execute(f'CREATE VIEW "{name}" AS {query}')
