"""The sampler's and the trainer's log-probs of stored actions side by side, and why an action cannot be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rollstore.errors import DuplicateError, NotFoundError
from rollstore.replay.conditions import sampler_at
from rollstore.schema import Rollout, Span, from_table
from rollstore.usable import Transform, draw, usable_as_behavior

UNKNOWN = np.iinfo(np.int64).min
"""Stands for a lag that is not known, in the column of lags."""
DIMENSIONS = ("lag", "position", "length", "engine", "cache_state")
COLUMNS = ("evaluation_id", "run_id", "rollout_id", "segment", "weight_version", "kind", "logprobs")


class Scans(Protocol):
    """What a comparison needs of a store."""

    def scan(
        self, table: str, columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> Iterable[pa.RecordBatch]: ...


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One evaluation of one segment. Log-probs [A], NaN where not known."""

    version: int | None
    kind: str | None
    logprobs: NDArray[np.float32]
    evaluation: str = ""
    """Its evaluation_id."""


Key = tuple[str | None, str, int]
"""run_id, rollout_id, segment."""


def evaluations_of(store: Scans, ids: tuple[str, ...]) -> dict[Key, list[Scored]]:
    """The evaluations of these ids by segment.

    Raises NotFoundError where an id has no rows, DuplicateError where one segment has two of one version.
    """
    found: dict[Key, list[Scored]] = {}
    names: set[str] = set()
    for batch in store.scan("evaluations", columns=list(COLUMNS), where=pc.field("evaluation_id").isin(list(ids))):
        logprobs = batch.column("logprobs")
        rest = batch.select([name for name in COLUMNS if name != "logprobs"]).to_pylist()
        for index, row in enumerate(rest):
            names.add(row["evaluation_id"])
            if not logprobs[index].is_valid:
                continue
            values = logprobs[index].values.cast(pa.float32()).to_numpy(zero_copy_only=False)
            name = row["evaluation_id"]
            one = Scored(version=row["weight_version"], kind=row["kind"], logprobs=values, evaluation=name)
            here = found.setdefault((row["run_id"], row["rollout_id"], row["segment"]), [])
            if any(other.version == one.version for other in here):
                raise DuplicateError(
                    f"rollout {row['rollout_id']!r}: segment {row['segment']}: wanted one evaluation of version "
                    f"{one.version}, got two under {', '.join(ids)}"
                )
            here.append(one)
    missing = [name for name in ids if name not in names]
    if missing:
        raise NotFoundError(f"evaluations: wanted rows of {missing[0]!r}, the store has none")
    return found


def segments_of(store: Scans) -> Iterable[Rollout]:
    """All stored segments."""
    for batch in store.scan("rollouts"):
        yield from from_table(pa.Table.from_batches([batch]))


def trainer_version(scored: dict[Key, list[Scored]], current: int | None) -> int | None:
    """The trainer's version: the one told, or the only one there is. Raises ValueError where neither decides it."""
    versions = {one.version for rows in scored.values() for one in rows}
    known = sorted(version for version in versions if version is not None)
    told = ", ".join(map(str, known)) or "none"
    if current is not None and current not in known:
        raise ValueError(f"current: wanted one of the evaluated versions {told}, got {current}")
    if current is None and len(known) > 1:
        raise ValueError(f"current: wanted the version of the trainer, got none; the evaluations have {told}")
    return current if current is not None else known[0] if known else None


class Sides:
    """Columns over the actions that can be compared: q, p under the action's own version, p under the trainer's."""

    def __init__(self) -> None:
        self.columns: dict[str, list[NDArray[Any]]] = {
            name: [] for name in ("q", "own", "now", "position", "token", "rollout", *DIMENSIONS)
        }
        self.rollouts: list[tuple[str, int]] = []
        self.left_out: Counter[str] = Counter()
        self.actions = self.outside = self.unscored = 0

    def joined(self) -> dict[str, NDArray[Any]]:
        """Each column over all actions, empty where there are none."""
        return {name: np.concatenate(pieces) if pieces else np.zeros(0) for name, pieces in self.columns.items()}

    def add(self, rollout: Rollout, rows: list[Scored], current: int | None) -> None:
        """The actions of one segment with all its evaluations; those that cannot enter are counted by reason.

        Raises ValueError for an evaluation of another number of actions.
        """
        at = np.flatnonzero(rollout.action_mask)
        for row in rows:
            if len(row.logprobs) != len(at):
                raise ValueError(
                    f"evaluation {row.evaluation!r}: rollout {rollout.rollout_id!r}: segment {rollout.segment}: wanted "
                    f"{len(at)} log-probs, one for each action, got {len(row.logprobs)}"
                )
        self.actions += len(at)
        if rollout.logprobs is None:
            self.left_out["no recorded log-prob"] += len(at)
            return
        told = _told(rollout, at, {row.kind for row in rows})
        q = rollout.logprobs.values.astype(np.float64)
        why = told.pop("why")
        why[(why == "") & ~rollout.logprobs.known] = "no recorded log-prob"
        why[(why == "") & ~np.isfinite(q)] = "the recorded log-prob is not finite"
        keep = why == ""
        self.left_out.update(why[~keep].tolist())
        versions = np.full(len(at), -1, dtype=np.int64)
        known = np.zeros(len(at), dtype=bool)
        if rollout.weight_versions is not None:
            versions, known = rollout.weight_versions.values.astype(np.int64), rollout.weight_versions.known
        own, now = np.full(len(at), np.nan), np.full(len(at), np.nan)
        for row in rows:
            if row.version is not None:
                mine = known & (versions == row.version)
                own[mine] = row.logprobs[mine]
            if row.version == current:
                now = row.logprobs.astype(np.float64)
        self.outside += int(np.count_nonzero(keep & (np.isneginf(now) | np.isneginf(own))))
        unknown = keep & np.isnan(own) & np.isnan(now)
        self.left_out.update(["no evaluation of its version"] * int(unknown.sum()))
        keep &= ~unknown
        lag = np.full(len(at), UNKNOWN, dtype=np.int64)
        if current is not None:
            lag[known] = current - versions[known]
        values: dict[str, NDArray[Any]] = {
            "q": q,
            "own": own,
            "now": now,
            "position": at,
            "token": rollout.tokens[at],
            "rollout": np.full(len(at), len(self.rollouts)),
            "lag": lag,
            "length": np.full(len(at), len(at)),
            **told,
        }
        self.rollouts.append((rollout.rollout_id, rollout.segment))
        for name, column in values.items():
            self.columns[name].append(column[keep])


def _spans(rollout: Rollout, at: NDArray[np.int64]) -> list[tuple[Span | None, slice]]:
    """The actions in stretches of one span: (span, which of the actions)."""
    if not rollout.spans:
        return [(None, slice(0, len(at)))]
    starts = np.array([span.start for span in rollout.spans])
    ends = starts + np.array([span.length for span in rollout.spans])
    first, last = np.searchsorted(at, starts), np.searchsorted(at, ends)
    stretches = zip(rollout.spans, first.tolist(), last.tolist(), strict=True)
    return [(span, slice(top, end)) for span, top, end in stretches if end > top]


def _told(rollout: Rollout, at: NDArray[np.int64], kinds: set[str | None]) -> dict[str, NDArray[Any]]:
    """Of each action: why it cannot enter (empty: it can), its engine and its cache state."""
    columns = {name: np.full(len(at), "unknown", dtype=object) for name in ("why", "engine", "cache_state")}
    for span, own in _spans(rollout, at):
        kind = rollout.logprob_kind if span is None or span.logprob_kind is None else span.logprob_kind
        columns["why"][own] = _reason(kind, sampler_at(rollout, int(at[own.start])), kinds)
        engine = rollout.engine if span is None or span.engine is None else span.engine
        named = "" if engine is None else " ".join(one for one in (engine.name, engine.version) if one)
        columns["engine"][own] = named or "unknown"
        columns["cache_state"][own] = (span.cache_state if span is not None else None) or "unknown"
    if rollout.trainable is not None:
        columns["why"][~rollout.trainable] = "not trainable"
    return columns


def _reason(kind: str | None, sampler: Any, kinds: set[str | None]) -> str:
    if kinds != {kind}:
        other = " and ".join(sorted(str(one) for one in kinds))
        return f"recorded as {kind or 'no kind'}, evaluated as {other}"
    if kind == "behavior":
        # What an evaluation of kind behavior applies: the recorded temperature and filters, in the order of the chain.
        done = Transform(temperature=True, filters=True)
        drawn = None if sampler is None else replace(draw(sampler), filters_first=False)
        verdict = usable_as_behavior(kind, drawn, done)
        return "" if verdict.usable else verdict.reason
    if sampler is not None and sampler.temperature == 0:
        return "temperature 0 draws from no distribution"
    return ""
