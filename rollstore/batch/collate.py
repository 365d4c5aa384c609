"""Rows of the rollouts table -> TokenBatch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa

from rollstore.batch.packer import Packer
from rollstore.batch.token_batch import TokenBatch
from rollstore.usable import Transform


def collate(
    table: pa.Table,
    *,
    columns: Mapping[str, str] | None = None,
    sampler: Any = None,
    trainer_transform: Transform | None = None,
    always: Collection[str] = (),
) -> TokenBatch:
    """Pack rows of the `rollouts` schema into one batch. Tensors are on the CPU.

    table: rows of the rollouts table; a slice or a selection is fine, columns that are absent count as null, and
    columns named like the fields of `ACTION_COLUMNS` and `weights` (lists, a number an action) or `final_values` (a
    number a row) are taken in as well. columns: field of the batch -> name of the column that holds it, for those extra
    fields, as `{"anchor_logprobs": "x_anchor"}`; such a column must be there. A weight that is null is 1. sampler: what
    to assume where no sampler was recorded (any object with the attributes of `rollstore.schema.Sampler`); without it
    those log-probs are no denominators. trainer_transform: what the trainer applies to its own logits; nothing, when
    left out. always: fields among `OPTIONAL` (those of `ACTION_COLUMNS`, final_values, heads, support, routed_experts)
    that are set though no row has them, as NaN or without entries, where they would be None: so that a batch does not
    depend on which rows came together.

    Rollouts are told apart by rollout_id. The reward is that of the rollout's last segment and stands on each of its
    segments; its group is (run_id, step, group_id), each of the first segment that has one. So all segments of a
    rollout belong in one table. Raises `UnsupportedRecordError` when a list does not fit its row, an action stands at
    position 0, a row has no rollout_id, a column has another type or a number that the batch cannot hold (2.5 as a
    token, an integer above 2**53 or 1e300 as a float), or a weight is negative, infinite or NaN; `DuplicateError` where
    one (rollout_id, segment) stands twice, or rows of two runs have one rollout_id; `ValueError` for a field in
    `columns` or `always` that is none of those, a column that is absent, or more than 2**31 - 1 tokens; `TypeError` for
    a `table`, `columns` or `sampler` that is none.
    """
    return Packer(table, columns=columns, sampler=sampler, trainer_transform=trainer_transform, always=always).batch()
