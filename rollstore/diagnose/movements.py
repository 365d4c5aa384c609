"""By how much the scores of one item move when it is scored again, from rows of the scores table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.schema import TABLES

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ITEM = ("rollout_id", "segment", "span", "position")
"""What one item is: a rollout, or a part of one."""

NEEDED = (*ITEM, "value", "status", "batch_company", "batch_rows", "repeat")


@dataclass(frozen=True, kw_only=True, eq=False)
class Movements:
    """The scores of I items under one setting, item after item; S scores, S - I of them movements.

    The first score of an item is its own baseline: scored alone (batch_rows 1) where it was, else the first repeat.
    """

    items: pa.Table
    """[I] rows of `ITEM`."""
    start: Ints
    """[I + 1]: where the scores of each item begin; the first is the baseline."""
    values: Floats
    """[S] scores."""
    alone: npt.NDArray[np.bool_]
    """[I]: whether the baseline was scored alone."""
    companies: int
    """Different batches that the scores come from, where they are named."""
    batch_rows: tuple[int, ...]
    """Sizes of those batches, rising."""

    @property
    def item_of(self) -> Ints:
        """[S - I]: the item of each movement."""
        return np.repeat(np.arange(len(self.start) - 1), np.diff(self.start) - 1)

    def sizes(self) -> Floats:
        """[S - I]: |score - baseline of its item|, item after item."""
        again = np.ones(len(self.values), bool)
        again[self.start[:-1]] = False
        baseline = np.repeat(self.values[self.start[:-1]], np.diff(self.start))
        return np.abs(self.values - baseline)[again]

    def deviation(self) -> float | None:
        """Standard deviation of repeats within an item, n - 1, pooled over items; None without repeats."""
        freedom = len(self.values) - len(self.alone)
        if freedom < 1:
            return None
        counts = np.diff(self.start)
        item = np.repeat(np.arange(len(counts)), counts)
        means = np.bincount(item, self.values, minlength=len(counts)) / np.maximum(counts, 1)
        return float(np.sqrt(np.square(self.values - means[item]).sum() / freedom))

    def largest(self) -> Floats:
        """[I]: the largest movement of each item; NaN of one that was scored once."""
        out = np.full(len(self.alone), np.nan)
        np.fmax.at(out, self.item_of, self.sizes())
        return out


def movements(scores: pa.Table) -> Movements:
    """The movements in scores that are all of one scorer, version and setting. What is not scored is left out."""
    declared = TABLES["scores"].by_name
    for name in NEEDED:
        if name not in scores.column_names:
            scores = scores.append_column(name, declared[name].nulls(scores.num_rows))
    known = pc.and_(pc.equal(scores["status"], "scored"), pc.is_finite(scores["value"]))
    rows = scores.select(list(NEEDED)).filter(known)
    alone = pc.if_else(pc.fill_null(pc.equal(rows["batch_rows"], 1), False), 0, 1)
    rows = rows.append_column("not_alone", alone)
    order = [(name, "ascending") for name in (*ITEM, "not_alone", "repeat", "batch_company")]
    rows = rows.sort_by(order).combine_chunks()
    first = _changes(rows, ITEM)
    start = np.append(np.flatnonzero(first), rows.num_rows)
    sizes = pc.drop_null(pc.unique(rows["batch_rows"])).to_pylist()
    return Movements(
        items=rows.select(list(ITEM)).filter(pa.array(first)),
        start=start,
        values=rows["value"].to_numpy().astype(np.float64),
        alone=rows["not_alone"].to_numpy()[first] == 0,
        companies=pc.count_distinct(rows["batch_company"]).as_py(),
        batch_rows=tuple(sorted(sizes)),
    )


def _changes(rows: pa.Table, names: Sequence[str]) -> npt.NDArray[np.bool_]:
    """bool [rows]: where a sorted row differs from the one before; null equals null."""
    changed = np.zeros(rows.num_rows, bool)
    if rows.num_rows:
        changed[0] = True
    for name in names:
        column = rows[name]
        now, before = column.slice(1), column.slice(0, max(0, rows.num_rows - 1))
        same = pc.fill_null(pc.equal(now, before), False)
        same = pc.or_(same, pc.and_(pc.is_null(now), pc.is_null(before)))
        changed[1:] |= ~same.to_numpy(zero_copy_only=False)
    return changed
