"""The tensors that common trainers take, under their names, from a packed batch. None of the trainers is imported."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollstore.batch.arguments import check_batch
from rollstore.batch.denominator import refuse_unusable
from rollstore.batch.padded import to_responses
from rollstore.batch.token_batch import TokenBatch
from rollstore.errors import UnsupportedRecordError


def to_verl(
    batch: TokenBatch, *, pad_id: int = 0, prompt_width: int | None = None, response_width: int | None = None
) -> dict[str, Tensor]:
    """The batch of a verl `DataProto` (verl 0.9): `DataProto.from_single_dict(to_verl(batch))`.

    prompts [B, P], responses [B, R]; input_ids, attention_mask, position_ids [B, P + R] int64; response_mask [B, R]
    int64: actions with weight. float32 [B, R], 0 where there is no action: rollout_log_probs, the behavior's;
    old_log_probs, the anchor's, and ref_log_prob, advantages, returns, values where the batch has them.
    token_level_scores, with the reward at the last action of its rollout's last segment, where every row with an action
    has one: a missing reward is no zero. Raises UnsupportedRecordError where a log-prob is missing or may be no
    denominator, or a weight is neither 0 nor 1.
    """
    parts = to_responses(batch, pad_id=pad_id, prompt_width=prompt_width, response_width=response_width)
    active = _active(batch)
    attention = torch.cat([parts.prompt_mask, parts.response_attention], 1).long()
    columns = {
        "rollout_log_probs": _behavior(batch, active),
        "old_log_probs": batch.anchor_logprobs,
        "ref_log_prob": batch.reference_logprobs,
        "advantages": batch.advantages,
        "returns": batch.returns,
        "values": batch.values,
        "token_level_scores": _scores(batch),
    }
    return {
        "prompts": parts.prompts,
        "responses": parts.responses,
        "input_ids": torch.cat([parts.prompts, parts.responses], 1),
        "attention_mask": attention,
        "position_ids": parts.position_ids,
        "response_mask": parts.spread(active.long()),
        **{name: parts.spread(column.float()) for name, column in columns.items() if column is not None},
    }


def to_trl(
    batch: TokenBatch, *, pad_id: int = 0, prompt_width: int | None = None, response_width: int | None = None
) -> dict[str, Any]:
    """The inputs of TRL's `GRPOTrainer` to its loss (trl 1.16).

    prompt_ids, prompt_mask [B, P], completion_ids, completion_mask [B, R] int64; tool_mask [B, R] int64: actions with
    weight. float32 [B, R]: sampling_per_token_logps, the behavior's, and advantages (required); old_per_token_logps,
    the anchor's, and ref_per_token_logps where the batch has them. num_items_in_batch []: actions with weight.
    Raises as `to_verl`, and ValueError without advantages.
    """
    parts = to_responses(batch, pad_id=pad_id, prompt_width=prompt_width, response_width=response_width)
    active = _active(batch)
    columns = {
        "sampling_per_token_logps": _behavior(batch, active),
        "advantages": _advantages(batch),
        "old_per_token_logps": batch.anchor_logprobs,
        "ref_per_token_logps": batch.reference_logprobs,
    }
    return {
        "prompt_ids": parts.prompts,
        "prompt_mask": parts.prompt_mask.long(),
        "completion_ids": parts.responses,
        "completion_mask": parts.response_attention.long(),
        "tool_mask": parts.spread(active.long()),
        "num_items_in_batch": active.sum(),
        **{name: parts.spread(column.float()) for name, column in columns.items() if column is not None},
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
    advantages, behavior = _advantages(batch), _behavior(batch, active)
    columns = {
        "logprobs": torch.zeros(count).index_put((at,), behavior.float().cpu()),
        "advantages": torch.zeros(count).index_put((at,), torch.where(active, advantages, 0).float().cpu()),
    }
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
    """[A]: the log-probs that ratios are taken to; 0 for an action that does not count."""
    refuse_unusable(batch)
    missing = active & ~batch.recorded
    if bool(missing.any()):
        row = int(batch.sequence[missing][0])
        raise UnsupportedRecordError(
            f"rollout {batch.rollout_ids[row]!r}: wanted a log-prob of every action with weight, "
            f"{int(missing.sum())} have none: give them weight 0"
        )
    return torch.where(active, batch.behavior_logprobs, 0)


def _advantages(batch: TokenBatch) -> Tensor:
    if batch.advantages is None:
        raise ValueError("advantages: wanted a batch with them, as of rollstore.losses.group_zscore, got none")
    return batch.advantages


def _scores(batch: TokenBatch) -> Tensor | None:
    """[A]: the reward at the last action of each rollout; None where one is missing."""
    acting = torch.unique(batch.sequence)
    if bool(batch.rewards[acting].isnan().any()):
        return None
    place = batch.segment[batch.sequence] * len(batch.tokens) + batch.position_ids[batch.action_index]
    owner = batch.rollout[batch.sequence]
    last = torch.full((int(batch.rollout.max()) + 1 if batch.rows else 0,), -1, device=place.device)
    last = last.scatter_reduce(0, owner, place, "amax")
    return torch.where(place == last[owner], batch.rewards[batch.sequence], 0)
