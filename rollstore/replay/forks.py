"""How much the samples of a prompt have in common: where each forked, and what running them as one would have saved.

From the tokens alone. `generate` runs that way; these are the same numbers for groups that something else drew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rollstore.errors import DuplicateError

COLUMNS = ("rollout_id", "segment", "run_id", "step", "group_id", "prompt_id", "sample_index", "tokens")


class Scans(Protocol):
    """What the report needs of a store."""

    def scan(self, table: str, columns: Sequence[str] | None = None) -> Iterable[pa.RecordBatch]: ...


class Fork(NamedTuple):
    """Where one sequence left another. The first of a group has no parent."""

    parent: int | None
    """Index of the earlier sequence that shares the longest prefix; of equals, the first."""
    position: int
    """Length of the shared prefix; 0 without a parent."""


@dataclass(frozen=True, kw_only=True)
class Savings:
    """A shared generation against one run for each sample. The last token of a run is drawn and never fed back."""

    samples: int
    forward_rows: int
    """Token rows through the model."""
    forward_rows_alone: int
    kv_tokens: int
    """Entries written to KV caches: one for each token row, and one for each position copied where samples fork. A
    cache that shares prefixes by page copies none: there it is `forward_rows`."""
    kv_tokens_alone: int
    padding_rows: int = 0
    """Rows that only filled a batch to its fixed shape; they count in no other number."""

    @property
    def forward_saved(self) -> float | None:
        """Share of the token rows that need not run; None where there are none."""
        return 1 - self.forward_rows / self.forward_rows_alone if self.forward_rows_alone else None

    @property
    def kv_saved(self) -> float | None:
        """Share of the KV entries that need not be written."""
        return 1 - self.kv_tokens / self.kv_tokens_alone if self.kv_tokens_alone else None

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        return asdict(self) | {"forward_saved": self.forward_saved, "kv_saved": self.kv_saved}

    def line(self) -> str:
        """The report for a person."""
        return (
            f"{self.samples} samples: {self.forward_rows} of {self.forward_rows_alone} forward rows "
            f"({_percent(self.forward_saved)} saved), {self.kv_tokens} of {self.kv_tokens_alone} KV tokens "
            f"({_percent(self.kv_saved)} saved)"
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """One stored group: the segments of one number whose members share run, step and group."""

    run_id: str | None
    step: int | None
    group_id: str
    segment: int
    members: tuple[str, ...]
    """rollout_ids, by sample_index."""
    forks: tuple[Fork, ...]
    """One a member; parents are indices into `members`."""
    distinct: int
    """Sequences that differ."""
    savings: Savings


@dataclass(frozen=True, kw_only=True)
class Forks:
    """The stored groups of a store. Rollouts without a group are in none."""

    groups: tuple[Group, ...]
    total: Savings

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        return {
            "total": self.total.to_dict(),
            "groups": [
                asdict(group)
                | {
                    "forks": [fork._asdict() for fork in group.forks],
                    "savings": group.savings.to_dict(),
                }
                for group in self.groups
            ],
        }

    def lines(self, most: int = 20) -> list[str]:
        """The report for a person, with at most `most` groups, those that share most first."""
        out = [f"{len(self.groups)} groups, {self.total.line()}"]
        ordered = sorted(self.groups, key=lambda group: group.savings.forward_saved or 0.0, reverse=True)
        for group in ordered[:most]:
            where = "" if group.step is None else f" step {group.step}"
            positions = sorted(fork.position for fork in group.forks if fork.parent is not None)
            forked = f"; forks at {', '.join(map(str, positions[:8]))}" if positions else ""
            more = f" and {len(positions) - 8} more" if len(positions) > 8 else ""
            out.append(
                f"  {group.group_id}{where} segment {group.segment}: {group.distinct} distinct of "
                f"{group.savings.line()}{forked}{more}"
            )
        if len(self.groups) > most:
            out.append(f"  and {len(self.groups) - most} more groups")
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines())


def forks(store: Scans, *, run: str | None = None) -> Forks:
    """Where the members of every stored group part, and what a shared generation would have saved.

    A group is (run_id, step, group_id) and a segment number; `run` picks one run. A row stored twice counts once.
    Holds the tokens of all groups in memory. Raises DuplicateError for one segment stored with different tokens.
    """
    found: dict[tuple[Any, ...], dict[str, tuple[int | None, NDArray[np.int32]]]] = {}
    for batch in store.scan("rollouts", columns=list(COLUMNS)):
        for row, tokens in _rows(batch):
            if row["group_id"] is None or (run is not None and row["run_id"] != run):
                continue
            key = (row["run_id"], row["step"], row["group_id"], row["segment"])
            members = found.setdefault(key, {})
            before = members.setdefault(row["rollout_id"], (row["sample_index"], tokens))
            if before[1] is not tokens and not np.array_equal(before[1], tokens):
                raise DuplicateError(
                    f"rollout {row['rollout_id']!r}: segment {row['segment']}: wanted one content, got two"
                )
    groups = tuple(_group(key, members) for key, members in found.items())
    return Forks(groups=groups, total=total([group.savings for group in groups]))


def tree(sequences: Sequence[NDArray[Any]]) -> list[Fork]:
    """Where each of some sequences forked from an earlier one, in their order."""
    out = [Fork(None, 0)] * len(sequences)
    todo = [list(range(len(sequences)))] if sequences else []
    while todo:
        first, *others = todo.pop()
        parted: dict[tuple[int, int], list[int]] = {}
        for other in others:
            length = shared(sequences[first], sequences[other])
            if length == len(sequences[other]):
                out[other] = Fork(first, length)
            else:
                parted.setdefault((length, int(sequences[other][length])), []).append(other)
        for (length, _), members in parted.items():
            out[members[0]] = Fork(first, length)
            todo.append(members)
    return out


def shared(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Length of the common prefix."""
    common = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:common]) != np.asarray(b[:common]))
    return int(differ[0]) if len(differ) else common


def savings(sequences: Sequence[NDArray[Any]]) -> Savings:
    """What running sequences that start alike as one saves."""
    fed = [sequence[:-1] for sequence in sequences]
    rows = 0
    leaving: Counter[tuple[int, int]] = Counter()  # (parent, position) -> samples that go on from there
    for one, fork in zip(fed, tree(fed), strict=True):
        rows += len(one) - fork.position
        if fork.parent is not None and len(one) > fork.position:
            leaving[fork.parent, fork.position] += 1
    # One of those that go on keeps the cache, the others copy it.
    copied = sum(position * (count - (len(fed[parent]) <= position)) for (parent, position), count in leaving.items())
    alone = sum(len(one) for one in fed)
    return Savings(
        samples=len(sequences),
        forward_rows=rows,
        forward_rows_alone=alone,
        kv_tokens=rows + copied,
        kv_tokens_alone=alone,
    )


def total(parts: Iterable[Savings]) -> Savings:
    """Summed over groups."""
    sums: dict[str, int] = dict.fromkeys(Savings.__dataclass_fields__, 0)
    for part in parts:
        for name in sums:
            sums[name] += getattr(part, name)
    return Savings(**sums)


def _rows(batch: pa.RecordBatch) -> Iterable[tuple[Mapping[str, Any], NDArray[np.int32]]]:
    names = [name for name in COLUMNS if name != "tokens"]
    tokens = batch.column("tokens")
    for index, row in enumerate(batch.select(names).to_pylist()):
        yield row, tokens[index].values.to_numpy(zero_copy_only=False)


def _group(key: tuple[Any, ...], members: Mapping[str, tuple[int | None, NDArray[np.int32]]]) -> Group:
    ordered = sorted(members, key=lambda name: (members[name][0] is None, members[name][0] or 0, name))
    sequences = [members[name][1] for name in ordered]
    parted = tree(sequences)
    return Group(
        run_id=key[0],
        step=key[1],
        group_id=key[2],
        segment=key[3],
        members=tuple(ordered),
        forks=tuple(parted),
        distinct=len({sequence.tobytes() for sequence in sequences}),
        savings=savings(sequences),
    )


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.1%}"
