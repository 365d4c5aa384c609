"""The evaluations table: the same tokens scored by another forward pass. Version 1.0."""

from __future__ import annotations

import pyarrow as pa

from rollstore.schema.column import FINITE, TIMESTAMP, Column, Table
from rollstore.schema.rollouts import numerics

ROLES = ("trainer", "anchor", "reference", "teacher", "engine", "critic")
KINDS = ("raw", "tempered", "behavior")

floats = pa.list_(pa.float32())

EVALUATIONS = Table(
    name="evaluations",
    meaning="the same tokens scored by another forward pass",
    key=("evaluation_id", "run_id", "rollout_id", "segment"),
    columns=(
        Column(name="evaluation_id", id=1, type=pa.string(), required=True, meaning="one id for one pass over many rollouts"),
        Column(name="run_id", id=2, type=pa.string(), meaning="the run"),
        Column(name="rollout_id", id=3, type=pa.string(), required=True, meaning="the rollout"),
        Column(name="segment", id=4, type=pa.int32(), required=True, minimum=0, meaning="its segment"),
        Column(name="role", id=5, type=pa.string(), enum=ROLES, meaning="whose forward this is"),
        Column(name="policy", id=6, type=pa.string(), meaning="model name"),
        Column(name="weight_version", id=7, type=pa.int64(), meaning="its weights"),
        numerics(8),
        Column(name="kind", id=20, type=pa.string(), enum=KINDS, meaning="behavior: each action under its own recorded sampler or support"),
        Column(name="logprobs", id=21, type=floats, align="A", nullable_items=True, maximum=FINITE, meaning="log-prob of each action; nats"),
        Column(name="token_logprobs", id=22, type=floats, align="T", nullable_items=True, maximum=FINITE, meaning="log-prob of each token; position 0 is null"),
        Column(name="values", id=23, type=floats, align="A", nullable_items=True, meaning="V just before each action"),
        Column(name="final_value", id=24, type=pa.float32(), meaning="V after the last token, trailing observations included"),
        Column(name="head_size", id=25, type=pa.int32(), minimum=0, meaning="k asked for; 0 when there are no heads"),
        Column(name="head_counts", id=26, type=pa.list_(pa.int32()), align="A", minimum=0, meaning="entries per action; null: every action has head_size"),
        Column(name="head_tokens", id=27, type=pa.list_(pa.int32()), align="H", minimum=0, meaning="ids, flat over actions"),
        Column(name="head_logprobs", id=28, type=floats, align="H", maximum=FINITE, meaning="their log-probs; nats"),
        Column(name="entropies", id=29, type=floats, align="A", nullable_items=True, meaning="entropy at each action; nats"),
        Column(name="created_at", id=30, type=TIMESTAMP, meaning="when"),
    ),
)  # fmt: skip
