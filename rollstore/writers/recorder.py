"""Turns to segments: observe what the policy sees, act what it draws, end. Each segment is appended when it is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rollstore.errors import SchemaError
from rollstore.schema import Flag, Heads, Known, Rollout, Sampler, Span
from rollstore.schema.known import known
from rollstore.writers.refusals import NOT_YET, PER_ROW, TOGETHER, Taken, are_ids, require
from rollstore.writers.uuid7 import uuid7

ACTION_COLUMNS = ("logprobs", "weight_versions", "ranks", "entropies", "batch_rows")
"""Columns with one value per action of which single ones may be unknown."""

Ints = npt.NDArray[np.int64]

TAKEN = Taken()
"""What was said of spans and samplers so far, in all recorders."""


class Appends(Protocol):
    """What a recorder needs of a writer."""

    def append(self, data: Rollout) -> None: ...


class Recorder:
    """Builds the segments of one rollout, turn by turn.

    `fields` are columns of the rollouts table that hold for every segment (group_id, policy, replay_key, ...). Leaving
    the `with` block without `end` appends what there is: with ending `aborted` after an exception (which goes on),
    otherwise with ending `unknown`. Arrays are copied: an engine may use its own again. Not for use by two threads at
    once. What the schema would refuse of an argument raises ValueError at its call, and nothing is recorded of that.
    """

    def __init__(self, writer: Appends, *, rollout_id: str | None = None, **fields: Any) -> None:
        unknown = sorted(set(fields) - set(Rollout.__struct_fields__))
        if unknown:
            raise TypeError(f"rollout: wanted columns of the rollouts table, got {', '.join(unknown)}")
        self.rollout_id = uuid7() if rollout_id is None else rollout_id
        own = {name: value for name, value in fields.items() if name not in PER_ROW}
        require("rollout", TOGETHER, rollout_id=self.rollout_id, **own)
        self._writer = writer
        self._fields: dict[str, Any] = {"started_at": datetime.now(UTC), **_copied(fields)}
        self._segment = 0
        self._cause: str | None = None
        self._ended = False
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[Ints] = []
        self._length = 0
        self._mask: list[npt.NDArray[np.bool_]] = []
        self._actions: list[dict[str, Known | None]] = []
        self._action_counts: list[int] = []
        self._heads: list[Heads | None] = []
        self._supports: list[tuple[Ints, Ints] | None] = []
        self._flags: list[Flag] = []
        self._spans: list[Span] = []
        self._samplers: list[Sampler] = []
        self._turn = 0
        self._acted = False

    @property
    def tokens(self) -> Ints:
        """int64 [T]: the tokens of the current segment so far."""
        return np.concatenate(self._tokens) if self._tokens else np.zeros(0, np.int64)

    @property
    def segment(self) -> int:
        """Number of the current segment."""
        return self._segment

    def observe(self, tokens: Any, *, role: str, origin: str = "rendered", **span: Any) -> None:
        """Tokens [n] that the policy sees and did not draw here.

        `span` are further fields of the span. Raises ValueError after `end`, on tokens that are not whole numbers, and
        on what the schema refuses.
        """
        self._check_open()
        ids = _ids(tokens)
        next_turn = self._acted and role != "assistant"
        fields: dict[str, Any] = {"turn": self._turn + next_turn, "role": role, "origin": origin, **span}
        alone = Span(start=0, length=len(ids), is_action=False, **fields)
        said = ("observe", role, origin, _without_words(span))
        if said not in TAKEN or not are_ids(ids):
            require("observe", NOT_YET, tokens=ids, action_mask=np.zeros(len(ids), bool), spans=(alone,))
            TAKEN.add(said)
        if next_turn:
            self._turn, self._acted = self._turn + 1, False
        self._spans.append(Span(start=self._length, length=len(ids), is_action=False, **fields))
        self._put(ids, action=False)

    def act(
        self,
        tokens: Any,
        *,
        logprobs: Any = None,
        weight_versions: Any = None,
        sampler: Sampler | None = None,
        heads: Heads | None = None,
        ranks: Any = None,
        entropies: Any = None,
        batch_rows: Any = None,
        support_counts: Any = None,
        support_tokens: Any = None,
        flags: Sequence[Flag] = (),
        logprob_kind: str | None = None,
        head_kind: str | None = None,
        role: str = "assistant",
        **span: Any,
    ) -> None:
        """Tokens [n] that the policy drew, with what the engine said of each.

        The per-action arguments are [n], with None (or a `Known` pair) for single unknowns; a whole one that was not
        reported stays None. `weight_versions` may be one number for all; the span is split where it changes.
        `support_counts` [n] and `support_tokens` (flat) come together. An index of a flag counts from the first of
        these tokens, or of their head or support entries. Raises ValueError, with nothing recorded of the call, where
        a length does not fit and where the schema refuses a value.
        """
        self._check_open()
        ids = _ids(tokens)
        count = len(ids)
        if isinstance(weight_versions, int | np.integer):
            if isinstance(weight_versions, bool) or not -(2**63) <= weight_versions < 2**63:
                raise ValueError(f"act: weight_versions: wanted a version of 64 bits, got {weight_versions}")
            weight_versions = np.full(count, weight_versions, np.int64)
        given = {
            "logprobs": logprobs,
            "weight_versions": weight_versions,
            "ranks": ranks,
            "entropies": entropies,
            "batch_rows": batch_rows,
        }
        columns = {name: None if value is None else _own(known(value)) for name, value in given.items()}
        for name, column in columns.items():
            if column is not None and len(column) != count:
                raise ValueError(f"act: {name}: wanted {count} values, one per token, got {len(column)}")
            if column is not None and (column.values.ndim != 1 or column.values.dtype.kind not in "iuf"):
                shape, kind = column.values.shape, column.values.dtype
                raise ValueError(f"act: {name}: wanted one number per token, got {kind} of shape {shape}")
        head_counts = None if heads is None else _head_counts(heads, count)
        if support_counts is None and support_tokens is not None:
            raise ValueError("act: support: wanted support_counts beside support_tokens, got none")
        support = None if support_counts is None else _support(support_counts, support_tokens, count)
        fields: dict[str, Any] = {"turn": self._turn, "role": role, "origin": "sampled", **span}
        kept = None if heads is None else _counted(heads, head_counts)
        alone = Span(start=0, length=count, is_action=True, sampler=None if sampler is None else 0, **fields)
        said = ("act", role, _without_words(span), sampler)
        settings: dict[str, Any] = {"spans": (alone,), "samplers": None if sampler is None else (sampler,)}
        require(
            "act", NOT_YET, tokens=ids, action_mask=np.ones(count, bool), **({} if said in TAKEN else settings),
            **columns, heads=kept, flags=tuple(flags) or None,
            support_counts=None if support is None else support[0],
            support_tokens=None if support is None else support[1],
            logprob_kind=logprob_kind, head_kind=head_kind, vocab_size=self._fields.get("vocab_size"),
        )  # fmt: skip
        TAKEN.add(said)
        fields["sampler"] = self._sampler(sampler)
        for name, kind in (("logprob_kind", logprob_kind), ("head_kind", head_kind)):
            if kind is not None and self._fields.setdefault(name, kind) != kind:
                fields[name] = kind
        start = self._length
        for first, last in _runs(columns["weight_versions"], count):
            self._spans.append(Span(start=start + first, length=last - first, is_action=True, **fields))
        self._flags.extend(self._moved(flag, start) for flag in flags)
        self._put(ids, action=True)
        self._supports.append(support)
        self._actions.append(columns)
        self._action_counts.append(count)
        self._heads.append(kept)
        self._acted = True

    def next_segment(self, cause: str) -> None:
        """End the current segment as `continued` and begin the next: its tokens are observed anew, origin `carried`."""
        self._check_open()
        require("next_segment", TOGETHER, segment_cause=cause)
        self._append(ending="continued", reward_status="on_final_segment")
        self._segment += 1
        self._cause = cause
        self._clear()

    def end(
        self,
        ending: str,
        *,
        reason: str | None = None,
        reward: float | None = None,
        reward_status: str | None = None,
        bootstrap: bool | None = None,
        **fields: Any,
    ) -> None:
        """End the rollout and append its last segment. Raises SchemaError on rows that the schema refuses."""
        self._check_open()
        self._append(
            ending=ending,
            ending_reason=reason,
            reward=reward,
            reward_status=reward_status,
            bootstrap=bootstrap,
            **fields,
        )
        self._ended = True

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        nothing = not self._tokens and error is not None
        if self._ended or nothing or isinstance(error, SchemaError):  # rows once refused would be refused again
            return
        self.end("unknown" if error is None else "aborted")

    def _check_open(self) -> None:
        if self._ended:
            raise ValueError(f"rollout {self.rollout_id}: wanted an open rollout, got one that has ended")

    def _put(self, ids: Ints, *, action: bool) -> None:
        self._tokens.append(ids)
        self._length += len(ids)
        self._mask.append(np.full(len(ids), action))

    def _sampler(self, sampler: Sampler | None) -> int | None:
        if sampler is None:
            return None
        if sampler not in self._samplers:
            self._samplers.append(sampler)
        return self._samplers.index(sampler)

    def _moved(self, flag: Flag, start: int) -> Flag:
        """The flag with its index counted over the whole segment so far."""
        if flag.index is None:
            return flag
        head_entries = sum(len(h.tokens) for h in self._heads if h is not None and h.tokens is not None)
        support_entries = sum(len(support[1]) for support in self._supports if support is not None)
        before = {
            "tokens": start,
            "action_mask": start,
            "token_bytes": start,
            "head_tokens": head_entries,
            "head_logprobs": head_entries,
            "support_tokens": support_entries,
        }
        index = flag.index + before.get(flag.column or "", sum(self._action_counts))
        return Flag(kind=flag.kind, column=flag.column, index=index)

    def _append(self, **fields: Any) -> None:
        columns = {name: _joined([a[name] for a in self._actions], self._action_counts) for name in ACTION_COLUMNS}
        row: dict[str, Any] = {
            **self._fields,
            **columns,
            "finished_at": datetime.now(UTC),
            "segment": self._segment,
            "heads": _joined_heads(self._heads, self._action_counts),
            **_joined_supports(self._supports, self._action_counts),
            "flags": (*(self._fields.get("flags") or ()), *self._flags) or None,
            "spans": tuple(self._spans),
            "samplers": tuple(self._samplers) or None,
            **{name: value for name, value in fields.items() if value is not None},
        }
        if self._cause is not None:
            row["segment_cause"] = self._cause
        mask = np.concatenate(self._mask) if self._mask else np.zeros(0, bool)
        self._writer.append(Rollout(rollout_id=self.rollout_id, tokens=self.tokens, action_mask=mask, **row))


def _copied(fields: dict[str, Any]) -> dict[str, Any]:
    """The same fields, whose values nobody else changes: arrays and mappings of the caller's may be used again."""
    return {
        name: np.array(value) if isinstance(value, np.ndarray) else dict(value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
    }


def _without_words(span: dict[str, Any]) -> dict[str, Any]:
    """The fields of a span without the name of its request: that differs each time, and any text will do."""
    return {**span, "request_id": ""} if isinstance(span.get("request_id"), str) else span


def _ids(tokens: Any) -> Ints:
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"tokens: wanted a 1-d array of whole numbers, got {ids.dtype} of shape {ids.shape}")
    return ids.astype(np.int64)


def _runs(versions: Known | None, count: int) -> list[tuple[int, int]]:
    """(first, past the last) of each run of equal versions; one run where none is known."""
    if versions is None or not count:
        return [(0, count)]
    change = (versions.values[1:] != versions.values[:-1]) | (versions.known[1:] != versions.known[:-1])
    edges = [0, *(np.flatnonzero(change) + 1).tolist(), count]
    return list(pairwise(edges))


def _head_counts(heads: Heads, count: int) -> npt.NDArray[np.int64]:
    counts = np.full(count, heads.size or 0) if heads.counts is None else np.asarray(heads.counts)
    if len(counts) != count:
        raise ValueError(f"act: heads.counts: wanted {count} values, one per token, got {len(counts)}")
    for name, values in (("tokens", heads.tokens), ("logprobs", heads.logprobs)):
        entries = 0 if values is None else len(values)
        if entries != counts.sum():
            raise ValueError(f"act: heads.{name}: wanted {counts.sum()} entries, got {entries}")
    return counts


def _support(counts: Any, tokens: Any, count: int) -> tuple[Ints, Ints]:
    kept, ids = _ids(counts), _ids([] if tokens is None else tokens)
    if len(kept) != count or len(ids) != kept.sum():
        raise ValueError(
            f"act: support: wanted {count} counts of {kept.sum()} ids in all, got {len(kept)} of {len(ids)}"
        )
    return kept, ids


def _joined_supports(supports: Sequence[tuple[Ints, Ints] | None], counts: Sequence[int]) -> dict[str, Ints]:
    """The support over all acts; one that did not report it contributes empty ones."""
    if all(support is None for support in supports):
        return {}
    nothing = np.zeros(0, np.int64)
    return {
        "support_counts": np.concatenate(
            [np.zeros(n, np.int64) if s is None else s[0] for s, n in zip(supports, counts, strict=True)]
        ),
        "support_tokens": np.concatenate([nothing if support is None else support[1] for support in supports]),
    }


def _counted(heads: Heads, counts: npt.NDArray[np.int64] | None) -> Heads:
    lists = (counts, heads.tokens, heads.logprobs)
    counts_, tokens, logprobs = (None if values is None else np.array(values) for values in lists)
    return Heads(size=heads.size, counts=counts_, tokens=tokens, logprobs=logprobs)


def _own(column: Known) -> Known:
    return Known(column.values.copy(), column.known.copy())


def _joined(columns: Sequence[Known | None], counts: Sequence[int]) -> Known | None:
    """One column over all acts; an act that did not report it contributes unknowns."""
    reported = [column for column in columns if column is not None]
    if not reported:
        return None
    values = [
        np.zeros(count, reported[0].values.dtype) if column is None else column.values
        for column, count in zip(columns, counts, strict=True)
    ]
    marks = [
        np.zeros(count, bool) if column is None else column.known for column, count in zip(columns, counts, strict=True)
    ]
    return Known(np.concatenate(values), np.concatenate(marks))


def _joined_heads(heads: Sequence[Heads | None], counts: Sequence[int]) -> Heads | None:
    reported = [h for h in heads if h is not None]
    if not reported:
        return None
    per_action = [
        np.zeros(n, np.int64) if h is None else np.asarray(h.counts) for h, n in zip(heads, counts, strict=True)
    ]
    all_counts = np.concatenate(per_action)
    size = max(h.size or 0 for h in reported)
    return Heads(
        size=size,
        counts=None if (all_counts == size).all() else all_counts,
        tokens=np.concatenate([np.asarray(h.tokens) for h in reported]),
        logprobs=np.concatenate([np.asarray(h.logprobs) for h in reported]),
    )
