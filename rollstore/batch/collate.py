"""Rows of the rollouts table -> TokenBatch."""

from __future__ import annotations

from collections.abc import Mapping
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
) -> TokenBatch:
    """Pack rows of the `rollouts` schema into one batch. Tensors are on the CPU.

    table: rows of the rollouts table; a slice or a selection is fine, columns that are absent count as null, and list
    columns named like the fields of `ACTION_COLUMNS`, `final_values` (double) or `weights` are taken in as well.
    columns: field of the batch -> name of the column that holds it, for those extra fields, as
    `{"anchor_logprobs": "x_anchor"}`. sampler: what to assume where no sampler was recorded (any object with the
    attributes of `rollstore.schema.Sampler`); without it those log-probs are no denominators. trainer_transform: what
    the trainer applies to its own logits; nothing, when left out.

    The reward is that of the rollout's last segment and stands on each of its segments. Raises
    `UnsupportedRecordError` when a list does not fit its row, an action stands at position 0, a row has no rollout_id
    or a weight is negative or infinite; `ValueError` for a field in `columns` that is none of those.
    """
    return Packer(table, columns=columns, sampler=sampler, trainer_transform=trainer_transform).batch()
