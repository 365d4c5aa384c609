"""Means with intervals whose values come in clusters, by a key; and keys wide enough that a plot can show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollstore.diagnose.evidence import Evidence
from rollstore.diagnose.intervals import clustered
from rollstore.diagnose.report.section import Interval
from rollstore.diagnose.waits import means

POINTS = 200
"""So many points of a line at most: neighbouring steps share one beyond that."""


@dataclass(frozen=True, kw_only=True)
class Mean:
    """Of `n` values with one key (None: not known)."""

    key: int | None
    n: int
    mean: float
    clusters: int
    """Prompt groups or rollouts that the values come from."""
    interval: Interval
    """95%; None with one cluster."""

    @property
    def ends(self) -> tuple[float | None, float | None]:
        return (None, None) if self.interval is None else self.interval


def grouped(value: str, key: str) -> str:
    """SQL of a column of the rollouts by a key, with prompt groups as clusters. Values that are not finite are none."""
    return f"""
    SELECT {key} AS key, {value}::double AS value, CASE WHEN group_id IS NULL THEN rollout_id
        ELSE concat_ws('/', coalesce(run, '-'), coalesce(step::varchar, '-'), group_id) END AS "cluster"
    FROM per_rollout WHERE isfinite({value}::double)"""


def mean_by(found: Evidence, values: str, *, total: str = "value", size: str = "1") -> tuple[Mean, ...]:
    """Means by key. values: a query with `key`, `cluster`, and the columns that `total` and `size` are made of."""
    relation = f'SELECT key, "cluster", sum({total})::double AS total, sum({size})::double AS size FROM ({values}) '
    rows = found.rows(means(relation + "GROUP BY ALL HAVING sum(" + size + ") > 0"))
    return tuple(
        Mean(
            key=None if key is None else int(key), n=int(n), mean=mean, clusters=clusters,
            interval=clustered(mean, n, clusters, squares),
        )
        for key, n, mean, clusters, squares in rows
    )  # fmt: skip


def extent(found: Evidence, table: str, column: str) -> tuple[int, int]:
    """The least and the greatest value of a column of whole numbers; (0, 0) where it has none."""
    ends = found.one(f"SELECT min({column}) AS low, max({column}) AS high FROM {table}")
    return (0, 0) if ends["low"] is None else (int(ends["low"]), int(ends["high"]))


def width(low: int, high: int) -> int:
    """How many neighbouring whole numbers share a point."""
    return (high - low) // POINTS + 1


def keyed(column: str, low: int, wide: int) -> str:
    """SQL of the first number of the point that a column's value falls into."""
    return column if wide == 1 else f"({column} - {low}) // {wide} * {wide} + {low}"


def fifth(column: str, low: int, high: int) -> str:
    """SQL of 0 to 4: in which fifth of low to high a column's value lies."""
    return f"({column} - {low}) * 5 // {high - low + 1}"


def first_and_last(found: Sequence[Mean]) -> tuple[Mean, Mean] | None:
    """The means of the least and the greatest key that is known; None where there is only one."""
    known = [mean for mean in found if mean.key is not None]
    return (known[0], known[-1]) if len(known) > 1 else None
