"""One rollout again: regenerated from (checkpoint, sample, key) under its recorded samplers, and compared to the token.

What the rollout observed (prompts, tool output) is fed back as recorded; only what it drew is drawn again. A rollout
without a key cannot be drawn again: its tokens are scored instead, teacher-forced.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rollstore.errors import NotFoundError, UnsupportedRecordError
from rollstore.replay import noise
from rollstore.replay.compare import LEAST_TOLERANCE, Comparison, compare
from rollstore.replay.conditions import Condition, conditions, differing, explanations, noise_at, sampler_at
from rollstore.replay.difference import Odds, judge, plain, shared_noise_gap
from rollstore.replay.regenerate import cut, drawn_runs, regenerate
from rollstore.schema import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Gets(Protocol):
    """What a replay needs of a store."""

    def get(self, rollout_id: str) -> list[Rollout]: ...


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A rollout without a key, scored teacher-forced under its recorded samplers."""

    rollout_id: str
    segment: int
    actions: int
    outside: int
    """Actions that the model's own filters would not have kept."""
    max_difference: float | None
    """Largest |log-prob now - recorded|, in nats; None without recorded log-probs."""
    mean_difference: float | None
    k3: float | None
    """Mean of r - 1 - ln r over r = now / recorded: an estimate of KL(recorded || now)."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came of replaying a rollout."""

    rollout_id: str
    keyed: bool
    identical: bool
    """Every drawn token came out the same. False for a rollout without a key: see `checked`."""
    draws: int
    """Tokens drawn again."""
    segments: tuple[Comparison, ...]
    """Recorded run against replay, up to the first segment that differs."""
    checked: tuple[Checked, ...]
    """Segments without a key."""
    max_logprob_difference: float | None
    """Largest |log-prob now - recorded| over the actions whose tokens agree, in nats; None where none can be compared.
    """
    tolerance: float
    """What rounding may make of it: the tolerance that was given, else the least one of a near tie."""
    same_distribution: bool | None
    """Whether no log-prob differs by more than the tolerance. None where a segment's log-probs cannot be compared and
    none differs: the same tokens alone do not tell."""
    differ: tuple[Condition, ...]
    """What is known to differ between the recorded run (a) and the replay (b), up to the first token that differs."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        return {
            "rollout_id": self.rollout_id,
            "keyed": self.keyed,
            "identical": self.identical,
            "draws": self.draws,
            "same_distribution": self.same_distribution,
            "max_logprob_difference": plain(self.max_logprob_difference),
            "tolerance": self.tolerance,
            "differ": plain([asdict(one) for one in self.differ]),
            "segments": [segment.to_dict() for segment in self.segments],
            "checked": [plain({name: getattr(one, name) for name in one.__dataclass_fields__}) for one in self.checked],
        }

    def lines(self) -> list[str]:
        """The report for a person; a is the recorded run, b the replay."""
        if self.identical:
            return self._identical()
        out = [line for segment in self.segments if segment.first is not None for line in segment.lines()]
        for one in self.checked:
            outside = f", {one.outside} outside the model's support" if one.outside else ""
            out.append(
                f"{one.rollout_id} segment {one.segment}: not keyed, scored instead: {one.actions} actions{outside}"
            )
            if one.max_difference is not None:
                means = f"mean {one.mean_difference:.3g}, k3 {one.k3:.3g}"
                out.append(f"  |log-prob - recorded| at most {one.max_difference:.3g}, {means}")
        return out

    def _identical(self) -> list[str]:
        """The same tokens, and whatever says that they were not drawn from the same distribution."""
        if self.same_distribution is False:
            out = [
                f"{self.rollout_id}: identical tokens, but log-probs differ by up to "
                f"{self.max_logprob_difference:.3g}: not the recorded distribution "
                f"({self.draws} drawn again, tolerance {self.tolerance:.3g})"
            ]
        else:
            out = [f"{self.rollout_id}: identical: {self.draws} tokens drawn again, every one the same"]
        for one in self.segments:
            if one.max_logprob_difference is None:
                out.append(f"  segment {one.segment}: log-probs {one.logprobs} (a: recorded, b: now)")
        out.extend(f"  {one.name} differs: recorded {one.a}, now {one.b}" for one in self.differ)
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines())


def replay(
    store: Gets,
    rollout_id: str,
    model: PreTrainedModel,
    *,
    segment: int | None = None,
    reference: PreTrainedModel | None = None,
    weight_version: int | None = None,
    rows: int | None = None,
    tolerance: float | None = None,
) -> Replayed:
    """Regenerates a stored rollout with `model` and says where it comes apart from the record, if it does.

    `reference` is a model with the recorded weights: it gives the margins of the recorded run where its head does not
    hold both candidates. `weight_version` is that of `model`, None = unknown. `rows` pads each forward pass to that
    many rows, to repeat a recorded batch shape. `tolerance`: see `compare`; it is also what the
    log-probs of tokens that agree may differ by, 0.001 unless given.

    Raises NotFoundError for an unknown id or segment, UnsupportedRecordError where a sampler cannot be honoured or a
    noise recipe is not the one known here.
    """
    recorded = store.get(rollout_id)
    if segment is not None:
        recorded = [one for one in recorded if one.segment == segment]
        if not recorded:
            raise NotFoundError(f"rollout {rollout_id!r}: wanted segment {segment}, the store has no such segment")
    found: list[Comparison] = []
    checked: list[Checked] = []
    differ: list[Condition] = []
    draws = 0
    for one in recorded:
        if not one.action_mask.any():
            continue
        if not is_keyed(one):
            checked.append(_check(one, model))
            continue
        again = regenerate(one, model, weight_version=weight_version, rows=rows)
        draws += int(again.action_mask.sum())
        comparison = compare(cut(one, len(again.tokens)), again, tolerance=tolerance)
        differ.extend(differing(cut(one, len(again.tokens)), again))
        if comparison.first is not None:
            comparison = _weigh(comparison, one, again, model, reference)
        found.append(comparison)
        if comparison.first is not None:
            break
    most = LEAST_TOLERANCE if tolerance is None else tolerance
    known = [one.max_logprob_difference for one in found if one.max_logprob_difference is not None]
    largest = max(known, default=None)
    within = True if found and len(known) == len(found) else None
    return Replayed(
        rollout_id=rollout_id,
        keyed=bool(found) and not checked,
        identical=not checked and all(one.first is None for one in found),
        draws=draws,
        segments=tuple(found),
        checked=tuple(checked),
        max_logprob_difference=largest,
        tolerance=most,
        same_distribution=False if largest is not None and largest > most else within,
        differ=tuple(dict.fromkeys(differ)),
    )


def is_keyed(rollout: Rollout) -> bool:
    """Whether every draw of the segment has a key. Raises UnsupportedRecordError for a recipe not known here."""
    keyed = all(noise_at(rollout, start) is not None for start, _ in drawn_runs(rollout))
    if keyed and rollout.noise != noise.RECIPE:
        raise UnsupportedRecordError(
            f"rollout {rollout.rollout_id!r}: noise: wanted {noise.RECIPE}, got {rollout.noise or 'none'}"
        )
    return keyed


def _weigh(
    comparison: Comparison, recorded: Rollout, again: Rollout, model: PreTrainedModel, reference: PreTrainedModel | None
) -> Comparison:
    """The first difference with both candidates' log-probs from forward passes over the tokens before it."""
    first = comparison.first
    if first is None or first.action is None or first.token_a is None or first.token_b is None:
        return comparison
    candidates = (first.token_a, first.token_b)
    before = first.a if reference is None else _odds(reference, recorded, first.position, candidates)
    weighed = judge(
        segment=first.segment,
        position=first.position,
        action=first.action,
        token_a=first.token_a,
        token_b=first.token_b,
        a=before,
        b=_odds(model, recorded, first.position, candidates),
        noise_gap=shared_noise_gap(recorded, again, first.position, *candidates),
        tolerance=first.tolerance,
    )
    found = conditions(recorded, again, first.position, first.action)
    return replace(
        comparison,
        verdict=weighed.verdict,
        first=weighed,
        explanations=explanations(found, weighed.verdict, contradicted=weighed.contradicted),
    )


def _odds(model: PreTrainedModel, rollout: Rollout, position: int, candidates: tuple[int, int]) -> Odds:
    from rollstore.replay.score import next_logprobs

    logprobs = next_logprobs(model, rollout.tokens[:position], sampler_at(rollout, position))
    return Odds(logprob_a=float(logprobs[candidates[0]]), logprob_b=float(logprobs[candidates[1]]), source="model")


def _check(rollout: Rollout, model: PreTrainedModel) -> Checked:
    from rollstore.replay.score import score_rollouts

    now = score_rollouts(model, [rollout])[0][0].astype(np.float64)
    finite = np.isfinite(now)
    outside = int((~finite).sum())
    differences = ratios = np.zeros(0)
    if rollout.logprobs is not None:
        both = finite & rollout.logprobs.known & np.isfinite(rollout.logprobs.values)
        delta = now[both] - rollout.logprobs.values[both].astype(np.float64)
        differences, ratios = np.abs(delta), np.expm1(delta) - delta
    measured = len(differences) > 0
    return Checked(
        rollout_id=rollout.rollout_id,
        segment=rollout.segment,
        actions=len(now),
        outside=outside,
        max_difference=float(differences.max()) if measured else None,
        mean_difference=float(differences.mean()) if measured else None,
        k3=float(ratios.mean()) if measured else None,
    )
