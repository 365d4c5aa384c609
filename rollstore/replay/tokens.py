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
from itertools import accumulate, chain, pairwise
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
    """The first place of one span, or of one border between two, where ids come back as others.

    kind: `unknown_id` (the tokenizer has no such id), `special` (a special token comes or goes), `bytes` (the tokens
    do not hold whole characters), `text` (the text itself comes back differently), `merge` (the same text in other
    tokens), or `boundary` (at the border of two spans tokens merge or part, beyond what changes in either alone).
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
    decoded. Spans are taken alone first, then the whole segment at once; where that brings other ids than the spans
    did, each two neighbours together, since tokens may merge over their border.
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
    spans = _spans(rollout)
    parts = [tokens[start:end] for start, end, _, _ in spans]
    returned = [_again(part, tokenizer) for part in parts]
    for (start, _, role, is_action), part, again in zip(spans, parts, returned, strict=True):
        change = _change(part, again, tokenizer)
        if change is not None:
            at, kind, ids, became = change
            yield Change(position=start + at, role=role, is_action=is_action, kind=kind, ids=ids, became=became)
    for n, at, place, whole in _borders(tokens, parts, returned, tokenizer):
        start, _, role, is_action = spans[n]
        ids, became = tuple(tokens[start + at : start + at + SHOWN]), tuple(whole[place : place + SHOWN])
        yield Change(position=start + at, role=role, is_action=is_action, kind="boundary", ids=ids, became=became)


def _borders(
    tokens: list[int], parts: list[list[int]], returned: list[list[int] | None], tokenizer: Tokenizer
) -> Iterator[tuple[int, int, int, list[int]]]:
    """(span, place in it, place in what came back, what came back) of each border where something happens."""
    known = [again for again in returned if again is not None]
    joined = list(chain.from_iterable(known)) if len(known) == len(returned) else None
    whole = None if joined is None else _again(tokens, tokenizer)
    if whole is not None and whole in (joined, tokens):
        return
    found = False
    for n, ((one, other), (again, behind)) in enumerate(zip(pairwise(parts), pairwise(returned), strict=True)):
        merged = None if again is None or behind is None else _again(one + other, tokenizer)
        if again is None or behind is None or merged in (None, one + other, again + behind):
            continue
        found = True
        place = min(_first_difference(again, merged), len(again))
        yield n, _recorded(one, again, place), place, merged
    if found or joined is None or whole is None:
        return
    place = _first_difference(joined, whole)  # only more than two spans together come back as other ids
    begins = [0, *accumulate(map(len, known))]
    n = next((n for n in range(len(known)) if begins[n] <= place < begins[n + 1]), len(known) - 1)
    yield n, _recorded(parts[n], known[n], place - begins[n]), place, whole


def _first_difference(one: list[int], other: list[int]) -> int:
    shared = (n for n, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(shared, min(len(one), len(other)))


def _recorded(part: list[int], again: list[int], place: int) -> int:
    """The place in a span's recorded ids of a place in what it comes back as alone, counted from its end."""
    return max(len(part) - max(len(again) - place, 1), 0)


def _spans(rollout: Rollout) -> list[tuple[int, int, str | None, bool]]:
    """(start, end, role, whether drawn) of each span that has tokens; runs of the mask where no spans are recorded."""
    if rollout.spans is not None:
        return [(s.start, s.start + s.length, s.role, s.is_action) for s in rollout.spans if s.length]
    mask = rollout.action_mask.astype(bool).tolist()
    edges = [n for n in range(len(mask) + 1) if n in (0, len(mask)) or mask[n] != mask[n - 1]]
    return [(start, end, None, mask[start]) for start, end in pairwise(edges)]


def _again(ids: list[int], tokenizer: Tokenizer) -> list[int] | None:
    """The ids after a way through text; None where the tokenizer does not have one of them."""
    if any(token >= len(tokenizer) for token in ids):
        return None
    return list(tokenizer.encode(_text(ids, tokenizer), add_special_tokens=False))


def _change(
    ids: list[int], again: list[int] | None, tokenizer: Tokenizer
) -> tuple[int, str, tuple[int, ...], tuple[int, ...]] | None:
    """(place, kind, ids, what they became) of the first difference; None where all come back."""
    if again is None:
        strange = next(n for n, token in enumerate(ids) if token >= len(tokenizer))
        return strange, "unknown_id", tuple(ids[strange : strange + SHOWN]), ()
    if again == ids:
        return None
    text = _text(ids, tokenizer)
    at = _first_difference(ids, again)
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
