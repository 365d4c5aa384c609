"""Advantages along a trajectory: gae and td. They run over actions with weight; observations take no decay step."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from rollstore.batch import TokenBatch
from rollstore.errors import UnsupportedRecordError
from rollstore.losses.arguments import before_counts, columns, number
from rollstore.losses.units import dense, sum_by

SHOWN = 5
"""How many ids a refusal names."""


class Chain(NamedTuple):
    """The actions with weight, in order of rollout, segment and position. N of them.

    order [N]: which action of the batch; last [N] bool: the last of its rollout, where the recursion begins; end [N]:
    row of the rollout's last segment.
    """

    order: Tensor
    last: Tensor
    end: Tensor


class Trajectories(NamedTuple):
    """What was decided: unscored [] rollouts that were left out, bootstrapped [] rollouts that ended in a value."""

    unscored: Tensor
    bootstrapped: Tensor


def gae(batch: TokenBatch, *, gamma: float = 1.0, lam: float = 0.95) -> tuple[TokenBatch, Trajectories]:
    """A_t = d_t + gamma lam A_{t+1}, d_t = r_t + gamma V_{t+1} - V_t (Schulman et al. 2015, arXiv 1506.02438, eq. 16).

    Sets `advantages` and `returns` = A + V [A], float32 or wider, and `signal` to None: what another function decided
    of the groups holds no more. The outcome is paid at the rollout's last action, `action_rewards` at
    theirs. The recursion runs through all segments of a rollout, a segment's last action into the next one's first
    value. At the end of the rollout stands 0, or, where `bootstrap` says so, its own final value, never another
    rollout's. Raises `UnsupportedRecordError` naming the rollouts whose bootstrap is unknown, which lack the final
    value they need, or of which a segment between two others is not here, or in which a value or reward is infinite.
    A rollout of which a reward is not known gets weight 0 and is counted as unscored: where there are
    `action_rewards`, one of its actions without; else, its outcome.
    """
    columns(batch)
    before_counts(batch, "gae")
    number("gamma", gamma, 0.0, 1.0)
    number("lam", lam, 0.0, 1.0)
    if batch.values is None:
        raise UnsupportedRecordError("batch.values is not set: gae needs a value before each action")
    values = batch.values
    batch, unscored = _scored(batch)
    chain = _chain(batch)
    value = values[chain.order].to(torch.float64)
    _refuse(batch, chain, value)
    reward = torch.zeros_like(value)
    if batch.action_rewards is not None:
        reward = reward + batch.action_rewards[chain.order].to(torch.float64)
    outcome = batch.rewards[chain.end].to(torch.float64)
    reward = torch.where(chain.last & ~outcome.isnan(), reward + torch.nan_to_num(outcome), reward)
    beyond = _beyond(batch, chain)
    following = torch.where(chain.last, beyond, torch.roll(value, -1))
    steps = (~chain.last).to(torch.float64) * (gamma * lam)
    advantages = _scan(reward + gamma * following - value, steps)

    def spread(of_chain: Tensor) -> Tensor:
        wide = torch.promote_types(values.dtype, torch.float32)
        return torch.zeros_like(values, dtype=wide).index_copy(0, chain.order, of_chain.to(wide))

    bootstrapped = (chain.last & (batch.bootstrap[chain.end] == 1)).sum()
    batch = replace(batch, advantages=spread(advantages), returns=spread(advantages + value), signal=None)
    return batch, Trajectories(unscored, bootstrapped)


def td(batch: TokenBatch, *, gamma: float = 1.0) -> tuple[TokenBatch, Trajectories]:
    """A_t = r_t + gamma V_{t+1} - V_t, return r_t + gamma V_{t+1}: `gae` with lam 0; the same rules at the end."""
    return gae(batch, gamma=gamma, lam=0.0)


def _scored(batch: TokenBatch) -> tuple[TokenBatch, Tensor]:
    """Weight 0 on rollouts of which a reward is not known; how many there are."""
    missing = batch.rewards.isnan()
    if batch.action_rewards is not None:
        gaps = (batch.weights != 0) & batch.action_rewards.isnan()
        missing = sum_by(gaps.to(torch.int64), batch.sequence, batch.rows) > 0
    index, _ = dense(batch.rollout)
    unscored = torch.zeros_like(index).index_fill(0, index[missing], 1)
    out = unscored[index] > 0
    return replace(batch, weights=torch.where(out[batch.sequence], 0, batch.weights)), unscored.sum()


def _chain(batch: TokenBatch) -> Chain:
    rollout, _ = dense(batch.rollout)
    by_rollout, final_row = _rows_in_order(batch, rollout)
    rank = torch.empty_like(by_rollout)
    rank[by_rollout] = torch.arange(batch.rows, device=rollout.device)
    active = torch.nonzero(batch.weights != 0).squeeze(-1)
    order = active[torch.sort(rank[batch.sequence[active]], stable=True).indices]
    of_action = rollout[batch.sequence[order]]
    last = torch.ones_like(order, dtype=torch.bool)
    last[:-1] = of_action[1:] != of_action[:-1]
    return Chain(order, last, final_row[of_action])


def _rows_in_order(batch: TokenBatch, rollout: Tensor) -> tuple[Tensor, Tensor]:
    """(rows by rollout, then segment [B]; for each rollout index the row of its last segment [B])."""
    by_segment = torch.sort(batch.segment, stable=True).indices
    rows = by_segment[torch.sort(rollout[by_segment], stable=True).indices]
    is_last = torch.ones_like(rows, dtype=torch.bool)
    is_last[:-1] = rollout[rows][1:] != rollout[rows][:-1]
    final = torch.zeros_like(rows)
    final[rollout[rows][is_last]] = rows[is_last]
    return rows, final


def _beyond(batch: TokenBatch, chain: Chain) -> Tensor:
    """Value after the end of each action's rollout [N]: 0, or its final value."""
    goes_on = batch.bootstrap[chain.end] == 1
    if batch.final_values is None:
        return torch.zeros_like(chain.end, dtype=torch.float64)
    return torch.where(goes_on, batch.final_values[chain.end].to(torch.float64), 0)


def _refuse(batch: TokenBatch, chain: Chain, value: Tensor) -> None:
    """Raise when a value or an end is not known, or a segment in the middle is not here. value [N]."""
    sequence = batch.sequence[chain.order]
    _name(batch, torch.unique(sequence[~value.isfinite()]), "an action with weight has no finite value")
    if batch.action_rewards is not None:
        infinite = batch.action_rewards[chain.order].isinf()
        _name(batch, torch.unique(sequence[infinite]), "an action with weight has an infinite reward")
    ends = chain.end[chain.last]
    _name(batch, ends[batch.rewards[ends].isinf()], "its reward is infinite")
    state = batch.bootstrap[ends]
    final = torch.full_like(batch.rewards, torch.nan) if batch.final_values is None else batch.final_values
    _name(batch, ends[state == -1], "bootstrap is not known, so what follows the last action is not either")
    _name(batch, ends[(state == 1) & ~final[ends].isfinite()], "bootstrap is true and there is no finite final value")
    rollout, _ = dense(batch.rollout)
    has = torch.zeros(batch.rows, dtype=torch.bool, device=rollout.device).index_fill(0, rollout[ends], True)
    rows, _ = _rows_in_order(batch, rollout)
    follows = (rollout[rows][1:] == rollout[rows][:-1]) & (batch.segment[rows][1:] != batch.segment[rows][:-1] + 1)
    _name(batch, rows[1:][follows & has[rollout[rows][1:]]], "the segment before this one is not in the batch")


def _name(batch: TokenBatch, rows: Tensor, why: str) -> None:
    if len(rows):
        shown = [batch.rollout_ids[row] for row in rows[:SHOWN].tolist()]
        more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
        raise UnsupportedRecordError(f"gae: {why}: rollouts {', '.join(shown)}{more}")


def _scan(values: Tensor, steps: Tensor) -> Tensor:
    """x_t = values_t + steps_t x_{t+1}, from the right, in log2(N) doublings. values, steps [N]."""
    reach = 1
    while reach < len(values):
        shifted = torch.nn.functional.pad(values[reach:], (0, reach))
        values = values + torch.where(steps != 0, steps * shifted, 0)  # select: 0 x inf is NaN
        steps = steps * torch.nn.functional.pad(steps[reach:], (0, reach))
        reach *= 2
    return values
