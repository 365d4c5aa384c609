"""Which distributions are recorded, under which sampler, and are the log-probs such as a distribution can give?"""

from __future__ import annotations

from rollstore.diagnose.evidence import EXAMPLES, Evidence
from rollstore.diagnose.rules.rule import Found, Limits, of_segments

_DREW = "actions > 0"


def distributions(evidence: Evidence, limits: Limits) -> Found:
    """Every log-prob says of which distribution it is, and the one that drew can be had from it.

    The roles of evaluations and the trainer's own log-probs in `uses` are counted; those in `require` must be there.
    """
    found = of_segments(
        evidence,
        problems={
            "log-probs of no known kind": "logprobs IS NOT NULL AND of_kind < actions",
            "kind leaves out what drew": "logprobs IS NOT NULL AND undrawn > 0",
        },
        unknown={"no log-probs": "logprobs IS NULL"},
        fine="every log-prob is of a known distribution",
        among=_DREW,
    )
    kinds = evidence.rows(
        f"SELECT logprob_kind, count(*) FROM facts WHERE {_DREW} AND logprobs > 0 AND logprob_kind IS NOT NULL "
        "GROUP BY 1 ORDER BY 1"
    )
    roles = evidence.rows(
        "SELECT role, count(*) FROM evaluations WHERE role IS NOT NULL AND logprobs IS NOT NULL GROUP BY 1 ORDER BY 1"
    )
    current = evidence.one("SELECT count(*) AS n FROM uses WHERE logprobs IS NOT NULL")["n"]
    held = dict(kinds) | dict(roles) | ({"current": current} if current else {})
    counts = {**found.counts, **{f"segments with {name}": count for name, count in held.items()}}
    missing = [name for name in limits["require"] if name not in held]
    present = f"present: {', '.join(held) or 'none'}"
    if missing:
        said = f"required and absent: {', '.join(missing)}; {present}"
        return Found(verdict="problem", said=said, counts=counts, examples=found.examples)
    return Found(verdict=found.verdict, said=f"{found.said}; {present}", counts=counts, examples=found.examples)


def sampler_recorded(evidence: Evidence, limits: Limits) -> Found:
    """Every action names a sampler with a temperature, and the engine did what was asked."""
    return of_segments(
        evidence,
        problems={"actions without sampler": "sampled < actions", "sampler not honoured": "unhonoured > 0"},
        unknown={},
        fine="every action has its sampler",
        among=_DREW,
    )


def logprobs_above_zero(evidence: Evidence, limits: Limits) -> Found:
    """No log-prob is above zero by more than rounding."""
    return of_segments(
        evidence,
        problems={"log-probs above zero": "above_zero > 0"},
        unknown={"no log-probs": "coalesce(logprobs_known, 0) = 0"},
        fine="no log-prob is above zero",
        among=_DREW,
    )


def logprobs_missing(evidence: Evidence, limits: Limits) -> Found:
    """Every action that may be trained on has a log-prob."""
    found = of_segments(
        evidence,
        problems={
            "no log-probs": "logprobs IS NULL",
            "single ones unknown": "logprobs_known < logprobs",
            "NaN from the engine": "nan_logprob > 0",
        },
        unknown={},
        fine="every action has its log-prob",
        among="actions > 0 AND trained > 0",
    )
    unknown = evidence.one(f"SELECT coalesce(sum(actions - logprobs_known), 0) AS n FROM facts WHERE {_DREW}")["n"]
    counts = {**found.counts, "actions without one": int(unknown)}
    return Found(verdict=found.verdict, said=found.said, counts=counts, examples=found.examples)


def logprobs_floored(evidence: Evidence, limits: Limits) -> Found:
    """No log-prob is a stand-in such as -9999, and nothing was drawn that could not be."""
    return of_segments(
        evidence,
        problems={"stand-ins for minus infinity": "floored > 0", "drawn at minus infinity": "impossible > 0"},
        unknown={"no log-probs": "coalesce(logprobs_known, 0) = 0"},
        fine="no log-prob is a stand-in",
        among=_DREW,
    )


def duplicate_ids(evidence: Evidence, limits: Limits) -> Found:
    """One (rollout_id, segment) has one content, and one key of another table one row. Equal copies count once."""
    conflicts = evidence.repeats.conflicts
    counts = {"rollouts with two contents": len(conflicts), "equal copies": evidence.repeats.left_out.num_rows}
    examples = [id_ for id_, _ in conflicts[:EXAMPLES]]
    for table, key in _KEYS.items():
        query = f"FROM (SELECT rollout_id FROM {table} GROUP BY {key}, rollout_id HAVING count(*) > 1)"
        counts[f"keys of {table} twice"] = evidence.one(f"SELECT count(*) AS n {query}")["n"]
        if counts[f"keys of {table} twice"] and len(examples) < EXAMPLES:
            found = evidence.rows(f"SELECT DISTINCT rollout_id {query} ORDER BY 1 LIMIT {EXAMPLES - len(examples)}")
            examples += [id_ for (id_,) in found]
    wrong = {name: count for name, count in counts.items() if count and name != "equal copies"}
    said = ", ".join(f"{name}: {count:,}" for name, count in wrong.items())
    return Found(
        verdict="problem" if wrong else "ok",
        said=said or "no id has two contents",
        counts=counts,
        examples=tuple(examples),
    )


_KEYS = {
    "scores": 'segment, span, "position", scorer, scorer_version, setting, batch_company, repeat',
    "evaluations": "evaluation_id, run_id, segment",
    "uses": 'train_run, "attempt", train_step, segment, epoch',
}
"""What identifies a row of a table beside its rollout_id."""
