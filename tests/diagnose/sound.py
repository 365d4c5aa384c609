"""Rollouts with which every rule of an audit is content, to break in one place at a time."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rollstore.replay.verdict import Gate, keep
from rollstore.schema import TABLES, Engine, Numerics, Rollout, Sampler, Span, to_table
from rollstore.store.part import write_part
from rollstore.store.store import Store
from rollstore.store.store import open as open_store

START = datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)
GATE = "gate-of-the-tests"
NUMERICS = Numerics(weights="bfloat16", gate=GATE)
ENGINE = Engine(name="vllm", version="0.19", numerics=NUMERICS)
RESUME = {f"resume.{name}": "restart" for name in ("queue", "sampler", "tools", "context")}
PROMPT = (Span(start=0, length=1, role="system", is_action=False, origin="rendered"),
          Span(start=1, length=2, role="user", is_action=False, origin="rendered"))  # fmt: skip


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def spans(actions: int, **fields: Any) -> tuple[Span, ...]:
    defaults = {"role": "assistant", "origin": "sampled", "sampler": 0, "engine_finish": "stop"}
    drew = Span(start=3, length=actions, is_action=True, **{**defaults, **fields})
    return (*PROMPT, drew)


def sound(name: str, *, actions: int = 4, begin: float = 0.0, seconds: float = 10.0, **fields: Any) -> Rollout:
    """A rollout of three prompt tokens and some actions; the last is the stop token, 9."""
    defaults: dict[str, Any] = {
        "tokens": [1, 2, 3, *range(20, 19 + actions), 9],
        "action_mask": [0, 0, 0, *[1] * actions],
        "spans": spans(actions),
        "samplers": (Sampler(temperature=1.0, max_tokens=16, stop_token_ids=(9,)),),
        "logprobs": -np.arange(1, actions + 1, dtype=np.float32) / 8,
        "logprob_kind": "behavior",
        "weight_versions": [7] * actions,
        "weight_version_source": "per_token",
        "tokenizer": "tokenizer-1",
        "chat_template": "template-1",
        "context_policy": "none/1",
        "engine": ENGINE,
        "run_id": "run",
        "step": 1,
        "environment": "math",
        "group_id": "g",
        "group_size": 2,
        "ending": "terminated",
        "ending_reason": "stop_token",
        "reward": 1.0,
        "requested_at": at(begin - 1),
        "started_at": at(begin),
        "finished_at": at(begin + seconds),
        "metadata": RESUME,
    }
    return Rollout(rollout_id=name, **{**defaults, **fields})


def pair(**fields: Any) -> list[Rollout]:
    """A whole group, one member right and one wrong."""
    return [sound("right", **fields), sound("wrong", **{**fields, "reward": 0.0})]


def table(name: str, rows: Iterable[dict[str, Any]]) -> pa.Table:
    listed = list(rows)
    names = list(dict.fromkeys(key for row in listed for key in row))
    full = TABLES[name].arrow_schema
    return pa.Table.from_pylist(listed, schema=pa.schema([full.field(key).remove_metadata() for key in names]))


def uses(*ids: str, **fields: Any) -> pa.Table:
    defaults = {"train_run": "t", "attempt": 0, "train_step": 2, "weight_version": 8, "disposition": "trained"}
    return table("uses", ({**defaults, "rollout_id": id_, **fields} for id_ in ids))


def stored(folder: Path, *rollouts: Rollout, gated: bool = True, **tables: pa.Table) -> Store:
    """A store with these rollouts and tables, and the passed gate of `ENGINE`."""
    store = open_store(folder / "store", create=True)
    with store.writer() as writer:
        for rollout in rollouts:
            writer.append(rollout)
    for name, rows in tables.items():
        store.append(name, rows)
    if gated:
        keep(store, Gate(gate_id=GATE, engine=ENGINE, weight_version=7, checks=(), gradients_checked=False))
    return store


def planted(store: Store, rollout: Rollout, **columns: Any) -> None:
    """A sound row of which some columns are replaced behind the back of append, as another writer may do."""
    row = to_table([rollout])
    for name, values in columns.items():
        place = row.schema.get_field_index(name)
        row = row.set_column(place, row.schema.field(place), pa.array([values], row.schema.field(place).type))
    name = f"20260506T070809-{'ab' * 16}-000001"
    for column, value in {"written_by": name, "written_row": 0}.items():
        place = row.schema.get_field_index(column)
        row = row.set_column(place, row.schema.field(place), pa.array([value], row.schema.field(place).type))
    write_part(store.filesystem, "rollouts", name, row)
