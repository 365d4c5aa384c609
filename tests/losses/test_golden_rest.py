"""Peers' corrections, advantages, denominators and score centring, reproduced through our parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstore.batch import Heads
from rollstore.losses import (
    fixed_length,
    gae,
    group_mean,
    group_zscore,
    icepop,
    leave_one_out,
    logprobs_of_logits,
    mis,
    reinforce,
    score_centering,
    sequence_mean,
    sequence_sum_mean,
    signal_groups,
    tis,
    token_mean,
    whiten,
    within,
)
from rollstore.losses.ratios import Corrected, Corrections, correct
from tests.losses.padded import Padded, golden, variable

CORRECTION = golden("verl_rollout_correction")


def corrected(correction: Corrections) -> tuple[Padded, Corrected]:
    given = CORRECTION["inputs"]
    pad = Padded(given["response_mask"])
    batch = pad.batch(
        anchor_logprobs=pad.flat(given["old_log_prob"]), behavior_logprobs=pad.flat(given["rollout_log_prob"])
    )
    live = torch.zeros(batch.actions, dtype=torch.float64)
    return pad, correct(correction, batch, live, batch.valid, default="anchor")


def verl_weight(case: dict[str, Any]) -> Corrections:
    threshold, level = case["rollout_is_threshold"], case["rollout_is"]
    if isinstance(threshold, str):
        low, high = (float(bound) for bound in threshold.split("_"))
        return mis(low, high, level=level)
    return tis(threshold, level=level)


@pytest.mark.parametrize(
    "case", CORRECTION["is_weights"], ids=lambda c: f"{c['rollout_is']} {c['rollout_is_threshold']}"
)
def test_verls_importance_weights_are_ours_before_it_normalises_over_the_micro_batch(case: dict[str, Any]) -> None:
    pad, got = corrected(verl_weight(case))
    weight, wanted = pad.padded(got.weight), torch.tensor(case["weights"], dtype=torch.float64)
    if case["batch_normalize"]:
        # verl then divides by the mean weight of the micro-batch in hand; that depends on the cut, so it is out of
        # scope, and undone here
        wanted = wanted * case["metrics"]["rollout_is_batch_norm_factor"]
    torch.testing.assert_close(weight, wanted, rtol=1e-6, atol=1e-9)


gate = partial(icepop, inside="one")
REJECTIONS: dict[str, Corrections] = {
    "token_k1 0.5_2.0": gate(0.5, 2.0),
    "token_k1 0.5_1.5": gate(1 / 1.5, 2.0),
    "token_k3 0.1": within(0.1, statistic="k3"),
    "seq_sum_k2 0.3": within(0.3, statistic="k2", level="sequence"),
    "seq_sum_k3 0.5": within(0.5, statistic="k3", level="sequence"),
    "seq_mean_k1 0.8_1.25": gate(0.8, 1.25, level="geometric"),
    "seq_mean_k3 0.1": within(0.1, statistic="k3", level="geometric"),
    "token_k1,seq_mean_k3 0.5_2.0,0.1": (gate(0.5, 2.0), within(0.1, statistic="k3", level="geometric")),
}
REJECTIONS_OUT_OF_SCOPE = {"seq_max_k2 0.2", "seq_max_k3 0.3"}


@pytest.mark.parametrize("case", CORRECTION["rejection"], ids=lambda c: f"{c['rollout_rs']} {c['threshold']}")
def test_verls_rejection_rules_keep_the_same_actions(case: dict[str, Any]) -> None:
    name = f"{case['rollout_rs']} {case['threshold']}"
    if name in REJECTIONS_OUT_OF_SCOPE:
        return
    pad, got = corrected(REJECTIONS[name])
    assert torch.equal(pad.padded(got.kept.double()), torch.tensor(case["mask"], dtype=torch.float64))


def test_a_truncated_token_weight_and_a_geometric_gate_combine_as_in_verl() -> None:
    case = CORRECTION["combined_token_tis2_seq_mean_k1"]
    pad, got = corrected((tis(2.0), gate(0.8, 1.25, level="geometric")))
    mask = torch.tensor(case["mask"], dtype=torch.float64)
    torch.testing.assert_close(pad.padded(got.weight), torch.tensor(case["weights"], dtype=torch.float64) * mask)
    assert torch.equal(pad.padded(got.kept.double()), mask)


# ---- advantages


ADVANTAGES = golden("verl_advantages_gae")
GIVEN = ADVANTAGES["inputs"]
ADVANTAGES_OUT_OF_SCOPE = {"opo", "grpo_passk (7 rows, no singleton)"}


def verl_groups(**columns: Any) -> tuple[Padded, Any]:
    pad = Padded(GIVEN["response_mask"])
    rewards = torch.tensor(GIVEN["token_level_rewards"], dtype=torch.float64).sum(-1)
    names = sorted(set(GIVEN["index"]))
    group = torch.tensor([names.index(name) for name in GIVEN["index"]])
    return pad, pad.batch(rewards=rewards, group=group, **columns)


def outcome_to_go(value: float) -> Any:
    """Discounted rewards to go less a constant baseline: gae at gamma = lam = 1 over constant values."""

    def estimate(batch: Any) -> Any:
        values = torch.full((batch.actions,), value, dtype=torch.float64)
        return gae(replace(batch, values=values), gamma=1.0, lam=1.0)

    return estimate


ESTIMATORS: dict[str, Any] = {
    "grpo std": lambda b: group_zscore(b, single="raw")[0],
    "grpo_vectorized": lambda b: group_zscore(b, single="raw")[0],
    "rloo": lambda b: leave_one_out(b, single="raw")[0],
    "reinforce_plus_plus": lambda b: whiten(outcome_to_go(0.0)(b)[0])[0],
    "reinforce_plus_plus_baseline": lambda b: whiten(group_mean(b, single="raw")[0])[0],
    "remax": lambda b: outcome_to_go(0.25)(b)[0],
}


@pytest.mark.parametrize("case", ADVANTAGES["cases"], ids=lambda c: c["estimator"])
def test_verls_outcome_advantages_are_the_same(case: dict[str, Any]) -> None:
    if case["estimator"] in ADVANTAGES_OUT_OF_SCOPE:
        return
    pad, batch = verl_groups()
    got = ESTIMATORS[case["estimator"]](batch).advantages.double()
    wanted = pad.flat(case["advantages"])
    # verl divides a singleton by 1 + eps (0.69999933), and advantages of an outcome are float32 here
    torch.testing.assert_close(got, wanted, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("case", ADVANTAGES["gae"], ids=lambda c: f"gamma={c['gamma']}")
def test_verls_gae_is_the_same_before_and_after_whitening(case: dict[str, Any]) -> None:
    pad, batch = verl_groups()
    rewards = torch.tensor(GIVEN["token_level_rewards"], dtype=torch.float64)
    batch = replace(
        batch, values=pad.flat(GIVEN["values"]), action_rewards=pad.flat(rewards), rewards=0 * batch.rewards
    )
    got, _ = gae(batch, gamma=case["gamma"], lam=case["lam"])
    assert got.advantages is not None
    assert got.returns is not None
    torch.testing.assert_close(got.advantages, pad.flat(case["advantages_unwhitened"]))
    torch.testing.assert_close(got.returns, pad.flat(case["returns"]))
    white, _ = whiten(got)
    # verl adds 1e-8 to the counts it divides by
    torch.testing.assert_close(white.advantages, pad.flat(case["advantages_whitened"]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", golden("trl_advantages")["cases"], ids=lambda c: c["scale_rewards"])
def test_trls_advantages_are_the_same_with_an_unscored_member(case: dict[str, Any]) -> None:
    rewards = golden("trl_advantages")["inputs"]["rewards"]
    flat = [float("nan") if reward is None else reward for row in rewards for reward in row]
    pad = Padded([[1]] * 12)
    group = torch.arange(12) // 4
    batch = pad.batch(rewards=torch.tensor(flat, dtype=torch.float64), group=group)
    scale = {"group": "group", "batch": "step"}[case["scale_rewards"]]
    got, _ = group_zscore(batch, scale=scale, eps=1e-4)
    assert got.advantages is not None
    torch.testing.assert_close(got.advantages.double(), torch.tensor(case["advantages"]).double(), rtol=1e-6, atol=1e-7)
    assert got.weights.tolist() == [0.0 if reward != reward else 1.0 for reward in flat]


# ---- what zero-variance groups do to the denominator


def test_denominators_with_and_without_zero_variance_groups_are_verls_and_trls() -> None:
    case = golden("zero_variance_denominators")
    pad = Padded(case["inputs"]["mask"])
    signal = torch.tensor(case["inputs"]["zero_variance_row"]) == 0
    batch = pad.batch(signal=signal)
    terms = pad.flat(case["inputs"]["loss_mat"])
    modes = {
        "token-mean": token_mean,
        "seq-mean-token-mean": sequence_mean,
        "seq-mean-token-sum": sequence_sum_mean,
    }
    for wanted in case["verl"]:
        reduce = modes[wanted["mode"]]
        _, everything, without = wanted.values()
        torch.testing.assert_close(reduce(terms, batch, batch.weights).item(), everything, rtol=1e-6, atol=1e-9)
        got = signal_groups(reduce)(terms, batch, batch.weights).item()
        torch.testing.assert_close(got, without, rtol=1e-6, atol=1e-9)
    trl = case["trl_[all_rows, zero_variance_rows_masked]"]
    all_rows = partial(sequence_mean, empty="count")
    masked = torch.where(signal[batch.sequence], batch.weights, 0)
    for reduce, wanted in (
        (all_rows, trl["grpo (mean over all rows)"]),
        (token_mean, trl["bnpo/dapo token denominators"]),
        (fixed_length(4, empty="count"), trl["dr_grpo B*max_len(4)"]),
    ):
        got = [reduce(terms, batch, batch.weights).item(), reduce(terms, batch, masked).item()]
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)


# ---- score centring: gradients, not values


CENTRING = golden("score_centering")
CENTRING_OUT_OF_SCOPE = {"PPO band [0.8,1.2]", "TOPR seq_sum neg clamp 1", "DPPO tv 0.2 ppo"}
LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}


def reference_weight(params: dict[str, Any] | None) -> Any:
    if params is None:
        return None
    level, low, high = LEVELS[params["level"]], params["low"], params["high"]
    if params["outside"] == "clamp":
        return tis(high, low, level=level)
    return icepop(low, high, inside=params["inside"], level=level)


def centring_problem(kind: str) -> tuple[Any, Tensor, Any]:
    """(batch, logits with gradient [3, 5, 8], the trainer's log-probs of a flat view of them)."""
    given = CENTRING["inputs"]
    # position t scores token t + 1; the last position scores none
    mask = torch.tensor(given["mask"])[:, 1:]
    pad = Padded([[*row, 0] for row in mask.tolist()])
    logits = variable(torch.tensor(given["logits"], dtype=torch.float64))
    row, place = pad.mask.nonzero(as_tuple=True)
    drawn = torch.tensor(given["tokens"])[row, place + 1]
    if kind == "top-k centering":
        ids = torch.tensor(given["center_ids"])[row, place]
        logprobs = torch.tensor(given["center_logprobs"], dtype=torch.float64)[row, place]
    else:
        sampler = torch.tensor(given["sampler_logits"], dtype=torch.float64)[row, place]
        logprobs, ids = sampler.log_softmax(-1), torch.arange(8).expand(len(row), 8)
    counts = torch.full((len(row),), ids.shape[1])
    batch = pad.batch(
        behavior_logprobs=torch.tensor(given["sampling_token_logprobs"], dtype=torch.float64)[row, place],
        advantages=pad.spread(given["advantages"]),
        heads=Heads(ids.reshape(-1), logprobs.reshape(-1), counts),
    )
    return batch, logits, logprobs_of_logits(logits[row, place], drawn, ids.reshape(-1), counts)


@pytest.mark.parametrize("case", CENTRING["cases"], ids=lambda c: f"{c['is']} | {c['centering']}")
def test_score_centring_has_the_gradient_of_the_reference(case: dict[str, Any]) -> None:
    if case["is"] in CENTRING_OUT_OF_SCOPE:
        return
    batch, logits, (own, at_head) = centring_problem(case["centering"])
    weight = reference_weight(case["is_params"])
    if case["centering"] == "no centering":
        loss, _ = reinforce(batch, own, correction=weight)
    else:
        loss, _ = score_centering(batch, own, at_head, weight=weight)
    loss.backward()
    torch.testing.assert_close(
        logits.grad, torch.tensor(case["grad_logits"], dtype=torch.float64), rtol=1e-6, atol=1e-9
    )
    if case["centering"] == "no centering":
        torch.testing.assert_close(loss.item(), case["loss"])


OTHER_OUT_OF_SCOPE = {"batch_normalize", "vespo_phi", "get_off_policy_mask"}
"""Not cases of their own: a flag of verl's weights, and the two functions of trl_masks.json."""


def test_every_golden_case_left_out_is_a_case_there_is() -> None:
    assert golden("trl_masks")["function"] == "get_off_policy_mask/get_gamma_weights"
    assert {case["is"] for case in CENTRING["cases"]} >= CENTRING_OUT_OF_SCOPE
    assert {case["estimator"] for case in ADVANTAGES["cases"]} >= ADVANTAGES_OUT_OF_SCOPE
    named = {f"{case['rollout_rs']} {case['threshold']}" for case in CORRECTION["rejection"]}
    assert named == set(REJECTIONS) | REJECTIONS_OUT_OF_SCOPE
