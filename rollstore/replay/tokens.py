"""Round trip of ids: what a rollout's tokens would have become on a way through text, and back.

A report, never a rewrite: the ids that are recorded stay what the model saw. It shows where a pipeline that decodes and
encodes again would train on other tokens than were drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol

import msgspec
import pyarrow as pa
import xxhash

from rollstore.schema import Rollout, from_table

SHOWN = 3
"""Ids that are shown on each side of a change."""

KEPT = 1000
"""Changed rollouts that a report holds one by one; all of them are counted."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer: those of transformers have it."""

    all_special_ids: list[int]

    def __len__(self) -> int: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class Scans(Protocol):
    """What is needed of a store."""

    def scan(self, table: str) -> Iterable[pa.RecordBatch]: ...


@dataclass(frozen=True, kw_only=True)
class Change:
    """The first place of one span where ids come back as others.

    kind: `unknown_id` (the tokenizer has no such id), `special` (a special token comes or goes), `bytes` (the tokens
    do not hold whole characters), `text` (the text itself comes back differently), `merge` (the same text in other
    tokens), or `boundary` (each span comes back, but at their border tokens merge).
    """

    position: int
    """In the segment's tokens."""
    role: str | None
    is_action: bool
    kind: str
    ids: tuple[int, ...]
    became: tuple[int, ...]
    """The ids from there on, as recorded and as they come back: at most three."""


@dataclass(frozen=True, kw_only=True)
class Changed:
    """One segment of which ids would have changed."""

    rollout_id: str
    segment: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, kw_only=True)
class RoundTrip:
    """What `check_tokens` found."""

    tokenizer: str
    template: str | None
    """Fingerprints of the tokenizer at hand and of its chat template."""
    segments: int
    """Decoded and encoded again. Those of another tokenizer are not: their ids mean other text."""
    changed: int
    drawn_changed: int
    """Segments with a change in what was drawn."""
    kinds: dict[str, int]
    """Changes of each kind."""
    other_tokenizer: dict[str, int]
    """Segments that record another tokenizer's fingerprint, by fingerprint."""
    other_template: dict[str, int]
    """Segments that record another chat template's: checked, but a prompt rendered anew would differ."""
    unknown_tokenizer: int
    """Segments that record no fingerprint of a tokenizer."""
    examples: tuple[Changed, ...]

    @property
    def share(self) -> float:
        """Changed segments among those that were checked; 0 where there are none."""
        return self.changed / self.segments if self.segments else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        return {**asdict(self), "share": self.share}

    def lines(self, most: int = 10) -> list[str]:
        """The report for a person, with at most `most` rollouts told in full."""
        said = [f"tokenizer {self.tokenizer}, template {self.template or 'none'}"]
        said += [f"{n} segments of another tokenizer, {name}: not checked" for name, n in self.other_tokenizer.items()]
        said += [f"{n} segments of another chat template, {name}" for name, n in self.other_template.items()]
        if self.unknown_tokenizer:
            said.append(f"{self.unknown_tokenizer} segments record no tokenizer")
        kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(self.kinds.items()))
        said.append(
            f"{self.changed} of {self.segments} segments ({self.share:.2%}) would come back with other ids, "
            f"{self.drawn_changed} of them in drawn tokens{f': {kinds}' if kinds else ''}"
        )
        for one in self.examples[:most]:
            said += [f"{one.rollout_id} segment {one.segment}: {_told(change)}" for change in one.changes]
        return said


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 over what decides ids: the tokenizer's own state, added and special tokens, and the BOS and EOS flags.

    Padding and truncation are settings of a call and left out. Fill `rollouts.tokenizer` with it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state: dict[str, Any]
    if backend is not None:
        state = json.loads(backend.to_str())
        state = {name: value for name, value in state.items() if name not in ("padding", "truncation")}
    else:
        state = {"vocab": sorted(tokenizer.get_vocab().items())}
    state["added"] = sorted(getattr(tokenizer, "get_added_vocab", dict)().items())
    state["special"] = {name: str(value) for name, value in getattr(tokenizer, "special_tokens_map", {}).items()}
    state["flags"] = {name: bool(getattr(tokenizer, name, False)) for name in ("add_bos_token", "add_eos_token")}
    return _digest(state)


def template_fingerprint(tokenizer: Any) -> str | None:
    """SHA-256 of the chat template; None where there is none. Fill `rollouts.chat_template` with it."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else _digest(template)


def check_tokens(source: Rollout | Sequence[Rollout] | Scans, tokenizer: Tokenizer) -> RoundTrip:
    """Decode and encode every span of every segment, and report where its ids come back as others.

    source: a store, or rollouts. A segment that records the fingerprint of another tokenizer is counted and not
    decoded. Spans are taken alone first, then the whole segment at once, where tokens may merge over their borders.
    """
    name, template = tokenizer_fingerprint(tokenizer), template_fingerprint(tokenizer)
    other: Counter[str] = Counter()
    templates: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    examples: list[Changed] = []
    segments = changed = drawn = unknown = 0
    for rollout in _rollouts(source):
        if rollout.tokenizer not in (None, name):
            other[str(rollout.tokenizer)] += 1
            continue
        segments += 1
        unknown += rollout.tokenizer is None
        if rollout.chat_template not in (None, template):
            templates[str(rollout.chat_template)] += 1
        found = tuple(_changes(rollout, tokenizer))
        if found:
            changed += 1
            drawn += any(change.is_action for change in found)
            kinds.update(change.kind for change in found)
            if len(examples) < KEPT:
                examples.append(Changed(rollout_id=rollout.rollout_id, segment=rollout.segment, changes=found))
    return RoundTrip(
        tokenizer=name, template=template, segments=segments, changed=changed, drawn_changed=drawn, kinds=dict(kinds),
        other_tokenizer=dict(other), other_template=dict(templates), unknown_tokenizer=unknown,
        examples=tuple(examples),
    )  # fmt: skip


def _rollouts(source: Any) -> Iterator[Rollout]:
    if isinstance(source, Rollout):
        yield source
    elif isinstance(source, Sequence):
        yield from source
    else:
        seen: set[int] = set()  # a segment that was written twice counts once
        for batch in source.scan("rollouts"):
            for rollout in from_table(pa.Table.from_batches([batch])):
                name = xxhash.xxh3_64_intdigest(
                    f"{rollout.segment} {rollout.rollout_id}".encode("utf-8", "surrogatepass")
                )
                if name not in seen:
                    seen.add(name)
                    yield rollout


def _changes(rollout: Rollout, tokenizer: Tokenizer) -> Iterator[Change]:
    tokens: list[int] = rollout.tokens.tolist()
    found = False
    for start, end, role, is_action in _spans(rollout):
        change = _change(tokens[start:end], tokenizer)
        if change is not None:
            found = True
            at, kind, ids, became = change
            yield Change(position=start + at, role=role, is_action=is_action, kind=kind, ids=ids, became=became)
    whole = None if found else _change(tokens, tokenizer)
    if whole is not None:
        at, _, ids, became = whole
        role, is_action = next((r, a) for start, end, r, a in _spans(rollout) if start <= at < end)
        yield Change(position=at, role=role, is_action=is_action, kind="boundary", ids=ids, became=became)


def _spans(rollout: Rollout) -> list[tuple[int, int, str | None, bool]]:
    """(start, end, role, whether drawn) of each span that has tokens; runs of the mask where no spans are recorded."""
    if rollout.spans is not None:
        return [(s.start, s.start + s.length, s.role, s.is_action) for s in rollout.spans if s.length]
    mask = rollout.action_mask.astype(bool).tolist()
    edges = [n for n in range(len(mask) + 1) if n in (0, len(mask)) or mask[n] != mask[n - 1]]
    return [(start, end, None, mask[start]) for start, end in pairwise(edges)]


def _change(ids: list[int], tokenizer: Tokenizer) -> tuple[int, str, tuple[int, ...], tuple[int, ...]] | None:
    """(place, kind, ids, what they became) of the first difference; None where all come back."""
    strange = next((n for n, token in enumerate(ids) if token >= len(tokenizer)), None)
    if strange is not None:
        return strange, "unknown_id", tuple(ids[strange : strange + SHOWN]), ()
    text = _text(ids, tokenizer)
    again = list(tokenizer.encode(text, add_special_tokens=False))
    if again == ids:
        return None
    shared = (n for n, (one, other) in enumerate(zip(ids, again, strict=False)) if one != other)
    at = next(shared, min(len(ids), len(again)))
    special = set(tokenizer.all_special_ids)
    here, there = ids[at : at + SHOWN], again[at : at + SHOWN]
    if "\ufffd" in text:
        kind = "bytes"
    elif special.intersection(here[:1] + there[:1]):
        kind = "special"
    else:
        kind = "merge" if _text(again, tokenizer) == text else "text"
    return min(at, max(len(ids) - 1, 0)), kind, tuple(here), tuple(there)


def _text(ids: list[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _told(change: Change) -> str:
    drawn = "drawn" if change.is_action else change.role or "not drawn"
    ids, became = (" ".join(map(str, some)) or "nothing" for some in (change.ids, change.became))
    return f"position {change.position} ({drawn}): {change.kind}: {ids} came back as {became}"


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:32]
