"""Checks that look at more than one column. Each yields its problems; `RULES` lists them by table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rollstore.schema.flat import Rows
from rollstore.schema.problem import Problem
from rollstore.schema.rules import evaluations, heads, keys, lengths, spans, times, values

Rule = Callable[[Rows], Iterator[Problem]]

RULES: dict[str, list[Rule]] = {
    "rollouts": [
        lengths.lengths,
        lengths.position_zero,
        lengths.head_lengths,
        lengths.flat_counts,
        lengths.routing,
        heads.heads,
        heads.support,
        spans.spans,
        times.rollout_times,
        values.versions,
        values.reward,
        values.ending,
        keys.keys,
        values.fork,
        values.vocabulary,
        values.repeated_id,
    ],
    "scores": [values.score],
    "evaluations": [evaluations.evaluation],
    "uses": [evaluations.use, times.use_times],
}
