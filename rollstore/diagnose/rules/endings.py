"""Do endings fit what was drawn, and do the segments of a rollout follow each other?"""

from __future__ import annotations

from rollstore.diagnose.evidence import Evidence
from rollstore.diagnose.rules.rule import Found, Limits, of_segments, verdict

_STOPPED = "(ending_reason IN ('stop_token', 'stop_string') OR (ending_reason IS NULL AND ending = 'terminated'))"
_LAST = "ending IS DISTINCT FROM 'continued'"


def endings_fit(evidence: Evidence, limits: Limits) -> Found:
    """The ending agrees with the engine's finish reason, the request's limit, and its own reason."""
    return of_segments(
        evidence,
        problems={
            "length reached but stop": f"last_length = last_limit AND ({_STOPPED} OR last_finish = 'stop') "
            "AND last_stops IS DISTINCT FROM true",
            "engine said length, ending says stop": f"last_finish = 'length' AND {_STOPPED}",
            "engine said stop, reason says max_tokens": "last_finish = 'stop' AND ending_reason = 'max_tokens'",
            "reason against ending": "(ending = 'terminated' AND ending_reason IN ('engine_abort', 'cancelled')) OR "
            "(ending IN ('truncated', 'aborted') AND ending_reason IN ('stop_token', 'stop_string'))",
        },
        unknown={"no ending": "ending IS NULL OR ending = 'unknown'"},
        fine="endings fit what was drawn",
        among=_LAST,
    )


def segments_complete(evidence: Evidence, limits: Limits) -> Found:
    """Segments run 0, 1, ... without a gap, and all but the last are `continued`."""
    rollouts = """(SELECT rollout_id,
        max(segment) + 1 > count(*) AS gap,
        max(segment) FILTER (ending = 'continued') = max(segment) AS unfinished,
        min(segment) FILTER (ending IS DISTINCT FROM 'continued') < max(segment) AS two_ends
        FROM facts GROUP BY rollout_id)"""
    counts = evidence.one(
        'SELECT count(*) AS rollouts, count(*) FILTER (gap) AS "segments missing", '
        'count(*) FILTER (unfinished) AS "continued and never went on", '
        f'count(*) FILTER (two_ends) AS "went on after an ending" FROM {rollouts}'
    )
    wrong = {name: count for name, count in counts.items() if count and name != "rollouts"}
    if not wrong:
        return Found(verdict="ok", said="every rollout has all its segments", counts=counts)
    return Found(
        verdict=verdict(len(wrong), 0),
        said=", ".join(f"{name}: {count:,}" for name, count in wrong.items()) + f" of {counts['rollouts']:,} rollouts",
        counts=counts,
        examples=evidence.ids("gap OR unfinished OR two_ends", of=rollouts),
    )
