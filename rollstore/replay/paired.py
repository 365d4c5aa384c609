"""Two scored runs of the same questions: a paired test, an interval, and what so many questions can resolve.

The mean of the per-question differences, its standard error with n - 1 in the denominator (Miller, "Adding error bars
to evals", 2024, section 4.2), and a sign-flip test: under no difference each question's difference is as likely with
either sign. For zero-or-one scores that is McNemar's exact test on the questions that changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

FLIPS = 20_000
EXACT = 16
"""Up to so many questions that changed, all sign flips are tried."""
POWER = 0.8
SLACK = 1e-12


@dataclass(frozen=True, kw_only=True)
class Paired:
    """b against a over n questions that both scored with finite numbers."""

    n: int
    mean_a: float
    mean_b: float
    difference: float
    """mean_b - mean_a."""
    low: float
    """The interval of the difference at `level`."""
    high: float
    level: float
    p: float
    """Two-sided: how often chance alone gives a difference as large."""
    resolvable: float
    """The smallest difference that n questions show four times in five, at 1 - `level`, at the spread that was seen."""
    unseen: float
    """What two independent runs would need, for zero-or-one scores: see `smallest_difference`. NaN for other scores."""
    better: int
    worse: int
    infinite: int = 0
    """Questions that are left out: a side's score is infinite, so that no mean or spread would be a number."""

    def line(self) -> str:
        """The report for a person."""
        left_out = f"; {self.infinite} more left out, with an infinite score" if self.infinite else ""
        return (
            f"mean {self.mean_a:.4g} to {self.mean_b:.4g} over {self.n} questions: {self.difference:+.4g}, "
            f"{self.level:.0%} interval [{self.low:+.4g}, {self.high:+.4g}], p {self.p:.3g}; {self.better} better, "
            f"{self.worse} worse; so many questions resolve {self.resolvable:.3g} (unpaired, {self.unseen:.3g})"
            f"{left_out}"
        )


def paired(a: Mapping[str, float], b: Mapping[str, float], *, level: float = 0.95) -> Paired | None:
    """Compares two scores of each question, over the questions in both; None below two of them.

    Those with a score that is no finite number count only in `infinite`. Raises ValueError for a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"level: wanted a number between 0 and 1, got {level}")
    shared = [name for name in a if name in b]
    both = [name for name in shared if math.isfinite(a[name]) and math.isfinite(b[name])]
    n = len(both)
    if n < 2:
        return None
    before, after = (np.array([side[name] for name in both], dtype=np.float64) for side in (a, b))
    d = after - before
    error = float(d.std(ddof=1)) / math.sqrt(n)
    z = NormalDist().inv_cdf(0.5 + level / 2)
    mean = float(np.concatenate([before, after]).mean())
    return Paired(
        n=n,
        mean_a=float(before.mean()),
        mean_b=float(after.mean()),
        difference=float(d.mean()),
        low=float(d.mean()) - z * error,
        high=float(d.mean()) + z * error,
        level=level,
        p=_sign_flips(d),
        resolvable=(z + NormalDist().inv_cdf(POWER)) * error,
        unseen=smallest_difference(n, mean, level=level) if 0 <= mean <= 1 else math.nan,
        better=int((d > 0).sum()),
        worse=int((d < 0).sum()),
        infinite=len(shared) - n,
    )


def smallest_difference(n: int, rate: float = 0.5, *, level: float = 0.95) -> float:
    """The difference of two success rates, each over n questions of its own draws, that leaves the interval of none.

    z * sqrt(2 rate (1 - rate) / n): 0.062 at 500 questions and one half. Raises ValueError for n below 1 or a rate
    outside [0, 1].
    """
    if n < 1 or not 0 <= rate <= 1:
        raise ValueError(f"smallest_difference: wanted n of at least 1 and a rate in [0, 1], got {n} and {rate}")
    return NormalDist().inv_cdf(0.5 + level / 2) * math.sqrt(2 * rate * (1 - rate) / n)


def last_mean(means: Sequence[float], k: int) -> tuple[float, float]:
    """(the last of a run's means, the mean of its last k): one checkpoint is one draw, k of them move less.

    Raises ValueError where there are fewer than k, or k is below 1.
    """
    if not 1 <= k <= len(means):
        raise ValueError(f"k: wanted 1 to {len(means)}, the checkpoints there are, got {k}")
    return means[-1], math.fsum(means[-k:]) / k


def _sign_flips(d: np.ndarray) -> float:
    moved = np.abs(d[d != 0])
    if not len(moved):
        return 1.0
    seen = abs(float(d.sum()))
    # Two orders of one sum round apart by far less than this share of what is summed, whatever its unit.
    near = seen - SLACK * float(moved.sum())
    if set(np.unique(moved)) == {moved[0]}:
        # All differences of one size: the exact binomial test on their signs.
        ups = round((len(moved) + float(d.sum()) / moved[0]) / 2)
        least = min(ups, len(moved) - ups)
        tail = sum(math.comb(len(moved), k) for k in range(least + 1)) / 2 ** len(moved)
        return min(1.0, 2 * tail)
    if len(moved) <= EXACT:
        signs = 1.0 - 2.0 * ((np.arange(1 << len(moved))[:, None] >> np.arange(len(moved))) & 1)
        return float((np.abs(signs @ moved) >= near).mean())
    rng = np.random.Generator(np.random.Philox(len(moved)))
    hits = sum(abs(float((rng.integers(0, 2, len(moved)) * 2 - 1) @ moved)) >= near for _ in range(FLIPS))
    return (hits + 1) / (FLIPS + 1)
