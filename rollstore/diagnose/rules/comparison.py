"""Can the runs of a store be compared: throughput, age of the data, and quality at equal time?"""

from __future__ import annotations

from typing import Any

from rollstore.diagnose.evidence import Evidence
from rollstore.diagnose.rules.rule import Found, Limits

_RUNS = """
    WITH runs AS (
        SELECT coalesce(run_id, '(no run)') AS run, min(coalesce(requested_at, started_at)) AS began,
            max(finished_at) AS ended, sum(actions)::bigint AS actions,
            count(*) FILTER (actions > 0 AND (started_at IS NULL OR finished_at IS NULL)) AS untimed
        FROM facts GROUP BY run_id),
    horizon AS (SELECT min(epoch(ended) - epoch(began)) AS seconds FROM runs),
    ages AS (
        SELECT coalesce(f.run_id, '(no run)') AS run, count(*) AS aged,
            avg(u.weight_version - f.weight_version_min) AS lag
        FROM uses u JOIN facts f ON u.rollout_id = f.rollout_id AND f.segment = coalesce(u.segment, 0)
        WHERE NOT u.superseded AND u.weight_version IS NOT NULL AND f.weight_version_min IS NOT NULL GROUP BY ALL),
    quality AS (
        SELECT r.run, count(f.reward) AS judged, avg(f.reward) AS reward, sum(f.actions)::bigint AS drawn
        FROM runs r JOIN facts f ON coalesce(f.run_id, '(no run)') = r.run, horizon h
        WHERE epoch(f.finished_at) <= epoch(r.began) + h.seconds GROUP BY r.run)
    SELECT run, actions, untimed, epoch(ended) - epoch(began) AS seconds, coalesce(aged, 0), lag, coalesce(judged, 0),
        reward, drawn, h.seconds
    FROM runs LEFT JOIN ages USING (run) LEFT JOIN quality USING (run), horizon h ORDER BY run"""


def equal_time(evidence: Evidence, limits: Limits) -> Found:
    """Where there are several runs, each has what a comparison needs.

    Throughput: start and end of every rollout that drew. Age: the trainer's weight version at each use, and the oldest
    that drew. Quality at equal time: rewards within the time that the shortest run took, counted from each run's own
    beginning. A run whose data are always of age 0 is synchronous.
    """
    runs = evidence.rows(_RUNS)
    counts: dict[str, int | float] = {"runs": len(runs)}
    if len(runs) < 2:
        return Found(verdict="cannot tell", said="one run: there is nothing to compare it with", counts=counts)
    lacking: dict[str, list[str]] = {}
    for run, *told in runs:
        missing, numbers = _judged(*told)
        counts |= {f"{run}: {name}": value for name, value in numbers.items()}
        if missing:
            lacking[run] = missing
    kinds = {"asynchronous" if (run[5] or 0) > 0 else "synchronous" for run in runs if run[4]}
    what = " and ".join(sorted(kinds)) or "unaged"
    if not lacking:
        said = f"{len(runs)} runs ({what}) have throughput, age and quality at {runs[0][-1]:.0f} s"
        return Found(verdict="ok", said=said, counts=counts)
    said = "; ".join(f"{run} lacks {', '.join(missing)}" for run, missing in list(lacking.items())[:3])
    return Found(verdict="problem", said=said, counts=counts, examples=tuple(lacking)[:5])


def _judged(
    actions: int, untimed: int, seconds: float | None, aged: int, lag: float | None, judged: int,
    reward: float | None, drawn: int | None, horizon: float | None,
) -> tuple[list[str], dict[str, Any]]:  # fmt: skip
    """(what a run lacks, what it has) of one row of `_RUNS`."""
    timed = not untimed and bool(seconds) and bool(actions)
    have = {"throughput": timed, "data age": aged > 0, "quality at equal time": judged > 0}
    numbers = {
        "tokens/s": actions / seconds if timed and seconds else None,
        "mean age": lag,
        "reward at equal time": reward,
        "tokens/s at equal time": drawn / horizon if drawn and horizon else None,
    }
    known = {name: round(value, 6) for name, value in numbers.items() if value is not None}
    return [name for name, there in have.items() if not there], known
