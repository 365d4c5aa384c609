"""Terms that are added to an objective: reference KL, entropy, clipped values. Each is (term [], metrics) to add.

They act on every action with weight: of `signal_groups(reducer)` they take the reducer alone.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from rollstore.batch import TokenBatch
from rollstore.losses.arguments import finite, number, word
from rollstore.losses.inputs import count_metrics, inputs, log_ratio, needed
from rollstore.losses.ratios import Metrics, exp
from rollstore.losses.reducers import Reducer, base, reduced, token_mean

Estimator = Literal["k1", "k2", "k3"]


def reference_kl(
    batch: TokenBatch,
    logprobs: Tensor,
    *,
    beta: float,
    estimator: Estimator = "k3",
    gradient: Estimator | None = None,
    reduce: Reducer = token_mean,
) -> tuple[Tensor, Metrics]:
    """beta E[k(x)], x = log p - log ref: k1 = x, k2 = x^2/2, k3 = e^-x - 1 + x (Schulman 2020). logprobs [A].

    All estimate KL(p || ref) on samples of p; only k2's gradient does. gradient: the estimator that the gradient is
    taken of, the value staying that of `estimator`.
    """
    finite("beta", beta)
    given = inputs(batch, logprobs, behavior=False, needs=("reference_logprobs",), below="reference_logprobs")
    x = log_ratio(batch, given, "reference_logprobs").log
    terms = _estimate(x, estimator)
    if gradient is not None:
        slope = _estimate(x, gradient)
        terms = terms.detach() + (slope - slope.detach())
    term = reduced(base(reduce), torch.where(given.possible, terms, 0), batch, given.weights)
    return beta * term, {"reference_kl": term.detach(), **given.metrics, **count_metrics(batch, given.weights)}


def _estimate(x: Tensor, estimator: Estimator) -> Tensor:
    word("estimator", estimator, get_args(Estimator))
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x.square() / 2
    return exp(-x) - 1 + x


def entropy_bonus(
    batch: TokenBatch, entropies: Tensor, *, beta: float, reduce: Reducer = token_mean
) -> tuple[Tensor, Metrics]:
    """-beta E[H(p)]: a reward for entropy. entropies [A]: the trainer's, in nats, with gradient."""
    finite("beta", beta)
    given = inputs(batch, entropies, behavior=False, needs=(), name="entropies")
    term = reduced(base(reduce), given.logprobs, batch, given.weights)
    return -beta * term, {"entropy": term.detach(), **given.metrics, **count_metrics(batch, given.weights)}


def value_clip(
    batch: TokenBatch, values: Tensor, *, clip: float | None = 0.2, reduce: Reducer = token_mean
) -> tuple[Tensor, Metrics]:
    """E[ max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) ] / 2 (PPO's clipped value loss; None: plain).

    values [A]: the critic's, with gradient. Needs `batch.values` (V_old) and `batch.returns` (R).
    """
    if clip is not None:
        number("clip", clip)
    given = inputs(batch, values, behavior=False, needs=("values", "returns"), name="values")
    new, dtype = given.logprobs, given.logprobs.dtype
    old = torch.where(given.active, needed(batch, "values").to(dtype), 0)
    target = torch.where(given.active, needed(batch, "returns").to(dtype), 0)
    errors = (new - target).square()
    metrics: Metrics = {}
    if clip is not None:
        clipped = (old + (new - old).clamp(-clip, clip) - target).square()
        metrics["value/clipped"] = (given.active & (clipped > errors)).sum()
        errors = torch.maximum(errors, clipped)
    term = reduced(base(reduce), errors, batch, given.weights) / 2
    metrics |= count_metrics(batch, given.weights)
    return term, {"value_loss": term.detach(), **given.metrics, **metrics}
