"""The SQL of the statistics: where time goes between a request and the step that used the rollout.

Two temporary tables, one row a rollout and one row a use, and queries over them with a condition {where}.
"""

from __future__ import annotations

ROLLOUTS = """
    CREATE OR REPLACE TEMP TABLE per_rollout AS
    WITH whole AS (
        SELECT rollout_id, any_value(environment) AS environment, any_value(engine) AS engine,
            arg_min(run_id, segment) AS run, arg_min(group_id, segment) AS group_id, arg_min(step, segment) AS step,
            any_value(prompt_id) AS prompt_id,
            sum(actions)::bigint AS actions, sum(trained)::bigint AS trainable, sum(tokens)::bigint AS tokens,
            min(requested_at) AS requested_at, min(started_at) AS started_at, max(finished_at) AS finished_at,
            sum(queue_seconds) AS queue_seconds, sum(tool_seconds) AS tool_seconds,
            sum(epoch(finished_at) - epoch(started_at)) AS busy,
            min(weight_version_min) AS version_min, max(weight_version_max) AS version_max,
            arg_max_null(reward, segment) AS reward, arg_max(reward_status, segment) AS reward_status,
            arg_max_null(ending, segment) AS ending, arg_max_null(ending_reason, segment) AS ending_reason
        FROM facts GROUP BY rollout_id),
    judged AS (
        SELECT rollout_id, max(created_at) AS scored_at, bool_or(status = 'timeout') AS scorer_timeout
        FROM scores WHERE span IS NULL AND "position" IS NULL GROUP BY rollout_id)
    SELECT w.*, j.scored_at, coalesce(j.scorer_timeout, false) AS scorer_timeout,
        coalesce(queue_seconds, epoch(started_at) - epoch(requested_at)) AS queued,
        busy - coalesce(tool_seconds, 0) AS generating,
        CASE WHEN group_id IS NOT NULL THEN
            epoch(max(finished_at) OVER (PARTITION BY run, step, group_id)) - epoch(finished_at) END AS group_wait,
        epoch(scored_at) - epoch(finished_at) AS scoring
    FROM whole w LEFT JOIN judged j USING (rollout_id)"""
"""One row a rollout: its sums over segments, and what it waited for. Seconds."""

# The version that the trainer had when a rollout entered its queue: that of the last use before, by any rollout.
USES = """
    CREATE OR REPLACE TEMP TABLE per_use AS
    WITH current AS (
        SELECT u.*, epoch(consumed_at) - epoch(enqueued_at) AS in_queue FROM uses u WHERE NOT superseded),
    published AS (
        SELECT train_run AS trainer, consumed_at AS at, max(weight_version) AS version
        FROM current WHERE consumed_at IS NOT NULL AND weight_version IS NOT NULL GROUP BY ALL)
    SELECT c.train_run, c.train_step, c.epoch, c.rollout_id, c.disposition, c.reason, c.tokens_trained,
        c.weight_version, c.step_started_at, c.step_finished_at, c.sync_seconds, c.enqueued_at, c.consumed_at,
        c.in_queue,
        epoch(c.enqueued_at) - epoch(r.finished_at) AS before_queue,
        c.weight_version - r.version_min AS lag,
        greatest(r.version_max, p.version) - r.version_min AS lag_before,
        c.weight_version - greatest(r.version_max, p.version) AS lag_in,
        r.actions, r.trainable, r.run, r.environment, r.engine, r.prompt_id, r.reward
    FROM current c JOIN per_rollout r USING (rollout_id)
    ASOF LEFT JOIN published p ON c.train_run = p.trainer AND c.enqueued_at >= p.at"""
"""One row a use that counts: its lag before and in the queue, in weight versions, and its waits, in seconds."""

WAITS = {
    "queue": ("per_rollout", "queued"),
    "generation": ("per_rollout", "generating"),
    "tools": ("per_rollout", "tool_seconds"),
    "group completion": ("per_rollout", "group_wait"),
    "scoring": ("per_rollout", "scoring"),
    "before the trainer's queue": ("per_use", "before_queue"),
    "in the trainer's queue": ("per_use", "in_queue"),
}
"""Wait -> (table, column), in the order of a rollout's life."""

LAGS = {"before the queue": "lag_before", "in the queue": "lag_in", "at the step": "lag"}

TOTALS = """
    SELECT count(*) AS rollouts, sum(actions)::bigint AS actions, sum(tokens)::bigint AS tokens,
        epoch(max(finished_at)) - epoch(min(coalesce(requested_at, started_at))) AS seconds,
        count(*) FILTER (ending_reason = 'time_limit' OR reward_status = 'timeout' OR scorer_timeout) AS timeouts,
        count(*) FILTER (ending = 'aborted') AS aborts
    FROM per_rollout WHERE {where}"""

USED = """
    SELECT count(DISTINCT rollout_id) AS rollouts,
        count(DISTINCT rollout_id) FILTER (disposition = 'trained') AS trained,
        count(*) FILTER (disposition = 'trained') AS passes,
        coalesce(sum(coalesce(tokens_trained, trainable)) FILTER (disposition = 'trained'), 0)::bigint AS loss_tokens,
        epoch(max(coalesce(step_finished_at, consumed_at))) - epoch(min(coalesce(step_started_at, consumed_at)))
            AS seconds
    FROM per_use WHERE {where}"""

REUSED = """
    SELECT count(*) AS n FROM (SELECT rollout_id FROM per_use WHERE {where} AND disposition = 'trained'
        GROUP BY rollout_id HAVING count(DISTINCT (train_run, train_step, "epoch")) > 1)"""


def means(relation: str) -> str:
    """SQL: (key, n, mean, clusters, squares) by key, as `intervals.clustered` takes them.

    relation: a query with columns key, "cluster", total and size, one row or more for each of the first two.
    """
    return f"""
    WITH parts AS ({relation}),
    means AS (SELECT key, sum(size)::bigint AS n, sum(total) / sum(size) AS mean FROM parts GROUP BY key),
    sums AS (SELECT key, "cluster", sum(total) AS total, sum(size) AS size FROM parts GROUP BY ALL)
    SELECT m.key, m.n, m.mean, count(*) AS clusters, sum((s.total - s.size * m.mean) ** 2) AS squares
    FROM means m JOIN sums s ON s.key IS NOT DISTINCT FROM m.key
    GROUP BY ALL ORDER BY m.key NULLS LAST"""


REWARDS = means("""
    SELECT version_min AS key, CASE WHEN group_id IS NULL THEN rollout_id
        ELSE concat_ws('/', coalesce(run, '-'), coalesce(step::varchar, '-'), group_id) END AS "cluster",
        sum(reward) AS total, count(*) AS size
    FROM per_rollout WHERE {where} AND isfinite(reward) GROUP BY ALL""")

# Lengths in powers of two: 0, 1, 2-3, 4-7, ...
DISCARDS = """
    SELECT {task} AS task, CASE WHEN actions > 0 THEN floor(log2(actions))::int ELSE -1 END AS size,
        count(*) AS n, count(*) FILTER (NOT kept) AS discarded, avg(reward) AS reward
    FROM (SELECT rollout_id, any_value(environment) AS environment, any_value(prompt_id) AS prompt_id,
              any_value(actions) AS actions, any_value(reward) AS reward, bool_or(disposition = 'trained') AS kept
          FROM per_use WHERE {where} GROUP BY rollout_id)
    GROUP BY ALL ORDER BY task NULLS LAST, size"""

STAGES = """
    WITH drawn AS (
        SELECT u.train_run, u.train_step, epoch(max(r.finished_at)) - epoch(min(r.started_at)) AS generation,
            epoch(max(r.scored_at)) - epoch(max(r.finished_at)) AS scoring,
            epoch(max(u.step_finished_at)) - epoch(min(u.step_started_at)) AS training, max(u.sync_seconds) AS sync
        FROM per_use u JOIN per_rollout r USING (rollout_id) WHERE {where} GROUP BY ALL)
    SELECT count(*) AS steps, median(generation) AS generation, median(greatest(scoring, 0)) AS scoring,
        median(training) AS training, median(sync) AS sync FROM drawn"""
