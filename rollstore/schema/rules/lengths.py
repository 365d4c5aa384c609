"""Lists have the lengths that the tokens, the actions and the announced counts give them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rollstore.schema.flat import Flat, Rows
from rollstore.schema.problem import Problem, at

Ints = npt.NDArray[np.int64]


def action_counts(rows: Rows) -> Ints:
    """int64 [rows]: how many tokens of each row are actions."""
    mask = rows.list("action_mask")
    if mask is None:
        return np.zeros(rows.count, np.int64)
    return totals(mask, mask.numpy(False).astype(np.int64))


def totals(lists: Flat, values: npt.NDArray[Any]) -> Ints:
    """int64 [rows]: the sum of `values` [items] over each row; right for empty rows, wherever they stand."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums[lists.offsets[1:]] - sums[lists.offsets[:-1]]


def wrong_length(rows: Rows, names: list[str], wanted: Ints, noun: str) -> Iterator[Problem]:
    for name in names:
        lists = rows.list(name)
        if lists is None:
            continue
        bad = np.flatnonzero(lists.valid & (lists.lengths != wanted))
        lengths = lists.lengths
        yield from at(
            name, "wrong_length", bad, lambda r, n=lengths: f"{n[r]} values", lambda r: f"{noun.format(n=wanted[r])}"
        )


def lengths(rows: Rows) -> Iterator[Problem]:
    """T-columns have one value per token, A-columns one per action."""
    tokens = rows.list("tokens")
    if tokens is None:
        return
    yield from wrong_length(rows, ["action_mask", "token_bytes"], tokens.lengths, "tokens has {n}")
    a_columns = [
        "trainable",
        "logprobs",
        "weight_versions",
        "head_counts",
        "support_counts",
        "ranks",
        "entropies",
        "batch_rows",
    ]
    yield from wrong_length(rows, a_columns, action_counts(rows), "action_mask has {n} actions")


def position_zero(rows: Rows) -> Iterator[Problem]:
    """Nothing scores the first token, so it cannot be an action."""
    mask = rows.list("action_mask")
    if mask is None:
        return
    some = np.flatnonzero(mask.lengths)
    first = mask.numpy(False)[mask.offsets[some]] if len(some) else np.zeros(0, bool)
    yield from at(
        "action_mask", "action_at_zero", some[first], lambda _: "an action at position 0", "an observation there"
    )


def entries(rows: Rows, actions: Ints) -> Ints | None:
    """int64 [rows]: head entries that head_counts or head_size announce; None where nothing announces any."""
    counts, size = rows.list("head_counts"), rows.numbers("head_size")
    if counts is None and size is None:
        return None
    fixed = np.zeros(rows.count, np.int64) if size is None else actions * size[0]
    if counts is None:
        return fixed
    return np.where(counts.valid, totals(counts, counts.numpy()), fixed)


def entry_counts(rows: Rows, actions: Ints) -> npt.NDArray[np.int64]:
    """int64 [sum of actions]: head entries of each action, over all rows."""
    size = rows.numbers("head_size")
    sizes = np.zeros(rows.count, np.int64) if size is None else size[0].astype(np.int64)
    counts = rows.list("head_counts")
    per_action = np.repeat(sizes, actions)
    if counts is not None:
        own = np.repeat(counts.valid, actions)
        per_action[own] = counts.numpy()
    return per_action


def head_lengths(rows: Rows) -> Iterator[Problem]:
    """The flat head columns have as many entries as head_counts, or actions times head_size, say."""
    announced = entries(rows, action_counts(rows))
    wanted = np.zeros(rows.count, np.int64) if announced is None else announced
    yield from wrong_length(
        rows, ["head_tokens", "head_logprobs"], wanted, "head_size and head_counts announce {n} entries"
    )
    tokens, logprobs = rows.list("head_tokens"), rows.list("head_logprobs")
    for name, lists, other in (("head_tokens", tokens, logprobs), ("head_logprobs", logprobs, tokens)):
        present = np.zeros(rows.count, bool) if lists is None else lists.valid
        partner = np.zeros(rows.count, bool) if other is None else other.valid
        yield from at(
            name,
            "missing_partner",
            np.flatnonzero(partner & ~present),
            lambda _: "null",
            "ids and log-probs come together",
        )


def flat_counts(rows: Rows) -> Iterator[Problem]:
    """The flat support has as many ids as support_counts say; the routing as many as count, layers and k say."""
    counts = rows.list("support_counts")
    wanted = np.zeros(rows.count, np.int64) if counts is None else totals(counts, counts.numpy())
    yield from wrong_length(rows, ["support_tokens"], wanted, "support_counts announce {n}")
    if rows.list("routed_experts") is not None:
        product = np.ones(rows.count, np.int64)
        for name in ("routed_count", "routed_layers", "routed_k"):
            numbers = rows.numbers(name)
            product *= 0 if numbers is None else numbers[0].astype(np.int64)
        yield from wrong_length(rows, ["routed_experts"], product, "routed_count x routed_layers x routed_k is {n}")


def evaluation(rows: Rows) -> Iterator[Problem]:
    """A-columns of one evaluation have one length; heads fit it; position 0 has no log-prob."""
    names = ["logprobs", "values", "head_counts", "entropies"]
    present = [(n, lists) for n in names if (lists := rows.list(n)) is not None]
    if present:
        wanted = np.max([lists.lengths for _, lists in present], axis=0)
        yield from wrong_length(rows, [n for n, _ in present], wanted, "another A-column has {n}")
        announced = entries(rows, wanted)
        wanted = np.zeros(rows.count, np.int64) if announced is None else announced
        yield from wrong_length(
            rows, ["head_tokens", "head_logprobs"], wanted, "head_size and head_counts announce {n} entries"
        )
    scored = rows.list("token_logprobs")
    if scored is not None:
        some = np.flatnonzero(scored.lengths)
        first = scored.known[scored.offsets[some]] if len(some) else np.zeros(0, bool)
        yield from at(
            "token_logprobs", "scored_at_zero", some[first], lambda _: "a log-prob at position 0", "null there"
        )
