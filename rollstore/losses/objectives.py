"""The objectives, one function each. q behavior, pi0 anchor, p live trainer; w = pi0/q, r = p/pi0; sg: no gradient.

Each takes a batch with advantages and the trainer's log-probs [A] (with gradient), and returns (loss [], metrics of
detached tensors). Ratios are formed in float32 or wider. An action counts when it has weight and what the objective
divides by was recorded; the rest is selected away, never multiplied by zero, and counted.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rollstore.batch import TokenBatch
from rollstore.losses.arguments import number, pair
from rollstore.losses.inputs import Inputs, LogRatio, inputs, log_ratio, policy_needs, signal_metrics
from rollstore.losses.ratios import (
    EXPONENT,
    HIGHEST,
    UNCLAMPED_BELOW,
    Corrected,
    Corrections,
    Exponent,
    Metrics,
    at_level,
    bounded,
    correct,
    exp,
)
from rollstore.losses.reducers import Reducer, fixed_length, reduced, sequence_mean, token_mean
from rollstore.losses.units import Unit

Loss = tuple[Tensor, Metrics]
Anchor = Literal["recorded", "behavior"]


def reinforce(
    batch: TokenBatch, logprobs: Tensor, *, correction: Corrections | None = None, reduce: Reducer = token_mean
) -> Loss:
    """-E[ sg(w) A log p ] (Williams 1992). A correction's ratio is p/q unless it says otherwise. logprobs [A]."""
    needs = policy_needs(None, correction, "live")
    given = inputs(batch, logprobs, behavior=correction is not None, needs=needs)
    done = correct(correction, batch, given.live, given.recorded, given.known, default="live")
    terms = -done.weight * given.advantages * given.logprobs
    return _reduced(batch, given, terms, reduce, done.metrics, done)


def ppo_clip(
    batch: TokenBatch,
    logprobs: Tensor,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    dual: float | None = None,
    correction: Corrections | None = None,
    anchor: Anchor = "recorded",
    exponent: Exponent = UNCLAMPED_BELOW,
    reduce: Reducer = token_mean,
) -> Loss:
    """-E[ sg(c(w)) min(r A, clip(r, 1-e_l, 1+e_h) A) ] (Schulman et al. 2017, arXiv 1707.06347). logprobs [A].

    The correction c(w) and the clip of r are separate controls, not a clip of their product. dual: for A < 0 the
    bracket is at least dual * A, dual above 1 (Ye et al. 2020, arXiv 1912.09729); TRL's `delta`. anchor="behavior":
    r = p/q. exponent: bounds of log r, None for no lower one.
    """
    pair("clip", clip)
    _exponent(exponent)
    if dual is not None:
        number("dual", dual, 1.0, above=True)
    given, ratios, done = _against_anchor(batch, logprobs, anchor, correction)
    ratio, advantages = exp(ratios.log, exponent), given.advantages
    clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    if dual is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual * advantages), surrogate)
    metrics = done.metrics | _ratio_metrics(ratios.seen, given, clip)
    return _reduced(batch, given, -done.weight * surrogate, reduce, metrics, done)


def dapo(
    batch: TokenBatch,
    logprobs: Tensor,
    *,
    clip: tuple[float, float] = (0.2, 0.28),
    dual: float | None = None,
    correction: Corrections | None = None,
    anchor: Anchor = "recorded",
    reduce: Reducer = token_mean,
) -> Loss:
    """`ppo_clip` with the higher upper clip and the token mean of DAPO (arXiv 2503.14476). logprobs [A]."""
    return ppo_clip(batch, logprobs, clip=clip, dual=dual, correction=correction, anchor=anchor, reduce=reduce)


def dr_grpo(
    batch: TokenBatch,
    logprobs: Tensor,
    *,
    length: float,
    clip: tuple[float, float] = (0.2, 0.2),
    correction: Corrections | None = None,
    anchor: Anchor = "recorded",
    unit: Unit = "rollout",
) -> Loss:
    """`ppo_clip` summed over tokens and divided by S * length, a constant (Dr. GRPO, arXiv 2503.20783). logprobs [A].

    Its advantages are `group_mean`, without a standard deviation.
    """
    reduce = fixed_length(length, unit=unit)
    return ppo_clip(batch, logprobs, clip=clip, correction=correction, anchor=anchor, reduce=reduce)


def gspo(
    batch: TokenBatch,
    logprobs: Tensor,
    *,
    clip: tuple[float, float] = (3e-4, 4e-4),
    correction: Corrections | None = None,
    anchor: Anchor = "recorded",
    unit: Unit = "rollout",
    reduce: Reducer = sequence_mean,
) -> Loss:
    """-E[ sg(c(w)) min(s A, clip(s) A) ], s = exp(mean_t log r_t) (GSPO, arXiv 2507.18071). logprobs [A].

    The token form: each action carries sg(s) p/sg(p), so per-action corrections act per action, and with
    one advantage a sequence and `sequence_mean` value and gradient are those of the sequence form.
    """
    pair("clip", clip)
    given, ratios, done = _against_anchor(batch, logprobs, anchor, correction)
    mean = at_level(ratios.seen, batch, given.ratio, level="geometric", unit=unit)
    ratio = bounded(mean) * (1 + (ratios.log - ratios.log.detach()))
    advantages = given.advantages
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages)
    metrics = done.metrics | _ratio_metrics(mean, given, clip)
    return _reduced(batch, given, -done.weight * surrogate, reduce, metrics, done)


def cispo(
    batch: TokenBatch,
    logprobs: Tensor,
    *,
    bounds: tuple[float, float] = (0.0, 5.0),
    correction: Corrections | None = None,
    anchor: Anchor = "recorded",
    reduce: Reducer = token_mean,
) -> Loss:
    """-E[ sg(c(w)) sg(clamp(r, low, high)) A log p ] (CISPO, MiniMax-M1, arXiv 2506.13585). logprobs [A].

    `bounds` are of the ratio itself: verl's (0.2, 0.28) is (0.8, 1.28) here, TRL's epsilon_high=5 is (0, 5).
    """
    pair("bounds", bounds, ordered=True)
    given, ratios, done = _against_anchor(batch, logprobs, anchor, correction)
    weight = bounded(ratios.seen).clamp(*bounds)
    metrics = done.metrics | _ratio_metrics(ratios.seen, given, (1 - bounds[0], bounds[1] - 1))
    terms = -done.weight * weight * given.advantages * given.logprobs
    return _reduced(batch, given, terms, reduce, metrics, done)


def sao(
    batch: TokenBatch,
    logprobs: Tensor,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    reduce: Reducer = token_mean,
) -> Loss:
    """-E[ (p/q) 1(1-e_l < p/q < 1+e_h) A ]: the direct ratio, kept on both sides only inside the band. logprobs [A].

    No anchor and no extra forward. Outside the band an action gives neither value nor gradient, whatever its sign,
    and stays in the denominator.
    """
    pair("clip", clip)
    given = inputs(batch, logprobs, behavior=True)
    ratios = log_ratio(batch, given, "behavior_logprobs")
    seen = ratios.seen.exp()
    outside = (seen <= 1 - clip[0]) | (seen >= 1 + clip[1])
    metrics = {"rejected": (given.active & outside).sum()} | _ratio_metrics(ratios.seen, given, clip)
    terms = torch.where(outside, 0, -exp(ratios.log) * given.advantages)
    return _reduced(batch, given, terms, reduce, metrics)


def reinforce_zero(batch: TokenBatch, logprobs: Tensor, *, reduce: Reducer = sequence_mean) -> Loss:
    """-(1/S) sum_i (1/T_i) sum_t A_i p/q: REINFORCE with the exact token ratio and nothing clipped. logprobs [A].

    The numerator is differentiable, T_i counts valid actions, and the advantages are `group_mean` only. At p = q its
    gradient is REINFORCE's: a ratio of one still has a gradient.
    """
    given = inputs(batch, logprobs, behavior=True)
    ratios = log_ratio(batch, given, "behavior_logprobs")
    terms = -exp(ratios.log) * given.advantages
    return _reduced(batch, given, terms, reduce, _ratio_metrics(ratios.seen, given, None))


def _against_anchor(
    batch: TokenBatch, logprobs: Tensor, anchor: Anchor, correction: Corrections | None
) -> tuple[Inputs, LogRatio, Corrected]:
    """What an objective with an anchor starts from: its inputs, log r, and the correction."""
    needs = policy_needs(anchor, correction, "anchor")
    direct = anchor == "behavior"
    below = None if direct else "anchor_logprobs"
    given = inputs(batch, logprobs, behavior=correction is not None or direct, needs=needs, below=below)
    ratios = log_ratio(batch, given, below or "behavior_logprobs")
    return given, ratios, correct(correction, batch, given.live, given.recorded, given.known, default="anchor")


def _exponent(got: Exponent) -> None:
    low, high = got
    number("exponent[1]", high, 0.0, HIGHEST)
    if low is not None:
        number("exponent[0]", low, -torch.inf, high)


def _reduced(
    batch: TokenBatch, given: Inputs, terms: Tensor, reduce: Reducer, metrics: Metrics, done: Corrected | None = None
) -> Loss:
    """Reduce over the actions that count; an impossible one gives 0, and so does a rejected one unless it leaves."""
    kept, stays = (given.possible, given.active) if done is None else (given.possible & done.kept, done.stays)
    weights = torch.where(given.active & stays, given.weights, 0)
    loss = reduced(reduce, torch.where(kept, terms, 0), batch, weights)
    return loss, {"loss": loss.detach(), **given.metrics, **signal_metrics(batch, weights), **metrics}


def _ratio_metrics(x: Tensor, given: Inputs, clip: tuple[float, float] | None) -> Metrics:
    """Of log-ratios x [A]. k1 and k3 are infinite where the trainer cannot produce what was drawn."""
    one = given.active.sum().clamp(min=1)
    ratio = bounded(x)
    metrics: Metrics = {
        "ratio/mean": torch.where(given.active, ratio, 0).sum() / one,
        "ratio/k1": -torch.where(given.active, x, 0).sum() / one,
        "ratio/k3": torch.where(given.active, ratio - 1 - x, 0).sum() / one,
        "ratio/overflow": (given.active & (x > EXPONENT)).sum(),
    }
    if clip is not None:
        advantages = given.advantages
        metrics["clipped/low"] = (given.active & (ratio < 1 - clip[0]) & (advantages < 0)).sum()
        metrics["clipped/high"] = (given.active & (ratio > 1 + clip[1]) & (advantages > 0)).sum()
    return metrics
