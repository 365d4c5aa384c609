"""One position where two runs differ: the odds of both candidates in both runs, and whether rounding can explain it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollstore.replay import noise
from rollstore.replay.conditions import NEUTRAL, honoured, noise_at, sampler_at, span_at
from rollstore.schema import Known, Rollout, Sampler


@dataclass(frozen=True, kw_only=True)
class Odds:
    """What one run gave the two candidates, before the noise. Nats; None = not recorded."""

    logprob_a: float | None
    logprob_b: float | None
    ceiling: float | None = None
    """A candidate that is not recorded lies at or below this: the last log-prob of the recorded head."""
    source: str
    """`recorded`, or `model` where a forward pass over the same tokens was made."""
    kind: str | None = "behavior"
    """Of the log-probs: behavior, tempered, raw; None = not named."""
    scale: float | None = 1.0
    """Times which the margin is one of the processed logits, to which the noise was added. None: not known."""

    def noised_bounds(self, gap: float) -> tuple[float, float]:
        """The least and the most the margin can be with noise that favours a by `gap`."""
        if self.scale is None:
            return -math.inf, math.inf
        low, high = self.margin_bounds
        return low * self.scale - gap, high * self.scale - gap

    def noised(self, gap: float | None) -> float | None:
        """The margin with noise; None where it is not known."""
        low, high = (-math.inf, math.inf) if gap is None else self.noised_bounds(gap)
        return low if low == high else None

    @property
    def margin(self) -> float | None:
        """By how much the run prefers b over a, without noise."""
        low, high = self.margin_bounds
        return low if low == high else None

    @property
    def margin_bounds(self) -> tuple[float, float]:
        """The least and the most the margin can be from what is recorded; equal where it is known."""
        a, b, most = self.logprob_a, self.logprob_b, self.ceiling
        if a is not None and b is not None and not a == b == -math.inf:
            return b - a, b - a
        if a is not None and b is None and most is not None:
            return -math.inf, most - a
        if b is not None and a is None and most is not None:
            return b - most, math.inf
        return -math.inf, math.inf


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first position where two runs differ. Margins say by how much a run prefers b over a: a's own draw has it
    negative with noise, b's positive."""

    segment: int
    position: int
    action: int | None
    """Index among the actions of a (of b where only b drew here); None where the token was not drawn here."""
    token_a: int | None
    """None: run a ended here."""
    token_b: int | None
    a: Odds
    b: Odds
    noise_gap: float | None
    """Noise of a minus noise of b: what b had to make up for. None where the draws share no noise."""
    margin_a: float | None
    margin_b: float | None
    noised_margin_a: float | None
    noised_margin_b: float | None
    gap: float | None
    """How far from a tie the two runs are at least: the wider margin, with noise where it drew, else without."""
    tolerance: float
    verdict: str
    """`near_tie`, `real`, `unknown`, or `different_input` where the token was not drawn."""
    contradicted: bool
    """The noise does not pick a recorded token from the behavior log-probs, so something else drew it."""
    action_b: int | None = None
    """Index among the actions of b; None where b did not draw here."""


def judge(
    *,
    segment: int,
    position: int,
    action: int,
    token_a: int,
    token_b: int,
    a: Odds,
    b: Odds,
    noise_gap: float | None,
    tolerance: float,
    action_b: int | None = None,
) -> Difference:
    """The verdict on two drawn tokens that differ.

    Under shared noise a flip can be rounding only where the noised margin is small in both runs; without it, where the
    plain margin is. Where noise and behavior log-probs contradict a recorded draw, the noise did not draw it, and the
    plain margin decides. Log-probs of another kind contradict nothing: what drew had other numbers.
    """
    bounds = (a.margin_bounds, b.margin_bounds)
    noised = bounds if noise_gap is None else (a.noised_bounds(noise_gap), b.noised_bounds(noise_gap))
    # a drew a, so its noised margin is at most 0; b drew b, so its is at least 0.
    wrong = (a.kind == "behavior" and noised[0][0] > tolerance, b.kind == "behavior" and noised[1][1] < -tolerance)
    contradicted = noise_gap is not None and any(wrong)
    decisive = bounds if contradicted else noised
    # How far from a tie each run is at least.
    gap = max(max(low, -high, 0.0) for low, high in decisive)
    # Rounding moves both runs, so one known margin that is small and none that is large is a near tie.
    known = any(low == high for low, high in decisive)
    verdict = "real" if gap > tolerance else "near_tie" if known else "unknown"
    margins = (a.margin, b.margin)
    return Difference(
        segment=segment,
        position=position,
        action=action,
        action_b=action if action_b is None else action_b,
        token_a=token_a,
        token_b=token_b,
        a=a,
        b=b,
        noise_gap=noise_gap,
        margin_a=margins[0],
        margin_b=margins[1],
        noised_margin_a=a.noised(noise_gap),
        noised_margin_b=b.noised(noise_gap),
        gap=gap if known or gap > 0 else None,
        tolerance=tolerance,
        verdict=verdict,
        contradicted=contradicted,
    )


def shared_noise_gap(a: Rollout, b: Rollout, position: int, token_a: int, token_b: int) -> float | None:
    """Noise of token_a minus noise of token_b, when both runs drew with the same noise by the recipe known here."""
    keyed = noise_at(a, position)
    if keyed is None or keyed != noise_at(b, position) or (a.noise, b.noise) != (noise.RECIPE, noise.RECIPE):
        return None
    pair = noise.gumbel_at(
        key=keyed[0],
        sample=keyed[1],
        segment=a.segment,
        positions=position,
        tokens=np.array([[token_a, token_b]]),
    )[0]
    return float(pair[0]) - float(pair[1])


def recorded_odds(run: Rollout, action: int, position: int, token_a: int, token_b: int) -> Odds:
    """The two candidates' log-probs as the run recorded them: its own draw's, and what its head holds."""
    head = _head(run, action)
    found: list[float | None] = []
    for token in (token_a, token_b):
        if head is not None and token in head[0]:
            found.append(head[0][token])
        elif token == int(run.tokens[position]) and _kinds_agree(run, position):
            found.append(_logprob(run, action))
        else:
            # A head shorter than was asked for holds the whole support.
            found.append(-math.inf if head is not None and head[1] else None)
    ceiling = min(head[0].values()) if head is not None else None
    kind = _kind(run, "logprob_kind" if head is None else "head_kind", position)
    return Odds(
        logprob_a=found[0],
        logprob_b=found[1],
        ceiling=ceiling,
        source="recorded",
        kind=kind,
        scale=_scale(kind, sampler_at(run, position)),
    )


def _scale(kind: str | None, sampler: Sampler | None) -> float | None:
    """Times which a margin of such log-probs is one of the processed logits; None where more than a temperature, or
    what is not known, lies between."""
    if kind == "behavior":
        return 1.0
    if kind not in ("raw", "tempered") or sampler is None or not honoured(sampler) or not sampler.temperature:
        return None
    if any(getattr(sampler, name) not in neutral for name, neutral in NEUTRAL.items()) or sampler.extra:
        return None
    return 1.0 / sampler.temperature if kind == "raw" else 1.0


def _head(run: Rollout, action: int) -> tuple[dict[int, float], bool] | None:
    """(token -> log-prob, whether it is the whole support) of one action."""
    heads = run.heads
    if heads is None or heads.tokens is None or heads.logprobs is None:
        return None
    if heads.counts is not None:
        start, count = int(heads.counts[:action].sum()), int(heads.counts[action])
    else:
        count = heads.size or 0
        start = action * count
    if count == 0:
        return None
    ids, values = heads.tokens[start : start + count].tolist(), heads.logprobs[start : start + count].tolist()
    return dict(zip(ids, values, strict=True)), heads.size is not None and count < heads.size


def _kinds_agree(run: Rollout, position: int) -> bool:
    return run.heads is None or _kind(run, "logprob_kind", position) == _kind(run, "head_kind", position)


def _kind(run: Rollout, name: str, position: int) -> str | None:
    span = span_at(run, position)
    own = None if span is None else getattr(span, name)
    return getattr(run, name) if own is None else own


def _logprob(run: Rollout, action: int) -> float | None:
    column: Known | None = run.logprobs
    if column is None or not column.known[action]:
        return None
    return float(column.values[action])


def difference_lines(first: Difference) -> list[str]:
    """The report on a difference for a person."""
    out = [f"  first difference at token {first.position}: {first.token_a} in a, {first.token_b} in b"]
    if first.action is None:
        return out
    for name, odds in (("a", first.a), ("b", first.b)):
        noised = "" if first.noise_gap is None else f", with noise {_margin(odds.noised_bounds(first.noise_gap))}"
        out.append(
            f"  in {name} ({odds.source}): log-probs {number_text(odds.logprob_a)} and {number_text(odds.logprob_b)}: "
            f"b over a {_margin(odds.margin_bounds)}{noised}"
        )
    if first.noise_gap is not None:
        out.append(f"  noise gap {first.noise_gap:.4g} in favour of a")
    return [*out, f"  gap {number_text(first.gap)}, tolerance {first.tolerance:.3g}"]


def plain(value: Any) -> Any:
    """Nested records as JSON can hold them, infinities as strings."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def number_text(value: float | None) -> str:
    """A log-prob or a gap for a person."""
    return "unknown" if value is None else f"{value:.4g}"


def margin_text(bounds: tuple[float, float]) -> str | None:
    """What is known of a margin, for a person; None where nothing is."""
    low, high = bounds
    if low == high:
        return f"{low:.4g}"
    if math.isfinite(high):
        return f"at most {high:.4g}"
    return f"at least {low:.4g}" if math.isfinite(low) else None


def _margin(bounds: tuple[float, float]) -> str:
    return f"by {margin_text(bounds) or 'an unknown margin'}"
