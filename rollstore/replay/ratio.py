"""What a set of log-ratios says: KL estimates, quantiles, tails, effective sample size. Pure numpy, float64.

Over actions drawn from q, with d = ln p - ln q:

* k1 = mean(-d), k2 = mean(d^2) / 2, k3 = mean(e^d - 1 - d), all estimates of KL(q || p) (Schulman, "Approximating KL
  divergence", 2020): k1 is unbiased with a large variance, k2 is biased, k3 is unbiased and never below zero;
* effective sample size = (sum w)^2 / sum w^2 over n, and second moment = mean(w^2), with w = e^d.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Of n log-ratios ln p - ln q, in nats."""

    n: int
    mean: float
    mean_abs: float
    k1: float
    k2: float
    k3: float
    quantiles: tuple[float, ...]
    """At `QUANTILES`."""
    least: float
    most: float
    max_probability_difference: float
    """Largest |p - q|."""
    effective_sample_size: float
    """Share of n that the weights p / q are worth; 1 when all are equal."""
    second_moment: float
    """Mean of (p / q)^2; 1 when p = q."""

    def line(self) -> str:
        """The main numbers for a person."""
        return (
            f"n {self.n}  mean|d| {self.mean_abs:.3g}  k1 {self.k1:.3g}  k3 {self.k3:.3g}  d in "
            f"[{self.least:.3g}, {self.most:.3g}]  max|p-q| {self.max_probability_difference:.3g}  "
            f"ESS {self.effective_sample_size:.4g}  E[w^2] {self.second_moment:.4g}"
        )


def summarise(p: NDArray[np.floating], q: NDArray[np.floating]) -> Summary | None:
    """Of finite log-probs p and q [n] each; None when there are none."""
    if not len(p):
        return None
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    d = p - q
    # A ratio beyond float64 is infinite: then so are the moments it enters.
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp(d)
        scaled = np.exp(d - d.max())  # the same share, without overflow
        return Summary(
            n=len(d),
            mean=float(d.mean()),
            mean_abs=float(np.abs(d).mean()),
            k1=float(-d.mean()),
            k2=float(np.square(d).mean() / 2),
            k3=float((np.expm1(d) - d).mean()),
            quantiles=tuple(np.quantile(d, QUANTILES).tolist()),
            least=float(d.min()),
            most=float(d.max()),
            max_probability_difference=float(np.abs(np.exp(p) - np.exp(q)).max()),
            effective_sample_size=float(scaled.sum() ** 2 / np.square(scaled).sum() / len(d)),
            second_moment=float(np.square(weights).mean()),
        )
