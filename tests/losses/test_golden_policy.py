"""Peers' own policy losses, value and gradient, reproduced through our parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from rollstore.batch import Counts, TokenBatch
from rollstore.losses import (
    cispo,
    fixed_length,
    gspo,
    icepop,
    mis,
    ppo_clip,
    reference_kl,
    reinforce,
    sequence_mean,
    sequence_sum_mean,
    tis,
    token_mean,
    token_sum,
    value_clip,
)
from rollstore.losses.units import measure
from tests.losses.padded import Padded, golden, variable

VERL = golden("verl_policy_losses")
TRL = golden("trl_grpo_losses")

VERL_OUT_OF_SCOPE = {"dppo_tv", "dppo_kl", "sapo", "geo_mean", "geo_mean + IS", "kl_cov", "dro"}
TRL_OUT_OF_SCOPE = {"sapo", "luspo sequence", "luspo token", "vespo", "vespo + token_truncate 3.0", "grpo + OPSM 0.05"}
"""The reasons stand in docs/losses.md, and test_docs_losses.py holds the two lists together."""

VERL_REDUCERS = {
    "token-mean": token_mean,
    "seq-mean-token-sum": sequence_sum_mean,
    "token-sum": token_sum,
    "seq-mean-token-mean": sequence_mean,
}
bounds = {"clip": (0.2, 0.28)}
VERL_CALLS: dict[str, Any] = {
    "vanilla": partial(ppo_clip, dual=3.0, **bounds),
    "vanilla+TIS(token,2.0)": partial(ppo_clip, dual=3.0, correction=tis(2.0), **bounds),
    "dual-clip c=1.5": partial(ppo_clip, dual=1.5, **bounds),
    "gspo wide + IS": partial(gspo, correction=tis(2.0), **bounds),
    "cispo": partial(cispo, bounds=(0.8, 1.28)),
    "cispo one-sided-ish [0,5]": partial(cispo, bounds=(0.0, 5.0)),
    "gpg": reinforce,
    "bypass reinforce geo-RS": partial(
        reinforce, correction=icepop(0.8, 1.25, inside="one", level="geometric", numerator="live", rejected="leave")
    ),
    "bypass ppo_clip token_k1 RS": None,
}


def verl_batch() -> tuple[Padded, TokenBatch, torch.Tensor]:
    given = VERL["inputs"]
    pad = Padded(given["response_mask"])
    batch = pad.batch(
        anchor_logprobs=pad.flat(given["old_log_prob"]),
        behavior_logprobs=pad.flat(given["rollout_log_prob"]),
        advantages=pad.flat(given["advantages"]),
    )
    return pad, batch, variable(pad.flat(given["log_prob"]))


def agrees(pad: Padded, loss: torch.Tensor, logprobs: torch.Tensor, value: float, gradient: Any) -> None:
    loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(loss.item(), value, rtol=1e-7, atol=1e-9)
    wanted = torch.tensor(gradient, dtype=torch.float64)
    torch.testing.assert_close(pad.padded(logprobs.grad), wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "case", [case for case in VERL["cases"] if case["label"] not in VERL_OUT_OF_SCOPE], ids=lambda case: case["label"]
)
def test_a_verl_policy_loss_has_the_same_value_and_gradient(case: dict[str, Any]) -> None:
    pad, batch, logprobs = verl_batch()
    call = VERL_CALLS[case["label"]]
    if call is None:
        # verl's token_k1 rule bounds q/p by [0.5, 2]; ours bounds p/q, by the inverses
        gate = icepop(0.5, 2.0, inside="one", numerator="live", rejected="leave")
        batch = replace(batch, anchor_logprobs=batch.behavior_logprobs)
        call = partial(ppo_clip, clip=(0.2, 0.2), dual=3.0, correction=gate)
    loss, _ = call(batch, logprobs, reduce=VERL_REDUCERS[case["loss_agg_mode"]])
    agrees(pad, loss, logprobs, case["loss"], case["grad_log_prob"])


# TRL's grpo is the mean over all rows, fully masked ones too; its dapo divides by the items of the global batch
all_rows = partial(sequence_mean, empty="count")
TRL_CALLS: dict[str, Any] = {
    "grpo": partial(ppo_clip, reduce=all_rows, **bounds),
    "dapo": partial(ppo_clip, **bounds),
    "grpo delta=1.5": partial(ppo_clip, dual=1.5, reduce=all_rows, **bounds),
    "cispo eps_high=5 (upper bound on the ratio itself)": partial(cispo, bounds=(0.0, 5.0)),
    "gspo (grpo + sequence level)": partial(gspo, reduce=all_rows, **bounds),
    "dapo + KL beta 0.04 (not bias-corrected)": partial(ppo_clip, clip=(0.2, 0.28)),
    "dapo + token_truncate [0.5,1.5]": partial(ppo_clip, correction=tis(1.5, 0.5), **bounds),
    "dapo + token_mask [0.5,1.5]": partial(ppo_clip, correction=mis(0.5, 1.5), **bounds),
    "dapo + sequence_truncate [None,3.0]": partial(ppo_clip, correction=tis(3.0, level="sequence"), **bounds),
    "dapo + sequence_truncate [0.5,1.5]": partial(ppo_clip, correction=tis(1.5, 0.5, level="sequence"), **bounds),
    "dapo + sequence_mask [None,3.0]": partial(ppo_clip, correction=mis(0.0, 3.0, level="sequence"), **bounds),
    "dapo + sequence_mask [0.5,1.5]": partial(ppo_clip, correction=mis(0.5, 1.5, level="sequence"), **bounds),
    "dapo num_items_in_batch=40, grad_accum 2, steps_per_generation 4": partial(ppo_clip, **bounds),
}


@pytest.mark.parametrize(
    "case", [case for case in TRL["cases"] if case["label"] not in TRL_OUT_OF_SCOPE], ids=lambda case: case["label"]
)
def test_a_trl_loss_has_the_same_value_and_gradient(case: dict[str, Any]) -> None:
    given = TRL["inputs"]
    pad = Padded(given["effective_mask"])
    batch = pad.batch(
        anchor_logprobs=pad.flat(given["old_per_token_logps"]),
        behavior_logprobs=pad.flat(given["sampling_per_token_logps"]),
        reference_logprobs=pad.flat(given["ref_per_token_logps"]),
        advantages=pad.spread(given["advantages"]),
    )
    logprobs = variable(pad.flat(given["per_token_logps"]))
    if "num_items_in_batch=40" in case["label"]:
        # 40 items in the whole step, and a trainer that divides by its 2 accumulation steps afterwards
        batch = replace(batch, counts=whole_step(batch, tokens=40.0, scale=2.0))
    loss, _ = TRL_CALLS[case["label"]](batch, logprobs)
    if "KL beta" in case["label"]:
        loss = loss + reference_kl(batch, logprobs, beta=0.04)[0]
    agrees(pad, loss, logprobs, case["loss"], case["grad_per_token_logps"])


def whole_step(batch: TokenBatch, *, tokens: float, scale: float = 1.0) -> Counts:
    return measure(batch, batch.weights)._replace(tokens=torch.tensor(tokens), scale=torch.tensor(scale))


def test_verls_clipped_value_loss_is_the_same() -> None:
    case = golden("verl_value_loss")
    given = case["inputs"]
    pad = Padded(given["response_mask"])
    batch = pad.batch(values=pad.flat(given["values"]), returns=pad.flat(given["returns"]))
    term, metrics = value_clip(batch, pad.flat(given["vpreds"]), clip=case["params"]["cliprange_value"])
    torch.testing.assert_close(term.item(), case["outputs"]["loss"])
    torch.testing.assert_close((metrics["value/clipped"] / pad.mask.sum()).item(), case["outputs"]["clipfrac"])


KL_OUT_OF_SCOPE = {"abs"}
KL = [case for case in golden("verl_kl")["cases"] if case["kl_penalty"] not in KL_OUT_OF_SCOPE]


@pytest.mark.parametrize("case", KL, ids=lambda c: c["kl_penalty"])
def test_verls_kl_penalties_are_the_same(case: dict[str, Any]) -> None:
    given = golden("verl_kl")["inputs"]
    pad = Padded(given["mask"])
    batch = pad.batch(reference_logprobs=pad.flat(given["ref_logprob"]))
    logprobs = variable(pad.flat(given["logprob"]))
    name = case["kl_penalty"]
    gradient = "k2" if name.endswith("+") else None
    loss, _ = reference_kl(batch, logprobs, beta=1.0, estimator=name.rstrip("+"), gradient=gradient, reduce=token_sum)
    value = (torch.tensor(case["value"], dtype=torch.float64) * pad.mask).sum().item()
    agrees(pad, loss, logprobs, value, case["grad_of_masked_sum"])


def test_agg_loss_is_our_reducers() -> None:
    case = golden("verl_agg_loss")
    pad = Padded(case["inputs"]["loss_mask"])
    batch, terms = pad.batch(), pad.flat(case["inputs"]["loss_mat"])
    modes: dict[str, Any] = {**VERL_REDUCERS, "seq-mean-token-sum-norm": fixed_length(pad.width)}
    for wanted in case["cases"]:
        given = batch
        if wanted["params"]:
            step = whole_step(batch, tokens=31.0, scale=2.0)
            given = replace(batch, counts=step._replace(rollouts=torch.tensor(10.0)))
        got = modes[wanted["mode"]](terms, given, given.weights)
        torch.testing.assert_close(got.item(), wanted["loss"], rtol=1e-7, atol=1e-9, msg=str(wanted))
