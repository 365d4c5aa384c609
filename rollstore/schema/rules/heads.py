"""Heads: distinct ids, falling log-probs, a mass of at most one, and agreement with the drawn log-prob."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rollstore.schema.flat import Flat, Rows
from rollstore.schema.problem import Problem, at
from rollstore.schema.rules.lengths import Ints, action_counts, entries, entry_counts

HEAD_MASS_TOLERANCE = 1e-3
"""A head's probabilities may sum to at most 1 + this."""

HEAD_MATCH_TOLERANCE = 1e-2
"""Where the drawn id is in a head of the same kind, the two log-probs may differ by this many nats."""

STAND_IN = -9999.0
"""Engines send this, or less, in place of minus infinity."""


def _sound_heads(rows: Rows) -> tuple[Flat, Flat, Ints, Ints] | None:
    """(ids, log-probs, entries per action, row of each action), or None where there is none or the lengths are off."""
    tokens, logprobs, mask = rows.list("head_tokens"), rows.list("head_logprobs"), rows.list("action_mask")
    if tokens is None or logprobs is None or mask is None:
        return None
    actions = action_counts(rows)
    counts = rows.list("head_counts")
    if counts is not None and (counts.lengths[counts.valid] != actions[counts.valid]).any():
        return None
    announced = entries(rows, actions)
    if (
        announced is None
        or (tokens.lengths != np.where(tokens.valid, announced, 0)).any()
        or (tokens.offsets != logprobs.offsets).any()
    ):
        return None
    action_rows = np.repeat(np.arange(rows.count), actions)
    per_action = np.where(tokens.valid[action_rows], entry_counts(rows, actions), 0)
    if (per_action < 0).any():
        return None
    return tokens, logprobs, per_action, action_rows


def heads(rows: Rows) -> Iterator[Problem]:
    """Within an action: ids distinct, log-probs falling, mass at most 1, and the drawn id's two log-probs agree."""
    sound = _sound_heads(rows)
    if sound is None or not len(sound[0].values):
        return
    tokens, logprobs, per_action, action_rows = sound
    action = np.repeat(np.arange(len(per_action)), per_action)
    row = action_rows[action]
    ids, values = tokens.numpy(), logprobs.numpy(np.float32("nan"))
    nan = np.unique(row[np.isnan(values)])
    yield from at("head_logprobs", "nan", nan, lambda _: "NaN", "a log-prob or minus infinity")
    order = np.lexsort((ids, action))
    same = (np.diff(ids[order]) == 0) & (np.diff(action[order]) == 0)
    repeated = dict(zip(row[order[1:][same]][::-1].tolist(), ids[order[1:][same]][::-1].tolist(), strict=True))
    yield from at(
        "head_tokens",
        "duplicate_head",
        sorted(repeated),
        lambda r: f"id {repeated[r]} twice in one head",
        "distinct ids",
    )
    rising = (np.diff(values) > 0) & (np.diff(action) == 0)
    yield from at(
        "head_logprobs",
        "head_order",
        np.unique(row[1:][rising]),
        lambda _: "a log-prob above the one before",
        "falling log-probs",
    )
    with np.errstate(over="ignore"):
        mass = np.bincount(action, np.exp(values.astype(np.float64)), minlength=len(per_action))
    heavy = np.flatnonzero(mass > 1 + HEAD_MASS_TOLERANCE)
    worst = {int(action_rows[a]): float(mass[a]) for a in heavy[::-1]}
    yield from at(
        "head_logprobs",
        "head_mass",
        sorted(worst),
        lambda r: f"mass {worst[r]:.6g}",
        f"at most 1 + {HEAD_MASS_TOLERANCE}",
    )
    yield from _head_matches(rows, ids, values, action, row)


def _head_matches(rows: Rows, ids: Any, values: Any, action: Any, row: Any) -> Iterator[Problem]:
    drawn, mask, tokens = rows.list("logprobs"), rows.list("action_mask"), rows.list("tokens")
    if (
        drawn is None
        or mask is None
        or tokens is None
        or (drawn.lengths != np.where(drawn.valid, action_counts(rows), 0)).any()
    ):
        return
    if (tokens.offsets != mask.offsets).any():
        return
    kinds, head_kinds = rows.objects("logprob_kind"), rows.objects("head_kind")
    same_kind = np.array(
        [k is not None and k != "unknown" and k == h for k, h in zip(kinds, head_kinds, strict=True)], bool
    )
    if not same_kind.any():
        return
    actions = action_counts(rows)
    first = np.zeros(rows.count + 1, np.int64)
    np.cumsum(actions, out=first[1:])
    own = action - first[row] + drawn.offsets[row]  # index of the action's own log-prob
    sampled = tokens.numpy()[mask.numpy(False)]
    candidate = same_kind[row] & drawn.valid[row] & (ids == sampled[action])
    own, head_value, row = own[candidate], values[candidate].astype(np.float64), row[candidate]
    value = drawn.numpy(np.float32("nan")).astype(np.float64)[own]
    both_floored = (value <= STAND_IN) & (head_value <= STAND_IN)
    with np.errstate(invalid="ignore"):
        off = ~both_floored & ~np.isnan(value) & ~(np.abs(value - head_value) <= HEAD_MATCH_TOLERANCE)
    worst = {int(r): (v, h) for r, v, h in zip(row[off][::-1], value[off][::-1], head_value[off][::-1], strict=True)}
    yield from at(
        "logprobs", "head_disagrees", sorted(worst),
        lambda r: f"{worst[r][0]:.6g} where the head of the same kind has {worst[r][1]:.6g}",
        f"equal within {HEAD_MATCH_TOLERANCE}",
    )  # fmt: skip
