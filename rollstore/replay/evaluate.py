"""Score stored rollouts with a model, teacher-forced, into the `evaluations` table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import NotFoundError
from rollstore.replay.arguments import whole
from rollstore.schema import TABLES, Known, Rollout, from_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollstore.replay.score import Segment

POOL = 64
"""Segments held at once, to be put in batches of like length."""
SAME = ("role", "kind", "policy", "weight_version")
"""What all rows of an evaluation share: going on with other settings under its id is refused."""

Progress = Callable[[int, int], None]
"""Called with (segments done, segments in all)."""

_Key = tuple[str | None, str, int]


class Scores(Protocol):
    """What an evaluation needs of a store."""

    def scan(
        self, table: str, columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> Iterable[pa.RecordBatch]: ...

    def writer(self, *, table: str) -> Any: ...


def _silent(done: int, of: int) -> None:
    """Shows no progress."""


def evaluate(
    store: Scores,
    model: PreTrainedModel,
    *,
    evaluation_id: str,
    role: str = "trainer",
    kind: str = "behavior",
    policy: str | None = None,
    weight_version: int | None = None,
    rollout_ids: str | Sequence[str] | None = None,
    rows_at_once: int = 8,
    tokens_at_once: int = 4096,
    packed: bool = False,
    progress: Progress = _silent,
) -> int:
    """Scores every segment that has actions and writes one row each; returns how many were added.

    `kind`: `behavior` puts each action under its own recorded sampler, `tempered` under its temperature alone, `raw`
    under neither. Heads are scored at the recorded head ids. `token_logprobs` holds every token: actions as in
    `logprobs`, observations raw.

    A forward pass takes at most `rows_at_once` segments of like length and `tokens_at_once` tokens, padding included (a
    longer segment runs alone); its logits are tokens_at_once x vocabulary floats. `packed` puts them in one row without
    padding instead, after a check that the model keeps them apart.

    Each pass is written and flushed: what was done survives an interrupt, and segments that already stand under
    `evaluation_id` are left out, so the same call goes on where it stopped. `rollout_ids` restricts it to those.

    Raises ValueError where the id's rows are of another role, kind, policy or version, the model mixes packed segments
    or does not have a recorded token, or a batch could hold nothing; NotFoundError for one of `rollout_ids` that the
    store does not have; UnsupportedRecordError, naming the rollout and token, for a sampler that cannot be honoured.
    """
    from rollstore.replay.score import packs, score_segments

    whole("rows_at_once", rows_at_once, least=1)
    whole("tokens_at_once", tokens_at_once, least=1)
    wanted = {rollout_ids} if isinstance(rollout_ids, str) else None if rollout_ids is None else set(rollout_ids)
    fields = {
        "evaluation_id": evaluation_id,
        "role": role,
        "kind": kind,
        "policy": policy,
        "weight_version": weight_version,
        "numerics": {"weights": _dtype(model), "activations": _dtype(model)},
    }
    done = _done(store, fields)
    todo = _todo(store, done, wanted)
    finished = 0
    progress(0, len(todo))
    checked = not packed
    with store.writer(table="evaluations") as writer:
        for batch in _batches(_rollouts(store, set(todo)), rows_at_once, tokens_at_once, packed=packed):
            if not checked and len(batch) > 1:
                if not packs(model, batch):
                    raise ValueError("packed: wanted a model that keeps segments of one row apart, this one does not")
                checked = True
            found = score_segments(model, batch, kind=kind, packed=packed)
            rows = [_row(rollout, one, fields) for rollout, one in zip(batch, found, strict=True)]
            writer.append(pa.Table.from_pylist(rows, schema=_schema(rows[0])))
            writer.flush()
            finished += len(batch)
            progress(finished, len(todo))
    return finished


def _done(store: Scores, fields: dict[str, Any]) -> set[_Key]:
    """The segments that stand under the id. Raises ValueError where they were evaluated otherwise."""
    found: set[_Key] = set()
    columns = ["run_id", "rollout_id", "segment", *SAME]
    here = pc.field("evaluation_id") == fields["evaluation_id"]
    for batch in store.scan("evaluations", columns=columns, where=here):
        for row in batch.to_pylist():
            other = [name for name in SAME if row[name] != fields[name]]
            if other:
                told = ", ".join(f"{name} {row[name]!r}" for name in other)
                asked = ", ".join(f"{fields[name]!r}" for name in other)
                raise ValueError(f"evaluation {fields['evaluation_id']!r}: wanted {told} as its rows have, got {asked}")
            found.add((row["run_id"], row["rollout_id"], row["segment"]))
    return found


def _todo(store: Scores, done: set[_Key], wanted: set[str] | None) -> list[_Key]:
    found: dict[_Key, None] = {}
    missing = set(wanted or ())
    for batch in store.scan("rollouts", columns=["run_id", "rollout_id", "segment", "action_mask"]):
        drawn = batch.column("action_mask")
        for index, row in enumerate(batch.select(["run_id", "rollout_id", "segment"]).to_pylist()):
            key = (row["run_id"], row["rollout_id"], row["segment"])
            missing.discard(row["rollout_id"])
            chosen = wanted is None or row["rollout_id"] in wanted
            if chosen and key not in done and bool(pc.any(drawn[index].values).as_py()):
                found[key] = None
    if missing:
        raise NotFoundError(f"rollout {min(missing)!r}: wanted a stored rollout, the store has none of this id")
    return list(found)


def _rollouts(store: Scores, todo: set[_Key]) -> Iterator[Rollout]:
    """The segments to do, each once although it may be stored twice."""
    for batch in store.scan("rollouts"):
        keys = list(zip(*(batch.column(name).to_pylist() for name in ("run_id", "rollout_id", "segment")), strict=True))
        mine: list[int] = []
        for index, key in enumerate(keys):
            if key in todo:
                todo.remove(key)
                mine.append(index)
        if mine:
            yield from from_table(pa.Table.from_batches([batch]).take(mine))


def _batches(rollouts: Iterable[Rollout], most_rows: int, most_tokens: int, *, packed: bool) -> Iterator[list[Rollout]]:
    pool: list[Rollout] = []
    for rollout in rollouts:
        pool.append(rollout)
        if len(pool) == max(POOL, most_rows):
            yield from _like(pool, most_rows, most_tokens, packed=packed)
            pool = []
    yield from _like(pool, most_rows, most_tokens, packed=packed)


def _like(pool: list[Rollout], most_rows: int, most_tokens: int, *, packed: bool) -> Iterator[list[Rollout]]:
    """Batches of like length, the longest first: memory that does not suffice is found out at once."""
    batch: list[Rollout] = []
    for rollout in sorted(pool, key=lambda one: -len(one.tokens)):
        together = [len(one.tokens) for one in (*batch, rollout)]
        size = sum(together) if packed else max(together) * len(together)
        if batch and (len(batch) == most_rows or size > most_tokens):
            yield batch
            batch = []
        batch.append(rollout)
    if batch:
        yield batch


def _row(rollout: Rollout, found: Segment, fields: dict[str, Any]) -> dict[str, Any]:
    recorded = rollout.heads if found.head_logprobs is not None else None
    return fields | {
        "run_id": rollout.run_id,
        "rollout_id": rollout.rollout_id,
        "segment": rollout.segment,
        "logprobs": found.logprobs,
        "token_logprobs": Known(found.token_logprobs, ~np.isnan(found.token_logprobs)).to_list(),
        "entropies": found.entropies,
        "head_size": None if recorded is None else recorded.size,
        "head_counts": None if recorded is None else recorded.counts,
        "head_tokens": None if recorded is None else recorded.tokens,
        "head_logprobs": found.head_logprobs,
        "created_at": datetime.now(UTC),
    }


def _schema(row: dict[str, Any]) -> pa.Schema:
    declared = TABLES["evaluations"].arrow_schema
    return pa.schema([declared.field(name) for name in row])


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")
