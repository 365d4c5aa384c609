"""Checks that look at more than one column. Each yields its problems; `RULES` lists them by table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rollstore.schema.flat import Rows
from rollstore.schema.problem import Problem
from rollstore.schema.rules import heads, lengths, spans, values

Rule = Callable[[Rows], Iterator[Problem]]

RULES: dict[str, list[Rule]] = {
    "rollouts": [
        lengths.lengths,
        lengths.position_zero,
        lengths.head_lengths,
        lengths.flat_counts,
        heads.heads,
        spans.spans,
        values.time_order,
        values.versions,
        values.reward,
        values.ending,
        values.keys,
        values.fork,
        values.vocabulary,
        values.repeated_id,
    ],
    "scores": [values.score],
    "evaluations": [lengths.evaluation],
    "uses": [],
}
