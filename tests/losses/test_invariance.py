"""Every loss: its gradient is the derivative of its value, and neither padding, order, cut nor mask changes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstore.batch import TokenBatch, select
from rollstore.errors import UnsupportedRecordError
from rollstore.losses import (
    cispo,
    dapo,
    dr_grpo,
    entropy_bonus,
    fixed_length,
    gspo,
    icepop,
    mis,
    ppo_clip,
    prompt_mean,
    reference_kl,
    reinforce,
    reinforce_zero,
    sampler_kl,
    sao,
    score_centering,
    sequence_mean,
    sequence_sum_mean,
    signal_groups,
    tis,
    token_mean,
    token_sum,
    trainable,
    value_clip,
    with_counts,
)
from tests.losses.padded import HEAD, doubles, problem, variable

Call = Callable[[TokenBatch, Tensor, Tensor], tuple[Tensor, Any]]
ALONE: dict[str, Call] = {
    "reinforce": lambda b, x, h: reinforce(b, x),
    "reinforce tis": lambda b, x, h: reinforce(b, x, correction=tis(1.1)),
    "ppo": lambda b, x, h: ppo_clip(b, x, dual=3.0, correction=tis(2.0)),
    "ppo behavior": lambda b, x, h: ppo_clip(b, x, anchor="behavior"),
    "ppo mis sequence": lambda b, x, h: ppo_clip(b, x, correction=mis(0.5, 2.0, level="sequence")),
    "ppo mis leave": lambda b, x, h: ppo_clip(b, x, correction=mis(0.95, 1.5, rejected="leave")),
    "gspo": lambda b, x, h: gspo(b, x, clip=(0.2, 0.3)),
    "cispo": lambda b, x, h: cispo(b, x, correction=icepop(0.2, 5.0)),
    "dapo": lambda b, x, h: dapo(b, x, reduce=prompt_mean),
    "dr_grpo": lambda b, x, h: dr_grpo(b, x, length=4.0),
    "sao": lambda b, x, h: sao(b, x, clip=(0.3, 0.3)),
    "reinforce_zero": lambda b, x, h: reinforce_zero(b, x),
    "score_centering": lambda b, x, h: score_centering(b, x, h),
    "score_centering tis kl": lambda b, x, h: score_centering(b, x, h, weight=tis(1.2), sampler_kl=0.1),
    "score_centering sequence": lambda b, x, h: score_centering(b, x, h, weight=tis(1.5, level="sequence")),
    "reference_kl": lambda b, x, h: reference_kl(b, x, beta=0.1),
    "sampler_kl": lambda b, x, h: sampler_kl(b, h, beta=0.1),
    "entropy_bonus": lambda b, x, h: entropy_bonus(b, -x, beta=0.1),
    "value_clip": lambda b, x, h: value_clip(b, x),
    "signal_groups": lambda b, x, h: ppo_clip(b, x, reduce=signal_groups(token_mean)),
}


def gradients(call: Call, batch: TokenBatch, logprobs: Tensor, at_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, h = variable(logprobs), variable(at_head)
    loss, metrics = call(batch, x, h)
    assert all(isinstance(value, Tensor) and not value.requires_grad for value in metrics.values())
    loss.backward()
    return loss.detach(), *(torch.zeros_like(v) if v.grad is None else v.grad for v in (x, h))


HELD = {"reinforce tis", "cispo", "score_centering", "score_centering tis kl", "score_centering sequence", "sampler_kl"}
"""Their coefficients stop the gradient, so a finite difference sees more than the gradient; held still, it agrees."""


@pytest.mark.parametrize("name", [name for name in ALONE if name not in HELD])
def test_the_gradient_is_the_derivative_of_the_value(name: str) -> None:
    batch, logprobs, at_head = problem()
    call = ALONE[name]
    moving = batch
    if name == "gspo":
        # the token form stops the gradient through the sequence ratio: one action a sequence has no other
        moving = replace(
            batch, sequence=torch.arange(batch.actions), rollout_ids=[str(i) for i in range(batch.actions)]
        )
        per_row = torch.arange(batch.actions)
        zero = per_row * 0
        moving = replace(
            moving, rollout=per_row, group=per_row, segment=zero, group_size=zero, rewards=zero.double(), signal=None
        )
        moving = replace(moving, bootstrap=zero.to(torch.int8), ending=zero.to(torch.int8))
    x, h = variable(logprobs), variable(at_head)
    assert torch.autograd.gradcheck(lambda a, b: call(moving, a, b)[0] + 0 * b.sum(), (x, h), eps=1e-6, atol=1e-6)


def held(call: Call, batch: TokenBatch, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss in which whatever stops the gradient keeps the value it had in the first call."""
    kept: list[Tensor] = []
    plain = Tensor.detach

    def loss(x: Tensor, h: Tensor) -> Tensor:
        first, rest = not kept, iter([*kept])

        def detach(self: Tensor) -> Tensor:
            if first:
                kept.append(plain(self).clone())
                return kept[-1]
            return next(rest)

        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "detach", detach)
            return call(batch, x, h)[0] + 0 * (x.sum() + h.sum())

    return loss


@pytest.mark.parametrize("name", [*sorted(HELD), "gspo"])
def test_the_gradient_is_the_derivative_with_what_stops_it_held_still(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gspo too, whose token form stops the gradient through the ratio of a sequence of several actions."""
    batch, logprobs, at_head = problem()
    x, h = variable(logprobs), variable(at_head)
    assert torch.autograd.gradcheck(held(ALONE[name], batch, monkeypatch), (x, h), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(HELD))
def test_with_its_coefficients_held_still_a_loss_is_linear_and_its_gradient_is_those_coefficients(name: str) -> None:
    batch, logprobs, at_head = problem()
    loss, grad_x, grad_h = gradients(ALONE[name], batch, logprobs, at_head)
    torch.testing.assert_close((grad_x * logprobs).sum() + (grad_h * at_head).sum(), loss)


@pytest.mark.parametrize("name", ALONE)
def test_the_order_of_rows_changes_nothing(name: str) -> None:
    batch, logprobs, at_head = problem()
    loss, grad_x, grad_h = gradients(ALONE[name], batch, logprobs, at_head)
    order = [3, 0, 4, 2, 1]
    at = torch.cat([torch.nonzero(batch.sequence == row).squeeze(-1) for row in order])
    head_at = (at[:, None] * HEAD + torch.arange(HEAD)).reshape(-1)
    again, again_x, again_h = gradients(ALONE[name], select(batch, order), logprobs[at], at_head[head_at])
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(again_x, grad_x[at])
    torch.testing.assert_close(again_h, grad_h[head_at])


@pytest.mark.parametrize("cut", [[[0], [1], [2], [3], [4]], [[4, 1], [0, 2, 3]]], ids=str)
@pytest.mark.parametrize("name", [name for name in ALONE if name != "ppo mis leave"])
def test_micro_batches_add_up_to_the_whole_step(name: str, cut: list[list[int]]) -> None:
    batch, logprobs, at_head = problem()
    loss, grad_x, grad_h = gradients(ALONE[name], batch, logprobs, at_head)
    micro = with_counts([select(batch, rows) for rows in cut])
    total = torch.zeros_like(loss)
    for rows, part in zip(cut, micro, strict=True):
        at = torch.cat([torch.nonzero(batch.sequence == row).squeeze(-1) for row in rows])
        head_at = (at[:, None] * HEAD + torch.arange(HEAD)).reshape(-1)
        value, part_x, part_h = gradients(ALONE[name], part, logprobs[at], at_head[head_at])
        total += value
        torch.testing.assert_close(part_x, grad_x[at])
        torch.testing.assert_close(part_h, grad_h[head_at])
    torch.testing.assert_close(total, loss)


REDUCERS: dict[str, Any] = {
    "token_mean": token_mean,
    "token_sum": token_sum,
    "sequence_mean": sequence_mean,
    "sequence_mean segment": partial(sequence_mean, unit="segment"),
    "sequence_mean count": partial(sequence_mean, empty="count"),
    "sequence_sum_mean": sequence_sum_mean,
    "fixed_length": fixed_length(5),
    "prompt_mean": prompt_mean,
    "signal": signal_groups(sequence_mean),
}


@pytest.mark.parametrize("reduce", REDUCERS.values(), ids=REDUCERS)
def test_a_rollouts_segments_and_a_groups_members_may_lie_in_different_micro_batches(reduce: Any) -> None:
    batch, logprobs, _ = problem()
    # rows 0 and 3 are segments of one rollout, row 4 has no weight, and group 9 has no signal
    weights = torch.where(batch.sequence == 4, 0.0, batch.weights)
    batch = replace(
        batch,
        rollout=torch.tensor([0, 1, 2, 0, 3]),
        segment=torch.tensor([0, 0, 0, 1, 0]),
        rollout_ids=["a", "b", "c", "a", "d"],
        group=torch.tensor([7, 7, 9, 7, 9]),
        weights=weights,
        signal=torch.tensor([True, True, False, True, False]),
    )
    whole = reduce(logprobs, batch, batch.weights)
    parts = [[0, 2], [3], [4, 1]]
    micro = with_counts([select(batch, rows) for rows in parts])
    total = 0
    for rows, part in zip(parts, micro, strict=True):
        at = torch.cat([torch.nonzero(batch.sequence == row).squeeze(-1) for row in rows])
        total = total + reduce(logprobs[at], part, part.weights)
    torch.testing.assert_close(total, whole)


@pytest.mark.parametrize("name", ALONE)
def test_values_of_actions_without_weight_change_nothing(name: str) -> None:
    batch, logprobs, at_head = problem()
    masked = torch.zeros(batch.actions, dtype=torch.bool)
    masked[[1, 5, 6]] = True
    entries = masked.repeat_interleave(HEAD)
    batch = replace(batch, weights=torch.where(masked, 0, batch.weights))
    loss, grad_x, grad_h = gradients(ALONE[name], batch, logprobs, at_head)
    for filler in (float("nan"), float("inf"), 1e30):

        def poisoned(column: Tensor | None, value: float = filler) -> Tensor | None:
            return None if column is None else torch.where(masked, value, column)

        assert batch.heads is not None
        bad = replace(
            batch,
            behavior_logprobs=poisoned(batch.behavior_logprobs),
            anchor_logprobs=poisoned(batch.anchor_logprobs),
            reference_logprobs=poisoned(batch.reference_logprobs),
            values=poisoned(batch.values),
            returns=poisoned(batch.returns),
            advantages=poisoned(batch.advantages),
            heads=batch.heads._replace(logprobs=torch.where(entries, filler, batch.heads.logprobs)),
        )
        x = torch.where(masked, filler, logprobs)
        again, again_x, again_h = gradients(ALONE[name], bad, x, torch.where(entries, filler, at_head))
        torch.testing.assert_close(again, loss)
        torch.testing.assert_close(again_x, grad_x)
        torch.testing.assert_close(again_h, grad_h)


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("rows", [[], [1], [0, 1, 2, 3, 4]], ids=["empty", "one action", "all masked"])
def test_empty_and_all_masked_batches_give_zero_and_one_action_is_finite(name: str, rows: list[int]) -> None:
    batch, logprobs, at_head = problem()
    at = torch.cat([torch.nonzero(batch.sequence == row).squeeze(-1) for row in rows] or [torch.zeros(0).long()])
    head_at = (at[:, None] * HEAD + torch.arange(HEAD)).reshape(-1)
    part = select(batch, rows)
    if len(rows) == 5:
        part = replace(part, weights=torch.zeros_like(part.weights))
    loss, grad_x, grad_h = gradients(ALONE[name], part, logprobs[at], at_head[head_at])
    assert bool(loss.isfinite()), name
    assert bool(grad_x.isfinite().all() & grad_h.isfinite().all())
    if rows != [1]:
        assert loss == 0
        assert not grad_x.any()


@pytest.mark.parametrize("name", [name for name in ALONE if name not in {"entropy_bonus", "value_clip"}])
def test_overflow_impossible_and_missing_log_probs_stay_finite(name: str) -> None:
    batch, logprobs, at_head = problem()
    behavior = batch.behavior_logprobs.clone()
    behavior[:4] = doubles(-500.0, 0.0, float("nan"), -torch.inf)
    logprobs = logprobs.clone()
    logprobs[:2] = doubles(0.0, -500.0)
    logprobs[5] = -torch.inf  # the trainer's own filter took the drawn token away
    batch = replace(batch, behavior_logprobs=behavior, valid=behavior.isfinite())
    loss, grad_x, grad_h = gradients(ALONE[name], batch, logprobs, at_head)
    assert bool(loss.isfinite())
    assert bool(grad_x.isfinite().all() & grad_h.isfinite().all())


GAPS = {
    "ppo": "anchor_logprobs",
    "gspo": "anchor_logprobs",
    "cispo": "advantages",
    "reinforce": "advantages",
    "reference_kl": "reference_logprobs",
    "value_clip": "returns",
}


@pytest.mark.parametrize("name", GAPS)
def test_an_action_that_lacks_what_the_objective_needs_is_left_out_and_counted(name: str) -> None:
    batch, logprobs, at_head = problem()
    column, gap = GAPS[name], torch.arange(batch.actions) == 5
    without = replace(batch, weights=torch.where(gap, 0, batch.weights))
    loss, grad_x, _ = gradients(ALONE[name], without, logprobs, at_head)
    holed = replace(batch, **{column: torch.where(gap, torch.nan, getattr(batch, column))})
    again, again_x, _ = gradients(ALONE[name], holed, logprobs, at_head)
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(again_x, grad_x)
    assert ALONE[name](holed, logprobs, at_head)[1][f"{column}/missing"] == 1
    unset = replace(batch, **{column: None})
    with pytest.raises(UnsupportedRecordError, match=f"batch.{column} is not set"):
        ALONE[name](unset, logprobs, at_head)


def test_an_unknown_anchor_and_a_correction_of_nothing_are_refused() -> None:
    batch, logprobs, _ = problem()
    with pytest.raises(ValueError, match="anchor: wanted 'recorded' or 'behavior', got 'old'"):
        ppo_clip(batch, logprobs, anchor="old")
    with pytest.raises(ValueError, match="there is nothing to correct"):
        ppo_clip(batch, logprobs, anchor="behavior", correction=tis(2.0))


def test_counts_of_what_an_objective_divides_by_leave_out_missing_log_probs() -> None:
    batch, logprobs, _ = problem()
    behavior = batch.behavior_logprobs.clone()
    behavior[[0, 7]] = float("nan")
    batch = replace(batch, behavior_logprobs=behavior, valid=behavior.isfinite())
    loss, _ = reinforce_zero(batch, logprobs)
    parts = [[0, 1], [2, 3, 4]]
    cut = [select(batch, rows) for rows in parts]
    micro = with_counts(cut, weights=[trainable(part, behavior=True) for part in cut])
    at = torch.tensor([0, 4]), torch.tensor([4, 12])
    total = sum(
        reinforce_zero(part, logprobs[start:stop])[0]
        for part, (start, stop) in zip(micro, zip(at[0].tolist(), at[1].tolist(), strict=True), strict=True)
    )
    torch.testing.assert_close(total, loss)
