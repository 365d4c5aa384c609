"""A segment as the columns that the script of a page draws: what is known of each token, as plain data for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from rollstore.cli.text import visible
from rollstore.cli.tokens import Token, pieces
from rollstore.schema import TABLES, Rollout, Span
from rollstore.view.reading import Segment

LONGEST = 400
"""Characters of one token's text that a page shows."""

HEAD = 20
"""Entries of a head that a page shows."""

UNLIKELY = 0.01
"""A draw of less probability is marked."""

Mark = tuple[int, str]
"""A position, and what is to be seen there."""


def columns(
    segment: Segment, *, of: int, marks: Sequence[Mark] | None = None, first: int | None = None
) -> dict[str, Any]:
    """One segment of `of`. Token lists have one value a token, `acts` says which are actions; the rest one an action.

    marks: positions to jump to, those of `own_marks` unless given. first: the one where two runs come apart.
    """
    one, rows = segment.rollout, segment.tokens
    acts = [token for token in rows if token.is_action]
    texts = [None if token.text is None else shown(token.text) for token in rows]
    return {
        "segment": one.segment,
        "of": of,
        "title": visible(
            " · ".join(part for part in (f"segment {one.segment} of {of}", one.segment_cause, _ending(one)) if part)
        ),
        "ids": [token.token for token in rows],
        "texts": None if all(text is None for text in texts) else [None if t is None else t[0] for t in texts],
        "escaped": [n for n, text in enumerate(texts) if text is not None and text[1]],
        "acts": "".join("-" if not token.is_action else "a" if token.trainable else "h" for token in rows),
        "logprobs": _numbers([token.logprob for token in acts]),
        "trainer": _numbers([token.trainer_logprob for token in acts]),
        "ratios": _numbers([token.ratio for token in acts]),
        "versions": _known([token.weight_version for token in acts]),
        "ranks": _known([token.head_rank for token in acts]),
        "advantages": _numbers([token.advantage for token in acts]),
        "weights": _numbers([token.weight for token in acts]),
        "heads": _heads(one, len(acts)),
        "spans": list(_spans(one, rows)),
        "marks": sorted(own_marks(segment) if marks is None else marks),
        "first": first,
    }


def names(segments: Iterable[Segment]) -> dict[str, str]:
    """The texts of the ids in the heads of a page."""
    return {str(id_): shown(text)[0] for one in segments for id_, text in one.names.items()}


def shown(text: str) -> tuple[str, bool]:
    """The text of a token as a page holds it, and whether anything in it is written out. Line ends and tabs stay."""
    safe = visible(text[:LONGEST], keep="\n\t")
    more = f"… and {len(text) - LONGEST} more characters" if len(text) > LONGEST else ""
    return safe + more, safe != text[:LONGEST]


def own_marks(segment: Segment) -> list[Mark]:
    """Where to look in one rollout: what was flagged, unlikely draws, and where the weights change."""
    one = segment.rollout
    actions = np.flatnonzero(one.action_mask).tolist()
    found: dict[int, list[str]] = {}
    for flag in one.flags or ():
        if flag.index is None:
            continue
        column = TABLES["rollouts"].by_name.get(flag.column or "")
        places = actions if column is not None and column.align == "A" else range(len(one.tokens))
        if 0 <= flag.index < len(places):
            found.setdefault(places[flag.index], []).append(f"flag {flag.kind} {flag.column}")
    version: int | None = None
    for token in segment.tokens:
        if token.logprob is not None and token.logprob < math.log(UNLIKELY):
            found.setdefault(token.position, []).append(f"drawn with p < {UNLIKELY}")
        now = token.weight_version
        if version is not None and now is not None and now != version:
            found.setdefault(token.position, []).append(f"weights {version} → {now}")
        version = version if now is None else now
    return [(position, visible("; ".join(why))) for position, why in found.items()]


def _ending(one: Rollout) -> str:
    return " ".join(part for part in (one.ending, one.ending_reason) if part)


def number(value: float | None) -> float | str | None:
    """A number as JSON has it, with 6 digits; what is not finite as text."""
    if value is None:
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else str(float(value))


def _numbers(values: Sequence[float | None]) -> list[float | str | None] | None:
    found = [number(value) for value in values]
    return None if all(value is None for value in found) else found


def _known(values: Sequence[int | None]) -> list[int | None] | None:
    return None if all(value is None for value in values) else list(values)


def _heads(one: Rollout, actions: int) -> dict[str, Any] | None:
    """The heads, cut to `HEAD` entries: how many each action has, then ids and log-probs one after the other."""
    heads = one.heads
    if heads is None or heads.tokens is None or heads.logprobs is None:
        return None
    counts = np.full(actions, heads.size or 0) if heads.counts is None else np.asarray(heads.counts)
    starts = np.cumsum(counts) - counts
    kept = np.arange(len(heads.tokens)) - np.repeat(starts, counts) < HEAD
    return {
        "counts": np.minimum(counts, HEAD).tolist(),
        "cut": bool((counts > HEAD).any()),
        "ids": heads.tokens[kept].tolist(),
        "logprobs": [number(value) for value in heads.logprobs[kept].tolist()],
    }


def _spans(one: Rollout, rows: Sequence[Token]) -> Iterator[dict[str, Any]]:
    """Where spans (without them, runs of actions and others) begin and end, and what their titles say."""
    start = 0
    for _, parts in groupby(pieces(one, rows), key=lambda piece: (id(piece.span), piece.is_action)):
        found = list(parts)
        span, acts = found[0].span, found[0].is_action
        count = sum(len(piece.tokens) for piece in found)
        role = span.role if span is not None and span.role is not None else "action" if acts else "observation"
        versions = [piece.weight_version for piece in found if piece.weight_version is not None]
        details = [f"{count:,} {'action' if acts else 'token'}{'' if count == 1 else 's'}"]
        details += [f"weights {_range(versions)}"] if versions else []
        yield {
            "start": start,
            "stop": start + count,
            "role": visible(role),
            "acts": acts,
            "tool": role == "tool",
            "details": visible(" · ".join((*_told(span, acts), *details))),
        }
        start += count


def _told(span: Span | None, acts: bool) -> list[str]:
    if span is None:
        return []
    told = [f"turn {span.turn}"] if span.turn is not None else []
    told += [str(span.origin)] if span.origin not in (None, "sampled" if acts else "rendered") else []
    finish = span.engine_finish or span.api_finish
    told += [finish] if finish else []
    told += [f"cache {span.cache_state}"] if span.cache_state not in (None, "fresh", "unknown") else []
    told += [f"edit: {span.edit.kind}"] if span.edit else []
    return told


def _range(versions: Sequence[int]) -> str:
    low, high = min(versions), max(versions)
    return str(low) if low == high else f"{low} to {high}"
