"""Batches for the loss tests, built from padded matrices as the peers' own inputs are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollstore.batch import Heads, Kind, TokenBatch
from rollstore.losses import group_mean

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
Matrix = list[list[float]]

MASK = [[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0], [1, 1, 0, 0]]
HEAD = 3


def golden(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())


class Padded:
    """A padded batch of B rows of width W; `mask` says which positions are actions; one prompt token in front."""

    def __init__(self, mask: Matrix) -> None:
        self.mask = torch.tensor(mask).bool()
        self.rows, self.width = self.mask.shape

    def flat(self, matrix: Any) -> Tensor:
        """[B, W] -> [A]"""
        return torch.as_tensor(matrix, dtype=torch.float64)[self.mask]

    def spread(self, values: Any) -> Tensor:
        """[B] -> [A]"""
        return torch.as_tensor(values, dtype=torch.float64)[:, None].expand(-1, self.width)[self.mask]

    def padded(self, values: Tensor) -> Tensor:
        """[A] -> [B, W], 0 elsewhere"""
        return torch.zeros(self.rows, self.width, dtype=values.dtype).masked_scatter(self.mask, values)

    def batch(self, **columns: Any) -> TokenBatch:
        """A batch of plain behavior log-probs at temperature 1; `columns` sets or replaces any field."""
        row, place = self.mask.nonzero(as_tuple=True)
        length = self.width + 1
        actions = len(row)
        ones = torch.ones(actions)
        defaults: dict[str, Any] = {
            "rollout_ids": [f"r{i}" for i in range(self.rows)],
            "tokens": torch.arange(self.rows * length) % 97,
            "cu_seqlens": torch.arange(0, self.rows * length + 1, length, dtype=torch.int32),
            "position_ids": torch.arange(length).repeat(self.rows),
            "action_index": row * length + place + 1,
            "logit_index": row * length + place,
            "sequence": row,
            "rollout": torch.arange(self.rows),
            "segment": torch.zeros(self.rows, dtype=torch.int64),
            "group": torch.zeros(self.rows, dtype=torch.int64),
            "group_size": torch.zeros(self.rows, dtype=torch.int64),
            "behavior_logprobs": -ones.double(),
            "behavior_kind": torch.full((actions,), Kind.behavior, dtype=torch.int8),
            "head_kind": torch.full((actions,), Kind.behavior, dtype=torch.int8),
            "transformed": torch.zeros(actions, dtype=torch.bool),
            "temperature": ones,
            "top_k": torch.zeros(actions, dtype=torch.int64),
            "top_p": ones,
            "min_p": 0 * ones,
            "penalties": torch.zeros(actions, dtype=torch.int16),
            "weight_versions": torch.zeros(actions, dtype=torch.int64),
            "version_known": torch.ones(actions, dtype=torch.bool),
            "rewards": torch.zeros(self.rows, dtype=torch.float64),
            "weights": ones,
            "bootstrap": torch.zeros(self.rows, dtype=torch.int8),
            "ending": torch.zeros(self.rows, dtype=torch.int8),
        }
        values = {**defaults, **columns}
        values.setdefault("valid", values["behavior_logprobs"].isfinite())
        return TokenBatch(**values)


def line(count: int, **columns: Any) -> TokenBatch:
    """One row of `count` actions."""
    return Padded([[1] * count]).batch(**columns)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def variable(values: Tensor) -> Tensor:
    return values.detach().clone().requires_grad_(True)


def one_head(counts: list[int], tokens: list[int], logprobs: list[float]) -> Heads:
    return Heads(torch.tensor(tokens), torch.tensor(logprobs, dtype=torch.float64), torch.tensor(counts))


def problem(seed: int = 0) -> tuple[TokenBatch, Tensor, Tensor]:
    """A batch with every column, and the trainer's log-probs [A] and head log-probs [H]."""
    generator = torch.Generator().manual_seed(seed)
    pad = Padded(MASK)
    actions = int(pad.mask.sum())

    def near(scale: float = 0.3) -> Tensor:
        return scale * torch.randn(actions, generator=generator, dtype=torch.float64)

    logprobs = -1.5 + near()
    heads = torch.rand(actions, HEAD, generator=generator, dtype=torch.float64)
    recorded = (0.8 * heads / heads.sum(-1, keepdim=True)).log()
    at_head = recorded + 0.1 * torch.randn(actions, HEAD, generator=generator, dtype=torch.float64)
    ids = torch.arange(HEAD).repeat(actions)
    batch = pad.batch(
        behavior_logprobs=logprobs + near(),
        anchor_logprobs=logprobs + near(0.2),
        reference_logprobs=logprobs + near(),
        values=near(),
        returns=near(),
        rewards=doubles(1.0, 0.0, 0.5, 0.25, 0.7),
        group=torch.tensor([7, 7, 9, 9, 9]),
        heads=Heads(ids, recorded.reshape(-1), torch.full((actions,), HEAD)),
    )
    batch, _ = group_mean(batch)
    return batch, logprobs, at_head.reshape(-1)
