"""What the schema would refuse, said before a row is whole: at the call that brought it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rollstore.errors import SchemaError
from rollstore.schema import Rollout, to_table
from rollstore.schema.problem import Problem

NOT_YET = frozenset({"action_at_zero", "incomplete_key"})
"""What may be wrong with one turn alone and right in its row."""

TOGETHER = frozenset({
    *NOT_YET, "ending_mismatch", "incomplete_fork", "missing_partner", "not_scored", "score_missing", "time_order",
    "version_range", "version_source", "wrong_length",
})  # fmt: skip
"""What may be wrong with some columns of a row and right with all of them."""

PER_ROW = frozenset({
    "tokens", "action_mask", "trainable", "token_bytes", "logprobs", "weight_versions", "ranks", "entropies",
    "batch_rows", "heads", "support_counts", "support_tokens",
    "routed_experts", "routed_start", "routed_count", "spans", "samplers", "flags", "fork_position",
})  # fmt: skip
"""Columns whose lengths or places are of a whole segment."""


def require(where: str, allowed: frozenset[str], **columns: Any) -> None:
    """Raise ValueError with the first thing that the schema refuses of these columns, but for kinds in `allowed`."""
    found = next((problem for problem in _problems(columns) if problem.kind not in allowed), None)
    if found is not None:
        raise ValueError(f"{where}: {found.column}: wanted {found.wanted}, got {found.found}")


class Taken:
    """What the schema took before, so that the same needs no second look: turns of a loop differ in their tokens alone.

    Told apart by how it is written, which says 1, 1.0 and True in three ways. Of it a sum is kept, and of so many.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most, self._sums = most, set[bytes]()

    def __contains__(self, what: object) -> bool:
        return _sum(what) in self._sums

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, what: object) -> None:
        if len(self._sums) >= self._most:
            self._sums.clear()
        self._sums.add(_sum(what))


def _sum(what: object) -> bytes:
    return xxhash.xxh3_128_digest(repr(what).encode(errors="surrogatepass"))


def are_ids(tokens: npt.NDArray[np.int64]) -> bool:
    """Whether the schema takes them all for token ids."""
    return not tokens.size or (int(tokens.min()) >= 0 and int(tokens.max()) < 2**31)


def _problems(columns: dict[str, Any]) -> list[Problem]:
    row: dict[str, Any] = {
        "rollout_id": "",
        "tokens": np.zeros(0, np.int64),
        "action_mask": np.zeros(0, bool),
        **columns,
    }
    try:
        to_table([Rollout(**row)])
    except SchemaError as error:
        return error.problems
    return []
