"""Heads and supports: distinct ids, falling log-probs, a mass of at most one, and agreement with the drawn token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollstore.schema.flat import Bools, Flat, Ints, Rows, running_sum
from rollstore.schema.problem import Kind, Problem, at, first_of_each
from rollstore.schema.rules.lengths import entry_counts, same_extents
from rollstore.schema.rules.spans import kind_by_action

HEAD_MASS_TOLERANCE = 1e-2
"""A head's probabilities may sum to at most 1 + this: room for log-probs that were rounded to bfloat16."""

HEAD_MATCH_TOLERANCE = 1e-2
"""Where the drawn id is in a head of the same kind, the two log-probs may differ by this many nats."""

STAND_IN = -9999.0
"""Engines send this, or less, in place of minus infinity."""


@dataclass(frozen=True)
class _Sets:
    """Ids that stand in sets, one an action, flat over all of them."""

    lists: Flat
    ids: npt.NDArray[np.int32]
    ends: Ints
    """[actions + 1]: where each action's entries begin and end."""

    def starts(self) -> Bools:
        """bool [entries]: the first entry of an action."""
        first = np.zeros(len(self.ids), bool)
        begin = self.ends[:-1]
        first[begin[begin < self.ends[1:]]] = True
        return first

    def rows(self, entries: npt.NDArray[np.int64]) -> Ints:
        """The row of each of some entries."""
        return self.lists.row_of(entries)


def _sets(rows: Rows, actions: Ints, tokens: str, counts: str, size: str | None) -> _Sets | None:
    """The sets, or None where there is none or their lengths are off (which the rules on lengths report)."""
    lists = rows.list(tokens)
    if lists is None or not len(lists.values) or lists.values.null_count:
        return None
    per_action = entry_counts(rows, actions, counts, size)
    if per_action is None or (len(per_action) and per_action.min() < 0):
        return None
    owned = np.repeat(lists.valid, actions)
    ends = running_sum(np.where(owned, per_action, 0))
    if (ends[running_sum(actions)] != lists.offsets).any():
        return None
    return _Sets(lists, lists.numpy(), ends)


def _duplicates(sets: _Sets, column: str, kind: Kind, where: str) -> Iterator[Problem]:
    """Ids that stand twice in one set. A sort of (action, id) pairs, which one 64-bit number holds."""
    pairs = np.repeat(np.arange(len(sets.ends) - 1) << 32, np.diff(sets.ends))
    pairs |= sets.ids
    pairs.sort()
    twice = pairs[1:][pairs[1:] == pairs[:-1]]
    if len(twice):
        rows = sets.rows(sets.ends[twice >> 32])
        first = first_of_each(rows, (twice & 0xFFFFFFFF).tolist())
        yield from at(column, kind, rows, lambda r: f"id {first[r]} twice in one {where}", "distinct ids")


def heads(rows: Rows) -> Iterator[Problem]:
    """Within an action of a rollout: what `_head` says, and the drawn id's two log-probs agree."""
    sets = _sets(rows, rows.actions, "head_tokens", "head_counts", "head_size")
    if sets is not None:
        yield from _head(rows, sets)
        yield from _head_matches(rows, sets)


def evaluation_heads(rows: Rows, actions: Ints) -> Iterator[Problem]:
    """The same for an evaluation of so many `actions` [rows], whose drawn ids stand elsewhere."""
    sets = _sets(rows, actions, "head_tokens", "head_counts", "head_size")
    if sets is not None:
        yield from _head(rows, sets)


def _head(rows: Rows, sets: _Sets) -> Iterator[Problem]:
    """Ids distinct, log-probs falling, mass at most 1."""
    yield from _duplicates(sets, "head_tokens", "duplicate_head", "head")
    logprobs = rows.list("head_logprobs")
    if logprobs is None or not same_extents(logprobs, sets.lists):
        return
    values = logprobs.numpy(np.float32("nan"))
    starts = sets.starts()
    rising = np.flatnonzero((values[1:] > values[:-1]) & ~starts[1:]) + 1
    yield from at("head_logprobs", "head_order", sets.rows(rising), "a log-prob above the one before", "falling ones")
    with np.errstate(over="ignore"):
        mass = np.add.reduceat(np.exp(values), np.flatnonzero(starts))
    heavy = np.flatnonzero(mass > 1 + HEAD_MASS_TOLERANCE)
    if len(heavy):
        owners = sets.rows(np.flatnonzero(starts)[heavy])
        first = first_of_each(owners, mass[heavy].tolist())
        wanted = f"at most 1 + {HEAD_MASS_TOLERANCE}"
        yield from at("head_logprobs", "head_mass", owners, lambda r: f"mass {first[r]:.6g}", wanted)


def _sampled(rows: Rows, sets: _Sets) -> tuple[Ints, Ints] | None:
    """(entries that are the drawn id, their actions), or None where the tokens and the mask do not fit."""
    tokens, mask = rows.list("tokens"), rows.list("action_mask")
    if tokens is None or mask is None or not same_extents(tokens, mask):
        return None
    counts = np.diff(sets.ends)
    entries = np.flatnonzero(sets.ids == np.repeat(tokens.numpy()[rows.drawn], counts))
    return entries, np.searchsorted(sets.ends, entries, side="right") - 1


def _head_matches(rows: Rows, sets: _Sets) -> Iterator[Problem]:
    drawn, logprobs = rows.list("logprobs"), rows.list("head_logprobs")
    if drawn is None or logprobs is None or not same_extents(logprobs, sets.lists):
        return
    if (drawn.lengths != np.where(drawn.valid, rows.actions, 0)).any():
        return
    kind, head_kind = (kind_by_action(rows, name) for name in ("logprob_kind", "head_kind"))
    if kind is None or head_kind is None:
        return
    found = _sampled(rows, sets)
    if found is None:
        return
    entries, action = found
    recorded = np.repeat(drawn.valid, rows.actions)
    comparable = (kind == head_kind) & (kind >= 0) & recorded
    entries, action = entries[comparable[action]], action[comparable[action]]
    place = np.cumsum(recorded) - 1  # of an action's own log-prob among those recorded
    value = drawn.numpy(np.float32("nan"))[place[action]].astype(np.float64)
    head_value = logprobs.numpy(np.float32("nan"))[entries].astype(np.float64)
    both_floored = (value <= STAND_IN) & (head_value <= STAND_IN)
    with np.errstate(invalid="ignore"):
        off = ~both_floored & ~np.isnan(value) & ~(np.abs(value - head_value) <= HEAD_MATCH_TOLERANCE)
    if off.any():
        owners = sets.rows(entries[off])
        first = first_of_each(owners, zip(value[off].tolist(), head_value[off].tolist(), strict=True))
        yield from at(
            "logprobs", "head_disagrees", owners,
            lambda r: f"{first[r][0]:.6g} where the head of the same kind has {first[r][1]:.6g}",
            f"equal within {HEAD_MATCH_TOLERANCE}",
        )  # fmt: skip


def support(rows: Rows) -> Iterator[Problem]:
    """Ids kept at one action are distinct."""
    sets = _sets(rows, rows.actions, "support_tokens", "support_counts", None)
    if sets is not None:
        yield from _duplicates(sets, "support_tokens", "duplicate_support", "support")


def outside_support(rows: Rows) -> Iterator[tuple[Flat, Bools]]:
    """(support_counts, bool [actions]: drawn outside the support that is recorded there). An empty one says nothing."""
    sets = _sets(rows, rows.actions, "support_tokens", "support_counts", None)
    found = None if sets is None else _sampled(rows, sets)
    counts = rows.list("support_counts")
    if sets is not None and found is not None and counts is not None:
        inside = np.zeros(len(sets.ends) - 1, bool)
        inside[found[1]] = True
        outside = ~inside & (np.diff(sets.ends) > 0)
        yield counts, outside[np.repeat(counts.valid, rows.actions)]
