"""Head entries [H] and the actions they belong to: tails, distances, and the coefficients of centring."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollstore.batch import Heads, TokenBatch
from rollstore.errors import UnsupportedRecordError
from rollstore.losses.arguments import tensor
from rollstore.losses.ratios import Metrics
from rollstore.losses.units import sum_by
from rollstore.schema.rules.heads import STAND_IN

TAIL = 1e-6
"""A tail below this is rounding: a complete float32 head otherwise makes rho -1, 0 or infinite."""


class Head(NamedTuple):
    """The recorded head beside the trainer's log-probs at the same ids.

    action [H]: which action; has [A]: the action has a head. q, p [H]: behavior and (detached) trainer probability.
    log_q, log_p, seen [H]: their logs, log_p with gradient and 0 where p is 0, seen without and minus infinity there.
    q_tail, p_tail [A]: mass outside, p_tail floored at 1e-6.
    rho [A]: q_tail / p_tail, 0 where q_tail is at most 1e-6 (`complete` [A]).
    """

    action: Tensor
    has: Tensor
    q: Tensor
    p: Tensor
    log_q: Tensor
    log_p: Tensor
    seen: Tensor
    q_tail: Tensor
    p_tail: Tensor
    rho: Tensor
    complete: Tensor
    metrics: Metrics

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each action's head: values [H] -> [A]."""
        return sum_by(values, self.action, self.has.shape[0])


def heads_of(batch: TokenBatch) -> Heads:
    """The heads of the batch, or `UnsupportedRecordError` saying how a batch comes by them."""
    if batch.heads is None:
        raise UnsupportedRecordError(
            "the batch has no heads: none were recorded, or they were not read: wanted RolloutLoader(heads=True), or "
            "the columns head_* in the table that is collated"
        )
    return batch.heads


def has_head(batch: TokenBatch) -> Tensor:
    """bool [A]: the action has a head without a NaN or an infinity above."""
    recorded = heads_of(batch)
    places = torch.arange(batch.actions, device=recorded.counts.device)
    action = torch.repeat_interleave(places, recorded.counts, output_size=recorded.tokens.shape[0])
    broken = sum_by((~(recorded.logprobs < torch.inf)).to(torch.int64), action, batch.actions)
    return (recorded.counts > 0) & (broken == 0)


def head(batch: TokenBatch, head_logprobs: Tensor, active: Tensor) -> Head:
    """Put the trainer's log-probs [H] (with gradient) beside the recorded head; only `active` [A] is looked at.

    An action with a head that has a NaN, or an infinity above, is one without a head. Raises `UnsupportedRecordError`
    without heads, `ValueError` when the lengths differ.
    """
    recorded = heads_of(batch)
    entries = (recorded.tokens.shape[0],)
    tensor("head_logprobs", head_logprobs, entries, "one value a head entry")
    tensor("batch.heads.logprobs", recorded.logprobs, entries, "one value a head entry")
    tensor("batch.heads.counts", recorded.counts, (batch.actions,), ids=True)
    wide = torch.promote_types(head_logprobs.dtype, torch.float32)
    places = torch.arange(batch.actions, device=active.device)
    action = torch.repeat_interleave(places, recorded.counts, output_size=recorded.tokens.shape[0])
    has = active & has_head(batch)
    entry = has[action]
    log_q = torch.where(entry, recorded.logprobs.to(wide), 0)
    seen = torch.where(entry, head_logprobs.detach(), 0).to(wide)
    possible = entry & ~(seen <= STAND_IN)
    log_p = torch.where(possible, head_logprobs, 0).to(wide)
    q, p = torch.where(entry, log_q.exp(), 0), torch.where(possible, seen.exp(), 0)
    q_tail = 1 - sum_by(q, action, batch.actions)
    p_tail = 1 - sum_by(p, action, batch.actions)
    complete = q_tail <= TAIL
    floored = ~complete & (p_tail < TAIL)
    p_tail = p_tail.clamp(min=TAIL)
    rho = torch.where(complete, 0, q_tail / p_tail)
    metrics = {
        "head/missing": (active & ~has).sum(),
        "head/complete": (has & complete).sum(),
        "head/impossible": (entry & ~possible & (q > 0)).sum(),
        "head/nan": (entry & seen.isnan()).sum(),
        "head/p_tail_floored": (has & floored).sum(),
    }
    return Head(action, has, q, p, log_q, log_p, seen, q_tail, p_tail, rho, complete, metrics)


def distances(found: Head) -> Metrics:
    """|q - p|_1 and KL(q||p) of head and tail, and q's mass outside the head [], means over actions with a head.

    The first two are never above the full ones. KL is infinite where the trainer gives 0 to an id of the head, which
    `head/impossible` counts. What a head hides of the centre, sum over the tail of (q_j - rho p_j)
    times the score, is at most twice the mass outside times the largest score.
    """
    number = found.has.sum().clamp(min=1)
    one = found.sum((found.q - found.p).abs()) + (found.q_tail - found.p_tail).abs()
    term = torch.where(found.q > 0, found.q * (found.log_q - found.seen), 0)
    tails = torch.where(found.complete, 0, found.q_tail * (found.q_tail.clamp(min=TAIL) / found.p_tail).log())
    kl = found.sum(term) + tails
    return {
        "head/l1": torch.where(found.has, one, 0).sum() / number,
        "head/kl": torch.where(found.has, kl, 0).sum() / number,
        "head/outside": torch.where(found.has, found.q_tail.clamp(min=0), 0).sum() / number,
    }
