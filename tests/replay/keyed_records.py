"""What the tests of this folder build records with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollstore.errors import NotFoundError
from rollstore.replay.samplers.transformers import Turn
from rollstore.schema import Heads, Known, Rollout


class Memory:
    """As much of a store as a replay reads."""

    def __init__(self, *rollouts: Rollout) -> None:
        self.rollouts = rollouts

    def get(self, rollout_id: str) -> list[Rollout]:
        found = [rollout for rollout in self.rollouts if rollout.rollout_id == rollout_id]
        if not found:
            raise NotFoundError(f"rollout {rollout_id!r}: not in the store")
        return found


def known(*columns: Any) -> Known:
    values = np.concatenate(columns)
    return Known(values, np.ones(len(values), dtype=bool))


def joined_heads(turns: Sequence[Turn]) -> Heads:
    heads = [turn.heads for turn in turns if turn.heads is not None]
    return Heads(
        size=heads[0].size,
        counts=np.concatenate([head.counts for head in heads]),
        tokens=np.concatenate([head.tokens for head in heads]),
        logprobs=np.concatenate([head.logprobs for head in heads]),
    )
