"""Which prompt groups carry signal, and why the others do not. A rollout counts once, however many segments it has."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from rollstore.batch import TokenBatch
from rollstore.errors import UnsupportedRecordError
from rollstore.losses.arguments import columns, finite, tensor
from rollstore.losses.arguments import ddof as check_ddof
from rollstore.losses.units import dense, sum_by


class Verdict(IntEnum):
    """Why a group has the advantages it has."""

    signal = 0
    none = 1
    """all rewards equal, up to the tolerance"""
    below_floor = 2
    """they differ by less than the scorer repeats itself"""
    single = 3
    """one scored member: nothing to compare with"""
    unscored = 4
    """no scored member"""
    dropped = 5
    """incomplete, and the caller drops such groups"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """A report over the G groups of a batch, and where each row belongs. Tensors [G] unless said otherwise."""

    ids: Tensor
    """int64: the global group id"""
    expected: Tensor
    """int64: members asked for; 0 when not recorded"""
    present: Tensor
    """int64: scored members"""
    failed: Tensor
    """int64: members that are there without a score"""
    unique: Tensor
    """int64: different completions among all members that are there"""
    tokens: Tensor
    """float32: weight of its actions that is trained on: in scored rollouts, and 0 where the group is dropped"""
    mean: Tensor
    """float64, over scored members; 0 without any"""
    deviation: Tensor
    """float64: standard deviation with the caller's ddof; 0 below two members"""
    verdict: Tensor
    """int8: a `Verdict`"""
    row_group: Tensor
    """int64 [B]: index of the row's group"""
    scored: Tensor
    """bool [B]: the row's rollout has a reward"""
    signal: Tensor
    """bool: its advantages are not all zero"""

    @property
    def missing(self) -> Tensor:
        """int64: members that were asked for and never came."""
        return torch.where(self.expected > 0, self.expected - self.present - self.failed, 0).clamp(min=0)

    @property
    def incomplete(self) -> Tensor:
        """bool: fewer scored members than were asked for."""
        return (self.expected > 0) & (self.present < self.expected)

    @property
    def identical(self) -> Tensor:
        """bool: no signal because all completions are the same one, which no reward could tell apart."""
        return (self.verdict == Verdict.none) & (self.unique == 1)

    @property
    def step_scale(self) -> Tensor:
        """[]: groups / groups with signal: by how much `signal_groups(prompt_mean)` makes the step larger.

        Of groups that are trained on: what is not scored is in no denominator. 0 without signal.
        """
        counted = self.tokens > 0
        with_signal = (counted & self.signal).sum()
        return torch.where(with_signal > 0, counted.sum() / with_signal.clamp(min=1), 0)

    def summary(self) -> dict[str, Tensor]:
        """Counts [] by name: groups of each verdict, incomplete ones, and tokens in groups without signal."""
        counts = {f"groups/{verdict.name}": (self.verdict == verdict).sum() for verdict in Verdict}
        return {
            "groups": torch.tensor(len(self.verdict), device=self.verdict.device),
            **counts,
            "groups/incomplete": self.incomplete.sum(),
            "groups/identical": self.identical.sum(),
            "members/failed": self.failed.sum(),
            "members/missing": self.missing.sum(),
            "tokens": self.tokens.sum(),
            "tokens/no_signal": torch.where(self.signal, 0, self.tokens).sum(),
            "step_scale": self.step_scale,
        }


def groups(
    batch: TokenBatch,
    *,
    rewards: Tensor | None = None,
    ddof: int = 1,
    tolerance: float = 1e-6,
    floor: Tensor | float | None = None,
    drop_incomplete: bool = False,
) -> Groups:
    """Statistics of each group's rewards and what they are worth.

    rewards [B]: instead of `batch.rewards`, for one component of a shaped total; NaN is unscored. tolerance: rewards
    whose standard deviation is at most this share of the largest |reward| are equal. floor: standard deviation of the
    scorer's repeats (`noise_floor`); None when it is not known, and then nothing is suppressed. A whole group must be
    in the batch: a rank that holds one member cannot tell. Raises `UnsupportedRecordError` for an infinite reward, and
    for a rollout whose segments differ in group or reward.
    """
    columns(batch)
    finite("tolerance", tolerance)
    check_ddof(ddof)
    if rewards is not None:
        tensor("rewards", rewards, (batch.rows,), "one value a row")
    if floor is not None:
        _floor(floor)
    given = (batch.rewards if rewards is None else rewards).to(torch.float64)
    ids, index = torch.unique(batch.group, return_inverse=True)
    size = len(ids)
    _refuse_infinite(batch, given)
    _refuse_split(batch, given)
    first = _first_rows(batch)
    scored = first & ~given.isnan()
    value = torch.where(scored, given, 0)
    present = sum_by(scored.to(torch.int64), index, size)
    mean = sum_by(value, index, size) / present.clamp(min=1)
    spread = torch.where(scored, given - mean[index], 0)
    deviation = (sum_by(spread.square(), index, size) / (present - ddof).clamp(min=1)).sqrt()
    deviation = torch.where(present > 1, deviation, 0)
    largest = torch.zeros(size, dtype=torch.float64, device=value.device).scatter_reduce(0, index, value.abs(), "amax")
    expected = torch.zeros_like(present).scatter_reduce(0, index, batch.group_size, "amax")

    verdict = torch.full((size,), int(Verdict.signal), dtype=torch.int8, device=value.device)
    if floor is not None:
        verdict[deviation < floor] = Verdict.below_floor
    verdict[deviation <= tolerance * largest] = Verdict.none
    verdict[present == 1] = Verdict.single
    verdict[present == 0] = Verdict.unscored
    if drop_incomplete:
        verdict[(expected > 0) & (present < expected)] = Verdict.dropped
    trained = ~given.isnan() & (verdict != Verdict.dropped)[index]
    return Groups(
        ids=ids,
        expected=expected,
        present=present,
        failed=sum_by((first & given.isnan()).to(torch.int64), index, size),
        unique=_unique(batch, index, size),
        tokens=sum_by(torch.where(trained[batch.sequence], batch.weights, 0), index[batch.sequence], size),
        mean=mean,
        deviation=deviation,
        verdict=verdict,
        row_group=index,
        scored=~given.isnan(),
        signal=verdict == Verdict.signal,
    )


def _refuse_infinite(batch: TokenBatch, given: Tensor) -> None:
    """Raise `UnsupportedRecordError`, by id, for an infinite reward [B]: it would make its whole group NaN."""
    if len(rows := torch.nonzero(given.isinf()).squeeze(-1)):
        at = int(rows[0])
        where = f"rollout {batch.rollout_ids[at]!r}: reward"
        raise UnsupportedRecordError(f"{where}: wanted a finite number, or NaN where unscored, got {float(given[at])}")


def _refuse_split(batch: TokenBatch, given: Tensor) -> None:
    """Raise, by id, where a rollout has two groups or two rewards: one would be counted, and the other trained."""
    head = _first_of(batch)
    one, other = given, given[head]
    same = {"group": batch.group == batch.group[head], "reward": (one == other) | (one.isnan() & other.isnan())}
    for what, fits in same.items():
        if len(rows := torch.nonzero(~fits).squeeze(-1)):
            where = f"rollout {batch.rollout_ids[int(rows[0])]!r}"
            raise UnsupportedRecordError(f"{where}: wanted one {what} on all its segments, got different ones")


def _floor(floor: Any) -> None:
    """A number, NaN where it is not known, or a tensor of one."""
    if isinstance(floor, Tensor):
        tensor("floor", floor, (), "one value")
    elif floor == floor:
        finite("floor", floor)


def noise_floor(repeats: Tensor) -> Tensor:
    """Standard deviation (n - 1) of repeated scores of one answer [N] -> []; NaN (not known, not 0) below two."""
    tensor("repeats", repeats, (repeats.numel() if isinstance(repeats, Tensor) else 0,), "a score a repeat")  # pyright: ignore[reportUnnecessaryIsInstance]
    return repeats.to(torch.float64).std(correction=1) if len(repeats) > 1 else repeats.new_tensor(torch.nan)


def _first_rows(batch: TokenBatch) -> Tensor:
    """bool [B]: one row a rollout."""
    first = _first_of(batch)
    return first == torch.arange(batch.rows, device=first.device)


def _first_of(batch: TokenBatch) -> Tensor:
    """int64 [B]: the first row of each row's rollout."""
    index, _ = dense(batch.rollout)
    rows = torch.arange(batch.rows, device=index.device)
    return torch.full_like(rows, batch.rows).scatter_reduce(0, index, rows, "amin")[index]


def _unique(batch: TokenBatch, group: Tensor, size: int) -> Tensor:
    """int64 [size]: different action sequences of each group's rollouts, by a 64-bit fingerprint of each."""
    rollout, _ = dense(batch.rollout)
    # members of a group share their prompt, so equal completions stand at equal positions: a sum needs no order
    place = batch.position_ids[batch.action_index] + (batch.segment[batch.sequence] << 32)
    mixed = _mix(batch.tokens[batch.action_index] + 1 + _mix(place))
    per_row = sum_by(mixed, batch.sequence, batch.rows)
    prints = sum_by(per_row, rollout, batch.rows)
    first = _first_rows(batch)
    pairs = torch.unique(torch.stack([group[first], prints[rollout][first]]), dim=1)
    return torch.bincount(pairs[0], minlength=size)


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 values (the finaliser of splitmix64, arithmetic wraps)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
