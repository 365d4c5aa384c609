"""What the golden stores hold, and rows as JSON that says every value exactly."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from rollstore.schema import (
    TABLES,
    Edit,
    Engine,
    Flag,
    Heads,
    Known,
    LogitBias,
    Media,
    Numerics,
    Rollout,
    Sampler,
    Span,
)

NIGHT = datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
"""The hour that Berlin's clocks skip."""

BIG = 2**64 - 1
NOISE = "gumbel-philox4x32/1"


def full() -> Rollout:
    """A rollout with a value in every column of schema 1.0, and in every child of its structs."""
    numerics = Numerics(
        weights="bfloat16", activations="bfloat16", kv="float8", lm_head="float32", gemm="native", attention="flash",
        parallelism="tp=2,pp=1", batch_invariant=True, gate="gate-7",
    )  # fmt: skip
    engine = Engine(name="vllm", version="0.11.0", numerics=numerics)
    common: dict[str, Any] = {
        "role": "assistant", "request_id": "r-1", "weight_label": "step-7", "cache_state": "fresh", "cached_tokens": 0,
        "preemptions": 1, "engine_finish": "stop", "api_finish": "stop", "started_at": NIGHT,
        "finished_at": NIGHT + timedelta(seconds=1), "raw_ref": "s3://raw/1", "state_ref": "s3://state/1",
        "engine": engine, "logprob_kind": "behavior", "head_kind": "raw", "replay_key": BIG, "replay_sample": 3,
        "media": (Media(kind="image", count=1, digest="ab", uri="s3://img/1", view="engine"),),
        "edit": Edit(kind="truncate", version="1", dropped_start=4, dropped_length=2),
    }  # fmt: skip
    spans = (
        Span(start=0, length=2, is_action=False, origin="rendered", turn=0, **{**common, "role": "user"}),
        Span(start=2, length=3, is_action=True, origin="sampled", turn=0, sampler=0, **common),
    )
    sampler = Sampler(
        temperature=0.5, top_p=0.95, top_k=50, min_p=0.125, repetition_penalty=1.5, presence_penalty=0.25,
        frequency_penalty=-0.5, max_tokens=64, min_tokens=1, seed=BIG, logit_bias=(LogitBias(token=5, bias=-100.0),),
        bad_words=("no",), stop=("\n", "END"), stop_token_ids=(2,), grammar="root ::= x",
        chain=("temperature", "top_p"), applied=True, extra={"n": 3, "text": "3"},
    )  # fmt: skip
    return Rollout(
        rollout_id="full", segment=0, segment_cause="start", run_id="math-7b", prompt_id="p-1",
        environment="arithmetic", group_id="g1", group_size=2, sample_index=0, step=2**53 + 1, policy="tiny",
        tokenizer="t-1", chat_template="c-1", context_policy="keep-all/1", tokenizer_size=100, vocab_size=128,
        engine=engine,
        tokens=[5, 6, 7, 117, 2], action_mask=[False, False, True, True, True], trainable=[True, False, True],
        token_bytes=(b"a", None, b"\xf0\x9f", b"\x98\x8a", b""),
        logprobs=Known(np.array([-0.5, 0, -math.inf], np.float32), np.array([True, False, True])),
        logprob_kind="behavior", head_kind="raw",
        weight_versions=[7, None, 8], weight_version_min=7, weight_version_max=8, weight_version_source="per_token",
        heads=Heads(size=2, counts=[2, 0, 1], tokens=[9, 7, 2], logprobs=[-0.25, -1.75, -0.125]),
        support_counts=[2, 1, 0], support_tokens=[7, 9, 117], ranks=[2, None, 0], entropies=[0.5, None, 0.0],
        batch_rows=[3, None, 1], routed_experts=np.array([0, 65535, 1, 2], np.uint16), routed_start=3, routed_count=2,
        routed_layers=1, routed_k=2, spans=spans, samplers=(sampler,), ending="truncated", ending_reason="max_tokens",
        bootstrap=True, replay_key=BIG, replay_sample=3, noise=NOISE, parent_rollout_id="parent", parent_segment=0,
        fork_position=2, reward=-0.0, reward_status="scored", requested_at=NIGHT, started_at=NIGHT,
        finished_at=NIGHT + timedelta(microseconds=1), tool_seconds=0.1, queue_seconds=1e-45,
        messages='[{"role": "user", "content": "lone \ud83d \\\\ and \x00"}]',
        flags=(Flag(kind="own", column="reward"),),
        metadata={"n": 2**63, "text": "3", "flag": True, "deep": {"a": [1, None]}}, extra=extra(1),
    )  # fmt: skip


def extra(number: int) -> dict[str, Any]:
    """Columns of the caller's own, of every family of types."""
    return {
        "x_count": 2**53 + number, "x_text": "é", "x_ratio": [math.nan, -math.inf, None, 0.1][number % 4],
        "x_when": NIGHT, "x_day": date(2026, 3, 29), "x_blob": b"\x80\x04\x95\x00", "x_words": ["a", None],
        "x_pair": {"a": 2**62, "b": ["x"]},
    }  # fmt: skip


def plain(name: str, **fields: Any) -> Rollout:
    """A small rollout; what else it records is up to `fields`."""
    seed = sum(name.encode()) % 90
    return Rollout(rollout_id=name, tokens=[seed, seed + 1, seed + 2], action_mask=[False, True, True], **fields)


def rollouts() -> list[list[Rollout]]:
    """The rollouts of the released store, a list for each part."""
    first = [
        full(),
        plain("fellow", run_id="math-7b", group_id="g1", group_size=2, sample_index=1, step=2**53 + 1, extra=extra(2)),
        Rollout(rollout_id="aborted", tokens=[1, 2], action_mask=[False, False], logprobs=[], ending="aborted"),
        Rollout(rollout_id="", tokens=[], action_mask=[]),
    ]
    second = [
        plain("long", segment=0, ending="continued", reward_status="on_final_segment", weight_versions=[3, 3]),
        plain("long", segment=1, ending="terminated", reward=1.0, segment_cause="compaction", weight_versions=[4, 4]),
        plain("late", run_id="math-7b", extra=extra(3)),
    ]
    third = [plain("after", run_id="code", step=9, extra=extra(0)), plain("said twice"), plain("said twice")]
    return [first, second, third]


def dead() -> list[Rollout]:
    """Rollouts that a writer flushed before it died."""
    return [plain("flushed", run_id="math-7b", logprobs=[-0.5, -1.0]), plain("flushed too", step=1)]


def others() -> dict[str, pa.Table]:
    """Rows of the other tables."""
    score = {
        "rollout_id": "full", "segment": 0, "span": 1, "scorer": "judge", "scorer_version": "2", "setting": "bf16",
        "batch_company": "b-1", "repeat": 0, "value": 0.412, "values": [0.5, None, -0.25], "status": "scored",
        "batch_rows": 8, "created_at": NIGHT, "metadata": [("k", "v"), ("none", None)],
    }  # fmt: skip
    unscored = {"rollout_id": "long", "segment": None, "position": 2, "scorer": "judge", "status": "timeout"}
    evaluation = {
        "evaluation_id": "e-1", "run_id": "math-7b", "rollout_id": "full", "segment": 0, "role": "reference",
        "policy": "tiny", "weight_version": 2**62, "kind": "raw", "logprobs": [-0.5, None, -2.0],
        "numerics": {"weights": "float32", "gemm": "values_only"},
        "token_logprobs": [None, -0.5, -1.0, -1.5, -2.0], "values": [0.5, 0.25, None], "final_value": 0.75,
        "head_size": 1, "head_counts": [1, 0, 1], "head_tokens": [7, 2], "head_logprobs": [-0.5, -0.25],
        "entropies": [0.1, None, 0.2], "created_at": NIGHT,
    }  # fmt: skip
    use = {
        "train_run": "t-1", "attempt": 1, "train_step": 2**53 + 1, "rollout_id": "full", "segment": 0, "epoch": 0,
        "weight_version": 9, "anchor_version": 8, "enqueued_at": NIGHT, "consumed_at": NIGHT, "disposition": "trained",
        "reason": "fresh", "tokens_trained": 2, "recipe": "r-1", "step_started_at": NIGHT, "step_finished_at": NIGHT,
        "sync_seconds": 0.5, "advantages": [0.5, None, -1.5], "logprobs": [-0.5, -1.0, -0.125],
        "weights": [1.0, 0.0, 1.0],
    }  # fmt: skip
    return {
        "scores": pa.Table.from_pylist([score, unscored], _schema("scores")),
        "evaluations": pa.Table.from_pylist([evaluation], _schema("evaluations")),
        "uses": pa.Table.from_pylist([use], _schema("uses")),
    }


def _schema(name: str) -> pa.Schema:
    return pa.schema([column.field for column in TABLES[name].columns])


def encoded(value: Any) -> Any:
    """A value as JSON that says it exactly: integers by their digits, floats in hexadecimal, the rest tagged."""
    if isinstance(value, float):
        return {"float": "nan" if math.isnan(value) else value.hex()}
    if isinstance(value, datetime):
        return {"us": (value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)}
    if isinstance(value, date):
        return {"day": value.isoformat()}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {name: encoded(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [encoded(item) for item in value]
    return value


def rows(table: pa.Table, leave_out: tuple[str, ...] = ("written_at", "written_by", "written_row")) -> list[Any]:
    """Rows by rollout and segment, without what is null and what the store itself adds."""
    found = [encoded({k: v for k, v in row.items() if k not in leave_out}) for row in table.to_pylist()]
    return sorted(found, key=lambda row: (row["rollout_id"], row.get("segment") or 0))
