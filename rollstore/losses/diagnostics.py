"""How far two policies are apart on recorded actions, and where. Any pair: p/q, p/pi0, pi0/q, two evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rollstore.batch import TokenBatch
from rollstore.losses.arguments import number as check_number
from rollstore.losses.arguments import pair, tensor
from rollstore.losses.ratios import EXPONENT, Metrics, bounded
from rollstore.losses.units import sum_by

QUANTILES = (0.5, 0.9, 0.99, 0.999)


def divergence(above: Tensor, below: Tensor, active: Tensor, *, low: float = 0.5, high: float = 2.0) -> Metrics:
    """Diagnostics [] of the ratio w = exp(above - below) over `active` actions, drawn from `below`. All inputs [A].

    k1 = -x, k2 = x^2/2, k3 = e^x - 1 - x for x = log w: estimates of KL(below || above). Extremes of x and quantiles of
    |x|; mean and largest difference of the two probabilities; effective sample size (sum w)^2 / (n sum w^2); E[w^2]
    (Renyi of order two); shares below `low` and above `high`; `overflow`: exponents above the clamp. Where `above` is
    minus infinity w is 0 and x infinite. An action with a NaN, or of which `below` is minus infinity, which was never
    drawn from it, is left out and counted as `missing`. 0 without actions.
    """
    pair("low, high", (low, high), ordered=True)
    x, w, gap, some = _ratio(above, below, active)
    missing, active = (active & ~some).sum(), some
    number = active.sum()
    one = number.clamp(min=1)
    found: Metrics = {
        "number": number,
        "missing": missing,
        "k1": -x.sum() / one,
        "k2": x.square().sum() / 2 / one,
        "k3": torch.where(active, w - 1 - x, 0).sum() / one,
        "probability_gap/mean": gap.sum() / one,
        "effective_share": w.sum().square() / torch.where(number > 0, one * w.square().sum(), 1),
        "w2": w.square().sum() / one,
        "share/low": (active & (w < low)).sum() / one,
        "share/high": (active & (w > high)).sum() / one,
        "overflow": (active & (x > EXPONENT)).sum(),
    }
    if not len(x):
        nothing = x.sum()
        extremes = {"log_ratio/max": nothing, "log_ratio/min": nothing, "probability_gap/max": nothing}
        return {**found, **extremes, **{f"log_ratio/q{q:g}": nothing for q in QUANTILES}}
    cuts = quantiles(torch.where(active, x.abs(), torch.inf), number)
    return {
        **found,
        "log_ratio/max": torch.where(number > 0, torch.where(active, x, -torch.inf).max(), 0),
        "log_ratio/min": torch.where(number > 0, torch.where(active, x, torch.inf).min(), 0),
        "probability_gap/max": gap.max(),
        **{f"log_ratio/q{q:g}": cut for q, cut in zip(QUANTILES, cuts, strict=True)},
    }


def divergence_by(above: Tensor, below: Tensor, active: Tensor, buckets: Buckets) -> Metrics:
    """number, k1, k3, effective_share, w2 and the largest |log w|, each [buckets]; 0 where a bucket is empty."""
    tensor("buckets", buckets.of_action, (active.shape[0],), "a bucket an action", ids=True)
    x, w, _, active = _ratio(above, below, active)
    size = len(buckets.labels)

    def total(values: Tensor) -> Tensor:
        return sum_by(torch.where(active, values, 0), buckets.of_action, size)

    number = total(torch.ones_like(x))
    one = number.clamp(min=1)
    squares = total(w.square())
    return {
        "number": number,
        "k1": -total(x) / one,
        "k3": total(w - 1 - x) / one,
        "effective_share": total(w).square() / torch.where(squares > 0, one * squares, 1),
        "w2": squares / one,
        "log_ratio/largest": torch.zeros_like(number).scatter_reduce(0, buckets.of_action, x.abs(), "amax"),
    }


class Buckets(NamedTuple):
    """of_action [A] int64: the bucket of each action; labels: what each bucket is."""

    of_action: Tensor
    labels: tuple[str, ...]


def by_lag(batch: TokenBatch, version: int, *, most: int = 8) -> Buckets:
    """By how many versions before `version` an action was drawn: 0 .. most - 1, `most` or more, and not known."""
    check_number("most", most, 1)
    lag = (version - batch.weight_versions).clamp(0, most)
    labels = (*(str(at) for at in range(most)), f"{most}+", "unknown")
    return Buckets(torch.where(batch.version_known, lag, most + 1), labels)


def by_position(batch: TokenBatch, edges: Sequence[int] = (64, 256, 1024, 4096, 16384)) -> Buckets:
    """By the position of the action in its row: below the first edge, and so on."""
    return _between(batch.position_ids[batch.action_index], edges)


def by_length(batch: TokenBatch, edges: Sequence[int] = (64, 256, 1024, 4096, 16384)) -> Buckets:
    """By how many actions the action's row has."""
    return _between(torch.bincount(batch.sequence, minlength=batch.rows)[batch.sequence], edges)


class Split(NamedTuple):
    """log p_k/q_v = log p_k/p_v + log p_v/q_v, each [A], NaN where one of them is not known.

    total: the log-ratio that a correction sees. movement: what training has moved since the action was drawn.
    disagreement: what trainer and engine disagree on under the same weights.
    """

    total: Tensor
    movement: Tensor
    disagreement: Tensor


def split_log_ratio(batch: TokenBatch, logprobs: Tensor, at_generation: Tensor) -> Split:
    """Split the mismatch. logprobs [A]: the trainer's, now; at_generation [A]: its evaluation at the version that drew
    each action, NaN where there is none."""
    for name, given in (("logprobs", logprobs), ("at_generation", at_generation)):
        tensor(name, given, (batch.actions,))
    movement = logprobs.detach() - at_generation
    behavior = torch.where(batch.valid, batch.behavior_logprobs, torch.nan).to(at_generation.dtype)
    disagreement = at_generation - behavior
    return Split(movement + disagreement, movement, disagreement)


def quantiles(ordered: Tensor, number: Tensor) -> Tensor:
    """`QUANTILES` of the `number` smallest of the values [A], linear between two of them; 0 without any.

    torch's own function takes no more than 16 million values.
    """
    ordered = ordered.sort().values
    at = (number - 1).clamp(min=0) * torch.tensor(QUANTILES, dtype=torch.float64, device=ordered.device)
    low, high = ordered[at.floor().long()], ordered[at.ceil().long()]
    between = torch.where(low == high, low, low + (at - at.floor()).to(ordered.dtype) * (high - low))
    return torch.where(number > 0, between, 0)


def _ratio(above: Tensor, below: Tensor, active: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log w, w, |p - q|, active where both are known) [A], detached, 0 where not active."""
    for name, given in (("above", above), ("below", below)):
        tensor(name, given, (active.shape[0],))
    active = active & ~above.isnan() & below.isfinite()
    wide = torch.promote_types(torch.promote_types(above.dtype, below.dtype), torch.float32)
    up = torch.where(active, above.detach(), 0).to(wide)
    down = torch.where(active, below.detach(), 0).to(wide)
    x = up - down
    return x, torch.where(active, bounded(x), 0), torch.where(active, (up.exp() - down.exp()).abs(), 0), active


def _between(values: Tensor, edges: Sequence[int]) -> Buckets:
    if not edges or any(low >= high for low, high in pairwise(edges)):
        raise ValueError(f"edges: wanted rising numbers, got {tuple(edges)}")
    inner = torch.tensor(edges, device=values.device)
    labels = (
        f"<{edges[0]}",
        *(f"{low}-{high - 1}" for low, high in pairwise(edges)),
        f"{edges[-1]}+",
    )
    return Buckets(torch.bucketize(values, inner, right=True), labels)
