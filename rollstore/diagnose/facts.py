"""One row a segment, of numbers: everything that an audit and the statistics ask of the lists of a rollout.

Computed batch by batch from Arrow, so that the lists themselves are held for one batch at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.diagnose.spans import Spans
from rollstore.schema import ROLLOUTS
from rollstore.schema.flags import LOGPROB_TOLERANCE
from rollstore.schema.flat import Flat, is_known
from rollstore.schema.rules.heads import STAND_IN

KEPT = (
    "rollout_id", "segment", "segment_cause", "run_id", "environment", "prompt_id", "group_id", "group_size", "step",
    "tokenizer", "chat_template", "context_policy", "logprob_kind", "weight_version_min", "weight_version_max",
    "weight_version_source", "ending", "ending_reason", "bootstrap", "reward", "reward_status", "requested_at",
    "started_at", "finished_at", "tool_seconds", "queue_seconds", "written_by", "written_row",
)  # fmt: skip
"""Columns of the rollouts table that stand in the facts as they are."""

LISTS = (
    "tokens", "action_mask", "trainable", "logprobs", "weight_versions", "ranks", "entropies", "batch_rows",
    "head_tokens", "head_counts", "support_counts",
)  # fmt: skip

COLUMNS = (*KEPT, *LISTS, "head_size", "engine", "spans", "samplers", "flags")
"""What is read of the rollouts table."""

FLAGS = ("context_shifted", "unplaced_logprobs", "sampled_id_missing", "nan_logprob")
"""Kinds of flags that are counted, each in a column of its name."""

_COUNTS = (
    "tokens", "mask", "actions", "trained", "logprobs", "logprobs_known", "above_zero", "floored", "impossible",
    "versions", "versions_known", "trainables", "ranks", "entropies", "batch_rows", "head_counts", "heads",
    "supports", "edits", "engines", "spans", "spanned", "span_actions", "roleless", "originless", "sampled",
    "unhonoured", "of_kind", "undrawn", "last_length", "last_limit", *FLAGS,
)  # fmt: skip
_MARKS = ("acts_at_zero", "broken_spans", "mask_differs", "last_stops")

SCHEMA = pa.schema(
    [
        *(ROLLOUTS.arrow_schema.field(name).remove_metadata() for name in KEPT),
        pa.field("engine", pa.string()),
        pa.field("last_finish", pa.string()),
        *(pa.field(name, pa.int32()) for name in _COUNTS),
        *(pa.field(name, pa.bool_()) for name in _MARKS),
    ]
)
"""Columns of the facts. A count of a list is null where the list is; see `segment_facts` for what each counts."""

Ints = npt.NDArray[np.int64]


def segment_facts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The facts of one batch, [rows] each.

    tokens, mask, actions: lengths of tokens and action_mask, trues in the mask. trained: actions that are trainable.
    logprobs, versions, trainables, ranks, entropies, batch_rows, head_counts, supports: lengths of those lists; heads:
    actions that the flat head list covers, by head_counts or at head_size. above_zero, floored, impossible: log-probs
    above 1e-5, finite ones of -9999 and less, and those of minus infinity. spanned, span_actions: tokens and actions
    under spans. roleless, originless: tokens under spans without role or origin. sampled: actions whose sampler has a
    temperature. unhonoured: actions whose sampler was not applied. of_kind: actions whose log-prob has a known kind;
    undrawn: those of a kind that leaves out what their sampler did. edits, engines: spans with one. last_length:
    actions since the last observation; last_limit, last_finish, last_stops: of the last span that drew.
    """
    lists = {name: Flat(batch.column(name)) for name in LISTS}
    mask = lists["action_mask"]
    drawn = mask.numpy(False)
    actions = mask.totals(drawn)
    columns: dict[str, Any] = {name: batch.column(name) for name in KEPT}
    columns["engine"] = _engine(batch.column("engine"))
    counts: dict[str, Any] = {
        "tokens": _length(lists["tokens"]),
        "mask": _length(mask),
        "actions": actions,
        "trained": _trained(lists["trainable"], actions),
        "heads": _heads(lists["head_tokens"], lists["head_counts"], batch.column("head_size")),
        **_logprobs(lists["logprobs"]),
        "versions": _length(lists["weight_versions"]),
        "versions_known": _known(lists["weight_versions"]),
        **{name: _length(lists[name]) for name in ("ranks", "entropies", "batch_rows", "head_counts")},
        "trainables": _length(lists["trainable"]),
        "supports": _length(lists["support_counts"]),
        **_flags(Flat(batch.column("flags"))),
    }
    first = np.zeros(batch.num_rows, bool)
    some = mask.lengths > 0
    first[some] = drawn[mask.offsets[:-1][some]]
    spans = Spans(batch, mask, drawn, actions, lists["tokens"])
    counts |= spans.counts()
    columns |= {name: _int32(values) for name, values in counts.items()}
    columns |= {"acts_at_zero": pa.array(first), **spans.marks(), "last_finish": spans.last_finish()}
    return pa.RecordBatch.from_arrays([columns[field.name] for field in SCHEMA], schema=SCHEMA)


def _int32(values: Any) -> pa.Array:
    array = values if isinstance(values, pa.Array) else pa.array(values)
    return array.cast(pa.int32())


def _length(lists: Flat) -> pa.Array:
    return pa.array(lists.lengths, mask=~lists.valid)


def _trained(trainable: Flat, actions: Ints) -> Ints:
    return np.where(trainable.valid, trainable.totals(trainable.numpy(False)), actions)


def _logprobs(lists: Flat) -> dict[str, Any]:
    values = lists.numpy(np.float32(0))
    endless = np.isneginf(values)
    return {
        "logprobs": _length(lists),
        "logprobs_known": _known(lists),
        "above_zero": _count(lists, values > LOGPROB_TOLERANCE),
        "floored": _count(lists, (values <= STAND_IN) & ~endless),
        "impossible": _count(lists, endless),
    }


def _known(lists: Flat) -> Ints:
    return lists.lengths if not lists.values.null_count else lists.totals(lists.known)


def _count(lists: Flat, marks: npt.NDArray[np.bool_]) -> Ints:
    """How many of a row's items are marked; of most batches none is."""
    return lists.totals(marks) if marks.any() else np.zeros(len(lists.valid), np.int64)


def _heads(tokens: Flat, counts: Flat, size: pa.Array) -> pa.Array:
    """Actions that a head list covers; null where there is none, -1 where it does not fit its counts or its size."""
    sizes = size.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    known = tokens.valid & (counts.valid | (is_known(size) & (sizes > 0)))
    whole, rest = np.divmod(tokens.lengths, np.maximum(sizes, 1))
    by_size = np.where(rest == 0, whole, -1)
    by_count = np.where(counts.totals(counts.numpy()) == tokens.lengths, counts.lengths, -1)
    return pa.array(np.where(counts.valid, by_count, by_size), mask=~known)


def _engine(column: pa.Array) -> pa.Array:
    """Name and version, as `vllm 0.19`; null where there is no name."""
    name, version = pc.struct_field(column, "name"), pc.struct_field(column, "version")
    return pc.if_else(pc.is_valid(version), pc.binary_join_element_wise(name, pc.fill_null(version, ""), " "), name)


def _flags(lists: Flat) -> dict[str, Any]:
    kinds = lists.values.field("kind") if len(lists.values) else None
    none = np.zeros(len(lists.valid), np.int64)
    return {
        kind: none if kinds is None else lists.totals(pc.fill_null(pc.equal(kinds, kind), False).to_numpy(False))
        for kind in FLAGS
    }
