"""How far two policies are apart on recorded actions, and where. Any pair: p/q, p/pi0, pi0/q, two evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rollstore.batch import TokenBatch
from rollstore.losses.arguments import mask, pair, tensor
from rollstore.losses.arguments import number as check_number
from rollstore.losses.inputs import inputs, policy_needs
from rollstore.losses.ratios import EXPONENT, Corrections, Metrics, Numerator, bounded, correct
from rollstore.losses.units import sum_by

QUANTILES = (0.5, 0.9, 0.99, 0.999)


def divergence(
    above: Tensor,
    below: Tensor,
    active: Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
    kept: Tensor | None = None,
) -> Metrics:
    """Diagnostics [] of the ratio w = exp(above - below) over `active` actions, drawn from `below`. All inputs [A].

    k1 = -x, k2 = x^2/2, k3 = e^x - 1 - x for x = log w: estimates of KL(below || above). Extremes of x and quantiles of
    |x|; mean and largest difference of the two probabilities; effective sample size (sum w)^2 / (n sum w^2); E[w^2]
    (Renyi of order two); shares below `low` and above `high`, which `tis(high, low)` would clip; with `kept` (bool, as
    of `weigh`) the share that a correction masked; `overflow`: exponents above the clamp. Where `above` is minus
    infinity w is 0 and x infinite. An action with a NaN, or of which `below` is minus infinity, which was never
    drawn from it, is left out and counted as `missing`. 0 without actions.
    """
    pair("low, high", (low, high), ordered=True)
    ratio = _ratio(above, below, active)
    x, gap, active = ratio.x, ratio.gap, ratio.active
    found = _sums(ratio, Tensor.sum, low, high, kept)
    number = found["number"]
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


def divergence_by(
    above: Tensor,
    below: Tensor,
    active: Tensor,
    buckets: Buckets,
    *,
    low: float = 0.5,
    high: float = 2.0,
    kept: Tensor | None = None,
) -> Metrics:
    """The figures of `divergence` in each bucket, and the largest |log w|, each [buckets]; 0 where one is empty."""
    pair("low, high", (low, high), ordered=True)
    mask("active", active)
    index, size = buckets.of_action, len(buckets.labels)
    tensor("buckets", index, (active.shape[0],), "a bucket an action", ids=True)
    ratio = _ratio(above, below, active)
    x, active = ratio.x, ratio.active

    def total(values: Tensor) -> Tensor:
        return sum_by(values.to(torch.float64), index, size)

    def extreme(values: Tensor, how: str) -> Tensor:
        start = torch.full((size,), -torch.inf if how == "amax" else torch.inf, dtype=x.dtype, device=x.device)
        found = start.scatter_reduce(0, index, torch.where(active, values, start[0]), how)
        return torch.where(number > 0, found, 0)

    found = _sums(ratio, total, low, high, kept)
    number = found["number"]
    cuts = _quantiles_by(torch.where(active, x.abs(), torch.inf), index, number)
    return {
        **found,
        "log_ratio/max": extreme(x, "amax"),
        "log_ratio/min": extreme(x, "amin"),
        "log_ratio/largest": extreme(x.abs(), "amax"),
        "probability_gap/max": extreme(ratio.gap, "amax"),
        **{f"log_ratio/q{q:g}": cut for q, cut in zip(QUANTILES, cuts, strict=True)},
    }


def _sums(ratio: _Ratio, total: Callable[[Tensor], Tensor], low: float, high: float, kept: Tensor | None) -> Metrics:
    """Every figure that is a sum over actions; `total` adds up values [A], 0 where not active."""
    x, w, gap, active, missing = ratio
    number = total(active)
    one = number.clamp(min=1)
    squares = total(w.square())
    found: Metrics = {
        "number": number,
        "missing": total(missing),
        "k1": -total(x) / one,
        "k2": total(x.square()) / 2 / one,
        "k3": total(torch.where(active, w - 1 - x, 0)) / one,
        "probability_gap/mean": total(gap) / one,
        "effective_share": total(w).square() / torch.where(squares > 0, one * squares, 1),
        "w2": squares / one,
        "share/low": total(active & (w < low)) / one,
        "share/high": total(active & (w > high)) / one,
        "overflow": total(active & (x > EXPONENT)),
    }
    if kept is not None:
        mask("kept", kept)
        tensor("kept", kept.to(x.dtype), tuple(active.shape))
        found["share/masked"] = total(active & ~kept) / one
    return found


def weigh(
    batch: TokenBatch, logprobs: Tensor, correction: Corrections, *, numerator: Numerator = "live"
) -> tuple[Tensor, Tensor]:
    """(weight [A] that a correction gives each action, kept [A]), as an objective would; without gradient.

    logprobs [A]: the trainer's. numerator: of a correction that does not say. For `divergence(kept=)`, and for
    `with_counts` with rejected="leave". Where no log-prob was recorded the ratio is taken to be 1.
    """
    needs = tuple(name for name in policy_needs(None, correction, numerator) if name != "advantages")
    given = inputs(batch, logprobs, behavior=True, needs=needs)
    done = correct(correction, batch, given.live, given.recorded, default=numerator)
    return done.weight, done.kept


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
    behavior = torch.where(batch.recorded, batch.behavior_logprobs, torch.nan)
    wide = torch.promote_types(torch.promote_types(logprobs.dtype, at_generation.dtype), behavior.dtype)
    wide = torch.promote_types(wide, torch.float32)  # as narrow as an evaluation may be, the record is not
    there = at_generation.detach().to(wide)
    movement = logprobs.detach().to(wide) - there
    disagreement = there - behavior.to(wide)
    return Split(movement + disagreement, movement, disagreement)


def quantiles(ordered: Tensor, number: Tensor) -> Tensor:
    """`QUANTILES` of the `number` smallest of the values [A], linear between two of them; 0 without any.

    torch's own function takes no more than 16 million values.
    """
    ordered = ordered.sort().values
    at = (number - 1).clamp(min=0) * torch.tensor(QUANTILES, dtype=torch.float64, device=ordered.device)
    low, high = ordered[at.floor().long()], ordered[at.ceil().long()]
    return torch.where(number > 0, _between_two(low, high, at - at.floor()), 0)


def _quantiles_by(values: Tensor, index: Tensor, number: Tensor) -> Tensor:
    """`QUANTILES` of each bucket [quantiles, buckets]: of the `number` [buckets] smallest of its values [A]."""
    order = values.argsort()
    ordered = values[order[index[order].argsort(stable=True)]]
    whole = torch.bincount(index, minlength=len(number))
    begins = torch.cumsum(whole, 0) - whole
    at = (number - 1).clamp(min=0) * torch.tensor(QUANTILES, dtype=torch.float64, device=values.device)[:, None]
    last = max(len(ordered) - 1, 0)
    low, high = ((begins + place.long()).clamp(max=last) for place in (at.floor(), at.ceil()))
    if not len(ordered):
        return torch.zeros_like(at, dtype=values.dtype)
    return torch.where(number > 0, _between_two(ordered[low], ordered[high], at - at.floor()), 0)


def _between_two(low: Tensor, high: Tensor, share: Tensor) -> Tensor:
    """Linear between two values; where they are equal, that one, infinite ones too."""
    return torch.where(low == high, low, low + share.to(low.dtype) * (high - low))


class _Ratio(NamedTuple):
    """log w, w, |p - q| [A], detached, 0 where not active; active where both are known; missing where one is not."""

    x: Tensor
    w: Tensor
    gap: Tensor
    active: Tensor
    missing: Tensor


def _ratio(above: Tensor, below: Tensor, active: Tensor) -> _Ratio:
    mask("active", active)
    for name, given in (("above", above), ("below", below)):
        tensor(name, given, (active.shape[0],))
    some = active & ~above.isnan() & below.isfinite()
    wide = torch.promote_types(torch.promote_types(above.dtype, below.dtype), torch.float32)
    up = torch.where(some, above.detach(), 0).to(wide)
    down = torch.where(some, below.detach(), 0).to(wide)
    x, gap = up - down, (up.exp() - down.exp()).abs()
    return _Ratio(x, torch.where(some, bounded(x), 0), torch.where(some, gap, 0), some, active & ~some)


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
