"""Lists have the lengths that the tokens, the actions and the announced counts give them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rollstore.schema.flat import Flat, Ints, Rows
from rollstore.schema.problem import Problem, at


def same_extents(one: Flat, other: Flat) -> bool:
    """Whether two lists have items for the same rows, as many each."""
    return bool((one.offsets == other.offsets).all())


def wrong_length(rows: Rows, names: Sequence[str], wanted: Ints, noun: str) -> Iterator[Problem]:
    """Lists that are not as long as `wanted` [rows]; `noun` says what is, as "tokens has {n}"."""
    for name in names:
        lists = rows.list(name)
        if lists is None:
            continue
        lengths = lists.lengths
        bad = np.flatnonzero(lists.valid & (lengths != wanted))
        yield from at(
            name,
            "wrong_length",
            bad,
            lambda r, n=lengths: f"{n[r]} values",
            lambda r: noun.format(n=wanted[r]),
        )


def together(rows: Rows, names: Sequence[str], wanted: str) -> Iterator[Problem]:
    """Columns that say something only together: where one has a value, each has."""
    known = [rows.known(name) for name in names]
    some = np.logical_or.reduce(known)
    for name, present in zip(names, known, strict=True):
        yield from at(name, "missing_partner", np.flatnonzero(some & ~present), "null", wanted)


A_COLUMNS = (
    "trainable", "logprobs", "weight_versions", "head_counts", "support_counts", "ranks", "entropies", "batch_rows",
)  # fmt: skip


def lengths(rows: Rows) -> Iterator[Problem]:
    """T-columns have one value per token, A-columns one per action."""
    tokens = rows.list("tokens")
    if tokens is not None:
        yield from wrong_length(rows, ("action_mask", "token_bytes"), tokens.lengths, "tokens has {n} values")
        yield from wrong_length(rows, A_COLUMNS, rows.actions, "action_mask has {n} actions")


def position_zero(rows: Rows) -> Iterator[Problem]:
    """Nothing scores the first token, so it cannot be an action."""
    mask = rows.list("action_mask")
    if mask is not None:
        some = np.flatnonzero(mask.lengths)
        first = some[rows.drawn[mask.offsets[some]]]
        yield from at("action_mask", "action_at_zero", first, "an action at position 0", "an observation there")


def entry_counts(rows: Rows, actions: Ints, counts: str, size: str | None) -> Ints | None:
    """int64 [sum of actions]: entries of each action, over all rows; None where the counts do not fit the actions."""
    lists, sizes = rows.list(counts), rows.numbers(size) if size else None
    fixed = np.zeros(rows.count, np.int64) if sizes is None else sizes[0].astype(np.int64)
    per_action = np.repeat(fixed, actions)
    if lists is not None:
        if (lists.lengths != np.where(lists.valid, actions, 0)).any():
            return None
        per_action[np.repeat(lists.valid, actions)] = lists.numpy()
    return per_action


def announced(rows: Rows, actions: Ints, counts: str, size: str | None) -> Ints:
    """int64 [rows]: entries that the counts, or else actions times the size, announce."""
    lists, sizes = rows.list(counts), rows.numbers(size) if size else None
    fixed = np.zeros(rows.count, np.int64) if sizes is None else actions * sizes[0]
    return fixed if lists is None else np.where(lists.valid, lists.totals(lists.numpy()), fixed)


def head_lengths(rows: Rows, actions: Ints | None = None) -> Iterator[Problem]:
    """The flat head columns have as many entries as head_counts, or actions times head_size, say."""
    if rows.list("head_tokens") is None and rows.list("head_logprobs") is None and rows.list("head_counts") is None:
        return
    entries = announced(rows, rows.actions if actions is None else actions, "head_counts", "head_size")
    noun = "head_counts and head_size announce {n} entries"
    yield from wrong_length(rows, ("head_tokens", "head_logprobs"), entries, noun)
    yield from together(rows, ("head_tokens", "head_logprobs"), "ids and log-probs together")
    alone = rows.known("head_counts") & ~rows.known("head_tokens") & ~rows.known("head_logprobs")
    yield from at("head_tokens", "missing_partner", np.flatnonzero(alone), "null", "the entries of head_counts")


def flat_counts(rows: Rows) -> Iterator[Problem]:
    """The flat support has as many ids as support_counts say; the routing as many as count, layers and k say."""
    if rows.list("support_tokens") is not None or rows.list("support_counts") is not None:
        yield from together(rows, ("support_counts", "support_tokens"), "counts and ids together")
        wanted = announced(rows, rows.actions, "support_counts", None)
        yield from wrong_length(rows, ("support_tokens",), wanted, "support_counts announce {n}")


def routing(rows: Rows) -> Iterator[Problem]:
    """Routed experts are count x layers x k ids, for tokens that are there."""
    experts, tokens = rows.list("routed_experts"), rows.list("tokens")
    if experts is None or tokens is None:
        return
    numbers = {name: rows.numbers(name) for name in ("routed_start", "routed_count", "routed_layers", "routed_k")}
    complete = experts.valid.copy()
    for name, column in numbers.items():
        known = np.zeros(rows.count, bool) if column is None else column[1]
        missing = np.flatnonzero(experts.valid & ~known)
        yield from at(name, "missing_partner", missing, "null", "a number, as routed_experts is recorded")
        complete &= known
    start, count, layers, k = (
        np.zeros(rows.count, np.int64) if column is None else column[0].astype(np.int64) for column in numbers.values()
    )
    wanted = np.where(complete, count * layers * k, experts.lengths)
    yield from wrong_length(rows, ("routed_experts",), wanted, "routed_count x routed_layers x routed_k is {n}")
    beyond = np.flatnonzero(complete & (start + count > tokens.lengths))
    yield from at(
        "routed_count", "out_of_range", beyond,
        lambda r: f"tokens {start[r]} to {start[r] + count[r]}", lambda r: f"within the {tokens.lengths[r]} tokens",
    )  # fmt: skip


def own_lengths(rows: Rows, names: Sequence[str]) -> Ints:
    """int64 [rows]: the length of the A-columns where no mask says it: that of the first that is recorded."""
    wanted = np.full(rows.count, -1, np.int64)
    for name in names:
        lists = rows.list(name)
        if lists is not None:
            wanted = np.where((wanted < 0) & lists.valid, lists.lengths, wanted)
    return wanted
