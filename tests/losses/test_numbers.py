"""The numbers that settle what each objective is, on cases a person can check by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstore.batch import Heads, Kind, Transform
from rollstore.errors import UnsupportedRecordError
from rollstore.losses import (
    dapo,
    dr_grpo,
    group_mean,
    gspo,
    logprobs_of_logits,
    mis,
    ppo_clip,
    reinforce,
    reinforce_zero,
    sampler_kl,
    sao,
    score_centering,
    sequence_mean,
    td,
    tis,
    token_mean,
    within,
)
from tests.losses.padded import Padded, doubles, line, one_head, variable

close = torch.testing.assert_close


def test_the_mean_over_actions_of_a_mask_with_holes_is_28_ninths() -> None:
    mask = [0] * 6 + [1] * 4 + [0] * 3 + [1] * 5 + [0] * 2
    pad = Padded([mask])
    batch = pad.batch()
    terms = doubles(*[2.0] * 4, *[4.0] * 5)
    close(token_mean(terms, batch, batch.weights), torch.tensor(28 / 9, dtype=torch.float64))


@pytest.mark.parametrize(("bootstrap", "wanted"), [(0, 0.2), (1, 0.92)], ids=["terminated", "truncated"])
def test_the_td_target_uses_the_next_value_only_when_the_episode_was_cut(bootstrap: int, wanted: float) -> None:
    batch = line(
        1,
        rewards=doubles(0.2),
        values=doubles(0.5),
        final_values=doubles(0.8),
        bootstrap=torch.tensor([bootstrap], dtype=torch.int8),
    )
    got, _ = td(batch, gamma=0.9)
    close(got.returns, doubles(wanted))
    close(got.advantages, doubles(wanted - 0.5))


def test_a_tempered_denominator_gives_075_where_the_raw_one_would_say_125() -> None:
    # raw [0.8, 0.2] at temperature 2 is [2/3, 1/3]; the trainer gives the second action 0.25
    drawn = doubles(1 / 3).log()
    batch = line(1, behavior_logprobs=drawn, temperature=torch.tensor([2.0]), advantages=doubles(1.0))
    batch = replace(batch, trainer_transform=Transform(temperature=True))
    loss, metrics = reinforce_zero(batch, doubles(0.25).log())
    close(loss, torch.tensor(-0.75, dtype=torch.float64))
    close(metrics["ratio/mean"], torch.tensor(0.75, dtype=torch.float64))
    raw = replace(batch, behavior_logprobs=doubles(0.2).log(), behavior_kind=torch.tensor([Kind.raw], dtype=torch.int8))
    with pytest.raises(UnsupportedRecordError, match="leaves out temperature=2"):
        reinforce_zero(raw, doubles(0.25).log())


def test_an_on_policy_ratio_is_refused_rather_than_08_when_top_p_was_on_and_the_trainer_did_not_apply_it() -> None:
    # raw [0.8, 0.2], top_p keeps only the first: it was drawn with probability 1, and the trainer says 0.8
    batch = line(1, behavior_logprobs=doubles(0.0), top_p=torch.tensor([0.7]), advantages=doubles(1.0))
    with pytest.raises(UnsupportedRecordError, match=r"did not declare that it applied top_p=0\.7"):
        reinforce_zero(batch, doubles(0.8).log())
    applied = replace(batch, trainer_transform=Transform(filters=True))
    close(reinforce_zero(applied, doubles(0.0))[1]["ratio/mean"], torch.tensor(1.0, dtype=torch.float64))


def test_correction_and_clip_are_separate_controls_of_105_and_120_not_of_126() -> None:
    batch = line(
        1,
        behavior_logprobs=doubles(0.20).log(),
        anchor_logprobs=doubles(0.21).log(),
        advantages=doubles(1.0),
    )
    p = doubles(0.252).log()
    open_clip = {"clip": (0.2, 0.5), "correction": tis(10.0)}
    loss, metrics = ppo_clip(batch, p, **open_clip)
    close(metrics["tis/mean"], torch.tensor(1.05, dtype=torch.float64))
    close(metrics["ratio/mean"], torch.tensor(1.20, dtype=torch.float64))
    close(-loss, torch.tensor(1.26, dtype=torch.float64))
    # w is truncated alone, r is clipped alone: 1.0 * 1.1
    loss, _ = ppo_clip(batch, p, clip=(0.2, 0.1), correction=tis(1.0))
    close(-loss, torch.tensor(1.1, dtype=torch.float64))


def expected_direction(objective: str, beta: float = 0.0) -> torch.Tensor:
    """Expected ascent direction on the logits, over draws from q, at one prefix with p = (0.8, 0.2), q = (0.5, 0.5)."""
    q, advantages = doubles(0.5, 0.5), doubles(2.0, 0.0)
    total = torch.zeros(2, dtype=torch.float64)
    for action in range(2):
        logits = variable(doubles(0.8, 0.2).log())
        own, heads = logprobs_of_logits(logits[None], torch.tensor([action]), torch.tensor([0, 1]), torch.tensor([2]))
        assert heads is not None
        batch = line(
            1,
            behavior_logprobs=q[action : action + 1].log(),
            advantages=advantages[action : action + 1],
            heads=one_head([2], [0, 1], q.log().tolist()),
        )
        if objective == "raw":
            loss, _ = reinforce(batch, own)
        elif objective == "exact":
            loss, _ = reinforce_zero(batch, own)
        else:
            loss, _ = score_centering(batch, own, heads, sampler_kl=beta)
        loss.backward()
        assert logits.grad is not None
        total -= q[action] * logits.grad
    return total


@pytest.mark.parametrize(
    ("objective", "beta", "wanted"),
    [("raw", 0.0, 0.20), ("centred", 0.0, 0.50), ("exact", 0.0, 0.32), ("centred", 0.2, 0.44)],
)
def test_the_expected_direction_of_the_logits(objective: str, beta: float, wanted: float) -> None:
    close(expected_direction(objective, beta), doubles(wanted, -wanted))


def test_the_sampler_kl_alone_adds_beta_times_the_expected_score() -> None:
    logits = variable(doubles(0.8, 0.2).log())
    _, heads = logprobs_of_logits(logits[None], torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([2]))
    assert heads is not None
    batch = line(1, heads=one_head([2], [0, 1], doubles(0.5, 0.5).log().tolist()))
    sampler_kl(batch, heads, beta=0.2)[0].backward()
    close(logits.grad, doubles(0.06, -0.06))


def test_at_p_equal_q_reinforce_zero_has_the_gradient_of_reinforce() -> None:
    pad = Padded([[1, 1, 0], [1, 1, 1]])
    q = pad.flat([[-0.5, -1.0, 0], [-0.2, -2.0, -0.1]])
    batch = pad.batch(behavior_logprobs=q, advantages=pad.spread([1.0, -0.5]))
    left, right = variable(q), variable(q)
    reinforce_zero(batch, left)[0].backward()
    reinforce(batch, right, reduce=sequence_mean)[0].backward()
    close(left.grad, right.grad)
    assert bool((left.grad != 0).all())


logits_of = st.lists(st.floats(-3, 3, allow_subnormal=False), min_size=4, max_size=4)


def full_problem(p_logits: torch.Tensor, q: torch.Tensor, action: int, advantage: float) -> tuple[Any, Any, Any]:
    size = len(q)
    own, heads = logprobs_of_logits(p_logits[None], torch.tensor([action]), torch.arange(size), torch.tensor([size]))
    batch = line(
        1,
        behavior_logprobs=q[action : action + 1].log(),
        advantages=doubles(advantage),
        heads=Heads(torch.arange(size), q.log(), torch.tensor([size])),
    )
    return batch, own, heads


@settings(max_examples=25, deadline=None)
@given(logits_of, logits_of, st.lists(st.floats(-2, 2), min_size=4, max_size=4))
def test_the_bias_of_centring_is_bounded_by_the_distance_of_q_from_p(
    p_logits: list[float], q_logits: list[float], advantages: list[float]
) -> None:
    p, q = doubles(*p_logits).softmax(-1), doubles(*q_logits).softmax(-1)
    centred, policy = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for action in range(4):
        logits = variable(doubles(*p_logits))
        batch, own, heads = full_problem(logits, q, action, advantages[action])
        score_centering(batch, own, heads)[0].backward()
        assert logits.grad is not None
        centred -= q[action] * logits.grad
        score = torch.nn.functional.one_hot(torch.tensor(action), 4) - p
        policy += p[action] * advantages[action] * score
    bound = max(abs(a) for a in advantages) * (q - p).abs().sum()
    kl = (q * (q / p).log()).sum()
    gap = (centred - policy).abs().max()
    assert gap <= bound + 1e-9
    assert bound <= max(abs(a) for a in advantages) * (2 * kl).sqrt() + 1e-9


@settings(max_examples=15, deadline=None)
@given(logits_of, logits_of)
def test_a_constant_advantage_gives_zero_under_exact_centring_and_under_exact_weights(
    p_logits: list[float], q_logits: list[float]
) -> None:
    q = doubles(*q_logits).softmax(-1)
    gates = (within(0.05), within(0.05, statistic="k2"))
    for weight in (None, tis(float("inf")), tis(2.0), mis(0.5, 2.0), *gates, "reinforce_zero"):
        drift = torch.zeros(4, dtype=torch.float64)
        for action in range(4):
            logits = variable(doubles(*p_logits))
            batch, own, heads = full_problem(logits, q, action, 1.0)
            if weight == "reinforce_zero":
                loss, _ = reinforce_zero(batch, own)
            else:
                loss, _ = score_centering(batch, own, heads, weight=weight)
            loss.backward()
            assert logits.grad is not None
            drift += q[action] * logits.grad
        close(drift, torch.zeros_like(drift), atol=1e-9, rtol=0)


def test_group_mean_is_what_reinforce_zero_expects_of_a_group_of_answers() -> None:
    pad = Padded([[1], [1], [1]])
    batch, _ = group_mean(pad.batch(rewards=doubles(1.0, 0.0, 0.5)))
    close(batch.advantages, torch.tensor([0.5, -0.5, 0.0]))


@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_sao_keeps_the_direct_ratio_only_inside_the_band_whatever_the_sign(advantage: float) -> None:
    ratios = doubles(0.7, 0.8, 0.9, 1.1, 1.2000001, 1.3)
    batch = line(6, behavior_logprobs=doubles(*[-1.0] * 6), advantages=doubles(*[advantage] * 6))
    logprobs = variable(ratios.log() - 1)
    loss, metrics = sao(batch, logprobs, clip=(0.2, 0.2))
    loss.backward()
    close(loss.item(), -advantage * 2.0 / 6)
    close(logprobs.grad, -advantage * doubles(0, 0, 0.9, 1.1, 0, 0) / 6)
    assert (metrics["rejected"], metrics["tokens"]) == (4, 6)


def test_dapo_is_ppo_with_a_higher_upper_clip_and_dr_grpo_divides_by_a_constant_length() -> None:
    pad = Padded([[1, 1, 1], [1, 0, 0]])
    ratios = pad.flat([[1.3, 1.25, 0.7], [1.1, 0, 0]])
    batch = pad.batch(anchor_logprobs=-torch.ones(4).double(), advantages=doubles(1, 1, -1, 2))
    logprobs = ratios.log() - 1
    close(dapo(batch, logprobs)[0].item(), -(1.28 + 1.25 - 0.8 + 2.2) / 4)
    close(dr_grpo(batch, logprobs, length=10.0)[0].item(), -(1.2 + 1.2 - 0.8 + 2.2) / (2 * 10))


def test_gspo_clips_the_root_of_the_product_and_shares_it_over_the_tokens() -> None:
    pad = Padded([[1, 1], [1, 0]])
    logprobs = variable(pad.flat([[0.3, -0.1], [0.5, 0]]) - 1)
    batch = pad.batch(anchor_logprobs=-torch.ones(3).double(), advantages=doubles(2, 2, 1))
    loss, _ = gspo(batch, logprobs, clip=(0.2, 0.2))
    loss.backward()
    root = doubles(0.1).exp().item()
    close(loss.item(), -(2 * root + 1.2) / 2)
    close(logprobs.grad, -doubles(root, root, 0) / 2)
