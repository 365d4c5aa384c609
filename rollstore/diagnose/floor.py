"""The noise floor of a scorer: the size that a difference of two scores must have before it means anything.

An item that is scored again, in other company within a batch, moves. The floor is three times the 95th percentile of
these movements, pooled over items. It is a property of one scorer, version and setting (dtype, batch size, prompt, ...)
and says how well the scorer repeats itself, not how good it is: a floor does not rank judges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.diagnose.movements import ITEM, NEEDED, Floats, Movements, movements
from rollstore.replay.verdict import SCORER as GATE
from rollstore.store.store import Store

QUANTILE, TIMES = 0.95, 3.0
SETTING = ("scorer", "scorer_version", "setting")
WORST = 20
"""Items that a floor names."""
RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class Item:
    """One item, and how far it moved."""

    rollout_id: str
    segment: int | None
    span: int | None
    position: int | None
    scores: int
    baseline: float
    largest: float
    """Of its movements."""


@dataclass(frozen=True, kw_only=True)
class Floor:
    """How well one scorer repeats itself under one setting. None: not known, for want of repeats."""

    scorer: str
    scorer_version: str | None
    setting: str | None
    items: int
    """With repeats."""
    single: int
    """Items scored once: they say nothing."""
    scores: int
    """Of the items with repeats."""
    alone: int
    """Items with repeats whose baseline was scored alone."""
    companies: int
    """Different batches."""
    batch_rows: tuple[int, ...]
    moved: float | None
    """Share of movements that are not zero."""
    median: float | None
    p95: float | None
    """Of the movements, pooled over items."""
    largest: float | None
    floor: float | None
    """3 * p95: differences of two scores up to this are noise."""
    interval: tuple[float, float] | None
    """95% of the floor, from resampled items; None below two."""
    deviation: float | None
    """Standard deviation of repeats (n - 1, pooled): what group advantages take as their `floor`."""
    worst: tuple[Item, ...]
    """Items by how far they moved, the furthest first."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        return asdict(self)


def floors(
    store: Store,
    *,
    scorer: str | None = None,
    version: str | None = None,
    setting: str | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    each: Callable[[Floor, Movements], None] = lambda floor, movements: None,
) -> list[Floor]:
    """The floors of a store's scorers, by scorer, version and setting, from all repeats that are stored.

    scorer, version, setting: only these. each: is handed every floor with its movements (for `per_item`, for a plot).
    One setting is in memory at a time. Raises CorruptionError.
    """
    given = dict(zip(SETTING, (scorer, version, setting), strict=True))
    chosen = [pc.field(name) == value for name, value in given.items() if value is not None]
    where = pc.field("scorer") != GATE  # its rows judge engines
    for condition in chosen:
        where = where & condition
    found: list[Floor] = []
    with store.snapshot() as snapshot:
        for key in _settings(snapshot.scan("scores", columns=SETTING, where=where)):
            own = where
            for name, value in key.items():
                own = own & (pc.field(name).is_null() if value is None else pc.field(name) == value)
            moved = movements(snapshot.scan("scores", columns=NEEDED, where=own).read_all())
            found.append(floor(moved, **key, resamples=resamples, seed=seed))
            each(found[-1], moved)
    return found


def floor(
    moved: Movements,
    *,
    scorer: str | None = None,
    scorer_version: str | None = None,
    setting: str | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Floor:
    """The floor of the movements of one setting."""
    sizes, counts = moved.sizes(), np.diff(moved.start)
    again = counts > 1
    p95 = _p95(sizes)
    return Floor(
        scorer=scorer or "unnamed",
        scorer_version=scorer_version,
        setting=setting,
        items=int(again.sum()),
        single=int((~again).sum()),
        scores=int(counts[again].sum()),
        alone=int(moved.alone[again].sum()),
        companies=moved.companies,
        batch_rows=moved.batch_rows,
        moved=float((sizes > 0).mean()) if len(sizes) else None,
        median=float(np.median(sizes)) if len(sizes) else None,
        p95=p95,
        largest=float(sizes.max()) if len(sizes) else None,
        floor=None if p95 is None else TIMES * p95,
        interval=_interval(sizes, moved.item_of, resamples, seed),
        deviation=moved.deviation(),
        worst=_worst(moved),
    )


def per_item(moved: Movements) -> pa.Table:
    """A row an item: what it is, how often it was scored, its baseline, whether that was alone, and its largest
    movement (null where it was scored once)."""
    largest = moved.largest()
    columns = {
        "scores": pa.array(np.diff(moved.start)),
        "baseline": pa.array(moved.values[moved.start[:-1]]),
        "alone": pa.array(moved.alone),
        "largest_movement": pa.array(largest, mask=np.isnan(largest)),
    }
    table = moved.items
    for name, values in columns.items():
        table = table.append_column(name, values)
    return table


def _settings(batches: pa.RecordBatchReader) -> list[dict[str, str | None]]:
    """The different settings, in order; the columns are looked at batch by batch."""
    seen: set[tuple[str | None, ...]] = set()
    for batch in batches:
        distinct = pa.Table.from_batches([batch]).group_by(list(SETTING)).aggregate([])
        seen.update(zip(*(distinct[name].to_pylist() for name in SETTING), strict=True))
    ordered = sorted(seen, key=lambda key: tuple(part or "" for part in key))
    return [dict(zip(SETTING, key, strict=True)) for key in ordered]


def _p95(sizes: Floats) -> float | None:
    return float(np.quantile(sizes, QUANTILE)) if len(sizes) else None


def _interval(sizes: Floats, item: Any, resamples: int, seed: int) -> tuple[float, float] | None:
    """A percentile bootstrap of the floor: items are drawn with replacement, each with all its movements."""
    places, counts = np.unique(item, return_counts=True)
    if len(places) < 2 or resamples < 1:
        return None
    starts = np.cumsum(counts) - counts
    random = np.random.default_rng(seed)
    found = np.empty(resamples)
    for n in range(resamples):
        drawn = random.integers(len(places), size=len(places))
        lengths = counts[drawn]
        # The movements of the drawn items: for each its first place, then one further each.
        steps = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        found[n] = TIMES * np.quantile(sizes[np.repeat(starts[drawn], lengths) + steps], QUANTILE)
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)


def _worst(moved: Movements) -> tuple[Item, ...]:
    largest = moved.largest()
    known = np.flatnonzero(~np.isnan(largest))
    order = known[np.argsort(-largest[known], kind="stable")][:WORST]
    counts, rows = np.diff(moved.start), moved.items.take(pa.array(order)).to_pylist()
    return tuple(
        Item(
            **{name: row[name] for name in ITEM},
            scores=int(counts[at]),
            baseline=float(moved.values[moved.start[at]]),
            largest=float(largest[at]),
        )
        for at, row in zip(order.tolist(), rows, strict=True)
    )
