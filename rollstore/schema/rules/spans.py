"""Spans: a partition of the tokens that agrees with the action mask."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.schema.flat import Rows
from rollstore.schema.problem import Problem, at
from rollstore.schema.rules.lengths import totals


def spans(rows: Rows) -> Iterator[Problem]:
    """Spans partition the tokens, agree with the action mask, and name samplers that are there."""
    lists, tokens, mask = rows.list("spans"), rows.list("tokens"), rows.list("action_mask")
    if lists is None or tokens is None or mask is None or (tokens.offsets != mask.offsets).any():
        return
    fields = dict(zip([f.name for f in lists.values.type], lists.values.flatten(), strict=True))
    start, length = (
        fields[n].fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64) for n in ("start", "length")
    )
    wanted_start = np.zeros(len(start), np.int64)
    wanted_start[1:] = (start + length)[:-1]
    firsts = lists.offsets[:-1][lists.lengths > 0]
    wanted_start[firsts] = 0
    broken = np.unique(lists.rows[(start != wanted_start) | (length < 0)])
    short = np.flatnonzero(lists.valid & (totals(lists, length) != tokens.lengths))
    broken = np.union1d(broken, short)
    covered = totals(lists, length)
    yield from at(
        "spans",
        "not_a_partition",
        broken,
        lambda r: f"spans over {covered[r]} tokens",
        lambda r: f"each of the {tokens.lengths[r]} tokens in one span, in order",
    )
    is_action = fields["is_action"].fill_null(False).to_numpy(zero_copy_only=False)
    origin = fields["origin"]
    drawn = pc.equal(origin, "sampled").fill_null(False).to_numpy(zero_copy_only=False)
    odd = (origin.is_valid().to_numpy(zero_copy_only=False)) & (drawn != is_action)
    yield from at(
        "spans",
        "origin_mismatch",
        np.unique(lists.rows[odd]),
        lambda _: "an origin that does not fit is_action",
        "sampled for actions, another origin for the rest",
    )
    sampler = fields["sampler"].fill_null(-1).to_numpy(zero_copy_only=False)
    samplers = rows.list("samplers")
    available = np.zeros(rows.count, np.int64) if samplers is None else samplers.lengths
    beyond = np.unique(lists.rows[sampler >= available[lists.rows]])
    yield from at(
        "spans", "no_such_sampler", beyond, lambda _: "a sampler index past the end", lambda r: f"below {available[r]}"
    )
    sound = ~np.isin(lists.rows, broken)
    begin = mask.offsets[lists.rows[sound]] + start[sound]
    sums = np.zeros(len(mask.values) + 1, np.int64)
    np.cumsum(mask.numpy(False), out=sums[1:])
    inside = sums[begin + length[sound]] - sums[begin]
    wrong = inside != np.where(is_action[sound], length[sound], 0)
    yield from at(
        "spans",
        "mask_mismatch",
        np.unique(lists.rows[sound][wrong]),
        lambda _: "a span that disagrees with action_mask",
        "all actions or none",
    )
    for bad in out_of_order(fields["started_at"], fields["finished_at"]):
        yield from at(
            "spans.finished_at",
            "time_order",
            np.unique(lists.rows[bad]),
            lambda _: "a time before started_at",
            "at or after it",
        )


def out_of_order(before: pa.Array, after: pa.Array) -> Iterator[npt.NDArray[np.bool_]]:
    bad = pc.less(after, before).fill_null(False).to_numpy(zero_copy_only=False)
    if bad.any():
        yield bad
