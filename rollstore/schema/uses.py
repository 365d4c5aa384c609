"""The uses table: what the trainer did with a rollout. Version 1.0."""

from __future__ import annotations

import pyarrow as pa

from rollstore.schema.column import FINITE, TIMESTAMP, Column, Table

floats = pa.list_(pa.float32())

USES = Table(
    name="uses",
    meaning="what the trainer did with it; an attempt that resumes at step s supersedes earlier attempts' rows with step >= s",
    key=("train_run", "attempt", "train_step", "rollout_id", "segment", "epoch"),
    columns=(
        Column(name="train_run", id=1, type=pa.string(), required=True, meaning="the training run"),
        Column(name="attempt", id=2, type=pa.int32(), minimum=0, meaning="0, 1, ...: restarts of that run"),
        Column(name="train_step", id=3, type=pa.int64(), required=True, minimum=0, meaning="optimizer step"),
        Column(name="rollout_id", id=4, type=pa.string(), required=True, meaning="the rollout"),
        Column(name="segment", id=5, type=pa.int32(), minimum=0, meaning="null: all of it"),
        Column(name="epoch", id=6, type=pa.int32(), minimum=0, meaning="pass over the data"),
        Column(name="weight_version", id=7, type=pa.int64(), meaning="weights of the consumer"),
        Column(name="anchor_version", id=8, type=pa.int64(), meaning="weights of the anchor"),
        Column(name="enqueued_at", id=9, type=TIMESTAMP, meaning="entered the trainer's queue"),
        Column(name="consumed_at", id=10, type=TIMESTAMP, meaning="left it"),
        Column(name="disposition", id=11, type=pa.string(), enum=("trained", "discarded", "filtered"), meaning="what became of it"),
        Column(name="reason", id=12, type=pa.string(), meaning="why"),
        Column(name="tokens_trained", id=13, type=pa.int64(), minimum=0, meaning="actions with weight"),
        Column(name="recipe", id=14, type=pa.string(), meaning="digest of objective, filters, reward shaping and reducer"),
        Column(name="step_started_at", id=15, type=TIMESTAMP, meaning="start of the step"),
        Column(name="step_finished_at", id=16, type=TIMESTAMP, meaning="end of the step"),
        Column(name="sync_seconds", id=17, type=pa.float32(), meaning="weight transfer after it; s"),
        Column(name="advantages", id=18, type=floats, align="A", nullable_items=True, meaning="advantage of each action"),
        Column(name="logprobs", id=19, type=floats, align="A", nullable_items=True, maximum=FINITE, meaning="the trainer's log-prob of each action; nats"),
        Column(name="weights", id=20, type=floats, align="A", nullable_items=True, meaning="loss weight of each action; 0: masked"),
    ),
)  # fmt: skip
