"""Times of one clock are in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from rollstore.schema.flat import Rows
from rollstore.schema.problem import Problem, at
from rollstore.schema.rules.spans import out_of_order


def rollout_times(rows: Rows) -> Iterator[Problem]:
    """requested_at <= started_at <= finished_at; written_at is another machine's clock and is not compared."""
    yield from _in_order(rows, ("requested_at", "started_at", "finished_at"))


def use_times(rows: Rows) -> Iterator[Problem]:
    """enqueued_at <= consumed_at; step_started_at <= step_finished_at."""
    yield from _in_order(rows, ("enqueued_at", "consumed_at"))
    yield from _in_order(rows, ("step_started_at", "step_finished_at"))


def _in_order(rows: Rows, names: tuple[str, ...]) -> Iterator[Problem]:
    for early, late in combinations(names, 2):
        before, after = rows.array(early), rows.array(late)
        if before is not None and after is not None:
            yield from at(late, "time_order", out_of_order(before, after), f"a time before {early}", "at or after it")
