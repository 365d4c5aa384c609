"""Advantages from outcomes of prompt groups: group_mean, group_zscore, leave_one_out; and whitening.

Each returns (batch, report): the batch with `advantages` [A], `signal` [B] and weight 0 on the actions of unscored
rollouts. They need whole groups: compute them over the step, then cut it into micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rollstore.batch import TokenBatch
from rollstore.losses.arguments import before_counts, columns, finite, word
from rollstore.losses.arguments import ddof as check_ddof
from rollstore.losses.groups import Groups, Verdict, groups
from rollstore.losses.units import dense, sum_by

Single = Literal["zero", "raw"]
"""A group of one scored member: advantage 0, or its reward as it is (verl's convention)."""
Scale = Literal["group", "step"]


def group_mean(
    batch: TokenBatch,
    *,
    single: Single = "zero",
    tolerance: float = 1e-6,
    floor: Tensor | float | None = None,
    drop_incomplete: bool = False,
) -> tuple[TokenBatch, Groups]:
    """A_i = R_i - mean(R of the group), over scored members (Dr. GRPO, arXiv 2503.20783; REINFORCE Zero).

    single, tolerance, floor, drop_incomplete: see `groups`. An incomplete group keeps the members it has unless it is
    dropped; either way it is reported.
    """
    found = groups(batch, tolerance=tolerance, floor=floor, drop_incomplete=drop_incomplete)
    return _apply(batch, found, _centred(batch, found), single)


def group_zscore(
    batch: TokenBatch,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    scale: Scale = "group",
    single: Single = "zero",
    tolerance: float = 1e-6,
    floor: Tensor | float | None = None,
    drop_incomplete: bool = False,
) -> tuple[TokenBatch, Groups]:
    """A_i = (R_i - mean) / (sd + eps) of the group (GRPO, arXiv 2402.03300).

    ddof: 1 divides the squares by n - 1, 0 by n. scale="step": the sd of all scored rollouts of the batch.
    """
    word("scale", scale, get_args(Scale))
    finite("eps", eps)
    found = groups(batch, ddof=ddof, tolerance=tolerance, floor=floor, drop_incomplete=drop_incomplete)
    deviation = found.deviation[found.row_group]
    if scale == "step":
        whole = groups(replace(batch, group=torch.zeros_like(batch.group)), ddof=ddof)
        deviation = whole.deviation[whole.row_group]
    return _apply(batch, found, _centred(batch, found) / (deviation + eps), single)


def leave_one_out(
    batch: TokenBatch,
    *,
    single: Single = "zero",
    tolerance: float = 1e-6,
    floor: Tensor | float | None = None,
    drop_incomplete: bool = False,
) -> tuple[TokenBatch, Groups]:
    """A_i = R_i - mean of the other scored members (RLOO, Kool et al. 2019; arXiv 2402.14740)."""
    found = groups(batch, tolerance=tolerance, floor=floor, drop_incomplete=drop_incomplete)
    number = found.present.clamp(min=2)[found.row_group]
    return _apply(batch, found, _centred(batch, found) * number / (number - 1), single)


def _centred(batch: TokenBatch, found: Groups) -> Tensor:
    """float64 [B]: reward minus the group's mean; NaN where unscored."""
    return batch.rewards.to(torch.float64) - found.mean[found.row_group]


def _apply(batch: TokenBatch, found: Groups, advantages: Tensor, single: Single) -> tuple[TokenBatch, Groups]:
    """Set the columns. advantages [B]; groups without signal get exactly 0."""
    word("single", single, get_args(Single))
    before_counts(batch, "advantages")
    verdict = found.verdict[found.row_group]
    alone = (verdict == Verdict.single) & (single == "raw")
    advantages = torch.where(alone, batch.rewards.to(advantages.dtype), advantages)
    signal = (verdict == Verdict.signal) | (alone & (batch.rewards.abs() > 0))  # not of NaN: its rollout is unscored
    advantages = torch.where(found.scored & signal, advantages, 0)
    out = found.scored & (verdict != Verdict.dropped)
    weights = torch.where(out[batch.sequence], batch.weights, 0)
    spread = advantages[batch.sequence].to(torch.float32)
    found = replace(found, signal=sum_by(signal.to(torch.int64), found.row_group, len(found.ids)) > 0)
    return replace(batch, advantages=spread, signal=signal, weights=weights), found


class Whitened(NamedTuple):
    """mean [] and variance [] of the advantages with weight; skipped [] bool: there were fewer than two."""

    mean: Tensor
    variance: Tensor
    skipped: Tensor


def whiten(batch: TokenBatch, *, ddof: int = 1, eps: float = 1e-8) -> tuple[TokenBatch, Whitened]:
    """(A - mean) / sqrt(var + eps) over the actions of the step that have weight.

    With fewer than two of them there is no variance: the advantages stay as they are, and `skipped` says so. One that
    is not finite is as good as missing: it stays as it is and moves no other. `signal`, where the batch has one, is
    decided anew: a group of equal rewards no longer has advantages of 0.
    """
    columns(batch)
    before_counts(batch, "whiten")
    check_ddof(ddof)
    finite("eps", eps)
    if batch.advantages is None:
        raise ValueError("batch.advantages is not set: there is nothing to whiten")
    weighted = batch.weights != 0
    active = weighted & batch.advantages.isfinite()
    number = active.sum()
    given = torch.where(active, batch.advantages, 0).to(torch.float64)
    mean = given.sum() / number.clamp(min=1)
    variance = torch.where(active, given - mean, 0).square().sum() / (number - ddof).clamp(min=1)
    skipped = number < 2
    white = torch.where(skipped, given, (given - mean) * (variance + eps).rsqrt())
    white = white.to(torch.promote_types(batch.advantages.dtype, torch.float32))
    white = torch.where(active, white, torch.where(weighted, batch.advantages, 0))
    signal = None if batch.signal is None else _carried(batch, active & (white != 0))
    return replace(batch, advantages=white, signal=signal), Whitened(mean, variance, skipped)


def _carried(batch: TokenBatch, moved: Tensor) -> Tensor:
    """bool [B]: some action of the row's group is among `moved` [A]."""
    group, _ = dense(batch.group)
    per_row = sum_by(moved.to(torch.int64), batch.sequence, batch.rows)
    return (sum_by(per_row, group, batch.rows) > 0)[group]
