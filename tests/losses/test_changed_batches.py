"""A batch that a caller changed: what is stale is refused or decided anew, and what is missing is counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstore.batch import Kind, TokenBatch, refuse_unusable, to_trl
from rollstore.errors import UnsupportedRecordError
from rollstore.losses import (
    Recorded,
    entropy_bonus,
    gae,
    group_mean,
    gspo,
    icepop,
    logprobs_of_logits,
    mis,
    noise_floor,
    ppo_clip,
    reference_kl,
    reinforce,
    reinforce_zero,
    sampler_kl,
    sao,
    score_centering,
    selected_logprobs,
    signal_groups,
    split_log_ratio,
    tis,
    token_mean,
    token_sum,
    trainable,
    value_clip,
    whiten,
    with_counts,
    within,
)
from tests.losses.padded import HEAD, Padded, doubles, line, one_head, problem, variable

close = torch.testing.assert_close
nan, inf = float("nan"), float("inf")


def singles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


# ---- whether a log-prob is there


NONE = line(
    4,
    behavior_logprobs=torch.full((4,), nan),
    behavior_kind=torch.full((4,), int(Kind.unknown), dtype=torch.int8),
    advantages=doubles(1, 1, 1, 1),
)
SET = replace(
    NONE,
    behavior_logprobs=singles([-0.5, -0.6, -0.5, -0.6]),
    behavior_kind=torch.full((4,), int(Kind.behavior), dtype=torch.int8),
)


@pytest.mark.parametrize(
    "use",
    [
        lambda batch: reinforce_zero(batch, SET.behavior_logprobs),
        lambda batch: reinforce(batch, SET.behavior_logprobs, correction=tis(2.0)),
        lambda batch: refuse_unusable(batch),
        lambda batch: to_trl(batch),
    ],
    ids=["reinforce_zero", "a correction", "refuse_unusable", "to_trl"],
)
def test_log_probs_that_are_set_without_valid_are_refused_and_never_silently_left_out(use: Any) -> None:
    message = r"^rollout 'r0': batch.valid: wanted True where there is a behavior log-prob, got False for 4 of them"
    with pytest.raises(UnsupportedRecordError, match=message):
        use(SET)
    use(replace(SET, valid=SET.behavior_logprobs.isfinite()))
    reinforce(SET, SET.behavior_logprobs)  # which divides by none of them


def test_what_valid_denies_may_be_left_out_by_weight() -> None:
    batch = replace(SET, valid=torch.tensor([True, True, False, False]), weights=singles([1, 1, 0, 0]))
    assert reinforce_zero(batch, SET.behavior_logprobs)[1]["tokens"] == 2


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("odd", "name"), [(nan, "missing"), (inf, "missing"), (-inf, "impossible"), (-1e4, "impossible")]
)
def test_a_log_prob_that_is_taken_away_leaves_the_loss_and_is_counted(odd: float, name: str, in_place: bool) -> None:
    batch = replace(SET, valid=torch.ones(4, dtype=torch.bool), behavior_logprobs=SET.behavior_logprobs.clone())
    p = SET.behavior_logprobs + 0.1
    reinforce_zero(batch, p)  # what it remembers of the batch is asked again after a change in place
    if in_place:
        batch.behavior_logprobs[1] = odd
    else:
        batch = replace(batch, behavior_logprobs=torch.where(torch.arange(4) == 1, odd, batch.behavior_logprobs))
    without = replace(SET, valid=torch.ones(4, dtype=torch.bool), weights=singles([1, 0, 1, 1]))
    loss, metrics = reinforce_zero(batch, p)
    close(loss, reinforce_zero(without, p)[0])
    assert (metrics[f"behavior/{name}"], metrics["actions"], metrics["tokens"]) == (1, 3, 3)
    assert trainable(batch, behavior=True).tolist() == [1, 0, 1, 1]
    assert split_log_ratio(batch, p, p).total.isnan().tolist() == [False, True, False, False]


# ---- whether a group carries signal


def two_groups() -> TokenBatch:
    """Group 0 with rewards 1 and 0, group 1 with 1 and 1; one, two, one and one actions."""
    pad = Padded([[1, 0], [1, 1], [1, 0], [1, 0]])
    return group_mean(pad.batch(rewards=doubles(1, 0, 1, 1), group=torch.tensor([0, 0, 1, 1])))[0]


def test_whitening_decides_anew_which_groups_carry_signal() -> None:
    batch = two_groups()
    assert batch.signal is not None
    assert batch.signal.tolist() == [True, True, False, False]
    white, _ = whiten(batch)
    assert white.signal is not None
    assert white.signal.tolist() == [True] * 4
    x = doubles(-1, -2, -3, -4, -5)
    close(reinforce(white, x, reduce=signal_groups(token_mean))[0], reinforce(white, x)[0])
    even, _ = whiten(replace(batch, advantages=torch.zeros(5)))
    assert even.signal is not None
    assert not even.signal.any()
    with pytest.raises(ValueError, match=r"^whiten: wanted a batch that with_counts has not counted"):
        whiten(with_counts([batch])[0])


def test_gae_forgets_what_was_decided_of_groups() -> None:
    batch, _ = gae(replace(two_groups(), values=torch.zeros(5)))
    assert batch.signal is None
    with pytest.raises(UnsupportedRecordError, match=r"^batch.signal is not set"):
        reinforce(batch, doubles(-1, -1, -1, -1, -1), reduce=signal_groups(token_mean))


def test_advantages_in_a_group_that_is_said_to_carry_none_are_counted() -> None:
    batch = two_groups()
    assert reinforce(batch, torch.zeros(5))[1]["signal/off"] == 0
    assert reinforce(replace(batch, advantages=torch.ones(5)), torch.zeros(5))[1]["signal/off"] == 2


def test_an_unscored_member_gives_no_signal_to_a_single_one_that_is_scored_0() -> None:
    pad = Padded([[1], [1]])
    for other, wanted in ((0.0, False), (2.0, True)):
        got, found = group_mean(pad.batch(rewards=doubles(other, nan)), single="raw")
        assert got.signal is not None
        assert (got.signal.tolist(), found.signal.tolist()) == ([wanted, False], [wanted])


REGULARISERS: dict[str, Callable[[TokenBatch, Tensor, Tensor, Any], Any]] = {
    "reference_kl": lambda b, x, h, r: reference_kl(b, x, beta=1.0, estimator="k1", reduce=r),
    "entropy_bonus": lambda b, x, h, r: entropy_bonus(b, -x, beta=1.0, reduce=r),
    "value_clip": lambda b, x, h, r: value_clip(b, x, reduce=r),
    "sampler_kl": lambda b, x, h, r: sampler_kl(b, h, beta=1.0, reduce=r),
}


@pytest.mark.parametrize("name", REGULARISERS)
def test_a_regulariser_acts_on_groups_without_signal_too_whatever_reducer_the_policy_has(name: str) -> None:
    batch, x, h = problem()
    batch = replace(batch, signal=batch.sequence.new_tensor([1, 1, 0, 0, 0]).bool())
    for reduce in (token_mean, token_sum):
        wanted, _ = REGULARISERS[name](batch, x, h, reduce)
        for one in (signal_groups(reduce), signal_groups(signal_groups(reduce))):
            close(REGULARISERS[name](batch, x, h, one)[0], wanted)
            close(REGULARISERS[name](with_counts([batch])[0], x, h, one)[0], wanted)


@pytest.mark.parametrize("name", REGULARISERS)
def test_every_regulariser_says_where_it_took_another_weight_than_was_counted(name: str) -> None:
    batch, x, h = problem()
    [counted] = with_counts([batch])
    assert REGULARISERS[name](counted, x, h, token_mean)[1]["counts/off"] == 0
    assert "counts/off" not in REGULARISERS[name](batch, x, h, token_mean)[1]
    less = replace(counted, weights=torch.where(batch.sequence < 2, 0, batch.weights))
    assert REGULARISERS[name](less, x, h, token_mean)[1]["counts/off"] == 2


def test_one_action_of_twenty_thousand_that_was_counted_and_not_taken_is_reported() -> None:
    batch = line(20_001, behavior_logprobs=torch.full((20_001,), -1.0), advantages=torch.ones(20_001))
    [counted] = with_counts([batch])
    counted.weights[7] = 0
    assert reinforce(counted, batch.behavior_logprobs)[1]["counts/off"] == 1


def test_a_rollout_of_which_one_action_in_two_million_lies_elsewhere_is_cut() -> None:
    from rollstore.batch.select import is_cut

    [counted] = with_counts([line(1)])
    assert counted.counts is not None
    counts = counted.counts._replace(segment_tokens=doubles(2e6), rollout_tokens=doubles(2e6 + 1))
    assert is_cut(counts, torch.zeros(1, dtype=torch.int64))
    assert not is_cut(counts._replace(rollout_tokens=doubles(2e6)), torch.zeros(1, dtype=torch.int64))


# ---- a ratio over a sequence is of all that has one


RATIOS = {
    "product of p/q": (tis(1e6, level="sequence"), 0.5 + 1.4),
    "root of p/q": (tis(1e6, level="geometric"), (0.5 + 1.4) / 2),
    "product of pi0/q": (tis(1e6, level="sequence", numerator="anchor"), 0.3 + 0.9),
}


@pytest.mark.parametrize("name", RATIOS)
def test_an_action_without_an_advantage_stays_in_the_ratio_of_its_sequence(name: str) -> None:
    correction, wanted = RATIOS[name]
    batch = line(2, behavior_logprobs=doubles(-1, -2), advantages=doubles(1, nan), anchor_logprobs=doubles(-0.7, -1.1))
    x = variable(doubles(-0.5, -0.6))
    loss, metrics = reinforce(batch, x, correction=correction, reduce=token_sum)
    loss.backward()
    close(x.grad, doubles(-math.exp(wanted), 0))
    assert metrics["actions"] == 1


def test_an_action_without_an_anchor_stays_in_p_over_q_and_leaves_pi0_over_q() -> None:
    batch = line(2, behavior_logprobs=doubles(-1, -2), advantages=doubles(1, 1), anchor_logprobs=doubles(-0.5, nan))
    p = doubles(-0.5, -0.6)
    for numerator, wanted in (("live", 0.5 + 1.4), ("anchor", 0.5)):
        weight = tis(1e6, level="sequence", numerator=numerator)  # pyright: ignore[reportArgumentType]
        _, metrics = ppo_clip(batch, p, correction=weight)
        close(metrics["tis/mean"], doubles(math.exp(wanted))[0])
        assert metrics["tokens"] == 1


def test_the_root_of_gspo_is_of_all_actions_with_an_anchor() -> None:
    batch = line(3, behavior_logprobs=doubles(-1, -1, -1), advantages=doubles(1, nan, 1))
    batch = replace(batch, anchor_logprobs=doubles(-1, -1, nan))
    x = variable(doubles(-0.9, -0.7, -5))
    loss, metrics = gspo(batch, x, clip=(0.9, 9.0), reduce=token_sum)
    loss.backward()
    close(x.grad, doubles(-math.exp(0.2), 0, 0))
    assert metrics["tokens"] == 1


# ---- bounds above the clamp


@pytest.mark.parametrize(
    "correction", [mis(0.5, 1e9), icepop(0.5, 1e9, inside="one"), within(1e9), within(1e9, level="geometric")]
)
def test_a_ratio_above_the_clamp_is_compared_as_it_is(correction: Any) -> None:
    batch = line(2, behavior_logprobs=doubles(-30, -1), advantages=doubles(1, 1))
    if correction.level == "geometric":
        batch = replace(batch, behavior_logprobs=doubles(-30, -30))
    _, metrics = reinforce(
        batch, doubles(0, -1) if correction.level == "token" else doubles(0, 0), correction=correction
    )
    assert metrics[f"{correction.name}/rejected"] == (1 if correction.level == "token" else 2)
    _, open_ended = reinforce(batch, doubles(0, -1), correction=mis(0.5, inf))
    assert open_ended["mis/rejected"] == 0
    assert open_ended["mis/overflow"] >= 1


def test_the_band_of_sao_is_of_the_ratio_and_not_of_what_it_is_clamped_to() -> None:
    batch = line(2, behavior_logprobs=doubles(-30, -1), advantages=doubles(1, 1))
    assert sao(batch, doubles(0, -1), clip=(0.2, 1e9))[1]["rejected"] == 1


def test_above_the_clamp_the_value_stops_at_e_20_and_the_gradient_is_that_of_the_clamped_ratio() -> None:
    batch = line(2, behavior_logprobs=doubles(-25, -1), advantages=doubles(1, 1))
    x = variable(doubles(0, -1))
    loss, metrics = reinforce_zero(batch, x, reduce=token_sum)
    loss.backward()
    close(loss.detach(), doubles(-math.exp(20) - 1)[0])
    close(x.grad, doubles(-math.exp(20), -1))
    assert metrics["ratio/overflow"] == 1


@pytest.mark.parametrize(("x", "wanted"), [(-60.0, math.exp(-20)), (60.0, 1.2), (-5.0, math.exp(-5))])
def test_a_two_sided_clamp_stops_the_ratio_at_both_ends_and_keeps_the_gradient(x: float, wanted: float) -> None:
    """As the peers clamp; above, the clip of PPO takes the gradient away as it does below the clamp."""
    batch = line(1, anchor_logprobs=doubles(0), advantages=doubles(1))
    given = variable(doubles(x))
    loss, _ = ppo_clip(batch, given, exponent=(-20, 20))
    loss.backward()
    close(loss.detach(), doubles(-wanted)[0])
    close(given.grad, doubles(-wanted if x < 0 else 0.0))


# ---- heads with a NaN


def test_a_recorded_head_with_a_nan_is_a_missing_head() -> None:
    heads = one_head([2, 2], [0, 1, 0, 1], [-0.5, nan, -0.5, -1.5])
    batch = line(2, behavior_logprobs=doubles(-0.5, -0.5), advantages=doubles(1, 1), heads=heads)
    x, h = variable(doubles(-0.6, -0.6)), variable(doubles(-0.6, -1.6, -0.6, -1.6))
    without = replace(batch, weights=torch.tensor([0.0, 1.0]))
    for call in (
        lambda b, x, h: score_centering(b, x, h, weight=tis(2.0), sampler_kl=0.1),
        lambda b, x, h: sampler_kl(b, h, beta=1.0),
    ):
        loss, metrics = call(batch, x, h)
        close(loss, call(without, x, h)[0])
        (grad,) = torch.autograd.grad(loss, h)
        assert bool(grad.isfinite().all())
        assert grad[:2].tolist() == [0, 0]
        assert metrics["head/missing"] == 1
    assert trainable(batch, heads=True).tolist() == [0, 1]


def test_a_trainer_that_gives_nan_at_a_head_id_gets_a_loss_of_nan_and_is_counted() -> None:
    batch, x, h = problem()
    broken = torch.where(torch.arange(len(h)) == 4, nan, h)
    for call in (lambda h: score_centering(batch, x, h), lambda h: sampler_kl(batch, h, beta=1.0)):
        loss, metrics = call(broken)
        assert bool(loss.isnan())
        assert metrics["head/nan"] == 1
        assert call(h)[1]["head/nan"] == 0
    masked = replace(batch, weights=torch.where(torch.arange(batch.actions) == 4 // HEAD, 0, batch.weights))
    assert score_centering(masked, x, broken)[1]["head/nan"] == 0


# ---- narrow dtypes


def test_evaluations_in_bfloat16_do_not_round_the_record_or_the_advantages() -> None:
    batch = line(2, behavior_logprobs=singles([-0.612345, -0.25]), rewards=doubles(1.0))
    at = singles([-0.5, -0.25]).bfloat16()
    got = split_log_ratio(batch, singles([-0.512345, -0.2]), at)
    assert got.total.dtype == torch.float32
    close(got.total, singles([-0.512345 + 0.612345, 0.05]))
    close(got.disagreement, singles([0.112345, 0.0]))
    values = singles([0.1, 0.7]).bfloat16()
    narrow, _ = gae(replace(batch, values=values), gamma=0.9)
    wide, _ = gae(replace(batch, values=values.double()), gamma=0.9)
    assert narrow.advantages is not None
    assert wide.advantages is not None
    assert narrow.advantages.dtype == narrow.returns.dtype == torch.float32  # pyright: ignore[reportOptionalMemberAccess]
    close(narrow.advantages.double(), wide.advantages, rtol=1e-6, atol=1e-7)
    white, _ = whiten(replace(batch, advantages=singles([1.0, 2.0]).bfloat16()), ddof=0)
    close(white.advantages, singles([-1.0, 1.0]))


# ---- weights, temperatures, devices


@pytest.mark.parametrize("wrong", [-1.0, nan, inf])
def test_a_weight_that_is_negative_or_no_number_is_refused(wrong: float) -> None:
    batch, x, h = problem()
    bad = replace(batch, weights=torch.where(torch.arange(batch.actions) == 3, wrong, batch.weights))
    message = r"^batch.weights: wanted finite numbers of at least 0, got "
    for use in (lambda: reinforce(bad, x), lambda: sampler_kl(bad, h, beta=1.0), lambda: group_mean(bad)):
        with pytest.raises(ValueError, match=message):
            use()
    with pytest.raises(ValueError, match=r"^weights\[0\]: wanted finite numbers of at least 0"):
        with_counts([batch], weights=[bad.weights])


def test_a_temperature_with_a_gradient_or_below_0_is_refused_where_none_is_computed_for_it() -> None:
    hidden, weight, tokens = torch.randn(2, 3), torch.randn(5, 3), torch.tensor([1, 2])
    learnt = torch.ones(2, requires_grad=True)
    for name in ("temperature", "top_p", "min_p"):
        with pytest.raises(ValueError, match=rf"^{name}: wanted a column without gradient"):
            selected_logprobs(hidden, weight, tokens, **{name: learnt})  # pyright: ignore[reportArgumentType]
    for use in (
        lambda t: selected_logprobs(hidden, weight, tokens, temperature=t),
        lambda t: logprobs_of_logits(hidden @ weight.T, tokens, how=Recorded(temperature=t)),
    ):
        with pytest.raises(ValueError, match=r"^temperature: wanted numbers of at least 0, NaN where not recorded"):
            use(torch.tensor([1.0, -1.0]))
        use(torch.tensor([nan, 0.0]))


def test_a_report_of_groups_lies_on_the_device_of_its_batch() -> None:
    _, found = group_mean(problem()[0])
    moved = replace(found, **{name: value.to("meta") for name, value in vars(found).items()})
    assert {value.device.type for value in moved.summary().values()} == {"meta"}
    assert noise_floor(torch.ones(1, device="meta")).device.type == "meta"


def test_batches_may_come_from_a_generator() -> None:
    batch, _, _ = problem()
    [one], [other] = with_counts(iter([batch])), with_counts([batch])
    assert one.counts is not None
    assert other.counts is not None
    close(one.counts.rollout_tokens, other.counts.rollout_tokens)
    [weighted] = with_counts([batch], weights=(2 * part.weights for part in [batch]))
    assert weighted.counts is not None
    close(weighted.counts.tokens, 2 * other.counts.tokens)
