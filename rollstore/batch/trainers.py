"""The tensors that common trainers take, under their names, from a packed batch. None of the trainers is imported."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollstore.batch.arguments import check_batch
from rollstore.batch.denominator import refuse_unusable
from rollstore.batch.padded import to_responses
from rollstore.batch.token_batch import TokenBatch, divisible
from rollstore.errors import UnsupportedRecordError

LOGPROBS = ("behavior_logprobs", "anchor_logprobs", "reference_logprobs")
"""Columns that a ratio divides by: a probability of 0 is as good as none."""


def to_verl(
    batch: TokenBatch, *, pad_id: int = 0, prompt_width: int | None = None, response_width: int | None = None
) -> dict[str, Tensor]:
    """The batch of a verl `DataProto` (verl 0.9): `DataProto.from_single_dict(to_verl(batch))`.

    prompts [B, P], responses [B, R]; input_ids, attention_mask, position_ids [B, P + R] int64; response_mask [B, R]
    int64: actions with weight. float32 [B, R], 0 where there is none: rollout_log_probs, the behavior's;
    old_log_probs, the anchor's, and ref_log_prob, advantages, returns, values where the batch has them.
    token_level_scores, with the reward at the last action with weight of its rollout (the last of all, where none
    has), where every row with an action has one: a missing reward is no zero. Raises UnsupportedRecordError where
    an action with weight lacks a log-prob or a finite value, a behavior log-prob may be no denominator, a reward is
    infinite, or a weight is neither 0 nor 1.
    """
    parts = to_responses(batch, pad_id=pad_id, prompt_width=prompt_width, response_width=response_width)
    active = _active(batch)
    attention = torch.cat([parts.prompt_mask, parts.response_attention], 1).long()
    columns = {
        "rollout_log_probs": _behavior(batch, active),
        "old_log_probs": _column(batch, "anchor_logprobs", active),
        "ref_log_prob": _column(batch, "reference_logprobs", active),
        "advantages": _column(batch, "advantages", active),
        "returns": _column(batch, "returns", active),
        "values": _column(batch, "values", active),
        "token_level_scores": _scores(batch, active),
    }
    return {
        "prompts": parts.prompts,
        "responses": parts.responses,
        "input_ids": torch.cat([parts.prompts, parts.responses], 1),
        "attention_mask": attention,
        "position_ids": parts.position_ids,
        "response_mask": parts.spread(active.long()),
        **{name: parts.spread(column) for name, column in columns.items() if column is not None},
    }


def to_trl(
    batch: TokenBatch, *, pad_id: int = 0, prompt_width: int | None = None, response_width: int | None = None
) -> dict[str, Any]:
    """The inputs of TRL's `GRPOTrainer` to its loss (trl 1.16).

    prompt_ids, prompt_mask [B, P], completion_ids, completion_mask [B, R] int64; tool_mask [B, R] int64: actions with
    weight. float32 [B, R], 0 where there is none: sampling_per_token_logps, the behavior's, and advantages (required);
    old_per_token_logps, the anchor's, and ref_per_token_logps where the batch has them. num_items_in_batch []: actions
    with weight. Raises as `to_verl`, and ValueError without advantages.
    """
    parts = to_responses(batch, pad_id=pad_id, prompt_width=prompt_width, response_width=response_width)
    active = _active(batch)
    columns = {
        "sampling_per_token_logps": _behavior(batch, active),
        "advantages": _advantages(batch, active),
        "old_per_token_logps": _column(batch, "anchor_logprobs", active),
        "ref_per_token_logps": _column(batch, "reference_logprobs", active),
    }
    return {
        "prompt_ids": parts.prompts,
        "prompt_mask": parts.prompt_mask.long(),
        "completion_ids": parts.responses,
        "completion_mask": parts.response_attention.long(),
        "tool_mask": parts.spread(active.long()),
        "num_items_in_batch": active.sum(),
        **{name: parts.spread(column) for name, column in columns.items() if column is not None},
    }


class Datum(NamedTuple):
    """One row as tinker takes it: `tinker.Datum(model_input=ModelInput.from_ints(tokens), loss_fn_inputs=inputs)`.

    tokens: all but the last. inputs, one value a token: target_tokens int64, the token after each; logprobs, of the
    behavior, and advantages float32, both 0 where the target is no action with weight, as its losses want them. mask
    bool: where it is one.
    """

    tokens: list[int]
    inputs: dict[str, Tensor]
    mask: Tensor


def to_tinker(batch: TokenBatch) -> list[Datum]:
    """The fields of tinker's Datum for `importance_sampling` and `ppo` (tinker 0.38). Raises as `to_trl`."""
    check_batch(batch)
    batch.unshared("to_tinker")
    active = _active(batch)
    count, at = len(batch.tokens), batch.action_index
    given = {"logprobs": _behavior(batch, active), "advantages": _advantages(batch, active)}
    columns = {name: torch.zeros(count).index_put((at,), column.cpu()) for name, column in given.items()}
    mask = torch.zeros(count, dtype=torch.bool).index_put((at,), active.cpu())
    tokens, bounds = batch.tokens.cpu(), batch.cu_seqlens.tolist()
    found: list[Datum] = []
    for begin, end in pairwise(bounds):
        targets = slice(min(begin + 1, end), end)
        inputs = {"target_tokens": tokens[targets], **{name: column[targets] for name, column in columns.items()}}
        found.append(Datum(tokens[begin : max(end - 1, begin)].tolist(), inputs, mask[targets]))
    return found


def _active(batch: TokenBatch) -> Tensor:
    """bool [A]: the actions that count. These trainers know a mask, and no other weight."""
    active = batch.weights != 0
    if not bool(((batch.weights == 1) | ~active).all()):
        raise UnsupportedRecordError("weights: wanted 0 or 1 for a trainer that only masks, got others")
    return active


def _behavior(batch: TokenBatch, active: Tensor) -> Tensor:
    """float32 [A]: the log-probs that ratios are taken to; 0 for an action that does not count."""
    refuse_unusable(batch)
    return _counted(batch, "behavior_logprobs", batch.behavior_logprobs, active, batch.recorded)


def _advantages(batch: TokenBatch, active: Tensor) -> Tensor:
    found = _column(batch, "advantages", active)
    if found is None:
        raise ValueError("advantages: wanted a batch with them, as of rollstore.losses.group_zscore, got none")
    return found


def _column(batch: TokenBatch, name: str, active: Tensor) -> Tensor | None:
    """float32 [A]: a column of floats; 0 for an action that does not count. None where the batch has none."""
    values: Tensor | None = getattr(batch, name)
    if values is None:
        return None
    if values.shape != active.shape:
        raise ValueError(f"{name}: wanted one value an action {tuple(active.shape)}, got {tuple(values.shape)}")
    values = values.float()
    return _counted(batch, name, values, active, divisible(values) if name in LOGPROBS else values.isfinite())


def _counted(batch: TokenBatch, name: str, values: Tensor, active: Tensor, usable: Tensor) -> Tensor:
    """float32 [A]: the values of the actions that count, of which none may lack one; 0 for the others.

    A trainer's mask does not hide a NaN: NaN times 0 is NaN.
    """
    missing = active & ~usable
    if bool(missing.any()):
        row = int(batch.sequence[missing][0])
        what = "log-prob" if name in LOGPROBS else "finite value"
        raise UnsupportedRecordError(
            f"rollout {batch.rollout_ids[row]!r}: {name}: wanted a {what} of every action with weight, "
            f"{int(missing.sum())} have none: give them weight 0"
        )
    return torch.where(active, values, 0).float()


def _scores(batch: TokenBatch, active: Tensor) -> Tensor | None:
    """float32 [A]: the reward at the last action with weight of each rollout, at its last one where none has; None
    where one is missing. Advantages that are counted back from the end do not cross an action that does not count."""
    acting, rewards = torch.unique(batch.sequence), batch.rewards.float()
    infinite = acting[rewards[acting].isinf()]
    if len(infinite):
        row = int(infinite[0])
        where = f"rollout {batch.rollout_ids[row]!r}: reward"
        raise UnsupportedRecordError(f"{where}: wanted a finite float32, got {float(batch.rewards[row])}")
    if bool(rewards[acting].isnan().any()):
        return None
    within = int(batch.segment.max()) + 1 if batch.rows else 0
    segment = active * within + batch.segment[batch.sequence]  # as if those with weight came later
    place = segment * len(batch.tokens) + batch.position_ids[batch.action_index]
    owner = batch.rollout[batch.sequence]
    last = torch.full((int(batch.rollout.max()) + 1 if batch.rows else 0,), -1, device=place.device)
    last = last.scatter_reduce(0, owner, place, "amax")
    return torch.where(place == last[owner], rewards[batch.sequence], 0)
