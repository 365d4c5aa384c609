"""An older major version that never was: schema 0.9, with prompt and response apart, and how it becomes 1.0."""

from __future__ import annotations

import pyarrow as pa

from rollstore.schema import TABLES

VERSION = "0.9"

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("prompt", pa.list_(pa.int32())), pa.field("response", pa.list_(pa.int32())),
        pa.field("response_logprobs", pa.list_(pa.float32())), pa.field("finish", pa.string()),
        pa.field("version", pa.int64()), pa.field("seed", pa.uint64()), pa.field("x_mood", pa.string()),
        pa.field("written_by", pa.string()), pa.field("written_row", pa.int64()),
    ],
    {"rollstore.schema": VERSION, "rollstore.table": "rollouts"},
)  # fmt: skip

_ENDINGS = {"stop": "terminated", "length": "truncated"}


def rows(part: str, names: list[str]) -> pa.Table:
    """Rows of 0.9 that a part, or a journal, of this name began with."""
    made = [
        {
            "id": name, "prompt": [1, 2], "response": [3, 4, 5][: number + 1], "seed": 2**64 - 1 - number,
            "response_logprobs": [-0.5, None, -1.5][: number + 1], "finish": ["stop", "length", None][number % 3],
            "version": 2**53 + 1 + number, "x_mood": [None, "calm"][number % 2], "written_by": part,
            "written_row": number,
        }
        for number, name in enumerate(names)
    ]  # fmt: skip
    return pa.Table.from_pylist(made, SCHEMA)


_COLUMNS = (
    "rollout_id", "segment", "tokens", "action_mask", "logprobs", "ending", "bootstrap", "weight_version_max",
    "samplers", "written_by", "written_row",
)  # fmt: skip


def upgrade(table: pa.Table, name: str) -> pa.Table:
    """Rows of 0.9 as rows of 1.0: what a library that had released 0.9 would carry for ever."""
    if name != "rollouts":
        return table
    made = [
        {
            "rollout_id": row["id"], "segment": 0, "tokens": [*row["prompt"], *row["response"]],
            "action_mask": [False] * len(row["prompt"]) + [True] * len(row["response"]),
            "logprobs": row["response_logprobs"], "ending": _ENDINGS.get(row["finish"]),
            "bootstrap": False if row["finish"] == "stop" else None, "weight_version_max": row["version"],
            "samplers": [{"seed": row["seed"]}], "written_by": row["written_by"], "written_row": row["written_row"],
        }
        for row in table.to_pylist()
    ]  # fmt: skip
    newest = TABLES[name].arrow_schema
    upgraded = pa.Table.from_pylist(made, pa.schema([newest.field(column) for column in _COLUMNS]))
    for own in (column for column in table.column_names if column.startswith("x_")):
        upgraded = upgraded.append_column(own, table[own])
    return upgraded
