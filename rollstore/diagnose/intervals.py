"""An interval for a mean whose values come in clusters, as the rewards of one prompt group do."""

from __future__ import annotations

import math

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
      2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip
"""0.975 quantiles of Student's t for 1, 2, ... degrees of freedom; beyond them 1.96 + 2.4 / df is right to 0.003."""


def t_quantile(freedom: int) -> float:
    """The 0.975 quantile of Student's t. Raises ValueError below one degree of freedom."""
    if freedom < 1:
        raise ValueError(f"freedom: wanted at least 1, got {freedom}")
    return _T[freedom - 1] if freedom <= len(_T) else 1.95996 + 2.4 / freedom


def clustered(mean: float, count: int, clusters: int, squares: float) -> tuple[float, float] | None:
    """A 95% interval of a mean over `count` values in `clusters`; None with one cluster.

    squares: sum over clusters of (sum of its values - its number * mean) squared. The variance of the mean is squares /
    count^2 * clusters / (clusters - 1) (cluster-robust, Liang and Zeger 1986), the quantile Student's t.
    """
    if clusters < 2:
        return None
    half = t_quantile(clusters - 1) * math.sqrt(squares * clusters / (clusters - 1)) / count
    return mean - half, mean + half
