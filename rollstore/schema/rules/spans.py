"""Spans: a partition of the tokens that agrees with the action mask, and what they override of the row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.schema.flat import Bools, Flat, Ints, Rows
from rollstore.schema.problem import Problem, at
from rollstore.schema.rollouts import LOGPROB_KINDS
from rollstore.schema.rules.lengths import same_extents


@dataclass(frozen=True)
class Partition:
    """The spans of all rows, one after another; `whole` are the rows whose spans cut their tokens without a gap."""

    lists: Flat
    start: Ints
    length: Ints
    whole: Bools
    """bool [rows]"""

    def tokens(self, spans: npt.NDArray[Any], tokens: Flat) -> tuple[Ints, Ints]:
        """First token of some spans of whole rows, and the one after the last, counted over all rows."""
        begin = tokens.offsets[self.lists.rows[spans]] + self.start[spans]
        return begin, begin + self.length[spans]


def partition(rows: Rows) -> Partition | None:
    """The spans, or None where there are none, or the tokens and their mask do not fit."""
    lists, tokens, mask = rows.list("spans"), rows.list("tokens"), rows.list("action_mask")
    if lists is None or tokens is None or mask is None or not same_extents(tokens, mask):
        return None
    fields = rows.children("spans")
    start, length = (_ints(fields[name], -1) for name in ("start", "length"))
    wanted = np.zeros(len(start), np.int64)
    wanted[1:] = (start + length)[:-1]
    wanted[lists.offsets[:-1][lists.lengths > 0]] = 0
    whole = lists.totals((start != wanted) | (length < 0)) == 0
    whole &= lists.valid & (lists.totals(length) == tokens.lengths)
    return Partition(lists, start, length, whole)


def _ints(array: pa.Array, missing: int) -> Ints:
    filled = array.fill_null(missing) if array.null_count else array
    return filled.to_numpy(zero_copy_only=False).astype(np.int64)


def _bools(array: pa.Array) -> Bools:
    filled = array.fill_null(False) if array.null_count else array
    return filled.to_numpy(zero_copy_only=False)


def spans(rows: Rows) -> Iterator[Problem]:
    """Spans partition the tokens, agree with the action mask, and name samplers that are there."""
    cut, tokens = partition(rows), rows.list("tokens")
    if cut is None or tokens is None:
        return
    lists, fields = cut.lists, rows.children("spans")
    covered = lists.totals(cut.length)
    yield from at(
        "spans", "not_a_partition", np.flatnonzero(lists.valid & ~cut.whole),
        lambda r: f"spans over {covered[r]} tokens",
        lambda r: f"each of the {tokens.lengths[r]} tokens in one span, in order",
    )  # fmt: skip
    is_action, origin = _bools(fields["is_action"]), fields["origin"]
    if origin.null_count < len(origin):
        odd = np.flatnonzero(
            _bools(pc.not_equal(pc.equal(origin, pa.scalar("sampled", pa.string())), pa.array(is_action)))
        )
        what, wanted = "an origin that does not fit is_action", "sampled for actions, another origin for the rest"
        yield from at("spans.origin", "origin_mismatch", lists.row_of(odd), what, wanted)
    samplers, named = rows.list("samplers"), fields["sampler"]
    if named.null_count < len(named):
        index = _ints(named, -1)
        available = np.zeros(rows.count, np.int64) if samplers is None else samplers.lengths
        beyond = np.flatnonzero(index >= available[lists.rows])
        wanted = lambda r: f"an index below {available[r]}"  # noqa: E731  one use, one line
        yield from at("spans.sampler", "no_such_sampler", lists.row_of(beyond), "an index past the samplers", wanted)
    inside = np.flatnonzero(cut.whole[lists.rows])
    begin, end = cut.tokens(inside, tokens)
    drawn = rows.drawn_before[end] - rows.drawn_before[begin]
    wrong = inside[drawn != np.where(is_action[inside], end - begin, 0)]
    what, wanted = "a span that disagrees with action_mask", "is_action true over actions only, false over none"
    yield from at("spans.is_action", "mask_mismatch", lists.row_of(wrong), what, wanted)
    late = out_of_order(fields["started_at"], fields["finished_at"])
    yield from at("spans.finished_at", "time_order", lists.row_of(late), "a time before started_at", "at or after it")


def out_of_order(before: pa.Array, after: pa.Array) -> npt.NDArray[np.int64]:
    """Where the second time is before the first; a null is in order with everything."""
    if before.null_count == len(before) or after.null_count == len(after):
        return np.zeros(0, np.int64)
    return np.flatnonzero(_bools(pc.less(after, before)))


def kind_by_action(rows: Rows, name: str) -> npt.NDArray[np.int8] | None:
    """int8 [actions]: the kind of each action's log-prob or head, a span's before the row's; -1 where not known.

    None where no action has one.
    """
    codes = {word: code for code, word in enumerate(LOGPROB_KINDS) if word != "unknown"}
    of_row = np.array([codes.get(word, -1) for word in rows.objects(name)], np.int8)
    cut, tokens = partition(rows) if name in rows.overridden else None, rows.list("tokens")
    kinds = np.repeat(of_row, rows.actions)
    if cut is not None and tokens is not None:
        words = rows.children("spans")[name].to_pylist()
        own = [n for n, word in enumerate(words) if word is not None and cut.whole[cut.lists.rows[n]]]
        for span in own:
            begin, end = cut.tokens(np.array([span]), tokens)
            kinds[rows.drawn_before[begin[0]] : rows.drawn_before[end[0]]] = codes.get(words[span], -1)
    return kinds if (kinds >= 0).any() else None
