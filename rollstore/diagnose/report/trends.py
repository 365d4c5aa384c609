"""What changes from step to step: reward and length, endings, signal, and what the queue does to the data's age."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import sqrt
from typing import Any

from rollstore.diagnose.evidence import Evidence
from rollstore.diagnose.report import figures
from rollstore.diagnose.report.means import Mean, extent, fifth, first_and_last, grouped, keyed, mean_by, width
from rollstore.diagnose.report.section import Section, between, missing

_REWARD, _ENDINGS = "Reward and length by weight version", "Endings by step"
_SIGNAL, _QUEUE = "Signal by step", "Queue and lag by training step"

ENDINGS = ("terminated", "truncated", "aborted", "continued", "unknown")

_ENDED = """
    SELECT {key} AS key, count(*) AS n, {counts}
    FROM (SELECT step, CASE WHEN ending IN ({known}) THEN ending ELSE 'unknown' END AS ending FROM per_rollout)
    GROUP BY ALL ORDER BY key NULLS LAST"""

_GROUPS = """
    SELECT {key} AS key, count(*) AS n,
        count(*) FILTER (missing = 0 AND unscored = 0 AND scored > 1 AND NOT zero_variance) AS signal,
        count(*) FILTER (missing = 0 AND unscored = 0 AND (scored < 2 OR zero_variance)) AS none,
        count(*) FILTER (missing > 0 OR unscored > 0) AS incomplete
    FROM groups GROUP BY ALL ORDER BY key NULLS LAST"""

_WAITED = """
    SELECT {key} AS key, count(*) AS n, quantile_cont(before_queue, [0.1, 0.5, 0.9]) AS before,
        quantile_cont(in_queue, [0.1, 0.5, 0.9]) AS inside, quantile_cont(lag, [0.1, 0.5, 0.9]) AS lag
    FROM per_use GROUP BY ALL ORDER BY key"""


def rewards(found: Evidence) -> Section:
    """Mean reward and actions by the oldest weight version that drew."""
    low, high = extent(found, "per_rollout", "version_min")
    wide = width(low, high)
    key, part = keyed("version_min", low, wide), fifth("version_min", low, high)
    means, lengths = (mean_by(found, grouped(value, key)) for value in ("reward", "actions"))
    ends, long = (first_and_last(mean_by(found, grouped(value, part))) for value in ("reward", "actions"))
    if ends is None or long is None:
        return missing("reward", _REWARD, "fewer than two weight versions have rewards")
    says = (
        f"Mean reward goes from {_told(ends[0])} over the first fifth of versions {low} to {high} to {_told(ends[1])} "
        f"over the last; {_apart(*ends)}. Actions a rollout go from {_told(long[0])} to {_told(long[1])}"
    )
    of_length = {mean.key: mean for mean in lengths}
    rows = [
        (mean.key, mean.n, mean.mean, *mean.ends, of_length[mean.key].mean if mean.key in of_length else None)
        for mean in means
    ]
    return Section(
        name="reward",
        title=_REWARD,
        says=says + ".",
        columns=("version", "rollouts", "reward", "from", "to", "actions"),
        rows=rows,
        note=_together(wide, "versions"),
        draw=partial(figures.two_lines, means, lengths, x="oldest weight version", ys=("reward", "actions")),
    )


def endings(found: Evidence) -> Section:
    """The share of each ending, a rollout counted once."""
    low, high = extent(found, "per_rollout", "step")
    wide = width(low, high)
    counts = ", ".join(f"count(*) FILTER (ending = '{name}') AS {name}" for name in ENDINGS)
    known = ", ".join(f"'{name}'" for name in ENDINGS)
    rows = found.rows(_ENDED.format(key=keyed("step", low, wide), counts=counts, known=known))
    if not rows:
        return missing("endings", _ENDINGS, "there are no rollouts")
    total = sum(row[1] for row in rows)
    cut = ENDINGS.index("truncated") + 2
    says = f"{_share(sum(row[cut] for row in rows), total)} of {total:,} rollouts were truncated"
    return _by_step("endings", _ENDINGS, says + _first_and_last(rows, cut), "rollouts", ENDINGS, rows, wide)


def signal(found: Evidence) -> Section:
    """Of the prompt groups, those whose rewards differ, those whose rewards are the same, and those not whole."""
    low, high = extent(found, "groups", "step")
    wide = width(low, high)
    rows = found.rows(_GROUPS.format(key=keyed("step", low, wide)))
    if not rows:
        return missing("signal", _SIGNAL, "no rollout has a group_id")
    total, carrying = (sum(row[place] for row in rows) for place in (1, 2))
    says = f"{_share(carrying, total)} of {total:,} prompt groups carry signal (all scored, not all alike)"
    names = ("signal", "no variance", "incomplete or unscored")
    return _by_step("signal", _SIGNAL, says + _first_and_last(rows, 2), "groups", names, rows, wide)


def queue(found: Evidence) -> Section:
    """What rollouts waited for the trainer, and how many versions old they were at its step."""
    low, high = extent(found, "per_use", "train_step")
    wide = width(low, high)
    rows = found.rows(_WAITED.format(key=keyed("train_step", low, wide)))
    chosen = {"wait before, s": 2, "wait in queue, s": 3, "lag, versions": 4}
    nothing = (None, None, None)
    series = {
        name: [tuple(row[place] or nothing) for row in rows]
        for name, place in chosen.items()
        if any(row[place] is not None and row[place][1] is not None for row in rows)
    }
    if not series:
        return missing("queue", _QUEUE, "no use says when it was enqueued and consumed, or under which version")
    every = found.one(
        "SELECT count(*) AS n, quantile_cont(lag, [0.5, 0.9]) AS lag, quantile_cont(in_queue, [0.5, 0.9]) AS inside "
        "FROM per_use"
    )
    parts = [
        f"the median rollout {what.format(value[0])}, one in ten {more.format(value[1])} or more"
        for value, what, more in (
            (every["lag"], "was {:.3g} versions old at its step", "{:.3g}"),
            (every["inside"], "waited {:.3g} s in the queue", "{:.3g} s"),
        )
        if value is not None and value[0] is not None
    ]
    says = "; ".join(parts) or "only waits before the queue are known"
    columns = ["training step", "uses"]
    for name in series:
        columns += [f"{name}: p10", "p50", "p90"]
    told = [(row[0], row[1], *(end for values in series.values() for end in values[n])) for n, row in enumerate(rows)]
    return Section(
        name="queue",
        title=_QUEUE,
        says=f"Over {every['n']:,} uses, {says}.",
        columns=columns,
        rows=told,
        note=_together(wide, "steps"),
        draw=partial(figures.quantiles, [row[0] for row in rows], series, x="training step"),
    )


def _by_step(
    name: str, title: str, says: str, what: str, names: Sequence[str], rows: Sequence[Sequence[Any]], wide: int
) -> Section:
    """Shares of each step that add up to one. rows: (step, how many, the parts ...)."""
    keys = ["unknown" if row[0] is None else row[0] for row in rows]
    parts = {part: [row[place + 2] / row[1] for row in rows] for place, part in enumerate(names)}
    return Section(
        name=name,
        title=title,
        says=says + ".",
        columns=("step", what, *names),
        rows=rows,
        note=_together(wide, "steps"),
        draw=partial(figures.shares, keys, parts, x="step", y=f"share of {what}"),
    )


def _first_and_last(rows: Sequence[Sequence[Any]], place: int) -> str:
    """The share at `place` over the first and the last fifth of the rows, of (key, n, parts ...)."""
    if len(rows) < 2:
        return ""
    some = max(1, len(rows) // 5)
    first, last = (
        _share(sum(row[place] for row in piece), sum(row[1] for row in piece)) for piece in (rows[:some], rows[-some:])
    )
    return f": {first} over the first fifth of the steps, {last} over the last"


def _told(mean: Mean) -> str:
    return f"{mean.mean:.4g} ({between(mean.interval)})"


def _apart(first: Mean, last: Mean) -> str:
    if first.interval is None or last.interval is None:
        return "one of them rests on a single group, so what that is worth cannot be told"
    if first.interval[1] < last.interval[0] or last.interval[1] < first.interval[0]:
        return "the intervals do not overlap"
    return "the intervals overlap, so these two alone do not show a change"


def _share(part: int, whole: int) -> str:
    low, high = wilson(part, whole)
    return f"{part / whole:.1%} (95% {low:.1%} to {high:.1%})"


def wilson(part: int, whole: int) -> tuple[float, float]:
    """A 95% interval of a share (Wilson, JASA 1927)."""
    z2 = 1.959964**2
    middle = (part + z2 / 2) / (whole + z2)
    half = 1.959964 / (whole + z2) * sqrt(part * (whole - part) / whole + z2 / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def _together(wide: int, what: str) -> str:
    return "" if wide == 1 else f"{wide} neighbouring {what} share a point."
