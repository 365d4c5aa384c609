"""Have a missing score, a broken tool, a failed task and a cut become the same zero?"""

from __future__ import annotations

from rollstore.diagnose.evidence import EXAMPLES, Evidence
from rollstore.diagnose.rules.rule import Found, Limits, verdict

NEVER_ZERO = ("unscored", "tool failure", "aborted")
"""Causes that say nothing about the task: a reward of zero for one of them is a missing score."""

# `failed`: judges that looked at the rollout, and none of them gave a score.
_CAUSES = """
    CREATE OR REPLACE TEMP TABLE zero_causes AS
    SELECT f.rollout_id, f.reward,
        CASE WHEN failed.rollout_id IS NOT NULL THEN 'unscored'
             WHEN ending_reason = 'tool_error' THEN 'tool failure'
             WHEN ending = 'aborted' OR ending_reason IN ('engine_abort', 'cancelled') THEN 'aborted'
             WHEN ending = 'truncated' AND bootstrap IS DISTINCT FROM false THEN 'truncation'
             WHEN ending IS NULL OR ending = 'unknown' THEN 'ending unknown'
             ELSE 'task failure' END AS cause
    FROM facts f LEFT JOIN (
        SELECT rollout_id FROM scores WHERE segment IS NULL AND span IS NULL AND "position" IS NULL
        GROUP BY rollout_id HAVING count(*) FILTER (status = 'scored') = 0) failed USING (rollout_id)
    WHERE reward IS NOT NULL"""


def zero_rewards(evidence: Evidence, limits: Limits) -> Found:
    """A zero means a failed task and nothing else.

    Truncated rollouts are a problem where all of them have the zero of failed tasks: then the reward does not judge
    them. A limit that belongs to the task has bootstrap false and counts as task.
    """
    evidence.connection.execute(_CAUSES)
    table = evidence.rows("SELECT cause, count(*), count(*) FILTER (reward = 0) FROM zero_causes GROUP BY cause")
    scored = {cause: total for cause, total, _ in table}
    zeros = {cause: zero for cause, _, zero in table if zero}
    statuses = evidence.rows(
        "SELECT coalesce(reward_status, 'no status'), count(*) FROM facts WHERE reward IS NULL "
        "AND reward_status IS DISTINCT FROM 'on_final_segment' GROUP BY 1 ORDER BY 1"
    )
    counts = {f"zero: {cause}": zeros[cause] for cause in sorted(zeros)}
    counts |= {f"no reward: {status}": count for status, count in statuses}
    if not scored:
        return Found(verdict="cannot tell", said="no rollout has a reward", counts=counts)
    wrong = [cause for cause in NEVER_ZERO if zeros.get(cause)]
    if zeros.get("task failure") and zeros.get("truncation") == scored.get("truncation", 0) > 0:
        wrong.append("truncation")
    unknown = zeros.get("ending unknown", 0)
    found = verdict(len(wrong), unknown)
    said = "every reward of zero is a task that was over and failed"
    if wrong:
        said = "the same zero stands for " + ", ".join(f"{cause} ({zeros[cause]:,})" for cause in wrong)
        said += f" and for failed tasks ({zeros['task failure']:,})" if zeros.get("task failure") else ""
    elif unknown:
        said = f"{unknown:,} zeros of rollouts that do not say how they ended"
    shown = wrong or (["ending unknown"] if unknown else [])
    named = ", ".join(f"'{cause}'" for cause in shown)
    query = f"reward = 0 AND cause IN ({named})"
    examples = evidence.ids(query, of="zero_causes", most=EXAMPLES) if shown else ()
    return Found(verdict=found, said=said, counts=counts, examples=examples)
