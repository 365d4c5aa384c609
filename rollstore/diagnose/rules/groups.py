"""Are prompt groups complete, and do they carry signal? A rollout counts once, however many segments it has."""

from __future__ import annotations

from rollstore.diagnose.evidence import Evidence
from rollstore.diagnose.rules.rule import Found, Limits, verdict

GROUPS = """(
    SELECT concat_ws('/', coalesce(run_id, '-'), coalesce(step::varchar, '-'), group_id) AS name,
        max(size) AS size, min(size) AS least_size, count(*) AS present,
        count(reward) AS scored, min(reward) AS least, max(reward) AS most,
        stddev_samp(reward) FILTER (isfinite(reward)) AS deviation
    FROM (SELECT arg_min(run_id, segment) AS run_id, arg_min(step, segment) AS step,
              arg_min(group_id, segment) AS group_id, max(group_size) AS size, arg_max_null(reward, segment) AS reward
          FROM facts GROUP BY rollout_id)
    WHERE group_id IS NOT NULL
    GROUP BY run_id, step, group_id)"""


def groups_complete(evidence: Evidence, limits: Limits) -> Found:
    """Every group has the members that were asked for, and all of them have a reward."""
    conditions = {
        "members missing": "present < size",
        "members too many": "present > size",
        "members that name other sizes": "least_size < size",
        "members without reward": "scored < present",
    }
    return _of_groups(evidence, conditions, {"size unknown": "size IS NULL"}, "every group is complete and scored")


def groups_variance(evidence: Evidence, limits: Limits) -> Found:
    """The share of scored groups whose rewards are all equal, or differ by less than `floor`, is at most `most`."""
    floor, most = limits["floor"], limits["most"]
    counts = evidence.one(f"""
        SELECT count(*) AS groups, count(*) FILTER (scored > 1) AS compared,
            count(*) FILTER (scored > 1 AND least = most) AS "all equal",
            count(*) FILTER (scored > 1 AND least < most AND deviation < {floor!r}) AS "below the floor",
            count(*) FILTER (scored = 1) AS "one scored member" FROM {GROUPS}""")
    flat = counts["all equal"] + counts["below the floor"]
    if not counts["compared"]:
        return Found(verdict="cannot tell", said="no group with two rewards", counts=counts)
    share = flat / counts["compared"]
    counts["share without signal"] = round(share, 6)
    said = f"{flat:,} of {counts['compared']:,} groups carry no signal ({share:.0%}, at most {most:.0%})"
    if share <= most:
        return Found(verdict="ok", said=said, counts=counts)
    flat_ones = f"scored > 1 AND (least = most OR deviation < {floor!r})"
    return Found(verdict="problem", said=said, counts=counts, examples=evidence.ids(flat_ones, of=GROUPS, name="name"))


def _of_groups(evidence: Evidence, problems: dict[str, str], unknown: dict[str, str], fine: str) -> Found:
    conditions = {**problems, **unknown}
    chosen = ", ".join(f'count(*) FILTER ({condition}) AS "{name}"' for name, condition in conditions.items())
    counts = evidence.one(f"SELECT count(*) AS groups, {chosen} FROM {GROUPS}")
    if not counts["groups"]:
        return Found(verdict="cannot tell", said="no rollout is in a group", counts=counts)
    found = verdict(sum(counts[name] for name in problems), sum(counts[name] for name in unknown))
    if found == "ok":
        return Found(verdict=found, said=fine, counts=counts)
    worst = [name for name in (problems if found == "problem" else unknown) if counts[name]]
    where = " OR ".join(f"({conditions[name]})" for name in worst)
    said = ", ".join(f"{name}: {counts[name]:,}" for name in worst) + f" of {counts['groups']:,} groups"
    return Found(verdict=found, said=said, counts=counts, examples=evidence.ids(where, of=GROUPS, name="name"))
