"""How far recorded log-probs are from a teacher-forced forward of the same checkpoint: the table of docs/engines.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollstore import Rollout
from rollstore.replay.score import score_rollouts


def differences(rollouts: list[Rollout], teacher: Any, kind: str) -> Any:
    """teacher-forced - recorded of every action; minus infinity where the checkpoint's filters leave the token out."""
    scored = score_rollouts(teacher, rollouts, kind=kind)
    return np.concatenate([own - r.logprobs.values for r, (own, _, _) in zip(rollouts, scored, strict=True)])


def mean(found: Any, what: str) -> float:
    """The mean of |d| where it is finite; says it as a row of the table."""
    inside = found[np.isfinite(found)].astype(np.float64)
    k3 = np.expm1(inside) - inside
    outside = len(found) - len(inside)
    size = float(np.abs(inside).mean())
    print(f"\n| {what} | {size:.1e} | {k3.mean():.1e} | {len(found)} | {outside} |")
    return size
