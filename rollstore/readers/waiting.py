"""Rollouts in memory that wait to be given, alone or in groups: their rows, a batch of the store at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import RollstoreError
from rollstore.readers.filters import NUMBER, answers
from rollstore.store.lookup import content

Ints: TypeAlias = npt.NDArray[np.int64]

NEEDED = (
    "rollout_id", "segment", "run_id", "step", "group_id", "group_size", "ending", "weight_version_min",
    "weight_version_max", "action_mask", "trainable",
)  # fmt: skip
"""Columns that a row is told by."""

_ROWS, _BYTES = 256, 1 << 22
"""A batch of either is large enough."""
_NO_SEGMENT = 1 << 62
"""After every segment that says something."""

Key: TypeAlias = str | tuple[Any, Any, Any]
"""Of what is given together: the id of a rollout, or (run_id, step, group_id)."""


class Block:
    """Rows that came together, and those still wanted; of the others no more stay in memory than of these."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self.rows: dict[int, Row] = {}
        self._arriving = True
        """whether rows of it may still be held: their numbers must stay"""

    def shrink(self) -> None:
        """Let go of what is not wanted any more, where that is most; without any row nothing holds the block."""
        if self.rows and not self._arriving and 2 * len(self.rows) < self.batch.num_rows:
            self._copy()

    def arrived(self) -> None:
        """All that is wanted is held. From now on it is in memory of its own: a batch may lie in that of a message."""
        self._arriving = False
        self._copy()

    def _copy(self) -> None:
        self.batch = self.batch.take(pa.array(list(self.rows), pa.int64()))
        self.rows = dict(enumerate(self.rows.values()))
        for number, row in self.rows.items():
            row.number = number


@dataclass(kw_only=True, slots=True, eq=False)
class Row:
    """A row of a block. of: its run_id, step and group_id, None where it says none; size: its group_size; versions: of
    its oldest and newest action, None where it does not say; acting: whether it has actions at all; actions: those that
    the record lets be trained on."""

    block: Block
    number: int
    id: str
    segment: int
    of: tuple[Any, Any, Any]
    size: int | None
    continued: bool
    versions: tuple[int | None, int | None]
    acting: bool
    tokens: int
    actions: int

    def content(self) -> pa.RecordBatch:
        """This row alone."""
        return self.block.batch.slice(self.number, 1)

    def equals(self, other: Row) -> bool:
        """Whether both record the same."""
        return content(self.content()) == content(other.content())

    def hold(self) -> None:
        """From now on it is wanted."""
        self.block.rows[self.number] = self


@dataclass(kw_only=True, slots=True, eq=False)
class Rollout:
    """A rollout that is arriving: its rows by segment. since: when the look began that found the first."""

    id: str
    since: float
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    _said: tuple[Any, ...] = field(default=(None,) * 4, init=False)
    """run_id, step, group_id and group_size, each of the first of these segments that says it"""
    _saying: tuple[int, ...] = field(default=(_NO_SEGMENT,) * 4, init=False)
    """and which segments these are"""
    _through: int = field(default=0, init=False)
    """as many segments from the first on are there"""

    def add(self, row: Row) -> None:
        """A segment that is not there yet."""
        self.rows[row.segment] = row
        while self._through in self.rows:
            self._through += 1
        says = (*row.of, row.size)
        earlier = [new is not None and row.segment < at for new, at in zip(says, self._saying, strict=True)]
        if any(earlier):
            self._said = tuple(new if first else old for first, new, old in zip(earlier, says, self._said, strict=True))
            self._saying = tuple(row.segment if first else at for first, at in zip(earlier, self._saying, strict=True))

    @property
    def key(self) -> Key:
        """What it shares with the others of its group, so far; its own id, where it is in none."""
        run, step, group, _ = self._said
        return self.id if group is None else (run, step, group)

    @property
    def grouped(self) -> bool:
        """Whether no segment that is missing can change its group_id."""
        return self._saying[2] <= self._through

    @property
    def settled(self) -> bool:
        """Whether no segment that is missing can change its key."""
        return max(self._saying[:3]) <= self._through or self.finished

    @property
    def size(self) -> int:
        """How many members its group has by what it says; 0 where it says nothing."""
        return self._said[3] or 0

    @property
    def settled_size(self) -> int:
        """The same, where no segment that is missing can change it, nor which group that is."""
        return self.size if max(self._saying) <= self._through or self.finished else 0

    @property
    def finished(self) -> bool:
        return len(self.rows) == self._through and not self.rows[self._through - 1].continued

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows.values())

    @property
    def actions(self) -> int:
        """Those that the record lets be trained on."""
        return sum(row.actions for row in self.rows.values())

    @property
    def last(self) -> Row:
        return self.rows[max(self.rows)]

    def ordered(self) -> list[Row]:
        return [self.rows[segment] for segment in sorted(self.rows)]

    def oldest(self) -> int | None:
        """The version of the oldest action; None where that of some action is not known."""
        return min(self._versions(0), default=None)

    def newest(self) -> int | None:
        return max(self._versions(1), default=None)

    def _versions(self, end: int) -> list[int]:
        """Of each segment that says it; none where one with actions does not."""
        found: list[int] = []
        for row in self.rows.values():
            version = row.versions[end]
            if version is not None:
                found.append(version)
            elif row.acting:
                return []
        return found


def release(rollouts: Iterable[Rollout]) -> None:
    """Their rows are not wanted any more."""
    blocks: set[Block] = set()
    for rollout in rollouts:
        for row in rollout.rows.values():
            del row.block.rows[row.number]
            blocks.add(row.block)
    for block in blocks:
        block.shrink()


@dataclass(kw_only=True, slots=True, eq=False)
class Unit:
    """What is given together: a rollout, or a group of them. key: what its members share; number: in the order of
    their coming; size: of the group as its members say it, the largest where they disagree, 0 while none does; since:
    when the look began that found the first; tokens, oldest (as of a rollout) and enqueued_at are set once it is
    ready; contradicted: how many members came with different contents; dropped: rows of `uses` of members that are
    left out, for the step in which the others are given or dropped: were they on record before, the others would be
    late after a restart in between."""

    key: Key
    number: int
    since: float
    size: int = 0
    tokens: int = 0
    oldest: int | None = None
    enqueued_at: datetime | None = None
    members: dict[str, Rollout] = field(default_factory=dict[str, Rollout])
    contradicted: int = 0
    _needed: int = 0
    """the size, as far as it cannot change with the segments that are missing"""
    _said: int = 0
    """the largest size that contradicted members said"""
    dropped: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def complete(self) -> bool:
        return 0 < self._needed <= self.finished + self.contradicted

    @property
    def finished(self) -> int:
        return sum(member.finished for member in self.members.values())

    def count(self) -> None:
        """Note how large the group is, and since when it waits, by its members of now."""
        self.since = min((member.since for member in self.members.values()), default=self.since)
        if isinstance(self.key, str):
            self.size = self._needed = 1
        else:
            members = self.members.values()
            self.size = max(self._said, *(member.size for member in members), 0)
            self._needed = max(self._said, *(member.settled_size for member in members), 0)

    def contradict(self, id_: str) -> None:
        """A member, which is to be dropped, came with different contents."""
        if self.members[id_].grouped:  # else it may be one of another group, and this one may be whole without it
            self.contradicted, self._said = self.contradicted + 1, max(self._said, self.members[id_].size)

    def measure(self) -> None:
        """Note what its members come to."""
        self.tokens = sum(member.tokens for member in self.members.values())
        oldest = [member.oldest() for member in self.members.values()]
        known = [version for version in oldest if version is not None]
        self.oldest = min(known, default=None) if len(known) == len(oldest) else None


def together(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in larger batches where theirs are small, as an engine's are that flushes each rollout: each costs
    as much as a hundred rows. What came before an error is given before it is raised."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    try:
        for batch in batches:
            held.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
            if rows >= _ROWS or size >= _BYTES:
                yield pa.concat_batches(held)
                held, rows, size = [], 0, 0
    except RollstoreError:
        if held:
            yield pa.concat_batches(held)
        raise
    if held:
        yield pa.concat_batches(held)


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """The rows of a batch, which has the columns NEEDED; none of them is held yet."""
    block = Block(batch)
    mask, trainable = batch.column("action_mask"), batch.column("trainable")
    drawn = _true(mask)
    actions = np.where(trainable.is_valid().to_numpy(zero_copy_only=False), _true(trainable), drawn)
    told = [batch.column(name).to_pylist() for name in NEEDED[:-2]]
    told += [drawn.tolist(), pc.list_value_length(mask).to_pylist(), actions.tolist()]
    return [
        Row(
            block=block,
            number=number,
            id=id_,
            segment=segment,
            of=(run, step, group),
            size=size,
            continued=ending == "continued",
            versions=(oldest, newest),
            acting=acting > 0,
            tokens=tokens,
            actions=trained,
        )
        for number, id_, segment, run, step, group, size, ending, oldest, newest, acting, tokens, trained in zip(
            range(batch.num_rows), *told, strict=True
        )
    ]


def _true(column: Any) -> Ints:
    """int64 [rows]: how many of each list are true; 0 where there is no list."""
    true = pc.fill_null(column.values, False).to_numpy(zero_copy_only=False)
    before = np.concatenate([[0], np.cumsum(true, dtype=np.int64)])[column.offsets.to_numpy()]
    return np.where(column.is_valid().to_numpy(zero_copy_only=False), np.diff(before), 0)


def gather(rows: Sequence[Row], names: Sequence[str] | None = None) -> pa.Table:
    """The contents of some rows, at least one, in that order: a take from each block, not one a row."""
    places: dict[Block, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row.block, []).append(place)
    taken: list[pa.RecordBatch] = []
    for block, own in places.items():
        batch = block.batch if names is None else block.batch.select(list(names))
        taken.append(batch.take(pa.array([rows[place].number for place in own], pa.int64())))
    order = np.concatenate([np.array(own, np.int64) for own in places.values()])
    table = pa.Table.from_batches(taken).combine_chunks()
    return table if (np.diff(order) == 1).all() else table.take(pa.array(np.argsort(order))).combine_chunks()


def kept(rollouts: Sequence[Rollout], where: pc.Expression, names: Sequence[str]) -> list[bool | Exception]:
    """Whether a filter keeps each rollout, or the error it ends in there: asked of its last segment, with the versions
    of all. names: the columns that the filter looks at. Raises MemoryError."""
    if not rollouts:
        return []
    table = pa.table({NUMBER: pa.array(np.arange(len(rollouts)))})
    for name, column in zip(names, gather([one.last for one in rollouts], names).columns if names else (), strict=True):
        table = table.append_column(name, column)
    for name, versions in (
        ("weight_version_min", [one.oldest() for one in rollouts]),
        ("weight_version_max", [one.newest() for one in rollouts]),
    ):
        if name in names:
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(versions, pa.int64()))
    return answers(table, where)
