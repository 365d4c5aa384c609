"""What changed between two rollouts, two runs or two stores, from what is recorded: no model is needed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from rollstore.errors import DuplicateError, NotFoundError
from rollstore.replay.compare import Comparison, compare
from rollstore.replay.difference import plain
from rollstore.replay.paired import Paired, paired
from rollstore.schema import Rollout, from_table, to_table
from rollstore.store.lookup import content

OUTCOME = ("segment", "span", "position")
"""Null in a score of the whole rollout."""


_Name = tuple[str | None, str]
"""run_id, rollout_id."""


class Scans(Protocol):
    """What a diff needs of a store."""

    def scan(self, table: str) -> Iterable[pa.RecordBatch]: ...


Source = Rollout | Sequence[Rollout] | Scans
"""One segment, segments, or a store (all of its rollouts)."""


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One segment that came out differently: where, and what became of its reward."""

    a: str
    """rollout_id in a."""
    b: str
    """rollout_id in b."""
    comparison: Comparison
    flipped: int
    """Drawn tokens that differ at the same position, over the whole length; behind the first the contexts differ."""
    reward_a: float | None
    reward_b: float | None
    outcome: str
    """`better`, `worse`, `neither`, `below_floor` where both rewards are within the scorer's noise floor of one
    another, or `unknown` without both rewards."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Two sets of rollouts side by side."""

    matched: int
    """Segments in both."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: int
    share_changed: float | None
    """Of the matched ones; None when nothing matched."""
    decisions: int
    """Positions drawn in both."""
    flipped_first: int
    """Decisions flipped up to the first difference, which is one: at most one a segment."""
    flipped_all: int
    """Decisions flipped over all tokens, those behind a first difference included."""
    earliest: int | None
    """The earliest first difference."""
    flips: tuple[Flip, ...]
    paired: Paired | None
    """The scores of the questions that both sides scored; None below two of them."""
    floor: float | None = None
    """The scorer's noise floor that outcomes were held against."""
    rollouts: int = 0
    """Matched rollouts: those with at least one matched segment."""
    rollouts_changed: int = 0
    """Of those, the ones with a changed segment."""
    share_rollouts_changed: float | None = None
    outcomes: dict[str, int] = field(default_factory=dict[str, int])
    """What became of the rewards of the changed rollouts, each counted once; see `Flip.outcome`."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        return plain(asdict(self))

    def lines(self, most: int = 10) -> list[str]:
        """The report for a person, with at most `most` flips told in full."""
        share = "" if self.share_changed is None else f" ({self.share_changed:.1%})"
        out = [
            f"{self.changed} of {self.matched} segments changed{share}; only in a {len(self.only_a)}, only in b "
            f"{len(self.only_b)}",
            f"decisions flipped: {self.flipped_first} up to the first difference, {self.flipped_all} over all "
            f"{self.decisions} tokens drawn in both",
        ]
        if self.share_rollouts_changed is not None:
            share = f"{self.share_rollouts_changed:.1%}"
            out.insert(1, f"{self.rollouts_changed} of {self.rollouts} rollouts changed ({share})")
        if self.earliest is not None:
            out.append(f"earliest difference at token {self.earliest}")
        if self.outcomes:
            names = ["better", "worse", "neither", "unknown"]
            counted = ", ".join(f"{self.outcomes.get(name, 0)} {name}" for name in names)
            if self.floor is not None:
                counted += f", {self.outcomes.get('below_floor', 0)} below the floor of {self.floor:g}"
            out.append(f"rewards of the changed rollouts, from a to b: {counted}")
        if self.paired is not None:
            out.append(f"scores: {self.paired.line()}")
        for flip in self.flips[:most]:
            out.extend(flip.comparison.lines())
        if len(self.flips) > most:
            out.append(f"and {len(self.flips) - most} more")
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines())


def by_id(rollout: Rollout) -> Hashable:
    """Matches the same rollout in two stores."""
    return rollout.rollout_id, rollout.segment


def by_draw(rollout: Rollout) -> Hashable:
    """Matches the same draw in two runs: one prompt, one key and sample, whatever the rollout is called."""
    prompt = rollout.prompt_id if rollout.prompt_id is not None else rollout.group_id
    return prompt, rollout.replay_key, rollout.replay_sample, rollout.sample_index, rollout.segment


def diff(
    a: Source,
    b: Source,
    *,
    match: Callable[[Rollout], Hashable] | None = None,
    run_a: str | None = None,
    run_b: str | None = None,
    tolerance: float | None = None,
    scorer: str | None = None,
    floor: float | None = None,
) -> Diff:
    """Compares recorded runs, a before b.

    `match` gives what two segments must share to be compared: `by_id`, `by_draw`, or a function of the caller's
    (default: `by_id`; two single segments are compared whatever they are called). `run_a` and `run_b` pick one run
    out of a store. `tolerance`: see `compare`. Holds both sides in memory. Rewards are the recorded ones, or with
    `scorer` that scorer's outcome scores, of two stores. A question is a prompt_id, else a group_id, else a rollout;
    its score is the mean over its matched rollouts. floor: of that scorer (`rollstore.diagnose.floor`), in its unit:
    rewards that differ by no more are `below_floor`, neither better nor worse; the paired test counts them as they are.
    A rollout is named by its run and its id: what another run calls the same has a reward of its own.

    Raises ValueError where two segments of one side match or the floor is below zero or not finite, TypeError where a
    scorer is asked of what is no store, NotFoundError where a side has no rollouts of its run, DuplicateError where a
    scorer scored one rollout twice, or one segment is stored twice with the same tokens and other contents.
    """
    if floor is not None and not 0 <= floor < math.inf:
        raise ValueError(f"floor: wanted a finite number of at least 0, got {floor}")
    if match is None:
        match = by_id if not (isinstance(a, Rollout) and isinstance(b, Rollout)) else _segment
    before, after = _keyed("a", a, match, run_a), _keyed("b", b, match, run_b)
    flips: list[Flip] = []
    outcomes: dict[tuple[_Name, _Name], str] = {}
    decisions = flipped_first = flipped_all = 0
    rewards_a, rewards_b = _rewards("a", a, before.values(), scorer), _rewards("b", b, after.values(), scorer)
    both = [key for key in before if key in after]
    for key in both:
        one, other = before[key], after[key]
        common = min(len(one.tokens), len(other.tokens))
        drawn = one.action_mask[:common] & other.action_mask[:common]
        flipped = int(np.count_nonzero(drawn & (one.tokens[:common] != other.tokens[:common])))
        decisions += int(drawn.sum())
        flipped_all += flipped
        comparison = compare(one, other, tolerance=tolerance)
        if comparison.first is None:
            continue
        first = comparison.first.position
        flipped_first += int(first < common and bool(drawn[first]))
        names = _name(one), _name(other)
        reward_a, reward_b = rewards_a.get(names[0]), rewards_b.get(names[1])
        outcome = outcomes[names] = _outcome(reward_a, reward_b, floor or 0.0)
        flips.append(
            Flip(
                a=one.rollout_id,
                b=other.rollout_id,
                comparison=comparison,
                flipped=flipped,
                reward_a=reward_a,
                reward_b=reward_b,
                outcome=outcome,
            )
        )
    firsts = [flip.comparison.first for flip in flips if flip.comparison.first is not None]
    pairs = {(_name(before[key]), _name(after[key])) for key in both}
    return Diff(
        matched=len(both),
        only_a=tuple(one.rollout_id for key, one in before.items() if key not in after),
        only_b=tuple(one.rollout_id for key, one in after.items() if key not in before),
        changed=len(flips),
        share_changed=len(flips) / len(both) if both else None,
        decisions=decisions,
        flipped_first=flipped_first,
        flipped_all=flipped_all,
        earliest=min((first.position for first in firsts), default=None),
        flips=tuple(flips),
        paired=_paired([(before[key], after[key]) for key in both], rewards_a, rewards_b),
        floor=floor,
        rollouts=len(pairs),
        rollouts_changed=len(outcomes),
        share_rollouts_changed=len(outcomes) / len(pairs) if pairs else None,
        outcomes=dict(Counter(outcomes.values())),
    )


def _name(rollout: Rollout) -> _Name:
    return rollout.run_id, rollout.rollout_id


def _segment(rollout: Rollout) -> Hashable:
    return rollout.segment


def _keyed(side: str, source: Source, match: Callable[[Rollout], Hashable], run: str | None) -> dict[Hashable, Rollout]:
    found: dict[Hashable, Rollout] = {}
    for rollout in _rollouts(source):
        if run is not None and rollout.run_id != run:
            continue
        key = match(rollout)
        if key in found and _same(found[key], rollout):
            if _content(found[key]) != _content(rollout):
                name = f"{side}: rollout {rollout.rollout_id!r}: segment {rollout.segment}"
                raise DuplicateError(f"{name}: wanted one content, got two of the same tokens")
            continue  # stored twice, which counts once
        if key in found:
            both = f"{found[key].rollout_id!r} and {rollout.rollout_id!r}"
            raise ValueError(f"{side}: wanted one segment a match, got {both} for {key}")
        found[key] = rollout
    if run is not None and not found:
        raise NotFoundError(f"{side}: no rollouts of run {run!r}")
    return found


def _same(one: Rollout, other: Rollout) -> bool:
    named = (_name(one), one.segment) == (_name(other), other.segment)
    return named and np.array_equal(one.tokens, other.tokens)


def _content(rollout: Rollout) -> str:
    (row,) = to_table([rollout]).combine_chunks().to_batches()
    return content(row)


def _rollouts(source: Source) -> Iterable[Rollout]:
    if isinstance(source, Rollout):
        return [source]
    if isinstance(source, Sequence):
        return source
    batches = source.scan("rollouts")
    return (rollout for batch in batches for rollout in from_table(pa.Table.from_batches([batch])))


def _rewards(side: str, source: Source, rollouts: Iterable[Rollout], scorer: str | None) -> Mapping[_Name, float]:
    """The score of each rollout; a reward stands on the last segment alone."""
    if scorer is None:
        return {_name(rollout): rollout.reward for rollout in rollouts if rollout.reward is not None}
    if isinstance(source, Rollout | Sequence):
        raise TypeError(f"{side}: wanted a store to find the scores of {scorer!r} in, got rollouts")
    found: dict[str, float] = {}
    for batch in source.scan("scores"):
        for row in batch.select([*OUTCOME, "rollout_id", "scorer", "status", "value"]).to_pylist():
            whole = all(row[name] is None for name in OUTCOME)
            if row["scorer"] != scorer or row["status"] != "scored" or not whole:
                continue
            if row["rollout_id"] in found:
                raise DuplicateError(
                    f"{side}: rollout {row['rollout_id']!r}: wanted one outcome score of {scorer!r}, got several"
                )
            found[row["rollout_id"]] = row["value"]
    names = dict.fromkeys(_name(rollout) for rollout in rollouts)
    several = [rollout_id for rollout_id, n in Counter(rollout_id for _, rollout_id in names).items() if n > 1]
    mixed = next((rollout_id for rollout_id in several if rollout_id in found), None)
    if mixed is not None:
        raise DuplicateError(f"{side}: rollout {mixed!r}: wanted one run, since a score names none, got several")
    return {name: found[name[1]] for name in names if name[1] in found}


def _paired(
    matched: Sequence[tuple[Rollout, Rollout]], rewards_a: Mapping[_Name, float], rewards_b: Mapping[_Name, float]
) -> Paired | None:
    """A rollout counts once, however many segments of it match."""
    scores: dict[str, dict[tuple[_Name, _Name], tuple[float, float]]] = {}
    for one, other in matched:
        a, b = rewards_a.get(_name(one)), rewards_b.get(_name(other))
        if a is not None and b is not None:
            question = one.prompt_id or one.group_id or one.rollout_id
            scores.setdefault(question, {})[_name(one), _name(other)] = (a, b)
    sides = [
        {question: _mean([pair[side] for pair in pairs.values()]) for question, pairs in scores.items()}
        for side in range(2)
    ]
    return paired(sides[0], sides[1])


def _mean(values: list[float]) -> float:
    """The mean; infinite or NaN where infinities make it so, or numbers too large to add."""
    try:
        return fmean(values)
    except (OverflowError, ValueError):
        return sum(values) / len(values)


def _outcome(a: float | None, b: float | None, floor: float) -> str:
    if a is None or b is None:
        return "unknown"
    if a == b:
        return "neither"
    if abs(b - a) <= floor:
        return "below_floor"
    return "better" if b > a else "worse"
