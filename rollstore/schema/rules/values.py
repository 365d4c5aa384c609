"""Single values that must fit one another: rewards, endings, versions, times, keys, forks, ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.schema.flat import Flat, Rows
from rollstore.schema.problem import Problem, at
from rollstore.schema.rules.spans import out_of_order


def time_order(rows: Rows) -> Iterator[Problem]:
    """requested_at <= started_at <= finished_at; written_at is another machine's clock and is not compared."""
    names = ("requested_at", "started_at", "finished_at")
    for early, late in ((0, 1), (1, 2), (0, 2)):
        before, after = rows.array(names[early]), rows.array(names[late])
        if before is not None and after is not None:
            for bad in out_of_order(before, after):
                yield from at(
                    names[late],
                    "time_order",
                    np.flatnonzero(bad),
                    lambda _, n=names[early]: f"a time before {n}",
                    "at or after it",
                )


def versions(rows: Rows) -> Iterator[Problem]:
    """Known versions lie within [weight_version_min, weight_version_max]."""
    low, high = rows.numbers("weight_version_min"), rows.numbers("weight_version_max")
    if low is not None and high is not None:
        bad = np.flatnonzero(low[1] & high[1] & (low[0] > high[0]))
        yield from at(
            "weight_version_min",
            "version_range",
            bad,
            lambda r: str(low[0][r]),
            lambda r: f"at most weight_version_max {high[0][r]}",
        )
    lists = rows.list("weight_versions")
    if lists is None:
        return
    values = lists.numpy()
    for bound, outside in ((low, np.less), (high, np.greater)):
        if bound is not None:
            bad = lists.known & bound[1][lists.rows] & outside(values, bound[0][lists.rows])
            yield from at(
                "weight_versions",
                "version_range",
                np.unique(lists.rows[bad]),
                lambda _: "a version outside the row's range",
                "within weight_version_min and weight_version_max",
            )


def reward(rows: Rows) -> Iterator[Problem]:
    """A reward is a number where, and only where, the status is scored; a missing score is never NaN or zero."""
    yield from _scored(rows, "reward", "reward_status")


def score(rows: Rows) -> Iterator[Problem]:
    """The same for scores; and at most one of span and position says what was judged."""
    lists = rows.list("values")
    if lists is not None:
        nan = np.isnan(lists.numpy(0.0))
        yield from at("values", "nan", np.unique(lists.rows[nan]), lambda _: "NaN", "a number, or null")
    yield from _scored(rows, "value", "status", or_list=lists)
    span, position = rows.array("span"), rows.array("position")
    if span is not None and position is not None:
        both = pc.and_(span.is_valid(), position.is_valid()).to_numpy(zero_copy_only=False)
        yield from at(
            "position", "two_targets", np.flatnonzero(both), lambda _: "a span and a position", "at most one of them"
        )


def _scored(rows: Rows, value: str, status: str, or_list: Flat | None = None) -> Iterator[Problem]:
    numbers = rows.numbers(value, missing=0.0)
    known = np.zeros(rows.count, bool) if numbers is None else numbers[1]
    if numbers is not None:
        nan = np.flatnonzero(np.isnan(numbers[0]))
        yield from at(value, "nan", nan, lambda _: "NaN", "a number, or null with a status that says why")
    statuses = rows.objects(status)
    scored = np.array([s == "scored" for s in statuses], bool)
    stray = np.flatnonzero(known & ~scored)
    yield from at(
        value, "not_scored", stray, lambda r: f"a value with {status} {statuses[r]}", f"null unless {status} is scored"
    )
    if or_list is not None:
        known = known | or_list.valid
    yield from at(
        value, "score_missing", np.flatnonzero(scored & ~known), lambda _: f"null with {status} scored", "a number"
    )


def ending(rows: Rows) -> Iterator[Problem]:
    """terminated: bootstrap false; truncated: true, false or null; continued, aborted, unknown or no ending: null."""
    flags = rows.numbers("bootstrap", missing=False)
    endings = np.array(rows.objects("ending"), object)
    known, value = (np.zeros(rows.count, bool),) * 2 if flags is None else (flags[1], flags[0])
    bad = (endings == "terminated") & ~(known & ~value)
    bad |= (endings != "terminated") & (endings != "truncated") & known
    shown = lambda r: f"{bool(value[r]) if known[r] else 'null'} with ending {endings[r]}"  # noqa: E731  one use, one line
    yield from at(
        "bootstrap", "ending_mismatch", np.flatnonzero(bad), shown, "terminated: false; truncated: any; otherwise null"
    )


def keys(rows: Rows) -> Iterator[Problem]:
    """Key, sample and recipe come together, and one run draws no noise twice in a step."""
    columns = [rows.array(n) for n in ("replay_key", "replay_sample", "noise")]
    known = [np.zeros(rows.count, bool) if c is None else c.is_valid().to_numpy(zero_copy_only=False) for c in columns]
    part = np.flatnonzero((known[0] | known[1] | known[2]) & ~(known[0] & known[1] & known[2]))
    yield from at(
        "replay_key", "incomplete_key", part, lambda _: "part of a key", "replay_key, replay_sample and noise together"
    )
    mask = rows.list("action_mask")
    keyed = np.flatnonzero(known[0] & known[1] & known[2])
    if mask is None or len(keyed) < 2 or columns[0] is None or columns[1] is None:
        return
    identity = zip(
        rows.objects("run_id"), rows.objects("step"), rows.objects("segment"),
        columns[0].to_pylist(), columns[1].to_pylist(), rows.objects("rollout_id"), strict=True,
    )  # fmt: skip
    everyone = list(identity)
    first: dict[Any, int] = {}
    values = mask.numpy(False)
    for row in keyed.tolist():
        other = first.setdefault(everyone[row][:5], row)
        if everyone[other][5] == everyone[row][5]:
            continue
        a, b = (values[mask.offsets[r] : mask.offsets[r + 1]] for r in (other, row))
        shared = min(len(a), len(b))
        if (a[:shared] & b[:shared]).any():
            yield from at(
                "replay_key",
                "noise_repeated",
                [row],
                lambda _, o=other: f"the key, sample, segment and positions of row {o}",
                "no noise twice in one step of a run",
            )


def fork(rows: Rows) -> Iterator[Problem]:
    """A fork names its parent and a position within its own tokens."""
    parent, position, tokens = rows.array("parent_rollout_id"), rows.numbers("fork_position"), rows.list("tokens")
    has_parent = np.zeros(rows.count, bool) if parent is None else parent.is_valid().to_numpy(zero_copy_only=False)
    has_position = np.zeros(rows.count, bool) if position is None else position[1]
    yield from at(
        "fork_position",
        "incomplete_fork",
        np.flatnonzero(has_parent != has_position),
        lambda _: "one of the two",
        "parent_rollout_id and fork_position together",
    )
    if position is not None and tokens is not None:
        beyond = np.flatnonzero(position[1] & (position[0] > tokens.lengths))
        yield from at(
            "fork_position",
            "out_of_range",
            beyond,
            lambda r: str(position[0][r]),
            lambda r: f"at most the {tokens.lengths[r]} tokens of the row",
        )


def vocabulary(rows: Rows) -> Iterator[Problem]:
    """An action, a head or a support id lies within the output layer; an observation may be anything."""
    size = rows.numbers("vocab_size")
    tokens, mask = rows.list("tokens"), rows.list("action_mask")
    if size is None or tokens is None or mask is None or (tokens.offsets != mask.offsets).any():
        return
    limit = np.where(size[1], size[0], np.iinfo(np.int32).max)
    drawn = mask.numpy(False)
    for name, lists, chosen in (
        ("tokens", tokens, drawn),
        ("head_tokens", rows.list("head_tokens"), None),
        ("support_tokens", rows.list("support_tokens"), None),
    ):
        if lists is not None:
            outside = lists.numpy() >= limit[lists.rows]
            outside = outside if chosen is None else outside & chosen
            yield from at(
                name,
                "outside_vocabulary",
                np.unique(lists.rows[outside]),
                lambda _: "an id past the output layer",
                lambda r: f"below vocab_size {limit[r]}",
            )


def repeated_id(rows: Rows) -> Iterator[Problem]:
    """One (rollout_id, segment) has one content. Equal rows are the same row said twice, and count once."""
    ids, segments = rows.objects("rollout_id"), rows.objects("segment")
    pairs = list(zip(ids, segments, strict=True))
    if len(set(pairs)) == len(pairs):
        return
    first: dict[Any, int] = {}
    ignored = [n for n in ("written_at", "written_by", "written_row") if n in rows.table.column_names]
    content = rows.table.drop_columns(ignored)
    for row, pair in enumerate(pairs):
        other = first.setdefault(pair, row)
        if other != row and not same_content(content.slice(other, 1), content.slice(row, 1)):
            yield from at(
                "rollout_id",
                "duplicate_id",
                [row],
                lambda r, o=other: f"{ids[r]!r} segment {segments[r]}, as row {o}, with other content",
                "one content for one id",
            )


def same_content(one: pa.Table, other: pa.Table) -> bool:
    """Whether two tables of one schema hold the same values, NaN equal to NaN."""
    return one.equals(other) or all(_same(a, b) for a, b in zip(one.columns, other.columns, strict=True))


def _same(a: pa.ChunkedArray, b: pa.ChunkedArray) -> bool:
    return a.equals(b) or repr(a.to_pylist()) == repr(b.to_pylist())
