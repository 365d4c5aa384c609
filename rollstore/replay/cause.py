"""Why an engine's log-probs are not the trainer's: the wrong kind of number, a narrower dtype, or neither."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollstore.replay.ratio import summarise
from rollstore.schema import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FITS = 0.1
"""Another kind is the cause where it leaves less than this share of the mean difference."""
ALIKE = (0.25, 4.0)
"""A dtype is the cause where it moves the trainer's own numbers by as much, within these factors."""
NARROW = ("bfloat16", "float16")

HINTS = {
    "raw": "taken before temperature and filters (in vLLM, logprobs_mode=raw_logprobs; processed_logprobs is wanted)",
    "tempered": "taken after the temperature and before the filters",
    "behavior": "renormalised over what the filters keep",
}


def cause_of_kind(model: PreTrainedModel, drawn: Sequence[Rollout], kind: str) -> str | None:
    """The kind of number that recorded log-probs really are, where it is not the one they are called."""
    sizes = {one: _mean_abs(model, drawn, one) for one in HINTS}
    told = sizes[kind]
    best = min(sizes, key=lambda one: np.inf if sizes[one] is None else float(sizes[one] or 0.0))
    found = sizes[best]
    if best == kind or found is None or (told is not None and found > FITS * told):
        return None
    shown = "unknown" if told is None else f"{told:.3g}"
    return (
        f"the numbers are {best} log-probs and are called {kind}: {HINTS[best]}; as {best} they differ by {found:.3g} "
        f"on average, as {kind} by {shown}"
    )


def cause_of_dtype(
    model: PreTrainedModel, sequences: Sequence[NDArray[Any]], own: Sequence[NDArray[np.float32]], mean_abs: float
) -> str | None:
    """A narrower dtype that moves the trainer's own scores of these sequences by as much as was seen."""
    import torch

    from rollstore.replay.score import token_logprobs

    named = str(model.dtype).removeprefix("torch.")
    for dtype in NARROW:
        if dtype == named:
            continue
        narrow: Any = copy.deepcopy(model).to(getattr(torch, dtype))
        moved = [token_logprobs(narrow, [one])[0] for one in sequences]
        size = float(np.abs(np.concatenate(moved) - np.concatenate(list(own))).mean())
        if ALIKE[0] * mean_abs <= size <= ALIKE[1] * mean_abs:
            return (
                f"rounding of {dtype}: the engine differs by {mean_abs:.3g} on average, the trainer's own {named} "
                f"weights cast to {dtype} by {size:.3g}"
            )
    return None


def _mean_abs(model: PreTrainedModel, drawn: Sequence[Rollout], kind: str) -> float | None:
    from rollstore.replay.score import score_rollouts

    now: list[NDArray[np.float32]] = []
    recorded: list[NDArray[np.float32]] = []
    for rollout in drawn:
        if rollout.logprobs is None:
            continue
        found = score_rollouts(model, [rollout], kind=kind)[0][0]
        both = np.isfinite(found) & rollout.logprobs.known & np.isfinite(rollout.logprobs.values)
        now.append(found[both])
        recorded.append(rollout.logprobs.values[both].astype(np.float32))
    summary = summarise(np.concatenate(now), np.concatenate(recorded)) if now else None
    return None if summary is None else summary.mean_abs
