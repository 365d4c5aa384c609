"""Which weights, tokenizer and template made the tokens, and did the engine pass a check?"""

from __future__ import annotations

import msgspec

from rollstore.diagnose.evidence import EXAMPLES, Evidence
from rollstore.diagnose.rules.rule import Found, Limits, of_segments, verdict
from rollstore.replay.verdict import SCORER, WHOLE, fingerprint
from rollstore.schema import Engine


def versions_per_token(evidence: Evidence, limits: Limits) -> Found:
    """Every action has the version of its weights, from where the tokens came and not from the start or the end."""
    claimed = "weight_version_source IN ('start_end', 'read_at_completion')"
    return of_segments(
        evidence,
        problems={
            "only claimed, from the start and end of a request": f"coalesce({claimed}, false)",
            "a range without versions": "versions IS NULL AND weight_version_max IS NOT NULL "
            f"AND NOT coalesce({claimed}, false)",
            "single ones unknown": "versions_known < versions",
        },
        unknown={
            "no version at all": "versions IS NULL AND weight_version_max IS NULL",
            "nobody says how they are known": "versions_known = versions AND weight_version_source IS NULL",
        },
        fine="every action has the version that drew it",
        among="actions > 0",
    )


def template_constant(evidence: Evidence, limits: Limits) -> Found:
    """One run has one chat template."""
    return _constant(evidence, "chat_template", "template")


def tokenizer_constant(evidence: Evidence, limits: Limits) -> Found:
    """One run has one tokenizer."""
    return _constant(evidence, "tokenizer", "tokenizer")


def _constant(evidence: Evidence, column: str, what: str) -> Found:
    runs = f"""
        SELECT coalesce(run_id, '(no run)') AS run, count(DISTINCT {column}) AS kinds,
            count(*) - count({column}) AS unknown
        FROM facts GROUP BY run_id"""
    counts = evidence.one(
        "SELECT count(*) AS runs, count(*) FILTER (kinds > 1) AS changed, sum(unknown)::bigint AS unknown "
        f"FROM ({runs})"
    )
    found = verdict(counts["changed"], counts["unknown"] or 0)
    if found == "ok":
        return Found(verdict=found, said=f"one {what} in each of {counts['runs']} runs", counts=counts)
    chosen = "kinds > 1" if found == "problem" else "unknown > 0"
    said = f"runs in which the {what} changes: {counts['changed']}"
    if found == "cannot tell":
        said = f"segments that name no {what}: {counts['unknown']:,}"
    return Found(verdict=found, said=said, counts=counts, examples=evidence.ids(chosen, of=f"({runs})", name="run"))


def engines_gated(evidence: Evidence, limits: Limits) -> Found:
    """Every engine names a numerical check that it passed, and the store holds that verdict on that very engine."""
    used = evidence.rows("SELECT engine, count(*), min(rollout_id) FROM rollouts GROUP BY engine")
    if evidence.one("SELECT sum(engines) AS n FROM facts")["n"]:
        used += evidence.rows(
            "SELECT engine, count(*), min(rollout_id) FROM spans WHERE engine IS NOT NULL GROUP BY engine"
        )
    passed, failed = _gates(evidence)
    found: dict[str, dict[str, str]] = {"problem": {}, "cannot tell": {}}
    rows: dict[str, int] = dict.fromkeys(("passed", "no gate", "not passed", "unknown gate", "no engine"), 0)
    for told, count, first in used:
        engine = None if told is None else msgspec.convert(told, Engine)
        state = _state(engine, passed, failed)
        rows[state] += count
        if state == "passed":
            continue
        name = "an unnamed engine" if engine is None else " ".join(filter(None, (engine.name, engine.version)))
        found["problem" if state in ("no gate", "not passed") else "cannot tell"][first] = f"{name} ({state})"
    decided = verdict(len(found["problem"]), len(found["cannot tell"]))
    said = "every engine passed its gate"
    shown = {} if decided == "ok" else found[decided]
    if shown:
        said = ", ".join(dict.fromkeys(shown.values()))
    return Found(verdict=decided, said=said, counts=rows, examples=tuple(sorted(shown))[:EXAMPLES])


def _gates(evidence: Evidence) -> tuple[dict[str, str], set[str]]:
    """(gate id -> fingerprint of those that passed, the ids of the others)."""
    rows = evidence.rows(
        "SELECT rollout_id, scorer_version, value FROM scores WHERE scorer = ? AND setting = ?", SCORER, WHOLE
    )
    passed = {id_: version for id_, version, value in rows if value == 1.0}
    return passed, {id_ for id_, _, value in rows if value != 1.0}


def _state(engine: Engine | None, passed: dict[str, str], failed: set[str]) -> str:
    if engine is None:
        return "no engine"
    gate = None if engine.numerics is None else engine.numerics.gate
    if gate is None:
        return "no gate"
    if gate in passed:  # a gate of other numerics proves nothing about these
        return "passed" if passed[gate] == fingerprint(engine) else "not passed"
    return "not passed" if gate in failed else "unknown gate"
