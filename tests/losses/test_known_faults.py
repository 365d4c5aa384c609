"""Failures seen in other trainers, as small inputs with the right answer. One test a case."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from rollstore.batch import Kind, Transform, as_behavior, select
from rollstore.errors import UnsupportedRecordError
from rollstore.losses import (
    Verdict,
    fixed_length,
    gae,
    group_mean,
    group_zscore,
    groups,
    icepop,
    noise_floor,
    ppo_clip,
    reference_kl,
    reinforce,
    reinforce_zero,
    sequence_mean,
    signal_groups,
    tis,
    token_mean,
    whiten,
    with_counts,
)
from rollstore.losses.ratios import correct
from tests.losses.padded import Padded, doubles, line, one_head, variable

close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)
nan = float("nan")


def rows(lengths: list[int], **columns: Any) -> Any:
    width = max(lengths)
    return Padded([[1] * length + [0] * (width - length) for length in lengths]).batch(**columns)


def test_a_complete_raw_head_tempers_exactly_and_an_incomplete_one_is_refused() -> None:
    head = one_head([3], [0, 1, 2], [-0.40761, -1.40761, -2.40761])
    kinds = {"behavior_kind": torch.tensor([2], dtype=torch.int8), "head_kind": torch.tensor([2], dtype=torch.int8)}
    batch = line(
        1,
        behavior_logprobs=doubles(-1.40761),
        temperature=torch.tensor([0.5]),
        heads=head,
        advantages=doubles(1.0),
        trainer_transform=Transform(temperature=True),
        **kinds,
    )
    tempered = as_behavior(batch, vocab_size=3)
    close(tempered.behavior_logprobs, doubles(-2.14293))
    _, metrics = reinforce_zero(tempered, doubles(-2.14293))
    close(metrics["ratio/mean"], torch.tensor(1.0, dtype=torch.float64))
    narrow = replace(batch, heads=one_head([1], [1], [-1.40761]))
    with pytest.raises(UnsupportedRecordError, match=r"'r0'.*temperature=0\.5"):
        reinforce_zero(as_behavior(narrow, vocab_size=3), doubles(-2.14293))


def test_a_filtered_log_prob_is_refused_unless_the_trainer_declares_the_filter() -> None:
    batch = line(1, behavior_logprobs=doubles(-1.31326), top_k=torch.tensor([2]), advantages=doubles(1.0))
    with pytest.raises(UnsupportedRecordError, match="top_k=2"):
        reinforce_zero(batch, doubles(-1.40761))


def test_a_missing_log_prob_enters_no_ratio_and_an_impossible_one_is_counted() -> None:
    batch = line(4, behavior_logprobs=doubles(-0.1, nan, -0.7, -torch.inf), advantages=doubles(1, 1, 1, 1))
    logprobs = variable(doubles(-0.1, -0.3, -0.7, -0.2))
    loss, metrics = reinforce_zero(batch, logprobs)
    loss.backward()
    close(loss, torch.tensor(-1.0, dtype=torch.float64))
    assert logprobs.grad is not None
    close(logprobs.grad, doubles(-0.5, 0, -0.5, 0))
    assert (metrics["behavior/missing"], metrics["behavior/impossible"], metrics["tokens"]) == (1, 1, 2)


def test_ratios_of_bf16_log_probs_are_formed_in_float32() -> None:
    batch = line(1, behavior_logprobs=torch.tensor([-12.375]), advantages=torch.tensor([1.0]))
    loss, metrics = reinforce_zero(batch, torch.tensor([-12.375], dtype=torch.bfloat16))
    assert loss.dtype == metrics["ratio/mean"].dtype == torch.float32
    close(loss, torch.tensor(-1.0))


def test_the_mismatch_is_taken_over_actions_and_not_over_observations() -> None:
    pad = Padded([[1, 0, 0, 1]])
    batch = pad.batch(behavior_logprobs=pad.flat([[-0.5, 0.0, 0.0, -0.7]]), advantages=pad.spread([1.0]))
    _, metrics = reinforce_zero(batch, pad.flat([[-0.5, -6.0, -5.0, -0.7]]))
    close(metrics["ratio/k1"], torch.tensor(0.0, dtype=torch.float64))


def test_a_group_with_two_aborted_members_uses_the_two_real_ones() -> None:
    batch, found = group_mean(rows([2, 0, 1, 0], rewards=doubles(1.0, nan, 0.0, nan)))
    assert (found.present.tolist(), found.failed.tolist()) == ([2], [2])
    loss, metrics = reinforce(batch, doubles(-1.0, -1.0, -1.0), reduce=sequence_mean)
    assert metrics["sequences"] == 2
    close(loss, torch.tensor(0.0, dtype=torch.float64))


def test_a_batch_of_rollouts_without_actions_gives_zero() -> None:
    batch, _ = group_mean(Padded([[0], [0]]).batch(rewards=doubles(nan, nan)))
    logprobs = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    for loss, metrics in (reinforce(batch, logprobs), reinforce_zero(batch, logprobs)):
        loss.backward()
        assert (loss.item(), metrics["tokens"].item()) == (0.0, 0.0)


# ---- groups


@pytest.mark.parametrize(
    ("ddof", "wanted"), [(1, [0.577350, 0, -1.154701, 0.577350]), (0, [0.707107, 0, -1.414214, 0.707107])]
)
def test_a_missing_reward_is_no_zero_and_reaches_no_other_group(ddof: int, wanted: list[float]) -> None:
    rewards = doubles(1.0, nan, 0.0, 1.0, nan, nan, nan, nan, 1.0, 0.0)
    group = torch.tensor([0] * 4 + [1] * 4 + [2] * 2)
    batch, found = group_zscore(rows([1] * 10, rewards=rewards, group=group), ddof=ddof, eps=0.0)
    assert batch.advantages is not None
    close(batch.advantages[:4], torch.tensor(wanted))
    assert batch.weights.tolist() == [1, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    close(found.mean[:1], doubles(0.666667))
    close(found.deviation[:1], doubles(0.577350 if ddof == 1 else 0.471405))
    assert found.verdict.tolist() == [Verdict.signal, Verdict.unscored, Verdict.signal]
    assert bool(batch.advantages.isfinite().all())


def test_a_component_that_is_missing_for_one_member_is_missing_in_that_component_alone() -> None:
    batch = rows([1] * 5, rewards=doubles(1.0, 0.0, 0.5, 1.0, 0.0), group=torch.tensor([0, 0, 0, 1, 1]))
    style = groups(batch, rewards=doubles(0.2, nan, 0.4, 1.0, 0.0))
    assert (style.present.tolist(), style.failed.tolist()) == ([2, 2], [1, 0])
    close(style.mean, doubles(0.3, 0.5))
    total = groups(batch)
    assert (total.present.tolist(), total.failed.tolist()) == ([3, 2], [0, 0])
    close(total.mean, doubles(0.5, 0.5))


def equal_and_mixed() -> Any:
    group = torch.tensor([0, 0, 1, 1])
    return rows([100, 100, 10, 30], rewards=doubles(1, 1, 1, 0), group=group)


def test_groups_without_signal_stay_in_the_denominator_unless_it_is_asked_otherwise() -> None:
    batch, found = group_zscore(equal_and_mixed(), eps=0.0)
    assert batch.advantages is not None
    terms = -batch.advantages.double()
    close(token_mean(terms, batch, batch.weights), torch.tensor(0.0589256, dtype=torch.float64))
    close(signal_groups(token_mean)(terms, batch, batch.weights), torch.tensor(0.3535534, dtype=torch.float64))
    summary = found.summary()
    assert (summary["groups/none"], summary["groups"]) == (1, 2)
    assert (summary["tokens/no_signal"], summary["tokens"]) == (200, 240)
    close(batch.advantages[[0, 100, 200, 210]], torch.tensor([0, 0, 0.707107, -0.707107]))
    assert batch.signal is not None
    kept = select(batch, torch.nonzero(batch.signal).squeeze(-1))
    assert (kept.rollout_ids, kept.rewards.tolist(), kept.actions) == (["r2", "r3"], [1, 0], 40)


def test_zero_variance_is_of_the_named_component() -> None:
    batch = rows([1, 1, 1], rewards=doubles(0.0, -0.2, -0.4))
    accuracy = groups(batch, rewards=doubles(0, 0, 0))
    assert accuracy.verdict.tolist() == [Verdict.none]
    assert (accuracy.summary()["groups/none"], groups(batch).summary()["groups/none"]) == (1, 0)
    shaped, total = group_zscore(batch, eps=0.0)
    assert total.verdict.tolist() == [Verdict.signal]
    close(shaped.advantages, torch.tensor([1.0, 0.0, -1.0]))


def test_identical_completions_are_another_cause_than_equal_rewards() -> None:
    pad = Padded([[1, 1]] * 8)
    tokens = torch.tensor([[0, 5, 6]] * 4 + [[0, 5, 6], [0, 6, 5], [0, 5, 7], [0, 5, 5]]).reshape(-1)
    group = torch.tensor([0] * 4 + [1] * 4)
    found = groups(pad.batch(tokens=tokens, group=group, rewards=torch.ones(8).double()))
    assert found.unique.tolist() == [1, 4]
    assert found.verdict.tolist() == [Verdict.none, Verdict.none]
    assert found.identical.tolist() == [True, False]
    assert found.summary()["groups/identical"] == 1


ARRIVALS = [("g1", 1.0), ("g2", 0.0), ("g1", 0.0), ("g2", 0.0), ("g2", 1.0), ("g1", nan), ("g2", 1.0)]


@pytest.mark.parametrize("order", [range(7), [6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 2, 5, 1, 4]], ids=str)
def test_groups_are_found_by_key_whatever_the_order_of_arrival(order: Any) -> None:
    arrived = [ARRIVALS[i] for i in order]
    batch = rows(
        [1] * 7,
        rollout_ids=[str(i) for i in order],
        rewards=doubles(*[reward for _, reward in arrived]),
        group=torch.tensor([int(name[1]) for name, _ in arrived]),
        group_size=torch.full((7,), 4),
    )
    batch, found = group_mean(batch)
    assert [found.expected.tolist(), found.present.tolist()] == [[4, 4], [2, 4]]
    assert [found.failed.tolist(), found.missing.tolist()] == [[1, 0], [1, 0]]
    assert found.incomplete.tolist() == [True, False]
    close(found.mean, doubles(0.5, 0.5))
    assert batch.advantages is not None
    by_id = dict(zip(batch.rollout_ids, batch.advantages.tolist(), strict=True))
    assert by_id == {"0": 0.5, "1": -0.5, "2": -0.5, "3": -0.5, "4": 0.5, "5": 0.0, "6": 0.5}


def test_an_incomplete_group_is_dropped_only_by_name() -> None:
    batch = rows([1, 1], rewards=doubles(1, 0), group_size=torch.tensor([4, 4]))
    kept, _ = group_mean(batch)
    dropped, found = group_mean(batch, drop_incomplete=True)
    assert (kept.weights.tolist(), dropped.weights.tolist()) == ([1, 1], [0, 0])
    assert found.verdict.tolist() == [Verdict.dropped]


def test_constant_rewards_per_prompt_give_zero_for_every_answer() -> None:
    group = torch.arange(12) // 4
    batch, found = group_zscore(rows([1] * 12, rewards=doubles(2, 5, 9)[group], group=group))
    assert batch.advantages is not None
    assert not batch.advantages.any()
    assert found.verdict.tolist() == [Verdict.none] * 3


def test_a_group_of_one_is_flagged_and_has_no_advantage() -> None:
    batch, found = group_zscore(rows([1], rewards=doubles(0.7)))
    assert (batch.advantages.tolist(), found.verdict.tolist()) == ([0.0], [Verdict.single])
    assert (found.summary()["groups/single"], found.summary()["groups/none"]) == (1, 0)


def test_whitening_one_value_leaves_it_and_says_so() -> None:
    batch, did = whiten(line(1, advantages=torch.tensor([2.5])))
    assert (batch.advantages.tolist(), bool(did.skipped)) == ([2.5], True)


def test_an_all_masked_batch_gives_zero_with_a_count_of_zero() -> None:
    batch = rows([2, 1], weights=torch.zeros(3), advantages=doubles(1, 1, 1))
    logprobs = variable(doubles(nan, -1, nan))
    loss, metrics = reinforce(batch, logprobs)
    loss.backward()
    assert (loss.item(), metrics["tokens"].item()) == (0.0, 0.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0, 0, 0]


def test_a_masked_nan_never_leaks_and_an_empty_sequence_counts_only_when_asked() -> None:
    batch = rows([2, 2], weights=torch.tensor([1.0, 1, 0, 0]))
    terms = doubles(2, 4, nan, 7)
    close(token_mean(terms, batch, batch.weights), torch.tensor(3.0, dtype=torch.float64))
    close(sequence_mean(terms, batch, batch.weights), torch.tensor(3.0, dtype=torch.float64))
    close(sequence_mean(terms, batch, batch.weights, empty="count"), torch.tensor(1.5, dtype=torch.float64))


@pytest.mark.parametrize("cut", [[10], [2, 8], [5, 5], [1] * 10], ids=str)
@pytest.mark.parametrize("reduce", [token_mean, sequence_mean, fixed_length(8)], ids=["token", "sequence", "fixed"])
def test_the_loss_of_a_step_does_not_depend_on_the_cut(cut: list[int], reduce: Any) -> None:
    whole = rows([1] * 10)
    terms = doubles(*[1.0] * 2, *[0.0] * 8)
    starts = [sum(cut[:i]) for i in range(len(cut))]
    parts = [range(start, start + size) for start, size in zip(starts, cut, strict=True)]
    micro = with_counts([select(whole, list(part)) for part in parts])
    pieces, together = variable(terms), variable(terms)
    total = sum(reduce(pieces[list(part)], batch, batch.weights) for part, batch in zip(parts, micro, strict=True))
    at_once = reduce(together, whole, whole.weights)
    close(total, at_once)
    total.backward()
    at_once.backward()
    torch.testing.assert_close(pieces.grad, together.grad, rtol=0, atol=1e-6)
    if reduce is token_mean:
        close(total, torch.tensor(0.2, dtype=torch.float64))
    averaged = with_counts([select(whole, list(part)) for part in parts], averaged_over=len(cut))
    losses = [reduce(terms[list(part)], batch, batch.weights) for part, batch in zip(parts, averaged, strict=True)]
    close(sum(losses) / len(cut), total)


# ---- ratios


def weights_of(log_ratios: torch.Tensor, correction: Any) -> Any:
    batch = line(len(log_ratios), behavior_logprobs=torch.zeros_like(log_ratios))
    return correct(correction, batch, log_ratios, batch.valid, default="live")


def test_huge_log_ratios_stay_finite_and_a_geometric_filter_sees_their_mean() -> None:
    log_ratios = torch.tensor([100.0, -100.0])
    both = (tis(2.0), icepop(0.5, 2.0, inside="one", level="geometric"))
    got = weights_of(log_ratios, both)
    assert got.kept.tolist() == [True, True]
    close(got.weight, torch.tensor([2.0, 3.7835e-44]), atol=0, rtol=0.05)
    close(got.metrics["icepop/max_before"], torch.tensor(1.0))
    assert all(bool(value.isfinite()) for value in got.metrics.values())
    batch = line(2, behavior_logprobs=torch.zeros(2), advantages=torch.ones(2))
    logprobs = variable(log_ratios)
    loss, _ = reinforce(batch, logprobs, correction=both)
    loss.backward()
    close(loss.detach(), torch.tensor(-100.0))
    assert logprobs.grad is not None
    close(logprobs.grad, -got.weight / 2, atol=0, rtol=0.05)


def test_a_rejected_sequence_contributes_exactly_zero() -> None:
    batch = line(2, behavior_logprobs=torch.zeros(2), anchor_logprobs=torch.zeros(2), advantages=torch.ones(2))
    logprobs = torch.tensor([100.0, 100.0], requires_grad=True)
    gate = icepop(0.5, 2.0, level="geometric", numerator="live")
    loss, metrics = ppo_clip(batch, logprobs, correction=(tis(2.0, numerator="live"), gate))
    loss.backward()
    assert (loss.item(), logprobs.grad.tolist()) == (0.0, [0.0, 0.0])
    assert (metrics["icepop/rejected"], metrics["icepop/overflow"], metrics["ratio/overflow"]) == (2, 2, 2)


def test_product_and_geometric_mean_of_a_long_sequence_are_told_apart_by_name() -> None:
    log_ratios = torch.full((1000,), -0.0028)
    close(weights_of(log_ratios, tis(2.0, level="sequence")).weight[0], torch.tensor(0.0608101))
    close(weights_of(log_ratios, tis(2.0, level="geometric")).weight[0], torch.tensor(0.9972039))


def test_what_icepop_masks_stays_in_the_denominator_or_leaves_it_by_choice() -> None:
    log_ratios = doubles(0.4, 1.0, 3.0).log()
    assert weights_of(log_ratios, icepop(0.5, 2.0)).weight.tolist() == [0, 1, 0]
    batch = line(3, behavior_logprobs=0 * log_ratios, advantages=doubles(1, 1, 1))
    stays, _ = reinforce(batch, log_ratios - 1, correction=icepop(0.1, 0.5))
    leaves, metrics = reinforce(batch, log_ratios - 1, correction=icepop(0.1, 0.5, rejected="leave"))
    close(leaves, 3 * stays / 2)
    assert (metrics["icepop/rejected"], metrics["actions"], metrics["tokens"]) == (1, 3, 2)


def test_one_value_a_sequence_where_one_a_token_is_wanted_is_an_error() -> None:
    batch = rows([2, 2], advantages=doubles(1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"wanted one value an action \(4,\), got \(2,\)"):
        reinforce(batch, doubles(-1, -1))


# ---- trajectories


@pytest.mark.parametrize("masked", [-70.0, nan])
def test_gae_never_reads_a_value_under_the_mask(masked: float) -> None:
    batch = line(
        4,
        values=doubles(0.3, 0.1, 0.4, masked),
        weights=torch.tensor([1.0, 1, 1, 0]),
        action_rewards=doubles(0, 0, 2, masked),
        rewards=doubles(0.0),
    )
    got, _ = gae(batch, gamma=1.0, lam=0.9)
    close(got.advantages, doubles(1.366, 1.74, 1.6, 0))


@pytest.mark.parametrize(("gamma", "wanted"), [(1.0, [0.695, 0.55, 0.5]), (0.5, [0.03375, 0.075, 0.5])])
def test_the_outcome_stands_on_the_last_action_and_observations_take_no_decay_step(
    gamma: float, wanted: list[float]
) -> None:
    pad = Padded([[1, 0, 1, 1, 0, 0]])
    got, _ = gae(pad.batch(values=doubles(0.2, 0.4, 0.5), rewards=doubles(1.0)), gamma=gamma, lam=0.9)
    close(got.advantages, doubles(*wanted))


def test_a_sequence_advantage_is_a_mean_over_its_actions_with_weight() -> None:
    batch = line(4, weights=torch.tensor([1.0, 1, 0, 0]))
    close(sequence_mean(doubles(2, 4, 9, 9), batch, batch.weights), torch.tensor(3.0, dtype=torch.float64))


# ---- noise


def test_differences_below_the_scorers_own_noise_are_no_signal() -> None:
    floor = noise_floor(doubles(0.412, 0.405, 0.418))
    close(floor, torch.tensor(0.0065064, dtype=torch.float64))
    rewards = doubles(0.410, 0.414, 0.409, 0.413, 0.10, 0.90, 0.10, 0.90)
    batch = rows([1] * 8, rewards=rewards, group=torch.arange(8) // 4)
    got, found = group_zscore(batch, floor=floor)
    close(found.deviation[0], torch.tensor(0.0023805, dtype=torch.float64))
    assert found.verdict.tolist() == [Verdict.below_floor, Verdict.signal]
    assert got.advantages is not None
    assert not got.advantages[:4].any()
    plain, found = group_zscore(batch, eps=0.0)
    assert plain.advantages is not None
    close(plain.advantages[:4], torch.tensor([-0.630, 1.050, -1.050, 0.630]), rtol=1e-3)
    assert found.verdict.tolist() == [Verdict.signal, Verdict.signal]
    assert bool(noise_floor(doubles(0.4)).isnan())


def test_64_groups_of_which_13_are_empty_divide_by_51_and_regularisers_by_64() -> None:
    group = torch.arange(128) // 2
    rewards = torch.where((group < 13) | (torch.arange(128) % 2 == 0), 1.0, 0.0).double()
    batch, found = group_mean(rows([1] * 128, rewards=rewards, group=group, reference_logprobs=torch.zeros(128)))
    assert (found.summary()["groups/none"], found.summary()["groups/signal"]) == (13, 51)
    close(found.step_scale, torch.tensor(64 / 51))
    ones = torch.ones(128, dtype=torch.float64)
    close(signal_groups(token_mean)(ones, batch, batch.weights), torch.tensor(1.0, dtype=torch.float64))
    policy = torch.where(group < 13, 0.0, 1.0).double()
    got = [reduce(policy, batch, batch.weights) for reduce in (token_mean, signal_groups(token_mean))]
    close(got[1] / got[0], torch.tensor(64 / 51, dtype=torch.float64))
    term, _ = reference_kl(batch, torch.full((128,), 0.1).double(), beta=1.0, estimator="k1")
    close(term, torch.tensor(0.1, dtype=torch.float64))


def test_no_signal_at_all_gives_zero() -> None:
    batch, _ = group_mean(rows([2, 2], rewards=doubles(1, 1)))
    logprobs = variable(doubles(-1, -1, -1, -1))
    loss, metrics = reinforce(batch, logprobs, reduce=signal_groups(token_mean))
    loss.backward()
    assert (loss.item(), metrics["tokens/signal"].item()) == (0.0, 0.0)


def test_an_unknown_kind_is_never_a_denominator() -> None:
    batch = line(1, advantages=doubles(1.0), behavior_kind=torch.tensor([Kind.unknown], dtype=torch.int8))
    with pytest.raises(UnsupportedRecordError, match="kind of the log-prob was not recorded"):
        reinforce_zero(batch, doubles(-1.0))
    # behind weight 0 nothing is asked of it
    reinforce_zero(replace(batch, weights=torch.zeros(1)), doubles(-1.0))


def test_a_rollout_counts_once_in_its_group_however_many_segments_it_has() -> None:
    batch = rows(
        [1, 1, 1, 1],
        rollout=torch.tensor([0, 0, 0, 1]),
        segment=torch.tensor([0, 1, 2, 0]),
        rewards=doubles(1, 1, 1, 0),
    )
    batch, found = group_mean(batch)
    assert (found.present.tolist(), found.mean.tolist()) == ([2], [0.5])
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5, -0.5]


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    group = torch.tensor([0, 0, 1, 1])
    batch, found = group_zscore(rows([1] * 4, rewards=doubles(0.1 + 0.2, 0.3, 1e-7, 2e-7), group=group))
    assert found.verdict.tolist() == [Verdict.none, Verdict.signal]
    assert batch.advantages is not None
    assert not batch.advantages[:2].any()
