"""Heads from the lists that engines return: sets, by falling log-prob, without padding and without an id forced in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollstore.schema import Flag, Heads, Known

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Entries(NamedTuple):
    """What an engine listed at each action: `counts` [A]; ids, log-probs and ranks (0: none said) flat over actions."""

    counts: Ints
    ids: Ints
    logprobs: Floats
    ranks: Ints

    @property
    def action(self) -> Ints:
        """The action of each entry."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


def entries(counts: Any, ids: Any, logprobs: Any, ranks: Any = None) -> Entries:
    """`Entries` from sequences; None among the ranks is none said. Raises ValueError for what is past 64 bits."""
    try:
        flat = np.asarray(ids, np.int64).reshape(-1)
        said = np.zeros(len(flat), np.int64) if ranks is None else np.array([rank or 0 for rank in ranks], np.int64)
    except OverflowError:
        raise ValueError("heads: wanted ids and ranks of 64 bits, got a larger number") from None
    return Entries(np.asarray(counts, np.int64).reshape(-1), flat, np.asarray(logprobs, np.float64).reshape(-1), said)


def drawn(listed: Entries, tokens: Ints) -> tuple[Known, Known, list[Flag]]:
    """(log-probs, ranks, flags) of the drawn `tokens` [A], looked up by id: the first entry of an action with that id.

    A token that is not among its action's entries has neither, and a flag.
    """
    count = len(tokens)
    action = listed.action
    hit = np.flatnonzero(listed.ids == tokens[action])
    rows, first = np.unique(action[hit], return_index=True)
    at = hit[first]
    values, ranks = np.zeros(count, np.float64), np.zeros(count, np.int64)
    found = np.zeros(count, bool)
    values[rows], ranks[rows], found[rows] = listed.logprobs[at], listed.ranks[at], True
    flags = [Flag(kind="sampled_id_missing", column="logprobs", index=n) for n in np.flatnonzero(~found).tolist()]
    return Known(values, found), Known(ranks, found & (ranks > 0)), flags


def heads(
    listed: Entries, *, size: int | None = None, tokens: Ints | None = None, impossible: bool = True
) -> tuple[Heads | None, list[Flag]]:
    """The heads, with their flags; None where no action has an entry.

    size: k asked for; None: the most entries of any action. tokens: drawn ids [A] that the engine adds to the k
    likeliest, dropped where there are more than k entries. impossible: keep entries of -inf; an engine that pads its
    top-k with arbitrary ids at -inf has no use for them. An id that is listed twice counts once; where its log-probs
    differ, the first is kept and flagged. A NaN is dropped and flagged.
    """
    action = listed.action
    order = np.lexsort((listed.ids, action))  # stable: of equal ids, the first listed comes first
    ids, logprobs, action, ranks = listed.ids[order], listed.logprobs[order], action[order], listed.ranks[order]
    begins = np.ones(len(ids), bool)
    begins[1:] = (action[1:] != action[:-1]) | (ids[1:] != ids[:-1])
    firsts = np.maximum.accumulate(np.where(begins, np.arange(len(ids)), 0))
    differs = ~begins & (logprobs != logprobs[firsts]) & ~np.isnan(logprobs)
    conflicts = np.unique(firsts[differs])
    keep = begins & ~np.isnan(logprobs)
    if tokens is not None:
        keep &= ~_forced(action, begins, ids == tokens[action], ranks, len(listed.counts), size)
    broken = np.unique(action[begins & np.isnan(logprobs)])
    if not impossible:
        keep &= ~np.isneginf(logprobs)
    kept = np.flatnonzero(keep)
    kept = kept[np.lexsort((order[kept], -logprobs[kept], action[kept]))]  # equals as the engine listed them
    place = np.full(len(ids), -1)
    place[kept] = np.arange(len(kept))
    flags = [Flag(kind="head_conflict", column="head_tokens", index=n) for n in place[conflicts].tolist() if n >= 0]
    flags += [Flag(kind="nan_head", column="head_counts", index=n) for n in broken.tolist()]
    if not len(kept):
        return None, flags
    counts = np.bincount(action[kept], minlength=len(listed.counts))
    asked = int(counts.max()) if size is None else size
    return _sized(asked, counts, ids[kept], logprobs[kept]), flags


def _forced(action: Ints, begins: Bools, is_drawn: Bools, ranks: Ints, count: int, size: int | None) -> Bools:
    """bool [entries]: the drawn id where it stands outside the k likeliest.

    Where k is not known, its rank says so: the others are the ranks 1, 2, ..., and it is beyond them.
    """
    distinct = np.bincount(action[begins], minlength=count)[action]
    return is_drawn & ((ranks > distinct) if size is None else (distinct > size))


def _sized(size: int, counts: Ints, ids: Ints, logprobs: Floats) -> Heads:
    return Heads(size=size, counts=None if (counts == size).all() else counts, tokens=ids, logprobs=logprobs)


def counts_of(head: Heads, actions: int) -> Ints:
    """int64 [A]: entries of each action."""
    return np.full(actions, head.size or 0, np.int64) if head.counts is None else np.asarray(head.counts, np.int64)


def cut_heads(head: Heads | None, first: int, last: int, actions: int) -> Heads | None:
    """The heads of actions first, ..., last - 1 out of `actions`."""
    if head is None or head.tokens is None or head.logprobs is None:
        return None
    counts = counts_of(head, actions)
    ends = np.concatenate([[0], np.cumsum(counts)])
    begin, end = int(ends[first]), int(ends[last])
    return _sized(head.size or 0, counts[first:last], head.tokens[begin:end], head.logprobs[begin:end])


def join_heads(parts: Sequence[Heads | None], actions: Sequence[int]) -> Heads | None:
    """The heads of several runs of actions as one; a run without heads has counts of 0."""
    some = [h for h in parts if h is not None and h.tokens is not None and h.logprobs is not None]
    if not some:
        return None
    none = np.zeros(0, np.int64)
    counts = [np.zeros(n, np.int64) if h is None else counts_of(h, n) for h, n in zip(parts, actions, strict=True)]
    return _sized(
        max(h.size or 0 for h in some),
        np.concatenate([none, *counts]),
        np.concatenate([np.asarray(h.tokens, np.int64) for h in some]),
        np.concatenate([np.asarray(h.logprobs) for h in some]),
    )
