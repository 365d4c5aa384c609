"""Scores a fixed set of items alone and again in other company, as rows for the scores table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import numpy as np
import pyarrow as pa
import xxhash

from rollstore.schema import TABLES

T = TypeVar("T")

_NAMES = (
    "rollout_id", "scorer", "scorer_version", "setting", "batch_company", "repeat", "value", "status", "batch_rows",
    "created_at",
)  # fmt: skip


def measure(
    score: Callable[[Sequence[T]], Sequence[float]],
    items: Sequence[T],
    *,
    ids: Sequence[str],
    scorer: str,
    scorer_version: str | None = None,
    setting: str | None = None,
    batch_rows: Sequence[int] = (8,),
    rounds: int = 4,
    first_repeat: int = 0,
    seed: int = 0,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> pa.Table:
    """Rows of the scores table: each item alone (repeat 0), then once a round in a batch with others, drawn anew.

    score: the scores of a batch of items, one each and in order; NaN is kept as `scorer_error`. ids [items]: the
    rollouts they are. batch_rows: sizes of the batches, taken in turn by the rounds. first_repeat: number of the first
    repeat, for a set that was measured before. Append the rows with `store.append("scores", rows)`.

    Raises ValueError where the scorer gives another number of scores than items, or ids are not one an item.
    """
    if len(ids) != len(items) or len(set(ids)) != len(ids):
        raise ValueError(f"ids: wanted one of its own for each of {len(items)} items, got {len(set(ids))}")
    if not items or rounds < 0 or not batch_rows or min(batch_rows) < 1:
        raise ValueError("measure: wanted items, batches of at least one, and no negative number of rounds")
    random = np.random.default_rng(seed)
    plan = [(0, [at]) for at in range(len(items))]
    for turn in range(rounds):
        order, size = random.permutation(len(items)).tolist(), batch_rows[turn % len(batch_rows)]
        plan += [(turn + 1, order[start : start + size]) for start in range(0, len(order), size)]
    rows: dict[str, list[object]] = {name: [] for name in _NAMES}
    for number, (turn, members) in enumerate(plan):
        progress(number, len(plan))
        values = [float(value) for value in score([items[at] for at in members])]
        if len(values) != len(members):
            raise ValueError(f"score: wanted {len(members)} scores for a batch of {len(members)}, got {len(values)}")
        company = xxhash.xxh3_64_hexdigest("\n".join(ids[at] for at in members).encode(errors="surrogatepass"))
        known = [value == value for value in values]
        count = len(members)
        rows["rollout_id"] += [ids[at] for at in members]
        rows["value"] += [value if is_known else None for value, is_known in zip(values, known, strict=True)]
        rows["status"] += ["scored" if is_known else "scorer_error" for is_known in known]
        same = (scorer, scorer_version, setting, company, first_repeat + turn, count, now())
        names = ("scorer", "scorer_version", "setting", "batch_company", "repeat", "batch_rows", "created_at")
        for name, value in zip(names, same, strict=True):
            rows[name] += [value] * count
    progress(len(plan), len(plan))
    types = TABLES["scores"].by_name
    return pa.table({name: pa.array(rows[name], types[name].type) for name in _NAMES})
