"""Rows of the rollouts table -> TokenBatch. Works on whole columns: no loop over rows, actions or tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
import xxhash
from torch import Tensor

from rollstore.batch.samplers import drawn
from rollstore.batch.token_batch import Ending, Heads, Routing, Support, TokenBatch
from rollstore.errors import UnsupportedRecordError
from rollstore.schema.flat import Flat, Rows
from rollstore.schema.rules.heads import STAND_IN
from rollstore.usable import Transform

Ints = npt.NDArray[np.int64]

ACTION_COLUMNS = ("anchor_logprobs", "reference_logprobs", "values", "action_rewards", "advantages", "returns")
"""Fields [A] that the rollouts table has no column for; taken from a column of that name if there is one."""


def collate(
    table: pa.Table,
    *,
    columns: Mapping[str, str] | None = None,
    sampler: Any = None,
    trainer_transform: Transform | None = None,
) -> TokenBatch:
    """Pack rows of the `rollouts` schema into one batch. Tensors are on the CPU.

    table: rows of the rollouts table; a slice or a selection is fine, columns that are absent count as null, and list
    columns named like the fields of `ACTION_COLUMNS`, `final_values` (double) or `weights` are taken in as well.
    columns: field of the batch -> name of the column that holds it, for those extra fields, as
    `{"anchor_logprobs": "x_anchor"}`. sampler: what to assume where no sampler was recorded (any object with the
    attributes of `rollstore.schema.Sampler`); without it those log-probs are no denominators. trainer_transform: what
    the trainer applies to its own logits; nothing, when left out.

    The reward is that of the rollout's last segment and stands on each of its segments. Raises
    `UnsupportedRecordError` when a list does not fit its row, or an action stands at position 0.
    """
    rows = Rows(table)
    tokens = rows.list("tokens")
    masks = rows.list("action_mask")
    if tokens is None or masks is None:
        tokens = masks = _no_tokens(table.num_rows)
    ids = rows.objects("rollout_id")
    _same_lengths("action_mask", masks.lengths, tokens.lengths, "tokens", ids)
    action_index = np.flatnonzero(masks.numpy(missing=False))
    sequence = tokens.rows[action_index]
    position = np.arange(len(tokens.rows)) - tokens.offsets[:-1][tokens.rows]
    if len(action_index) and not position[action_index].all():
        row = int(sequence[np.flatnonzero(position[action_index] == 0)[0]])
        raise UnsupportedRecordError(f"rollout {ids[row]!r}: its first token is an action; nothing scores position 0")

    actions = _Actions(rows, sequence, ids)
    how = drawn(rows, tokens.offsets, action_index, sequence, sampler)
    logprobs = actions.floats("logprobs", np.float32)
    logprobs = np.full(len(sequence), np.nan, np.float32) if logprobs is None else logprobs
    versions, version_known = actions.integers("weight_versions")
    rollout = _rollout(rows)
    segment = _numbers(rows, "segment", 0)
    renamed = dict(columns or {})
    extra = {name: _tensor(actions.floats(renamed.get(name, name))) for name in ACTION_COLUMNS}
    final_values = rows.numbers(renamed.get("final_values", "final_values"), missing=np.nan)
    return TokenBatch(
        rollout_ids=[str(id) for id in ids],
        tokens=torch.from_numpy(tokens.numpy().astype(np.int64)),
        cu_seqlens=torch.from_numpy(tokens.offsets.astype(np.int32)),
        position_ids=torch.from_numpy(position),
        action_index=torch.from_numpy(action_index),
        logit_index=torch.from_numpy(action_index - 1),
        sequence=torch.from_numpy(sequence),
        rollout=torch.from_numpy(rollout),
        segment=torch.from_numpy(segment),
        group=torch.from_numpy(_groups(rows, ids)),
        group_size=torch.from_numpy(_numbers(rows, "group_size", 0)),
        behavior_logprobs=torch.from_numpy(logprobs),
        valid=torch.from_numpy(np.isfinite(logprobs) & (logprobs > STAND_IN)),
        weight_versions=torch.from_numpy(versions),
        version_known=torch.from_numpy(version_known),
        rewards=torch.from_numpy(_rewards(rows, rollout, segment)),
        weights=torch.from_numpy(_weights(actions, renamed)),
        bootstrap=torch.from_numpy(_bootstrap(rows)),
        ending=torch.from_numpy(_codes(rows.array("ending"), list(Ending.__members__), Ending.unknown, rows.count)),
        trainer_transform=trainer_transform or Transform(),
        final_values=None if final_values is None else torch.from_numpy(final_values[0].astype(np.float32)),
        heads=_heads(rows, actions),
        support=_support(rows, actions),
        routed_experts=_routing(rows),
        behavior_kind=torch.from_numpy(how.behavior_kind),
        head_kind=torch.from_numpy(how.head_kind),
        transformed=torch.from_numpy(how.transformed),
        temperature=torch.from_numpy(how.temperature),
        top_k=torch.from_numpy(how.top_k),
        top_p=torch.from_numpy(how.top_p),
        min_p=torch.from_numpy(how.min_p),
        penalties=torch.from_numpy(how.penalties),
        anchor_logprobs=extra["anchor_logprobs"],
        reference_logprobs=extra["reference_logprobs"],
        values=extra["values"],
        action_rewards=extra["action_rewards"],
        advantages=extra["advantages"],
        returns=extra["returns"],
    )


class _Actions:
    """Lists with one value an action, spread over the actions [A] of the batch."""

    def __init__(self, rows: Rows, sequence: Ints, ids: list[str | None]) -> None:
        self.rows = rows
        self.sequence = sequence
        self.ids = ids
        self.counts = np.bincount(sequence, minlength=rows.count).astype(np.int64)

    def _list(self, name: str) -> tuple[Flat, npt.NDArray[np.bool_]] | None:
        """The column flattened, and which actions have a value in it (the list of their row is not null)."""
        column = self.rows.list(name)
        if column is None:
            return None
        wanted = np.where(column.valid, self.counts, 0)
        _same_lengths(name, column.lengths, wanted, "actions", self.ids)
        return column, column.valid[self.sequence]

    def floats(self, name: str, dtype: type[np.floating[Any]] = np.float32) -> npt.NDArray[Any] | None:
        """[A], NaN where the list or the value is null; None where the column is absent."""
        found = self._list(name)
        if found is None:
            return None
        column, present = found
        out = np.full(len(self.sequence), np.nan, dtype)
        out[present] = column.numpy(missing=np.nan)
        return out

    def integers(self, name: str, missing: int = 0) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """(values [A], known [A])."""
        out = np.full(len(self.sequence), missing, np.int64)
        known = np.zeros(len(self.sequence), np.bool_)
        found = self._list(name)
        if found is not None:
            column, present = found
            out[present] = column.numpy(missing=missing)
            known[present] = column.known
        return out, known


def _no_tokens(rows: int) -> Flat:
    return Flat(pa.array([[]] * rows, pa.list_(pa.int32())))


def _same_lengths(name: str, found: Ints, wanted: Ints, of: str, ids: list[str | None]) -> None:
    wrong = np.flatnonzero(found != wanted)
    if len(wrong):
        row = int(wrong[0])
        raise UnsupportedRecordError(
            f"rollout {ids[row]!r}: {name}: wrong_length: {found[row]} values, {of} has {wanted[row]}"
        )


def _tensor(values: npt.NDArray[Any] | None) -> Tensor | None:
    return None if values is None else torch.from_numpy(values)


def _numbers(rows: Rows, name: str, missing: int) -> Ints:
    found = rows.numbers(name, missing)
    return np.full(rows.count, missing, np.int64) if found is None else found[0].astype(np.int64)


def _codes(column: pa.Array | None, names: list[str], missing: int, count: int) -> npt.NDArray[np.int8]:
    """Strings -> their index in `names`; `missing` for null and for a word of a newer version."""
    if column is None:
        return np.full(count, missing, np.int8)
    codes = pc.index_in(column, value_set=pa.array(names)).fill_null(missing)
    return codes.to_numpy(zero_copy_only=False).astype(np.int8)


def _rollout(rows: Rows) -> Ints:
    """Dense index of the rollout ids, in order of appearance."""
    ids = rows.array("rollout_id")
    if ids is None:
        return np.arange(rows.count)
    return ids.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)


def _groups(rows: Rows, ids: list[str | None]) -> Ints:
    """A 64-bit id of (run_id, step, group_id), the same in every process; without a group, of the rollout alone.

    One hash a row, in C; 64 bits make a collision among a billion groups a matter of one in forty.
    """
    keys = zip(rows.objects("run_id"), rows.objects("step"), rows.objects("group_id"), ids, strict=True)
    named = [("r", run, id) if group is None else ("g", run, step, group) for run, step, group, id in keys]
    hashed = np.fromiter((xxhash.xxh3_64_intdigest(repr(name).encode()) for name in named), np.uint64, rows.count)
    return hashed.view(np.int64)


def _rewards(rows: Rows, rollout: Ints, segment: Ints) -> npt.NDArray[np.float64]:
    """The reward that stands on the last segment of each rollout, for every row of it."""
    found = rows.numbers("reward", missing=np.nan)
    own = np.full(rows.count, np.nan) if found is None else found[0].astype(np.float64)
    order = np.lexsort((segment, rollout))
    last = np.zeros(rows.count, np.int64)
    last[rollout[order]] = order  # the last write wins: the highest segment of each rollout
    return own[last[rollout]]


def _bootstrap(rows: Rows) -> npt.NDArray[np.int8]:
    found = rows.numbers("bootstrap", missing=False)
    if found is None:
        return np.full(rows.count, -1, np.int8)
    return np.where(found[1], found[0].astype(np.int8), np.int8(-1))


def _weights(actions: _Actions, renamed: dict[str, str]) -> npt.NDArray[np.float32]:
    """1, or the caller's weight; 0 where the record says that the action must not be trained on."""
    given = actions.floats(renamed.get("weights", "weights"))
    weights = np.ones(len(actions.sequence), np.float32) if given is None else np.nan_to_num(given, nan=1.0)
    trainable, known = actions.integers("trainable", missing=1)
    return np.where(known & (trainable == 0), np.float32(0), weights)


def _heads(rows: Rows, actions: _Actions) -> Heads | None:
    tokens, logprobs = rows.list("head_tokens"), rows.list("head_logprobs")
    if tokens is None or logprobs is None:
        return None
    counts, known = actions.integers("head_counts")
    has = tokens.valid & logprobs.valid
    counts = np.where(known, counts, _numbers(rows, "head_size", 0)[actions.sequence])
    counts = np.where(has[actions.sequence], counts, 0)
    summed = np.bincount(actions.sequence, weights=counts, minlength=rows.count).astype(np.int64)
    _same_lengths("head_tokens", tokens.lengths, summed, "the sum of head_counts", actions.ids)
    _same_lengths("head_logprobs", logprobs.lengths, summed, "the sum of head_counts", actions.ids)
    return Heads(
        torch.from_numpy(tokens.numpy().astype(np.int64)),
        torch.from_numpy(logprobs.numpy(missing=np.nan).astype(np.float32)),
        torch.from_numpy(counts),
    )


def _support(rows: Rows, actions: _Actions) -> Support | None:
    tokens = rows.list("support_tokens")
    if tokens is None:
        return None
    counts, _ = actions.integers("support_counts")
    summed = np.bincount(actions.sequence, weights=counts, minlength=rows.count).astype(np.int64)
    _same_lengths("support_tokens", tokens.lengths, summed, "the sum of support_counts", actions.ids)
    return Support(torch.from_numpy(tokens.numpy().astype(np.int64)), torch.from_numpy(counts))


def _routing(rows: Rows) -> Routing | None:
    experts = rows.list("routed_experts")
    if experts is None:
        return None
    shape = [_numbers(rows, f"routed_{name}", 0) for name in ("start", "count", "layers", "k")]
    wanted = np.where(experts.valid, shape[1] * shape[2] * shape[3], 0)
    _same_lengths("routed_experts", experts.lengths, wanted, "count * layers * k", rows.objects("rollout_id"))
    return Routing(torch.from_numpy(experts.numpy().astype(np.int32)), *(torch.from_numpy(part) for part in shape))
