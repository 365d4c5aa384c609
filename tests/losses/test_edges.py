"""Infinite, missing and impossible values stay where they are; what was decided once is decided anew after a change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstore.batch import Kind, TokenBatch, refuse_unusable, select
from rollstore.errors import UnsupportedRecordError
from rollstore.losses import (
    Verdict,
    cispo,
    divergence,
    gae,
    group_mean,
    group_zscore,
    gspo,
    icepop,
    leave_one_out,
    mask_truncated,
    mis,
    ppo_clip,
    reference_kl,
    reinforce,
    reinforce_zero,
    sampler_kl,
    sao,
    score_centering,
    selected_logprobs,
    sequence_mean,
    signal_groups,
    td,
    tis,
    token_mean,
    trainable,
    whiten,
    with_counts,
    within,
)
from rollstore.losses.diagnostics import quantiles
from rollstore.losses.reducers import prompt_mean
from tests.losses.padded import HEAD, Padded, doubles, line, one_head, problem, variable

close = torch.testing.assert_close
nan, inf = float("nan"), float("inf")
int8 = torch.int8


def rows(lengths: list[int], **columns: Any) -> TokenBatch:
    width = max(lengths)
    return Padded([[1] * length + [0] * (width - length) for length in lengths]).batch(**columns)


def backward(loss: Tensor, of: Tensor) -> Tensor:
    loss.backward()
    assert of.grad is not None
    return of.grad


# ---- along a trajectory


def test_a_rollout_with_an_unknown_action_reward_is_unscored_and_touches_no_other() -> None:
    rewards = doubles(0.1, 0.1, 0.1, 0.1, nan, nan)
    batch = rows([2, 2, 2], values=torch.zeros(6).double(), action_rewards=rewards, rewards=doubles(nan, 1.0, nan))
    got, did = gae(batch, lam=1.0)
    close(got.advantages, doubles(0.2, 0.1, 1.2, 1.1, 0, 0))
    assert got.weights.tolist() == [1, 1, 1, 1, 0, 0]
    assert did.unscored == 1


def test_one_missing_reward_in_one_segment_leaves_out_the_whole_rollout() -> None:
    batch = rows(
        [1, 1, 1],
        rollout=torch.tensor([0, 1, 0]),
        segment=torch.tensor([0, 0, 1]),
        values=torch.zeros(3).double(),
        action_rewards=doubles(nan, 0.5, 0.5),
    )
    got, did = td(batch)
    assert (got.weights.tolist(), did.unscored.item()) == ([0, 1, 0], 1)


def test_a_sum_that_overflows_stays_in_its_own_rollout() -> None:
    huge = 1.7e308
    rewards = doubles(1.0, 1.0, huge, huge, huge, 2.0)
    got, _ = gae(rows([2, 3, 1], values=torch.zeros(6).double(), action_rewards=rewards), lam=1.0)
    close(got.advantages, doubles(2.0, 1.0, inf, inf, huge, 2.0))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"rewards": doubles(0, inf)}, "its reward is infinite: rollouts r1$"),
        ({"action_rewards": doubles(0, -inf)}, "an action with weight has an infinite reward: rollouts r1$"),
        ({"values": doubles(0, inf)}, "an action with weight has no finite value: rollouts r1$"),
        (
            {"final_values": doubles(0, inf), "bootstrap": torch.tensor([0, 1], dtype=int8)},
            "no finite final value: rollouts r1$",
        ),
    ],
    ids=["outcome", "action reward", "value", "final value"],
)
def test_an_infinite_reward_or_value_is_refused_by_id(columns: dict[str, Any], message: str) -> None:
    batch = rows([1, 1], **{"values": doubles(0, 0), **columns})
    with pytest.raises(UnsupportedRecordError, match=message):
        gae(batch)
    # behind weight 0 nothing is asked of it
    got, _ = gae(replace(batch, weights=torch.tensor([1.0, 0.0])))
    assert got.advantages is not None
    assert bool(got.advantages.isfinite().all())


def test_whitening_leaves_out_an_advantage_that_is_not_finite() -> None:
    for odd in (nan, inf, -inf):
        batch = line(4, advantages=doubles(1.0, odd, 3.0, 5.0))
        got, did = whiten(batch, eps=0.0)
        assert got.advantages is not None
        close(got.advantages[[0, 2, 3]], doubles(-1, 0, 1))
        close(got.advantages[1], doubles(odd)[0], equal_nan=True)
        close(did.mean, doubles(3.0)[0])
        _, metrics = reinforce(got, doubles(-1, -1, -1, -1))
        assert (metrics["advantages/missing"], metrics["tokens"]) == (1, 3)


# ---- groups


@pytest.mark.parametrize("advantages", [group_mean, group_zscore, leave_one_out])
@pytest.mark.parametrize("infinite", [inf, -inf])
def test_an_infinite_reward_is_refused_by_id_and_no_signal(advantages: Any, infinite: float) -> None:
    with pytest.raises(
        UnsupportedRecordError, match=rf"^rollout 'r1': reward: wanted a finite number.*got {infinite}$"
    ):
        advantages(rows([1, 1, 1], rewards=doubles(1.0, infinite, 0.0)))


def test_the_scale_of_a_step_is_of_the_groups_that_the_reducers_count() -> None:
    """Four groups: signal, none, unscored, and one member with a reward."""
    batch = rows(
        [1] * 7,
        rewards=doubles(1, 0, 1, 1, nan, nan, 2),
        group=torch.tensor([0, 0, 1, 1, 2, 2, 3]),
    )
    for single, wanted in (("zero", 3.0), ("raw", 3 / 2)):
        got, found = group_mean(batch, single=single)
        close(found.step_scale, torch.tensor(wanted))
        assert got.advantages is not None
        terms = got.advantages.square()
        per_prompt = prompt_mean(terms, got, got.weights)
        close(signal_groups(prompt_mean)(terms, got, got.weights) / per_prompt, torch.tensor(wanted))
    assert found.signal.tolist() == [True, False, False, True]
    assert found.verdict.tolist() == [Verdict.signal, Verdict.none, Verdict.unscored, Verdict.single]
    summary = found.summary()
    assert (summary["tokens"], summary["tokens/no_signal"]) == (5, 2)


# ---- a trainer that cannot produce what was drawn


SAME = doubles(-0.1, -0.1, -0.1, -0.1)
IMPOSSIBLE, UNLIKELY = doubles(-0.1, -0.1, -inf, -0.1), doubles(-0.1, -0.1, -2000, -0.1)
RATIO = {"behavior_logprobs": SAME, "anchor_logprobs": SAME}
CORRECTIONS = {
    "product": (tis(2.0, level="sequence", numerator="live"), "tis/mean", 0.0),
    "geometric": (tis(2.0, level="geometric", numerator="live"), "tis/mean", 0.0),
    "icepop geometric": (icepop(0.5, 2.0, level="geometric", numerator="live"), "icepop/rejected", 4),
    "token": (tis(2.0, numerator="live"), "tis/mean", 3 / 4),
    "mis token": (mis(0.5, 2.0, numerator="live"), "mis/rejected", 1),
    "within token": (within(1.0, numerator="live"), "within/rejected", 1),
    "within sum": (within(1.0, statistic="k2", level="sequence", numerator="live"), "within/rejected", 4),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_token_that_the_trainer_cannot_produce_has_ratio_0_in_every_correction(name: str) -> None:
    correction, metric, wanted = CORRECTIONS[name]
    batch = line(4, advantages=doubles(1, 1, 1, 1), **RATIO)
    found = [ppo_clip(batch, variable(x), correction=correction) for x in (IMPOSSIBLE, UNLIKELY)]
    close(found[0][0], found[1][0])
    for _, metrics in found:
        close(metrics[metric].double(), torch.tensor(float(wanted)).double())


def test_rejected_to_leave_a_token_that_the_trainer_cannot_produce_leaves() -> None:
    batch = line(4, advantages=doubles(1, 1, 1, 1), **RATIO)
    _, metrics = reinforce(batch, IMPOSSIBLE, correction=mis(0.5, 2.0, rejected="leave"))
    assert (metrics["tokens"], metrics["trainer/impossible"]) == (3, 1)


def test_the_root_of_gspo_is_0_with_a_token_that_the_trainer_cannot_produce() -> None:
    batch = line(4, advantages=doubles(1, 1, 1, 1), **RATIO)
    for x in (IMPOSSIBLE, UNLIKELY):
        given = variable(x)
        loss, metrics = gspo(batch, given, clip=(0.2, 0.2))
        close(loss.detach(), doubles(0)[0])
        close(metrics["ratio/mean"], doubles(0)[0])
        close(backward(loss, given), doubles(0, 0, 0, 0), atol=1e-12, rtol=0)


def test_ratio_metrics_count_an_impossible_token_as_0_and_not_as_1() -> None:
    batch = line(4, advantages=doubles(1, 1, 1, 1), **RATIO)
    for loss in (ppo_clip, cispo, sao, reinforce_zero):
        value, metrics = loss(batch, IMPOSSIBLE)
        assert bool(value.isfinite())
        close(metrics["ratio/mean"], doubles(3 / 4)[0])
        assert (metrics["ratio/k1"], metrics["ratio/k3"]) == (inf, inf)


def test_a_ratio_over_a_sequence_is_of_all_its_actions_also_of_those_without_a_head() -> None:
    q = doubles(0.5, 0.5).log()
    batch = line(2, behavior_logprobs=q, advantages=doubles(1, 1), heads=one_head([0, 1], [0], [q[0].item()]))
    weight = tis(10.0, level="sequence")
    _, metrics = score_centering(batch, doubles(0.25, 0.5).log(), doubles(0.5).log(), weight=weight)
    close(metrics["tis/mean"], doubles(0.5)[0])
    assert (metrics["head/missing"], metrics["tokens"]) == (1, 1)


DIVIDED = {
    "ppo": ("anchor_logprobs", lambda b, x: ppo_clip(b, x)),
    "ppo tis": ("anchor_logprobs", lambda b, x: ppo_clip(b, x, correction=tis(2.0))),
    "gspo": ("anchor_logprobs", lambda b, x: gspo(b, x)),
    "cispo": ("anchor_logprobs", lambda b, x: cispo(b, x)),
    "reference_kl": ("reference_logprobs", lambda b, x: reference_kl(b, x, beta=0.1)),
    "reference_kl k1 k2": (
        "reference_logprobs",
        lambda b, x: reference_kl(b, x, beta=1, estimator="k1", gradient="k2"),
    ),
}


@pytest.mark.parametrize("none", [-inf, -9999.0, -3.4e38])
@pytest.mark.parametrize("name", DIVIDED)
def test_what_cannot_be_divided_by_leaves_the_loss_and_is_counted(name: str, none: float) -> None:
    column, call = DIVIDED[name]
    batch, logprobs, _ = problem()
    at = torch.arange(batch.actions) == 5
    odd = replace(batch, **{column: torch.where(at, none, getattr(batch, column))})
    without = replace(batch, weights=torch.where(at, 0, batch.weights))
    one, two = variable(logprobs), variable(logprobs)
    got, metrics = call(odd, one)
    wanted, _ = call(without, two)
    close(got, wanted)
    close(backward(got, one), backward(wanted, two))
    assert metrics[f"{column}/impossible"] == 1
    assert trainable(odd, needs=(column,)).tolist() == without.weights.tolist()


def test_an_anchor_of_probability_0_makes_the_ratio_of_its_sequence_0() -> None:
    batch = line(3, behavior_logprobs=doubles(-1, -1, -1), advantages=doubles(1, 1, 1))
    batch = replace(batch, anchor_logprobs=doubles(-1, -inf, -1))
    _, metrics = ppo_clip(batch, doubles(-1, -1, -1), correction=tis(2.0, level="sequence"))
    close(metrics["tis/mean"], doubles(0)[0])
    loss, metrics = reinforce(batch, doubles(-1, -1, -1), correction=tis(2.0, numerator="anchor"))
    close(loss, doubles(2 / 3)[0])
    assert metrics["actions"] == 3


OBJECTIVES: dict[str, Any] = {
    "reinforce": lambda b, x: reinforce(b, x),
    "reinforce mis leave": lambda b, x: reinforce(b, x, correction=mis(0.5, 2.0, rejected="leave")),
    "ppo icepop": lambda b, x: ppo_clip(b, x, correction=icepop(0.5, 2, numerator="live", rejected="leave")),
    "ppo within": lambda b, x: ppo_clip(b, x, correction=within(1.0, numerator="live", rejected="leave")),
    "gspo": lambda b, x: gspo(b, x),
    "cispo": lambda b, x: cispo(b, x),
    "sao": lambda b, x: sao(b, x),
    "reinforce_zero": lambda b, x: reinforce_zero(b, x),
    "reference_kl": lambda b, x: reference_kl(b, x, beta=0.1),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_trainer_that_gives_nan_gets_a_loss_of_nan_and_never_only_a_gradient_of_it(name: str) -> None:
    batch, logprobs, _ = problem()
    broken = torch.where(torch.arange(batch.actions) == 5, nan, logprobs)
    loss, metrics = OBJECTIVES[name](batch, broken)
    assert bool(loss.isnan())
    assert metrics["trainer/nan"] == 1


# ---- heads


def kinds(kind: Kind, count: int) -> Tensor:
    return torch.full((count,), int(kind), dtype=int8)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"head_kind": kinds(Kind.raw, 2)}, "its heads are raw"),
        ({"head_kind": kinds(Kind.unknown, 2)}, "its heads are unknown, .* record head_kind='behavior'"),
        ({"temperature": torch.tensor([0.5, 0.5])}, r"applied temperature=0\.5"),
        ({"top_k": torch.tensor([5, 5])}, "applied top_k=5"),
        ({"temperature": torch.tensor([0.0, 0.0])}, "temperature 0 draws from no distribution"),
    ],
)
def test_heads_are_asked_about_also_where_the_drawn_log_prob_is_missing(columns: dict[str, Any], message: str) -> None:
    missing = doubles(nan, nan)
    heads = one_head([1, 1], [0, 0], [-0.5, -0.5])
    batch = line(2, behavior_logprobs=missing, advantages=doubles(1, 1), heads=heads)
    sampler_kl(batch, doubles(-1, -1), beta=1.0)
    batch = replace(batch, **columns)
    with pytest.raises(UnsupportedRecordError, match=message):
        score_centering(batch, doubles(-1, -1), doubles(-1, -1))
    with pytest.raises(UnsupportedRecordError, match=message):
        sampler_kl(batch, doubles(-1, -1), beta=1.0)
    # the drawn log-probs are not there, so nothing can be wrong with them
    reinforce_zero(batch, doubles(-1, -1))
    # without a head nothing is asked of it either
    none = replace(batch, heads=one_head([0, 0], [], []))
    assert score_centering(none, doubles(-1, -1), doubles())[1]["tokens"] == 0


def test_kl_is_infinite_where_the_trainer_cannot_produce_an_id_of_the_head() -> None:
    heads = one_head([2], [0, 1], doubles(0.5, 0.4).log().tolist())
    batch = line(1, behavior_logprobs=doubles(0.5).log(), advantages=doubles(1.0), heads=heads)
    _, far = score_centering(batch, doubles(-1.0), doubles(-1.0, -50.0))
    at_head = variable(doubles(-1.0, -inf))
    loss, metrics = score_centering(batch, doubles(-1.0), at_head, weight=tis(2.0))
    assert (metrics["head/kl"], metrics["head/impossible"], far["head/impossible"]) == (inf, 1, 0)
    assert far["head/kl"] > 3
    assert bool(backward(loss, at_head).isfinite().all())


# ---- decided once


def test_after_a_refusal_weight_0_set_in_place_lets_the_rest_through() -> None:
    batch, logprobs, _ = problem()
    batch = replace(batch, behavior_kind=torch.where(batch.sequence == 0, int(Kind.raw), batch.behavior_kind))
    batch = replace(batch, temperature=torch.full_like(batch.temperature, 0.5))
    with pytest.raises(UnsupportedRecordError):
        reinforce_zero(batch, logprobs)
    batch.weights[:] = 0
    loss, _ = reinforce_zero(batch, logprobs)
    assert loss == 0


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("behavior_kind", int(Kind.raw)),
        ("temperature", 0.5),
        ("top_k", 3),
        ("top_p", 0.5),
        ("min_p", 0.5),
        ("penalties", 1),
    ],
)
def test_a_column_changed_in_place_after_a_first_loss_is_looked_at_again(column: str, value: float) -> None:
    batch, logprobs, _ = problem()
    batch = replace(batch, temperature=torch.full_like(batch.temperature, 1.0))
    reinforce_zero(batch, logprobs)
    getattr(batch, column).fill_(value)
    if column == "behavior_kind":
        batch.temperature.fill_(0.5)
    with pytest.raises(UnsupportedRecordError):
        reinforce_zero(batch, logprobs)


def test_heads_that_appear_in_place_are_looked_at_again() -> None:
    heads = one_head([1, 0], [0], [-0.5])
    batch = line(2, behavior_logprobs=doubles(nan, nan), heads=heads, head_kind=kinds(Kind.raw, 2))
    batch.weights[0] = 0
    refuse_unusable(batch, what="head")
    batch.weights[0] = 1
    sampled = replace(batch, temperature=torch.full((2,), 0.5))
    with pytest.raises(UnsupportedRecordError):
        refuse_unusable(sampled, what="head")


def test_under_inference_mode_nothing_is_remembered() -> None:
    with torch.inference_mode():
        batch, logprobs, _ = problem()
        reinforce_zero(batch, logprobs)
        batch.temperature.fill_(0.5)
        with pytest.raises(UnsupportedRecordError):
            reinforce_zero(batch, logprobs)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "support_counts", "head_counts"])
def test_what_the_log_probs_were_computed_with_may_not_change_before_the_backward_pass(name: str) -> None:
    hidden = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    given = {
        "temperature": torch.ones(2),
        "top_k": torch.full((2,), 4),
        "top_p": torch.full((2,), 0.9),
        "min_p": torch.full((2,), 0.01),
        "support_counts": torch.tensor([1, 0]),
        "head_counts": torch.tensor([1, 1]),
    }
    own, heads = selected_logprobs(
        hidden,
        torch.eye(5, 3),
        torch.zeros(2).long(),
        torch.zeros(2).long(),
        given["head_counts"],
        temperature=given["temperature"],
        top_k=given["top_k"],
        top_p=given["top_p"],
        min_p=given["min_p"],
        support=(torch.zeros(1).long(), given["support_counts"]),
    )
    assert heads is not None
    given[name][:1] += 1
    if name == "head_counts":  # they were read whole before: the answer does not depend on them any more
        (own.sum() + heads.sum()).backward()
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        own.sum().backward()


# ---- counted before the first micro-batch


def in_two_parts() -> tuple[TokenBatch, Tensor, list[list[int]]]:
    batch, logprobs, _ = problem()
    batch = replace(
        batch,
        rollout=torch.tensor([0, 1, 2, 0, 3]),
        segment=torch.tensor([0, 0, 0, 1, 0]),
        rollout_ids=["a", "b", "c", "a", "d"],
        group=torch.tensor([7, 7, 9, 7, 9]),
    )
    return batch, logprobs, [[0, 1, 2], [3, 4]]


UNITS: dict[str, Any] = {
    "gspo": lambda b, x: gspo(b, x),
    "product": lambda b, x: ppo_clip(b, x, correction=tis(2.0, level="sequence")),
    "geometric": lambda b, x: reinforce(b, x, correction=mis(0.5, 2.0, level="geometric")),
}


@pytest.mark.parametrize("name", UNITS)
def test_a_ratio_over_a_rollout_is_refused_where_its_segments_lie_in_different_batches(name: str) -> None:
    batch, logprobs, parts = in_two_parts()
    at = {row: torch.nonzero(batch.sequence == row).squeeze(-1) for row in range(5)}
    cut = with_counts([select(batch, rows) for rows in parts])
    later = [select(with_counts([batch])[0], rows) for rows in parts]
    for micro in (cut, later):
        for rows, part in zip(parts, micro, strict=True):
            x = logprobs[torch.cat([at[row] for row in rows])]
            with pytest.raises(ValueError, match=r"wanted all its segments in one batch.*unit='segment'$"):
                UNITS[name](part, x)
    whole = with_counts([select(batch, [0, 3, 1]), select(batch, [2, 4])])
    total = torch.zeros((), dtype=torch.float64)
    for rows, part in zip(([0, 3, 1], [2, 4]), whole, strict=True):
        total += UNITS[name](part, logprobs[torch.cat([at[row] for row in rows])])[0]
    close(total, UNITS[name](batch, logprobs)[0])
    gspo(cut[0], logprobs[:8], unit="segment")
    ppo_clip(cut[0], logprobs[:8], correction=tis(2.0))


CHANGING: dict[str, Any] = {
    "mask_truncated": mask_truncated,
    "group_mean": group_mean,
    "group_zscore": group_zscore,
    "leave_one_out": leave_one_out,
    "gae": gae,
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_changes_weights_is_refused_after_the_step_was_counted(name: str) -> None:
    [counted] = with_counts([problem()[0]])
    with pytest.raises(ValueError, match="wanted a batch that with_counts has not counted yet"):
        CHANGING[name](counted)


def test_weights_changed_after_the_step_was_counted_are_reported() -> None:
    batch, logprobs, at_head = problem()
    [counted] = with_counts([batch])
    assert reinforce(counted, logprobs)[1]["counts/off"] == 0
    assert "counts/off" not in reinforce(batch, logprobs)[1]
    masked = replace(counted, weights=torch.where(batch.sequence < 2, 0, batch.weights))
    assert reinforce(masked, logprobs)[1]["counts/off"] == 2
    assert score_centering(masked, logprobs, at_head)[1]["counts/off"] == 2
    missing = torch.where(batch.sequence == 1, nan, batch.behavior_logprobs)
    gaps = replace(counted, behavior_logprobs=missing)
    assert reinforce_zero(gaps, logprobs)[1]["counts/off"] == 1
    [right] = with_counts([replace(batch, behavior_logprobs=missing)], weights=[trainable(gaps, behavior=True)])
    assert reinforce_zero(right, logprobs)[1]["counts/off"] == 0


# ---- reports


def test_two_corrections_of_a_kind_report_apart() -> None:
    batch = line(2, behavior_logprobs=doubles(-1, -1), advantages=doubles(1, 1))
    both = (tis(2.0), tis(1.0, level="sequence"), tis(5.0))
    _, metrics = reinforce(batch, doubles(0.4, 0.1) - 1, correction=both)
    close(metrics["tis/mean"], doubles(0.4, 0.1).exp().mean())
    close(metrics["tis_2/mean"], doubles(1.0)[0])
    close(metrics["tis_2/max_before"], doubles(0.5).exp()[0])
    close(metrics["tis_3/mean"], metrics["tis/mean"])


def test_extremes_are_of_the_active_actions_alone() -> None:
    active = torch.tensor([True, False, True])
    low = divergence(doubles(-2, 5, -3), doubles(-1, 0, -1), active)
    assert (low["log_ratio/max"], low["log_ratio/min"]) == (-1, -2)
    high = divergence(doubles(2, -5, 3), doubles(1, 0, 1), active)
    assert (high["log_ratio/max"], high["log_ratio/min"]) == (2, 1)


def test_a_divergence_from_what_cannot_be_produced_is_infinite_and_a_missing_value_is_left_out_and_counted() -> None:
    every = torch.ones(4, dtype=torch.bool)
    got = divergence(doubles(-1, -inf, -1, nan), doubles(-1, -1, -inf, -1), every)
    assert (got["number"], got["missing"]) == (2, 2)
    assert (got["k1"], got["k3"], got["log_ratio/min"], got["log_ratio/q0.999"]) == (inf, inf, -inf, inf)
    close(got["probability_gap/max"], doubles(-1.0).exp()[0])
    close(got["w2"], doubles(0.5)[0])


def test_quantiles_are_those_of_torch_and_take_more_than_16_million_actions() -> None:
    generator = torch.Generator().manual_seed(0)
    above, below = (torch.randn(101, generator=generator).double() for _ in range(2))
    active = torch.rand(101, generator=generator) < 0.7
    got = divergence(above, below, active)
    x = (above - below).abs()[active]
    for q in (0.5, 0.9, 0.99, 0.999):
        close(got[f"log_ratio/q{q:g}"], x.quantile(q))
    many = torch.full((2**24 + 1,), 0.5)
    close(quantiles(many, torch.tensor(len(many))), torch.full((4,), 0.5))


def test_the_ratio_before_it_is_clamped_is_reported_at_its_own_level() -> None:
    batch = line(1000, behavior_logprobs=torch.zeros(1000), advantages=torch.ones(1000))
    logprobs = torch.full((1000,), -0.0028)
    for level, wanted in (("sequence", 0.0608101), ("geometric", 0.9972039)):
        _, metrics = reinforce(batch, logprobs, correction=tis(2.0, level=level))
        close(metrics["tis/max_before"], torch.tensor(wanted), rtol=1e-4, atol=1e-6)
    _, metrics = reinforce(batch, logprobs + 1.0, correction=tis(2.0))
    close(metrics["tis/max_before"], torch.tensor(0.9972).exp(), rtol=1e-4, atol=1e-6)
    close(metrics["tis/mean"], torch.tensor(2.0))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_a_loss_that_divides_by_no_recorded_log_prob_compiles_to_one_graph(name: str) -> None:
    batch, logprobs, _ = problem()
    call = {"ppo": ppo_clip, "gspo": gspo}[name]
    torch.compiler.reset()
    compiled = torch.compile(lambda x: call(batch, x)[0], fullgraph=True, backend="eager")
    left, right = variable(logprobs), variable(logprobs)
    close(backward(compiled(left), left), backward(call(batch, right)[0], right))


def test_the_head_entries_of_a_selection_follow_its_rows() -> None:
    batch, _, _ = problem()
    part = select(batch, torch.tensor([3, 0], dtype=torch.int32))
    assert part.heads is not None
    assert part.rollout_ids == ["r3", "r0"]
    assert part.heads.tokens.shape == (part.actions * HEAD,)
    assert (select(batch, []).rows, sequence_mean(doubles(), select(batch, []), torch.zeros(0)).item()) == (0, 0.0)
    assert token_mean(doubles(), select(batch, []), torch.zeros(0)) == 0
