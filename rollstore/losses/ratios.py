"""Importance ratios and what is done to them: tis, mis, icepop. q behavior, pi0 anchor, p the live trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rollstore.batch import TokenBatch
from rollstore.errors import UnsupportedRecordError
from rollstore.losses.arguments import number, pair, word
from rollstore.losses.units import UNITS, Unit, sum_by, unit_of_row

Level = Literal["token", "sequence", "geometric"]
Numerator = Literal["anchor", "live"]
Rejected = Literal["keep", "leave"]
Statistic = Literal["ratio", "k2", "k3"]
Inside = Literal["ratio", "one"]
Exponent = tuple[float | None, float]
Metrics = dict[str, Tensor]

EXPONENT = 20.0
"""Above this an exponent is clamped: e^20 is 4.9e8, and float32 is far from its end."""
HIGHEST = 80.0
"""An exponent's bound is at most this: float32 ends at e^88, and a ratio is multiplied yet."""
UNCLAMPED_BELOW: Exponent = (None, EXPONENT)


class Rule(NamedTuple):
    """What a correction makes of ratios: weight, of any shape, and kept, False where the ratio was rejected.

    A ratio of NaN is not rejected: the loss shall be NaN as well.
    """

    weight: Tensor
    kept: Tensor


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A stop-gradient weight on each action, from a ratio to the behavior policy; made by `tis`, `mis`, ...

    level: one ratio an action (`token`), their product over the unit (`sequence`), or its root (`geometric`).
    numerator: `anchor` pi0/q, `live` p/q; None: whichever the objective names. rejected: whether a rejected action
    stays in the denominator of the loss (`keep`) or leaves it (`leave`).
    """

    name: str
    rule: Callable[[Tensor], Rule]
    level: Level
    unit: Unit
    numerator: Numerator | None
    rejected: Rejected
    statistic: Statistic = "ratio"

    def __post_init__(self) -> None:
        word("level", self.level, get_args(Level))
        word("unit", self.unit, UNITS)
        word("rejected", self.rejected, get_args(Rejected))
        word("statistic", self.statistic, get_args(Statistic))
        if self.numerator is not None:
            word("numerator", self.numerator, get_args(Numerator))


Corrections = Correction | Sequence[Correction]
"""One correction, or several: weights multiply, and what one rejects is rejected."""


def exp(log_ratio: Tensor, clamp: Exponent = UNCLAMPED_BELOW) -> Tensor:
    """The ratio of a log-ratio, differentiable: value exp(clamp(x)), gradient exp(clamp(x)) dx also where clamped.

    Unclipped means unclipped: the clamp keeps the value finite and does not switch the gradient off.
    """
    value = bounded(log_ratio, clamp)
    still = log_ratio.detach()
    return value * (1 + (log_ratio - still))


def bounded(log_ratio: Tensor, clamp: Exponent = UNCLAMPED_BELOW) -> Tensor:
    """exp of a clamped log-ratio, detached. clamp: (lower, upper) bound of the exponent, None for no lower one."""
    return log_ratio.detach().clamp(*clamp).exp()


def tis(
    high: float = 2.0,
    low: float = 0.0,
    *,
    level: Level = "token",
    unit: Unit = "rollout",
    numerator: Numerator | None = None,
) -> Correction:
    """Truncated importance sampling: sg[clamp(w, low, high)] (Yao et al. 2025; IMPALA's c, arXiv 1802.01561)."""
    pair("tis: low, high", (low, high), ordered=True)
    number("tis: high", high, above=True)

    def rule(log_ratio: Tensor) -> Rule:
        return Rule(bounded(log_ratio).clamp(low, high), torch.ones_like(log_ratio, dtype=torch.bool))

    return Correction(name="tis", rule=rule, level=level, unit=unit, numerator=numerator, rejected="keep")


def mis(
    low: float,
    high: float,
    *,
    level: Level = "token",
    unit: Unit = "rollout",
    numerator: Numerator | None = None,
    rejected: Rejected = "keep",
) -> Correction:
    """Masked importance sampling: sg[w 1(low <= w <= high)]."""
    return _masked("mis", low, high, "ratio", level=level, unit=unit, numerator=numerator, rejected=rejected)


def icepop(
    low: float,
    high: float,
    *,
    inside: Inside = "ratio",
    level: Level = "token",
    unit: Unit = "rollout",
    numerator: Numerator | None = None,
    rejected: Rejected = "keep",
) -> Correction:
    """IcePop: 0 outside [low, high]; inside it the ratio, or 1 (Ling team 2025; verl and the reference use 1)."""
    word("inside", inside, get_args(Inside))
    return _masked("icepop", low, high, inside, level=level, unit=unit, numerator=numerator, rejected=rejected)


def within(
    high: float,
    *,
    statistic: Literal["k2", "k3"] = "k3",
    level: Level = "token",
    unit: Unit = "rollout",
    numerator: Numerator | None = None,
    rejected: Rejected = "keep",
) -> Correction:
    """A gate: 1 where a divergence estimate of the action, or its sum or mean over the unit, is at most `high`, else 0.

    k2 = x^2/2, k3 = e^x - 1 - x for x = log of the ratio.
    """
    number("within: high", high)
    word("statistic", statistic, ("k2", "k3"))

    def rule(value: Tensor) -> Rule:
        kept = ~(value > high)
        return Rule(kept.to(value.dtype), kept)

    return Correction(
        name="within",
        rule=rule,
        level=level,
        unit=unit,
        numerator=numerator,
        rejected=rejected,
        statistic=statistic,
    )


def _masked(
    name: str,
    low: float,
    high: float,
    inside: Inside,
    *,
    level: Level,
    unit: Unit,
    numerator: Numerator | None,
    rejected: Rejected,
) -> Correction:
    pair(f"{name}: low, high", (low, high), ordered=True)

    def rule(log_ratio: Tensor) -> Rule:
        ratio, whole = bounded(log_ratio), log_ratio.detach().exp()  # a bound may lie above what a weight is clamped to
        kept = ~((whole < low) | (whole > high))
        return Rule(torch.where(kept, ratio if inside == "ratio" else torch.ones_like(ratio), 0), kept)

    return Correction(name=name, rule=rule, level=level, unit=unit, numerator=numerator, rejected=rejected)


def at_level(log_ratio: Tensor, batch: TokenBatch, active: Tensor, *, level: Level, unit: Unit) -> Tensor:
    """Log-ratios [A] -> the log-ratio of the level that each action belongs to [A]; only `active` actions count.

    One of minus infinity makes that of its unit so. Raises `ValueError` where `with_counts` has seen that segments of
    a rollout lie in another batch: the ratio of the part is not that of the whole.
    """
    if level == "token":
        return log_ratio
    if unit == "rollout" and batch.counts is not None and batch.counts.cut:
        raise ValueError(
            f"a {level} ratio over a rollout: wanted all its segments in one batch, got a step that is cut within "
            "rollouts; cut it between them, or say unit='segment'"
        )
    index = unit_of_row(batch, unit)[batch.sequence]
    total = sum_by(torch.where(active, log_ratio, 0), index, batch.rows)
    if level == "geometric":
        total = total / sum_by(active.to(log_ratio.dtype), index, batch.rows).clamp(min=1)
    return total[index]


class Corrected(NamedTuple):
    """weight [A] detached; kept [A]; stays [A]: False where a rejected action leaves the denominator."""

    weight: Tensor
    kept: Tensor
    stays: Tensor
    metrics: Metrics


def correct(
    correction: Corrections | None,
    batch: TokenBatch,
    logprobs: Tensor,
    recorded: Tensor,
    known: Tensor | None = None,
    *,
    default: Numerator,
) -> Corrected:
    """The weight of each action.

    logprobs [A]: the live trainer's, -inf kept. recorded [A]: where there is a log-prob to divide by: a sequence's
    ratio is of all of these, whatever else one lacks. known [A]: those that the objective can use, which are reported;
    all, when left out.
    """
    known = recorded if known is None else known
    weight, kept = torch.ones_like(logprobs.detach()), torch.ones_like(known)
    stays = torch.ones_like(known)
    metrics: Metrics = {}
    for part in each(correction):
        log_ratio, there = correction_log_ratio(part, batch, logprobs, recorded, default=default)
        value = statistic_of(log_ratio, part.statistic)
        value = at_level(value, batch, there, level=part.level, unit=part.unit)
        done = part.rule(value)
        weight, kept = weight * done.weight, kept & done.kept
        if part.rejected == "leave":
            stays = stays & done.kept
        metrics |= _metrics(_free(part.name, metrics), value, done, known & there)
    return Corrected(weight, kept, stays, metrics)


def correction_log_ratio(
    part: Correction, batch: TokenBatch, logprobs: Tensor, recorded: Tensor, *, default: Numerator
) -> tuple[Tensor, Tensor]:
    """(log of numerator/q [A], detached; where there is one [A]). -inf where the numerator is 0; 0 without a ratio."""
    above = logprobs.detach()
    if (part.numerator or default) == "anchor":
        if batch.anchor_logprobs is None:
            raise UnsupportedRecordError(
                f"{part.name}: its numerator is the anchor and batch.anchor_logprobs is not set; "
                "set it, or say numerator='live'"
            )
        above = batch.anchor_logprobs.to(logprobs.dtype)
        recorded = recorded & (above < torch.inf)
    below = batch.behavior_logprobs.to(logprobs.dtype)
    return torch.where(recorded, above, 0) - torch.where(recorded, below, 0), recorded


def each(correction: Corrections | None) -> Sequence[Correction]:
    """None, one, or several, as a sequence. Raises `TypeError` for anything else."""
    if correction is None:
        return ()
    several: Any = (correction,) if isinstance(correction, Correction) else correction
    if not isinstance(several, list | tuple) or not all(isinstance(one, Correction) for one in several):
        raise TypeError(f"correction: wanted one as tis(2.0), or several of them in a tuple, got {correction!r}")
    return several


def alone(name: str, got: Any) -> None:
    """Raise `TypeError` unless it is one correction."""
    if not isinstance(got, Correction):
        raise TypeError(f"{name}: wanted one correction, as tis(2.0), got {got!r}")


def _free(name: str, taken: Metrics) -> str:
    """The name of a correction in the metrics: `tis`, and `tis_2` for a second of the kind."""
    names = (name if at == 1 else f"{name}_{at}" for at in count(1))
    return next(free for free in names if f"{free}/mean" not in taken)


def statistic_of(log_ratio: Tensor, statistic: Statistic) -> Tensor:
    """What a rule is given of a log-ratio: itself, or a divergence estimate of it."""
    if statistic == "k2":
        return log_ratio.square() / 2
    if statistic == "k3":
        return log_ratio.detach().exp() - 1 - log_ratio
    return log_ratio


def _metrics(name: str, value: Tensor, done: Rule, active: Tensor) -> Metrics:
    raw, weight = bounded(value), done.weight
    changed = active & done.kept & (weight != raw)
    squares = torch.where(active, weight.square(), 0).sum()
    total = torch.where(active, weight, 0).sum()
    number = active.sum().clamp(min=1)
    return {
        f"{name}/mean": total / number,
        f"{name}/max_before": torch.where(active, raw, 0).max() if raw.numel() else raw.sum(),
        f"{name}/changed": changed.sum(),
        f"{name}/rejected": (active & ~done.kept).sum(),
        f"{name}/overflow": (active & (value > EXPONENT)).sum(),
        f"{name}/effective_share": total.square() / torch.where(squares > 0, number * squares, 1),
    }


def rule_metrics(weight: Tensor, advantages: Tensor, active: Tensor) -> Metrics:
    """E_q[w^2], the order-two Renyi moment, and E_q[w^2 A^2] beside it. All [A] -> []."""
    number = active.sum().clamp(min=1)
    squares = torch.where(active, weight.square(), 0)
    return {"w2": squares.sum() / number, "w2_a2": (squares * advantages.square()).sum() / number}
