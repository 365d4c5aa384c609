"""What a trainer takes: flat tensors over a batch of whole rollouts, the least that every loss needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Packed:
    """T tokens, A actions, B rollouts, H head entries; types and meaning as in `rollstore.batch.TokenBatch`."""

    rollout_ids: list[str]
    tokens: Tensor
    cu_seqlens: Tensor
    position_ids: Tensor
    action_index: Tensor
    sequence: Tensor
    group: Tensor
    behavior_logprobs: Tensor
    weight_versions: Tensor
    rewards: Tensor
    head_tokens: Tensor | None = None
    head_logprobs: Tensor | None = None


def packed(columns: dict[str, Any]) -> Packed:
    """From flat numpy arrays: tokens, action_mask [T], lengths, reward, group [B], logprobs, weight_versions [A]."""
    lengths, mask = columns["lengths"], columns["action_mask"]
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    rows = np.repeat(np.arange(len(lengths)), lengths)
    index = np.flatnonzero(mask)
    heads = {}
    if "head_tokens" in columns:
        heads["head_tokens"] = torch.from_numpy(columns["head_tokens"].astype(np.int64))
        heads["head_logprobs"] = torch.from_numpy(np.array(columns["head_logprobs"], np.float32))
    return Packed(
        rollout_ids=columns["rollout_id"],
        tokens=torch.from_numpy(columns["tokens"].astype(np.int64)),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
        position_ids=torch.from_numpy(np.arange(total) - (ends - lengths)[rows]),
        action_index=torch.from_numpy(index),
        sequence=torch.from_numpy(rows[index]),
        group=torch.from_numpy(np.array(columns["group"], np.int64)),
        behavior_logprobs=torch.from_numpy(np.array(columns["logprobs"], np.float32)),
        weight_versions=torch.from_numpy(np.array(columns["weight_versions"], np.int64)),
        rewards=torch.from_numpy(np.array(columns["reward"], np.float64)),
        **heads,
    )


FLAT = ("tokens", "action_mask", "logprobs", "weight_versions", "head_tokens", "head_logprobs")


def of_rows(rows: list[dict[str, Any]], group: int = 8) -> Packed:
    """From rows whose lists are lists or arrays; neighbours by eight are a group."""
    columns: dict[str, Any] = {
        name: np.concatenate([np.asarray(row[name]) for row in rows]) for name in FLAT if name in rows[0]
    }
    columns["lengths"] = np.array([len(row["tokens"]) for row in rows])
    columns["reward"] = [row["reward"] for row in rows]
    columns["rollout_id"] = [row["rollout_id"] for row in rows]
    columns["group"] = np.arange(len(rows)) // group
    return packed(columns)


def of_groups(groups: list[dict[str, Any]]) -> Packed:
    """From samples that hold a whole group each, its lists already joined."""
    columns: dict[str, Any] = {
        name: np.concatenate([group[name] for group in groups])
        for name in (*FLAT, "lengths", "reward")
        if name in groups[0]
    }
    columns["rollout_id"] = [one for group in groups for one in group["rollout_id"].split()]
    columns["group"] = np.repeat(np.arange(len(groups)), [len(group["lengths"]) for group in groups])
    return packed(columns)


def of_table(table: pa.Table | pa.RecordBatch, group: int = 8) -> Packed:
    """From Arrow: the lists' buffers joined, without a Python object a value."""
    whole = table.combine_chunks() if isinstance(table, pa.Table) else pa.Table.from_batches([table])
    names = [name for name in FLAT if name in whole.column_names]
    columns: dict[str, Any] = {name: _one(whole[name]).flatten().to_numpy(zero_copy_only=False) for name in names}
    columns["lengths"] = pa.compute.list_value_length(whole["tokens"]).to_numpy().astype(np.int64)
    columns["reward"] = whole["reward"].to_numpy()
    columns["rollout_id"] = whole["rollout_id"].to_pylist()
    columns["group"] = np.arange(whole.num_rows) // group
    return packed(columns)


def _one(column: pa.ChunkedArray) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
