"""Score stored rollouts with a model, teacher-forced, into the `evaluations` table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from rollstore.schema import TABLES, Rollout, from_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Scores(Protocol):
    """What an evaluation needs of a store."""

    def scan(self, table: str, columns: Sequence[str] | None = None) -> Iterable[pa.RecordBatch]: ...

    def append(self, table: str, data: pa.Table) -> object: ...


def evaluate(
    store: Scores,
    model: PreTrainedModel,
    *,
    evaluation_id: str,
    role: str = "trainer",
    kind: str = "behavior",
    policy: str | None = None,
    weight_version: int | None = None,
    rollout_ids: Sequence[str] | None = None,
    rows_at_once: int = 8,
) -> int:
    """Scores every segment that has actions and appends one row each; returns how many were added.

    `kind`: `behavior` puts each action under its own recorded sampler, `tempered` under its temperature alone, `raw`
    under neither. Heads are scored at the recorded head ids. Segments that already stand under `evaluation_id` are
    left out, so an interrupted evaluation goes on where it stopped. `rollout_ids` restricts it to those.

    Raises UnsupportedRecordError, naming the rollout and token, for a sampler that cannot be honoured; what was scored
    before it is kept.
    """
    done = {
        (row["rollout_id"], row["segment"])
        for batch in store.scan("evaluations", columns=["evaluation_id", "rollout_id", "segment"])
        for row in batch.to_pylist()
        if row["evaluation_id"] == evaluation_id
    }
    wanted = None if rollout_ids is None else set(rollout_ids)
    fields = {
        "evaluation_id": evaluation_id,
        "role": role,
        "kind": kind,
        "policy": policy,
        "weight_version": weight_version,
        "numerics": {"weights": _dtype(model), "activations": _dtype(model)},
    }
    added = 0
    pending: list[Rollout] = []
    for rollout in _rollouts(store):
        chosen = wanted is None or rollout.rollout_id in wanted
        if not chosen or (rollout.rollout_id, rollout.segment) in done or not rollout.action_mask.any():
            continue
        done.add((rollout.rollout_id, rollout.segment))  # a row stored twice counts once
        pending.append(rollout)
        if len(pending) == rows_at_once:
            added += _append(store, model, pending, kind, fields)
            pending = []
    return added + _append(store, model, pending, kind, fields)


def _append(store: Scores, model: PreTrainedModel, rollouts: list[Rollout], kind: str, fields: dict[str, Any]) -> int:
    from rollstore.replay.score import score_rollouts

    rows: list[dict[str, Any]] = []
    for rollout, (logprobs, heads, entropies) in zip(rollouts, score_rollouts(model, rollouts, kind=kind), strict=True):
        recorded = rollout.heads if heads is not None else None
        rows.append(
            fields
            | {
                "run_id": rollout.run_id,
                "rollout_id": rollout.rollout_id,
                "segment": rollout.segment,
                "logprobs": logprobs,
                "entropies": entropies,
                "head_size": None if recorded is None else recorded.size,
                "head_counts": None if recorded is None else recorded.counts,
                "head_tokens": None if recorded is None else recorded.tokens,
                "head_logprobs": heads,
                "created_at": datetime.now(UTC),
            }
        )
    if rows:
        store.append("evaluations", pa.Table.from_pylist(rows, schema=_schema(rows[0])))
    return len(rows)


def _rollouts(store: Scores) -> Iterator[Rollout]:
    for batch in store.scan("rollouts"):
        yield from from_table(pa.Table.from_batches([batch]))


def _schema(row: dict[str, Any]) -> pa.Schema:
    declared = TABLES["evaluations"].arrow_schema
    return pa.schema([declared.field(name) for name in row])


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")
