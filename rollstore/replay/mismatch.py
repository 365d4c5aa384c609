"""How far the trainer's log-probs stand from the sampler's, and why: the weights moved, or the two disagree.

For an action drawn under version v with behavior log-prob ln q, and a trainer of version c:

    ln p_c - ln q  =  (ln p_c - ln p_v)  +  (ln p_v - ln q)
      total            weight movement      same-version disagreement

p_v is the trainer's own forward under the weights that drew: the evaluation whose version equals `weight_versions[i]`.
Only the second term is a fault of kernels, dtypes, samplers or caches. Observations, actions that are not trainable and
log-probs that are no denominator never enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstore.replay.difference import plain
from rollstore.replay.ratio import QUANTILES, Summary, summarise
from rollstore.replay.sides import (
    DIMENSIONS,
    UNKNOWN,
    Key,
    Scans,
    Sides,
    evaluations_of,
    segments_of,
    trainer_version,
)


@dataclass(frozen=True, kw_only=True)
class Extreme:
    """One action at an end of a distribution."""

    part: str
    rollout_id: str
    segment: int
    position: int
    token: int
    difference: float
    """ln p - ln q of its part, nats."""
    p: float
    q: float


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The actions with one value of one dimension."""

    dimension: str
    value: str
    parts: dict[str, Summary]


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """What `mismatch` found."""

    evaluations: tuple[str, ...]
    current: int | None
    """Version of the trainer in `total` and `weight movement`."""
    actions: int
    """Recorded actions of the rollouts that were evaluated."""
    left_out: dict[str, int]
    """Actions that entered nothing, by reason."""
    unscored: int
    """Segments with actions and without any of these evaluations."""
    outside: int
    """Actions to which the trainer's own filters give no probability: the ratio is 0, and no mean holds it."""
    parts: dict[str, Summary]
    """`total`, `weight movement`, `disagreement`: those that have actions."""
    slices: tuple[Slice, ...]
    extremes: tuple[Extreme, ...]
    """The furthest actions of each part, furthest first."""
    quantiles_at: tuple[float, ...] = QUANTILES

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        return plain(asdict(self))

    def lines(self, most: int = 5) -> list[str]:
        """The report for a person."""
        trainer = "" if self.current is None else f", trainer at version {self.current}"
        out = [f"{self.actions} actions under {', '.join(self.evaluations)}{trainer}"]
        out.extend(f"  {name:16} {summary.line()}" for name, summary in self.parts.items())
        out.extend(f"  left out: {count} actions: {why}" for why, count in self.left_out.items())
        if self.outside:
            out.append(f"  {self.outside} actions lie outside the trainer's own support: in no mean")
        if self.unscored:
            out.append(f"  {self.unscored} segments have none of these evaluations")
        for dimension in DIMENSIONS:
            own = [one for one in self.slices if one.dimension == dimension]
            for one in own if len(own) > 1 else ():
                told = "; ".join(
                    f"{name} n {part.n} mean|d| {part.mean_abs:.3g} k3 {part.k3:.3g}"
                    for name, part in one.parts.items()
                )
                out.append(f"  {dimension} {one.value}: {told}")
        for name in self.parts:
            for one in [end for end in self.extremes if end.part == name][:most]:
                out.append(
                    f"  {name}: {one.difference:+.3g} at {one.rollout_id} segment {one.segment} token {one.position} "
                    f"(id {one.token}): {one.p:.4g} against {one.q:.4g}"
                )
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines())


def mismatch(
    store: Scans, *, evaluations: str | Sequence[str], current: int | None = None, extremes: int = 10
) -> Mismatch:
    """The ratio of trainer to sampler over the actions that these evaluations scored, split by its causes.

    `evaluations`: the ids to join; each action's same-version number comes from the one whose weight_version equals
    the action's own. `current`: the version of the trainer; needed only where the evaluations have several. `extremes`:
    how many of the furthest actions of each part are named. Holds one number an action and evaluation in memory.

    Raises NotFoundError where an id has no rows, DuplicateError where two rows fit one action, ValueError where
    `current` is not among the versions or not told, no id is given, or an evaluation has another number of log-probs
    than its segment has actions.
    """
    ids = (evaluations,) if isinstance(evaluations, str) else tuple(evaluations)
    if not ids:
        raise ValueError("evaluations: wanted at least one id, got none")
    scored = evaluations_of(store, ids)
    current = trainer_version(scored, current)
    sides = Sides()
    seen: set[Key] = set()
    for rollout in segments_of(store):
        key = (rollout.run_id, rollout.rollout_id, rollout.segment)
        if key in seen or not rollout.action_mask.any():
            continue  # a row stored twice counts once
        seen.add(key)
        if key in scored:
            sides.add(rollout, scored[key], current)
        else:
            sides.unscored += 1
    return _report(sides, ids, current, extremes)


def _report(sides: Sides, ids: tuple[str, ...], current: int | None, extremes: int) -> Mismatch:
    columns = sides.joined()
    pairs = {
        "total": (columns["now"], columns["q"]),
        "weight movement": (columns["now"], columns["own"]),
        "disagreement": (columns["own"], columns["q"]),
    }
    sound = {name: np.isfinite(p) & np.isfinite(q) for name, (p, q) in pairs.items()}

    def over(chosen: NDArray[np.bool_] | None) -> dict[str, Summary]:
        out: dict[str, Summary] = {}
        for name, (p, q) in pairs.items():
            mask = sound[name] if chosen is None else sound[name] & chosen
            found = summarise(p[mask], q[mask])
            if found is not None:
                out[name] = found
        return out

    slices: list[Slice] = []
    for dimension in DIMENSIONS:
        column = _ranges(columns[dimension]) if dimension in ("position", "length") else columns[dimension]
        for value in np.unique(column):
            parts = over(column == value)
            if parts:
                slices.append(Slice(dimension=dimension, value=_shown(dimension, value), parts=parts))
    ends: list[Extreme] = []
    for name, (p, q) in pairs.items():
        mask = np.flatnonzero(sound[name])
        furthest = mask[np.argsort(-np.abs(p[mask] - q[mask]), kind="stable")[:extremes]]
        for index in furthest.tolist():
            rollout_id, segment = sides.rollouts[int(columns["rollout"][index])]
            ends.append(
                Extreme(
                    part=name,
                    rollout_id=rollout_id,
                    segment=segment,
                    position=int(columns["position"][index]),
                    token=int(columns["token"][index]),
                    difference=float(p[index] - q[index]),
                    p=float(p[index]),
                    q=float(q[index]),
                )
            )
    return Mismatch(
        evaluations=ids,
        current=current,
        actions=sides.actions,
        left_out=dict(sorted(sides.left_out.items())),
        unscored=sides.unscored,
        outside=sides.outside,
        parts=over(None),
        slices=tuple(slices),
        extremes=tuple(ends),
    )


def _ranges(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """The lower end of each number's range: ranges double, 0-15, 16-31, 32-63, ..."""
    return np.where(numbers < 16, 0, 1 << np.frexp(np.maximum(numbers, 1).astype(np.float64))[1].astype(np.int64) - 1)


def _shown(dimension: str, value: Any) -> str:
    if dimension in ("position", "length"):
        low = int(value)
        return "0-15" if low == 0 else f"{low}-{2 * low - 1}"
    return "unknown" if dimension == "lag" and value == UNKNOWN else str(value)
