"""The rows in the forms that the peers take, made the fastest way we know from the records an engine has at hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rollstore import Rollout

SCALARS = (
    "rollout_id", "segment", "run_id", "group_id", "group_size", "sample_index", "step", "logprob_kind", "head_kind",
    "ending", "reward", "reward_status",
)  # fmt: skip
TYPES = {
    "segment": pa.int32(), "group_size": pa.int32(), "sample_index": pa.int32(), "step": pa.int64(),
    "reward": pa.float64(),
}  # fmt: skip
SPAN = ("start", "length", "role", "is_action", "origin", "turn", "sampler")


def plain(row: Rollout) -> dict[str, Any]:
    """The columns of a row that have a value, as lists, texts and numbers: a line of JSON, or what is pickled."""
    logprobs, versions = row.logprobs, row.weight_versions
    made: dict[str, Any] = {name: value for name in SCALARS if (value := getattr(row, name)) is not None}
    made["tokens"] = row.tokens.tolist()
    made["action_mask"] = row.action_mask.tolist()
    if logprobs is not None:
        made["logprobs"] = logprobs.values.tolist()
    if versions is not None:
        made["weight_versions"] = versions.values.tolist()
    made["spans"] = [{name: getattr(span, name) for name in SPAN} for span in row.spans or ()]
    made["samplers"] = [{"temperature": sampler.temperature} for sampler in row.samplers or ()]
    if row.heads is not None:
        made["head_size"] = row.heads.size
        made["head_tokens"] = row.heads.tokens.tolist()
        made["head_logprobs"] = row.heads.logprobs.tolist()
    return made


def arrays(row: Rollout) -> dict[str, Any]:
    """As `plain`, with numpy arrays where there are numbers: what pickle and torch.save write fastest."""
    made: dict[str, Any] = {name: value for name in SCALARS if (value := getattr(row, name)) is not None}
    made |= {"tokens": row.tokens, "action_mask": row.action_mask}
    if row.logprobs is not None:
        made["logprobs"] = row.logprobs.values
    if row.weight_versions is not None:
        made["weight_versions"] = row.weight_versions.values
    made["spans"] = [{name: getattr(span, name) for name in SPAN} for span in row.spans or ()]
    made["samplers"] = [{"temperature": sampler.temperature} for sampler in row.samplers or ()]
    if row.heads is not None:
        made |= {"head_size": row.heads.size, "head_tokens": row.heads.tokens, "head_logprobs": row.heads.logprobs}
    return made


def columns(rows: Sequence[Rollout]) -> pa.Table:
    """The same columns as an Arrow table, without a single check: numpy joins the lists, Arrow takes the buffers."""
    made: dict[str, pa.Array] = {}
    for name in SCALARS:
        values = [getattr(row, name) for row in rows]
        if values[0] is not None:
            made[name] = pa.array(values, TYPES.get(name, pa.string()))
    made["tokens"] = _lists([row.tokens for row in rows])
    made["action_mask"] = _lists([row.action_mask for row in rows])
    made["logprobs"] = _lists([row.logprobs.values for row in rows if row.logprobs is not None])
    made["weight_versions"] = _lists([row.weight_versions.values for row in rows if row.weight_versions is not None])
    spans = [span for row in rows for span in row.spans or ()]
    fields = [pa.array([getattr(span, name) for span in spans]) for name in SPAN]
    made["spans"] = _of(pa.StructArray.from_arrays(fields, list(SPAN)), (len(row.spans or ()) for row in rows))
    samplers = [sampler.temperature for row in rows for sampler in row.samplers or ()]
    made["samplers"] = _of(
        pa.StructArray.from_arrays([pa.array(samplers, pa.float64())], ["temperature"]),
        (len(row.samplers or ()) for row in rows),
    )
    heads = [row.heads for row in rows if row.heads is not None]
    if heads:
        made["head_size"] = pa.array([head.size for head in heads], pa.int32())
        made["head_tokens"] = _lists([head.tokens for head in heads])
        made["head_logprobs"] = _lists([head.logprobs for head in heads])
    return pa.table(made)


def _lists(values: list[Any]) -> pa.ListArray:
    return _of(pa.array(np.concatenate(values)), (len(one) for one in values))


def _of(values: pa.Array, lengths: Iterable[int]) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(list(lengths))]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)
