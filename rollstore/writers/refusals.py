"""What the schema would refuse, said before a row is whole: at the call that brought it."""

from __future__ import annotations

from typing import Any

import numpy as np

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
