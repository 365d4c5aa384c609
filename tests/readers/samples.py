"""Rollouts whose tokens and log-probs follow from their names, and rows as comparable Python."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from rollstore.schema import Rollout, Sampler, Span
from rollstore.store.store import Store
from tests.strategies import plain

SYSTEM = ("written_by", "written_row", "written_at")


def rollout(name: str, tokens: int = 6, prompt: int = 2, **fields: Any) -> Rollout:
    """A rollout of `prompt` observations and then actions, with a span each, drawn at temperature 0.8."""
    seed = sum(name.encode())
    actions = tokens - prompt
    defaults: dict[str, Any] = {
        "tokens": np.arange(seed, seed + tokens, dtype=np.int32),
        "action_mask": np.arange(tokens) >= prompt,
        "logprobs": -(np.arange(actions, dtype=np.float32) + 1) / 8,
        "logprob_kind": "behavior",
        "weight_versions": np.full(actions, 7, np.int64),
        "spans": (
            Span(start=0, length=prompt, is_action=False, role="user", origin="rendered", turn=0),
            Span(start=prompt, length=actions, is_action=True, role="assistant", origin="sampled", turn=0, sampler=0),
        ),
        "samplers": (Sampler(temperature=0.8, top_k=0, top_p=1.0),),
        "run_id": "run",
        "step": 0,
    }
    return Rollout(rollout_id=name, **{**defaults, **fields})


def write(store: Store, *rollouts: Rollout, run: str = "run") -> None:
    """One sealed part."""
    with store.writer(run=run) as writer:
        writer.append(list(rollouts))


def group(name: str, rewards: list[float | None], size: int | None = None, **fields: Any) -> list[Rollout]:
    """A group with these rewards; None is a member that no one scored."""
    return [
        rollout(
            f"{name}-{n}",
            group_id=name,
            group_size=size or len(rewards),
            sample_index=n,
            reward=reward,
            reward_status="unscored" if reward is None else "scored",
            ending="terminated",
            **fields,
        )
        for n, reward in enumerate(rewards)
    ]


def settled(record: Rollout, name: str | None = None) -> Rollout:
    """The record under another name, the fields of a struct column of its own in one order: the order is part of its
    type, which the first use of the column fixes."""
    extra = {name: dict(sorted(v.items())) if isinstance(v, dict) else v for name, v in (record.extra or {}).items()}
    return msgspec.structs.replace(record, rollout_id=name or record.rollout_id, extra=extra or None)


def rows(table: pa.Table, leave_out: tuple[str, ...] = SYSTEM) -> list[Any]:
    """Rows for comparison, by id and segment: floats as bits, maps as lists of pairs, whatever reader it was."""
    found = [
        {name: plain(_pairs(value)) for name, value in row.items() if name not in leave_out and value is not None}
        for row in table.to_pylist()
    ]
    return sorted(found, key=lambda row: (row.get("rollout_id", ""), row.get("segment", 0)))


def _pairs(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"key", "value"}:
            return (value["key"], value["value"])
        return {name: _pairs(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_pairs(item) for item in value]
    return value
