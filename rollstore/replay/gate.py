"""Numerical CI: a fixed set of sequences scored by trainer and engine after every change of either.

What it holds against each other, all from one set of weights:

* engine: the engine's scores of the sequences against the trainer's;
* draws: the log-probs that the engine recorded for tokens it drew against the trainer's, teacher-forced;
* cache, batch, layout: the trainer's prefill against its cached decode, a batch of one against one of all, one process
  against two that each hold half of every product;
* gradients: those of the trainer against a reference.

A forward that agrees proves nothing about gradients: only the last does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollstore.replay.cases import Case
from rollstore.replay.cause import cause_of_dtype, cause_of_kind
from rollstore.replay.conditions import sampler_at
from rollstore.replay.limits import DEFAULT, Limits
from rollstore.replay.ratio import summarise
from rollstore.replay.verdict import Check, Gate, new_gate_id
from rollstore.schema import Engine, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Scorer = Callable[[Sequence[NDArray[Any]]], Sequence[NDArray[np.float32]]]
"""Raw log-probs [T - 1] of each sequence's tokens but the first, all sequences handed over at once."""

DECODED = 16
"""Tokens at the end of each sequence that the cache check decodes one by one."""


def gate(
    model: PreTrainedModel,
    cases: Sequence[Case],
    *,
    engine: Engine,
    scorer: Scorer | None = None,
    drawn: Sequence[Rollout] = (),
    limits: dict[str, Limits] | None = None,
    checkpoint: str | None = None,
    reference: PreTrainedModel | None = None,
    weight_version: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Gate:
    """Runs every check that it was given the means for; see the module.

    `model` is the trainer's. `engine` says what is being checked (its name, version and numerics make the
    fingerprint), `scorer` asks it for scores; without one the trainer alone is checked. `drawn` are rollouts that the
    engine recorded under the same weights. `checkpoint`, the folder of the same weights, lets two processes load them;
    `reference`, the same weights in another arithmetic, gives the gradients. Of `limits` a missing section has
    `limits.DEFAULT`.

    Raises ValueError without cases, UnsupportedRecordError for a sampler of `drawn` that cannot be honoured.
    """
    if not cases:
        raise ValueError("cases: wanted at least one sequence, got none")
    run = _Run(model, cases, engine, limits or {})
    work: list[Callable[[], None]] = [run.batch, run.cache]
    if scorer is not None:
        work.append(lambda: run.engine(scorer))
    if drawn:
        work.append(lambda: run.draws(drawn))
    if checkpoint is not None:
        work.append(lambda: run.layout(checkpoint))
    if reference is not None:
        work.append(lambda: run.gradients(reference))
    for number, one in enumerate(work):
        progress(number, len(work))
        one()
    progress(len(work), len(work))
    return Gate(
        gate_id=new_gate_id(engine),
        engine=engine,
        weight_version=weight_version,
        checks=tuple(run.checks),
        gradients_checked=reference is not None,
        skipped=dict(run.skipped),
    )


def _unchecked(rollout: Rollout) -> str | None:
    """Why the recorded log-probs of a rollout cannot be held against the trainer's; None where they can."""
    kind = rollout.logprob_kind
    if not rollout.action_mask.any():
        return "no action"
    if rollout.logprobs is None or not rollout.logprobs.known.any():
        return "no log-probs"
    if kind not in ("behavior", "tempered", "raw"):
        return "log-probs of no known kind"
    sampler = sampler_at(rollout, int(np.flatnonzero(rollout.action_mask)[0]))
    if kind != "raw" and sampler is not None and sampler.temperature == 0:
        return "drawn at temperature 0, which has no behavior log-probs"
    return None


def _nan(side: str, values: NDArray[np.float32]) -> str:
    bad = np.flatnonzero(np.isnan(values))
    return f"the {side} returned NaN: {len(bad)} of {len(values)} log-probs, the first at {int(bad[0])}"


class _Run:
    """The trainer's own scores, each sequence alone, and what was held against them."""

    def __init__(
        self, model: PreTrainedModel, cases: Sequence[Case], engine: Engine, limits: dict[str, Limits]
    ) -> None:
        from rollstore.replay.score import token_logprobs

        self.model, self.cases, self.fingerprint, self.limits = model, cases, engine, limits
        self.sequences = [case.tokens for case in cases]
        self.score = token_logprobs
        self.alone = [token_logprobs(model, [one])[0] for one in self.sequences]
        self.checks: list[Check] = []
        self.skipped: Counter[str] = Counter()

    def batch(self) -> None:
        self._against("batch", self.score(self.model, self.sequences), "the trainer's numbers depend on the batch")

    def cache(self) -> None:
        from rollstore.replay.samplers.transformers import decoded_logprobs

        for case, alone in zip(self.cases, self.alone, strict=True):
            count = min(DECODED, len(alone))
            found = decoded_logprobs(self.model, case.tokens, count)
            self._check(
                "cache", case.name, alone[-count:], found, "the trainer's cached decode rounds unlike its prefill"
            )

    def engine(self, scorer: Scorer) -> None:
        found = [np.asarray(one, dtype=np.float32) for one in scorer(self.sequences)]
        wrong = [
            case.name for case, one, own in zip(self.cases, found, self.alone, strict=True) if one.shape != own.shape
        ]
        if wrong:
            raise ValueError(f"scorer: wanted one log-prob for each token but the first, got others for {wrong[0]!r}")
        everything = summarise(np.concatenate(self.alone), np.concatenate(found))
        start = len(self.checks)
        self._against("engine", found, None)
        sound = everything is not None and np.isfinite(everything.mean_abs)
        if everything is not None and sound and not all(check.passed for check in self.checks[start:]):
            cause = cause_of_dtype(self.model, self.sequences, self.alone, everything.mean_abs)
            self._name(start, cause or "neither a narrower dtype: weights, tokens or attention differ")

    def draws(self, drawn: Sequence[Rollout]) -> None:
        from rollstore.replay.score import score_rollouts

        start = len(self.checks)
        by_kind: dict[str, list[Rollout]] = {}
        for rollout in drawn:
            why = _unchecked(rollout)
            if why is None:
                by_kind.setdefault(str(rollout.logprob_kind), []).append(rollout)
            else:
                self.skipped[why] += 1
        for kind, rollouts in by_kind.items():
            now: list[NDArray[np.float32]] = []
            then: list[NDArray[np.float32]] = []
            outside = 0
            for rollout in rollouts:
                found = score_rollouts(self.model, [rollout], kind=kind)[0][0]
                recorded = rollout.logprobs
                if recorded is None:
                    continue
                known = recorded.known & (np.isfinite(recorded.values) | np.isnan(recorded.values))
                outside += int(np.count_nonzero(known & np.isneginf(found)))
                known = known & ~np.isneginf(found)
                now.append(found[known])
                then.append(recorded.values[known].astype(np.float32))
            self._check("draws", kind, np.concatenate(now), np.concatenate(then), None, outside=outside)
            check = self.checks[-1]
            if not check.passed and check.n and check.cause is None:
                cause = cause_of_kind(self.model, rollouts, kind)
                if cause is None and check.mean_abs is not None:
                    whole = [np.asarray(rollout.tokens, dtype=np.int64) for rollout in rollouts]
                    own = [self.score(self.model, [one])[0] for one in whole]
                    cause = cause_of_dtype(self.model, whole, own, check.mean_abs)
                self._name(start, cause or "neither another kind nor a narrower dtype: weights or tokens differ")
        if not by_kind:
            self.checks.append(
                Check(
                    section="draws",
                    case="recorded",
                    passed=False,
                    why=("nothing compared: no log-probs of a known kind",),
                    n=0,
                )
            )

    def layout(self, checkpoint: str) -> None:
        from rollstore.replay import layout

        found = layout.scores(checkpoint, self.sequences, dtype=str(self.model.dtype).removeprefix("torch."))
        self._against("layout", found, "a product split over two processes rounds otherwise")

    def gradients(self, reference: PreTrainedModel) -> None:
        from rollstore.replay.gradients import compare_gradients

        short = [case.tokens[:64] for case in self.cases if len(case.tokens) <= 128]
        found = compare_gradients(self.model, reference, short or [case.tokens[:64] for case in self.cases])
        why = self._limits("gradients").exceeded(bitwise=found.bitwise, relative=found.relative)
        self.checks.append(
            Check(
                section="gradients",
                case=f"against {str(reference.dtype).removeprefix('torch.')}",
                passed=not why,
                why=tuple(why),
                n=sum(len(one) - 1 for one in short),
                bitwise=found.bitwise,
                relative=found.relative,
                cause=f"worst in {found.worst}: {found.worst_relative:.3g}; cosine {found.cosine:.6f}" if why else None,
            )
        )

    def _limits(self, section: str) -> Limits:
        return self.limits.get(section, DEFAULT)

    def _against(self, section: str, found: Sequence[NDArray[np.float32]], cause: str | None) -> None:
        for case, own, other in zip(self.cases, self.alone, found, strict=True):
            self._check(section, case.name, own, other, cause)

    def _check(
        self,
        section: str,
        case: str,
        trainer: NDArray[np.float32],
        other: NDArray[np.float32],
        cause: str | None,
        *,
        outside: int = 0,
    ) -> None:
        # -inf on both sides is no difference; on one side it is an infinite one.
        same = trainer == other
        p, q = trainer[~same].astype(np.float64), other[~same].astype(np.float64)
        sound = bool(np.isfinite(p).all() and np.isfinite(q).all())
        zero = np.zeros(int(same.sum()))
        summary = summarise(np.concatenate([p, zero]), np.concatenate([q, zero])) if sound else None
        infinite = None if len(trainer) == 0 else np.inf
        sizes = {
            "k3": infinite if summary is None else summary.k3,
            "mean_abs": infinite if summary is None else summary.mean_abs,
            "max_abs": infinite if summary is None else max(-summary.least, summary.most),
        }
        bitwise = trainer.tobytes() == other.tobytes()
        why = self._limits(section).exceeded(bitwise=bitwise, **sizes)
        if len(trainer) == 0:
            why.insert(0, "nothing compared")
        for side, values in (("trainer", trainer), ("engine" if cause is None else "other forward", other)):
            if np.isnan(values).any():
                cause = f"{_nan(side, values)} of {section}: {case}"
                why.append(f"NaN from the {side}")
        if outside:
            why.append(f"{outside} tokens outside the trainer's support")
        self.checks.append(
            Check(
                section=section,
                case=case,
                passed=not why,
                why=tuple(why),
                n=len(trainer),
                bitwise=bitwise,
                cause=cause if why else None,
                **sizes,
            )
        )

    def _name(self, start: int, cause: str) -> None:
        """Give the failed checks since `start` that have no cause theirs."""
        from dataclasses import replace

        for index in range(start, len(self.checks)):
            if not self.checks[index].passed and self.checks[index].cause is None:
                self.checks[index] = replace(self.checks[index], cause=cause)
