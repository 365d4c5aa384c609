"""Single values that must fit one another: rewards, endings, versions, forks, ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from rollstore.schema.flat import Rows
from rollstore.schema.problem import Problem, at
from rollstore.schema.rules.lengths import same_extents


def versions(rows: Rows) -> Iterator[Problem]:
    """Known versions lie within [weight_version_min, weight_version_max]; one read late is only a newest."""
    low, high, lists = (
        rows.numbers("weight_version_min"),
        rows.numbers("weight_version_max"),
        rows.list("weight_versions"),
    )
    if low is not None and high is not None:
        yield from at(
            "weight_version_min", "version_range", np.flatnonzero(low[1] & high[1] & (low[0] > high[0])),
            lambda r: str(low[0][r]), lambda r: f"at most weight_version_max {high[0][r]}",
        )  # fmt: skip
    if lists is not None:
        values = lists.numpy()
        for bound, outside in ((low, np.less), (high, np.greater)):
            if bound is not None:
                limit, bounded = (np.repeat(side, lists.lengths) for side in bound)
                bad = np.flatnonzero(lists.known & bounded & outside(values, limit))
                wanted = "within weight_version_min and weight_version_max"
                yield from at("weight_versions", "version_range", lists.row_of(bad), "a version outside", wanted)
    if rows.array("weight_version_source") is not None:
        late = np.array([word == "read_at_completion" for word in rows.objects("weight_version_source")], bool)
        told = np.zeros(rows.count, bool) if low is None else low[1].copy()
        if lists is not None:
            told |= lists.totals(lists.known) > 0
        wanted = "only weight_version_max: what was read afterwards is no version of single actions"
        yield from at(
            "weight_version_source", "version_source", np.flatnonzero(late & told), "read_at_completion", wanted
        )


def reward(rows: Rows) -> Iterator[Problem]:
    """A reward is a number where, and only where, the status is scored; a missing score is never zero."""
    yield from _scored(rows, "reward", "reward_status", rows.known("reward"))


def score(rows: Rows) -> Iterator[Problem]:
    """The same for scores, one or dense; and at most one of span and position says what was judged."""
    yield from _scored(rows, "value", "status", rows.known("value") | rows.known("values"))
    both = np.flatnonzero(rows.known("span") & rows.known("position"))
    yield from at("position", "two_targets", both, "a span and a position", "at most one of them")


def _scored(rows: Rows, value: str, status: str, known: Any) -> Iterator[Problem]:
    if not known.any() and rows.array(status) is None:
        return
    statuses = rows.objects(status)
    scored = np.array([word == "scored" for word in statuses], bool)
    found = lambda r: f"a value with {status} {statuses[r]}"  # noqa: E731  one use, one line
    yield from at(value, "not_scored", np.flatnonzero(known & ~scored), found, f"null unless {status} is scored")
    yield from at(value, "score_missing", np.flatnonzero(scored & ~known), f"null with {status} scored", "a number")


def ending(rows: Rows) -> Iterator[Problem]:
    """terminated: bootstrap false; truncated: true, false or null; continued, aborted, unknown or no ending: null."""
    if rows.array("ending") is None and rows.array("bootstrap") is None:
        return
    endings, goes_on = rows.objects("ending"), rows.objects("bootstrap")
    allowed = {"terminated": (False,), "truncated": (True, False, None)}
    bad = [n for n in range(rows.count) if goes_on[n] not in allowed.get(endings[n], (None,))]
    shown = lambda r: f"{goes_on[r]} with ending {endings[r]}"  # noqa: E731  one use, one line
    yield from at("bootstrap", "ending_mismatch", bad, shown, "terminated: false; truncated: any; otherwise null")


def fork(rows: Rows) -> Iterator[Problem]:
    """A fork names its parent and a position within its own tokens."""
    position, tokens = rows.numbers("fork_position"), rows.list("tokens")
    odd = np.flatnonzero(rows.known("parent_rollout_id") != rows.known("fork_position"))
    wanted = "parent_rollout_id and fork_position together"
    yield from at("fork_position", "incomplete_fork", odd, "one of the two", wanted)
    if position is not None and tokens is not None:
        beyond = np.flatnonzero(position[1] & (position[0] > tokens.lengths))
        wanted = lambda r: f"at most the {tokens.lengths[r]} tokens of the row"  # noqa: E731  one use, one line
        yield from at("fork_position", "out_of_range", beyond, lambda r: str(position[0][r]), wanted)


def vocabulary(rows: Rows) -> Iterator[Problem]:
    """An action, a head or a support id lies within the output layer; an observation may be anything."""
    size, tokens, mask = rows.numbers("vocab_size"), rows.list("tokens"), rows.list("action_mask")
    if size is None or tokens is None or mask is None or not same_extents(tokens, mask):
        return
    limit = np.where(size[1], size[0], np.iinfo(np.int32).max)
    for name in ("tokens", "head_tokens", "support_tokens"):
        lists = rows.list(name)
        if lists is None:
            continue
        outside = lists.numpy() >= np.repeat(limit, lists.lengths)
        if name == "tokens":
            outside &= rows.drawn
        owners = lists.row_of(np.flatnonzero(outside))
        wanted = lambda r: f"below vocab_size {limit[r]}"  # noqa: E731  one use, one line
        yield from at(name, "outside_vocabulary", owners, "an id past the output layer", wanted)


def repeated_id(rows: Rows) -> Iterator[Problem]:
    """One (rollout_id, segment) has one content. Equal rows are the same row said twice, and count once."""
    ids, segments = rows.objects("rollout_id"), rows.objects("segment")
    pairs = list(zip(ids, segments, strict=True))
    if len(set(pairs)) == len(pairs):
        return
    first: dict[Any, int] = {}
    others = {row: other for row, pair in enumerate(pairs) if (other := first.setdefault(pair, row)) != row}
    content = [array for name in rows.names if name not in _NOT_CONTENT and (array := rows.array(name)) is not None]
    differing = [row for row, other in others.items() if not all(_same(array, other, row) for array in content)]
    yield from at(
        "rollout_id", "duplicate_id", differing,
        lambda r: f"{ids[r]!r} segment {segments[r]}, as row {others[r]}, with other content",
        "one content for one id",
    )  # fmt: skip


_NOT_CONTENT = {"written_at", "written_by", "written_row"}


def _same(array: pa.Array, one: int, other: int) -> bool:
    """Whether two rows hold the same, NaN equal to NaN."""
    a, b = array.slice(one, 1), array.slice(other, 1)
    try:
        return a.equals(b) or repr(a.to_pylist()) == repr(b.to_pylist())
    except (OverflowError, ValueError):  # a time that Python cannot hold: a problem of its own
        return True
