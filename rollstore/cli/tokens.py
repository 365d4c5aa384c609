"""A rollout token by token: what every view of the command line is made from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollstore.cli.text import decode
from rollstore.cli.trained import Trained
from rollstore.schema import Known, Rollout, Span


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of a segment. `logprob`, `weight_version` and `head_rank` are None for observations and unknowns.

    `head_rank`: place in the recorded head, 1 = most likely; None also where the head does not hold the token.
    `trainable`: None for observations. What the trainer made of it is None for observations and where it is not stored:
    `ratio` is exp(trainer_logprob - logprob), `weight` that of the loss.
    """

    position: int
    token: int
    text: str | None
    role: str | None
    origin: str | None
    is_action: bool
    trainable: bool | None
    logprob: float | None
    weight_version: int | None
    head_rank: int | None
    trainer_logprob: float | None = None
    ratio: float | None = None
    advantage: float | None = None
    weight: float | None = None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Neighbouring tokens that one span holds and one weight version drew. `span` is None where none were recorded."""

    span: Span | None
    is_action: bool
    weight_version: int | None
    tokens: Sequence[Token]


def texts(rollout: Rollout, tokenizer: str | None = None) -> list[str | None] | None:
    """The text of each token: by the tokenizer at that path, else from the recorded bytes, else None."""
    if tokenizer is not None:
        from rollstore.cli.transformers import token_texts

        return token_texts(tokenizer, rollout.tokens.tolist())
    return None if rollout.token_bytes is None else decode(rollout.token_bytes)


def tokens(rollout: Rollout, texts: Sequence[str | None] | None = None, beside: Trained | None = None) -> list[Token]:
    """Every token of a segment, in order. `texts` [T] are their texts, None where unknown."""
    made = beside or Trained()
    mask = rollout.action_mask.tolist()
    count = len(mask)
    spans = _span_of_each(rollout.spans, count)
    action = (np.cumsum(rollout.action_mask) - 1).tolist()
    logprobs, versions = _listed(rollout.logprobs) or [], _listed(rollout.weight_versions)
    trainable = None if rollout.trainable is None else rollout.trainable.tolist()
    ranks = head_ranks(rollout)
    found: list[Token] = []
    for n, (token, is_action) in enumerate(zip(rollout.tokens.tolist(), mask, strict=True)):
        at, span = action[n], spans[n]
        found.append(
            Token(
                position=n,
                token=token,
                text=texts[n] if texts is not None else None,
                role=span.role if span else None,
                origin=span.origin if span else None,
                is_action=is_action,
                trainable=(trainable is None or trainable[at]) if is_action else None,
                logprob=logprobs[at] if is_action and logprobs else None,
                weight_version=versions[at] if is_action and versions else None,
                head_rank=ranks[at] if is_action and ranks else None,
                **(_made(made, at, logprobs) if is_action else {}),
            )
        )
    return found


def _made(by: Trained, at: int, logprobs: list[Any]) -> dict[str, float | None]:
    """What the trainer made of action number `at`; a list that is too short says nothing about the rest."""
    lists = {"trainer_logprob": by.logprobs, "advantage": by.advantages, "weight": by.weights}
    found = {name: one[at] if one is not None and at < len(one) else None for name, one in lists.items()}
    ours, theirs = logprobs[at] if logprobs else None, found["trainer_logprob"]
    if ours is not None and theirs is not None:
        # Above 709 a double overflows; two impossible tokens have no ratio.
        difference = theirs - ours
        found["ratio"] = math.exp(difference) if difference < 709 else math.inf if difference > 0 else None
    return found


def pieces(rollout: Rollout, of: Sequence[Token]) -> Iterator[Piece]:
    """The tokens in pieces. A span without tokens (a call that gave nothing) is a piece without tokens."""
    bounds: list[tuple[Span | None, int, int]]
    if rollout.spans is None:
        edges = (np.flatnonzero(np.diff(rollout.action_mask.astype(np.int8))) + 1).tolist()
        bounds = [(None, a, b) for a, b in zip([0, *edges], [*edges, len(of)], strict=True)] if of else []
    else:
        bounds = [(span, span.start, span.start + span.length) for span in rollout.spans]
    for span, start, stop in bounds:
        first = start
        for n in range(start + 1, stop):
            if of[n].weight_version != of[n - 1].weight_version:
                yield _piece(span, of[first:n])
                first = n
        yield _piece(span, of[first:stop])


def head_ranks(rollout: Rollout) -> list[int | None] | None:
    """Place of each action in its own head, 1 = most likely; None without heads."""
    heads = rollout.heads
    if heads is None or heads.tokens is None:
        return None
    drawn = rollout.tokens[rollout.action_mask.astype(bool)]
    counts = np.full(len(drawn), heads.size or 0) if heads.counts is None else heads.counts
    ends = np.cumsum(counts)
    ranks: list[int | None] = []
    for token, start, end in zip(drawn, ends - counts, ends, strict=True):
        at = np.flatnonzero(heads.tokens[start:end] == token)
        ranks.append(int(at[0]) + 1 if len(at) else None)
    return ranks


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What the table adds up to.

    `roles`: for each role (tokens, actions, sum of the known log-probs). `counts`: the number of actions as each
    recorded column has it; the record reconciles when they are all equal. `trained`: sums of what the trainer made of
    the actions, of the values that are known; empty where nothing is stored.
    """

    roles: dict[str, tuple[int, int, float]]
    counts: dict[str, int]
    logprobs_unknown: int
    trained: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def reconciled(self) -> bool:
        return len(set(self.counts.values())) <= 1


def sums(rollout: Rollout, of: Sequence[Token], beside: Trained | None = None) -> Sums:
    """Totals by role and of what the trainer made, and the number of actions as every column of actions has it."""
    roles: dict[str, tuple[int, int, float]] = {}
    for token in of:
        role = token.role or "(no role)"
        count, actions, total = roles.get(role, (0, 0, 0.0))
        roles[role] = (count + 1, actions + token.is_action, total + (token.logprob or 0.0))
    counts = {"action_mask": sum(token.is_action for token in of)}
    for name in ("logprobs", "weight_versions", "trainable", "ranks", "entropies"):
        column: Any = getattr(rollout, name)
        if column is not None:
            counts[name] = len(column)
    if rollout.spans is not None:
        counts["action spans"] = sum(span.length for span in rollout.spans if span.is_action)
    heads = rollout.heads
    if heads is not None and heads.tokens is not None:
        if heads.counts is not None:
            counts["head_counts"] = len(heads.counts)
        elif heads.size:
            counts["heads"] = len(heads.tokens) // heads.size
    made, trained = beside or Trained(), dict[str, float]()
    for name, values in (
        ("trainer log-probs", made.logprobs), ("advantages", made.advantages), ("loss weights", made.weights),
    ):  # fmt: skip
        if values is not None:
            counts[name] = len(values)
            trained[name] = _total(values)
    if made.advantages is not None and made.weights is not None:
        trained["weight x advantage"] = _total(
            [None if a is None or w is None else a * w for a, w in zip(made.advantages, made.weights, strict=False)]
        )
    unknown = sum(token.is_action and token.logprob is None for token in of)
    return Sums(roles=roles, counts=counts, logprobs_unknown=unknown, trained=trained)


def _total(values: Sequence[float | None]) -> float:
    return sum(value for value in values if value is not None)


def _listed(column: Known | None) -> list[Any] | None:
    return None if column is None else column.to_list()


def _span_of_each(spans: tuple[Span, ...] | None, count: int) -> list[Span | None]:
    each: list[Span | None] = [None] * count
    for span in spans or ():
        each[span.start : span.start + span.length] = [span] * span.length
    return each


def _piece(span: Span | None, of: Sequence[Token]) -> Piece:
    acts = span.is_action if span is not None else bool(of and of[0].is_action)
    return Piece(span=span, is_action=acts, weight_version=of[0].weight_version if of else None, tokens=of)
