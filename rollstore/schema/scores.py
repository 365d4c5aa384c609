"""The scores table: how a rollout was judged, possibly later, possibly often. Version 1.0."""

from __future__ import annotations

import pyarrow as pa

from rollstore.schema.column import STRING_MAP, TIMESTAMP, Column, Table

STATUSES = ("scored", "unscored", "scorer_error", "tool_error", "timeout", "filtered")

SCORES = Table(
    name="scores",
    meaning="how it was judged; every repeat is kept",
    key=(
        "rollout_id", "segment", "span", "position", "scorer", "scorer_version", "setting", "batch_company", "repeat",
    ),
    columns=(
        Column(name="rollout_id", id=1, type=pa.string(), required=True, meaning="the rollout"),
        Column(name="segment", id=2, type=pa.int32(), minimum=0, meaning="null: the whole rollout"),
        Column(name="span", id=3, type=pa.int32(), minimum=0, meaning="the span judged; neither span nor position: the outcome"),
        Column(name="position", id=4, type=pa.int32(), minimum=0, meaning="the token judged"),
        Column(name="scorer", id=5, type=pa.string(), required=True, meaning="who judged"),
        Column(name="scorer_version", id=6, type=pa.string(), meaning="its version"),
        Column(name="setting", id=7, type=pa.string(), meaning="dtype, batch size, prompt, ..."),
        Column(name="batch_company", id=8, type=pa.string(), meaning="id of the batch it was scored in"),
        Column(name="repeat", id=9, type=pa.int32(), minimum=0, meaning="which repeat"),
        Column(name="value", id=10, type=pa.float64(), meaning="the score; null unless scored"),
        Column(name="values", id=11, type=pa.list_(pa.float64()), align="A", nullable_items=True, meaning="dense process rewards"),
        Column(name="status", id=12, type=pa.string(), enum=STATUSES, meaning="a missing score is never a zero"),
        Column(name="batch_rows", id=13, type=pa.int32(), minimum=1, meaning="rows in the scorer's forward"),
        Column(name="created_at", id=14, type=TIMESTAMP, meaning="when"),
        Column(name="metadata", id=15, type=STRING_MAP, meaning="the caller's own"),
    ),
)  # fmt: skip
