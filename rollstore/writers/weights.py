"""Which weights drew which tokens, from what an engine says: spans of labels, two readings, or one at completion."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rollstore.schema import Known

Number = Callable[[str], int | None]
"""A rule that makes a number of a label, or None where there is none in it."""


def version_number(label: str) -> int | None:
    """The number of a label that is one, or that ends in one behind a separator, as `step-42`; else None.

    A number behind another number (a date, a version of a program) or behind letters (a digest) is none, and so is one
    below zero, which engines say where no version was set: a hyphen separates only behind a word.
    """
    found = re.fullmatch(r"(?:.*(?<!\d)[_:/]|.*[^\d_:/\s-]-)?(\d{1,19})", label)
    number = int(found[1]) if found else None
    return number if number is not None and number < 2**63 else None


class Stretch(NamedTuple):
    """Drawn tokens start, ..., end - 1 of one reply, all under one label and one state of the cache."""

    start: int
    end: int
    label: str | None = None
    cache_state: str | None = None


@dataclass(frozen=True, kw_only=True)
class Weights:
    """`stretches` partition the drawn tokens [A]; there is always one. `versions` is [A]; None: none is known."""

    stretches: tuple[Stretch, ...]
    versions: Known | None = None
    oldest: int | None = None
    newest: int | None = None
    source: str | None = None
    prefill_label: str | None = None
    """The engine's word for the weights that were there before the first token."""


def unknown_weights(count: int) -> Weights:
    """Nothing was said of the weights of `count` tokens."""
    return Weights(stretches=(Stretch(0, count),))


def by_spans(
    count: int,
    spans: Iterable[tuple[str, int, int]],
    *,
    number: Number = version_number,
    first_cache: str | None = None,
    later_cache: str = "unknown",
) -> Weights:
    """From the engine's own spans (label, start, end) over `count` tokens. What no span covers stays unknown.

    `first_cache` is the state of the KV cache under the first span, `later_cache` that under each later one, whose
    weights came while the request was under way. Raises ValueError where spans overlap or leave the tokens.
    """
    stretches: list[Stretch] = []
    at = 0
    for label, start, end in sorted(spans, key=lambda span: span[1:]):
        if start < at or end < start or end > count:
            raise ValueError(
                f"weight_versions: wanted spans in order within {count} tokens, got {label!r} at {start}:{end}"
            )
        if start > at:
            stretches.append(Stretch(at, start))
        if end > start or not count:
            stretches.append(Stretch(start, end, label, later_cache if stretches else first_cache))
        at = end
    if at < count or not stretches:
        stretches.append(Stretch(at, count))
    values, known = np.zeros(count, np.int64), np.zeros(count, bool)
    numbers: list[int] = []
    for stretch in stretches:
        found = None if stretch.label is None else number(stretch.label)
        if found is not None:
            numbers.append(found)
            values[stretch.start : stretch.end], known[stretch.start : stretch.end] = found, True
    complete = len(numbers) == len(stretches)
    return Weights(
        stretches=tuple(stretches),
        versions=Known(values, known) if numbers else None,
        oldest=min(numbers) if complete else None,
        newest=max(numbers) if complete else None,
        source="per_span" if any(stretch.label is not None for stretch in stretches) else None,
    )


def by_ends(count: int, before: str, after: str, *, number: Number = version_number) -> Weights:
    """From the label read before the request and the one read after it: oldest and newest, no version per token.

    Weights that were set back are older after it than before.
    """
    oldest, newest = number(before), number(after)
    if oldest is not None and newest is not None:
        oldest, newest = min(oldest, newest), max(oldest, newest)
    return Weights(
        stretches=(Stretch(0, count, after),), oldest=oldest, newest=newest, source="start_end", prefill_label=before
    )


def by_labels(count: int, labels: Sequence[str], *, number: Number = version_number) -> Weights:
    """From labels of which each held for some time of the request, in their order, as somebody said who changed them.

    One that held all the time is that of every token. Of several, the oldest and newest are known and no version per
    token; where one of them has no number, not even those.
    """
    numbers = [number(label) for label in labels]
    known = [found for found in numbers if found is not None]
    bounds = (min(known), max(known)) if len(known) == len(labels) else (None, None)
    one = len(labels) == 1
    versions = Known(np.full(count, known[0], np.int64), np.ones(count, bool)) if one and known else None
    return Weights(
        stretches=(Stretch(0, count, labels[0] if one else None),), versions=versions, oldest=bounds[0],
        newest=bounds[1], source="start_end", prefill_label=labels[0] or None,
    )  # fmt: skip


def at_completion(count: int, label: str, *, number: Number = version_number) -> Weights:
    """From one label read when the reply had come: the newest the tokens can be of, and nothing else."""
    return Weights(stretches=(Stretch(0, count, label),), newest=number(label), source="read_at_completion")
