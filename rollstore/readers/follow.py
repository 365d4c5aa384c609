"""A store that engines are still writing, as a queue: each rollout once, groups whole, what became of it on record."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import DuplicateError
from rollstore.readers import arguments
from rollstore.readers.arrivals import ORIGIN, Arrivals
from rollstore.readers.filters import check_scalar
from rollstore.readers.ledger import Ledger
from rollstore.store.store import Store

NEEDED = (
    "rollout_id", "segment", "run_id", "step", "group_id", "group_size", "ending", "weight_version_min",
    "weight_version_max", "action_mask", "trainable", *ORIGIN,
)  # fmt: skip


_LATE = "late: its group was closed"
_NO_GROUP = 1 << 62
"""After every segment that has a group."""


def _utc() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class Clock:
    """Time as a follower sees it: seconds that only go on, a pause, and the date for the record."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    date: Callable[[], datetime] = _utc


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What is given, and when it is given up.

    tokens_per_batch, rollouts_per_batch: the most of a batch; with whole_groups the second counts groups. where: over
    scalar columns of the last segment; others are `filtered`. version, max_lag: what is more than max_lag versions
    behind when it would be given is discarded, counted from its oldest action; so is what has an unknown version.
    whole_groups: a group comes whole, once group_size members are finished. group_wait: seconds after which one that is
    still incomplete is closed, for ever when None; incomplete: then to take what there is of it, or to leave it out.
    A group of which no member says its group_size waits as long, and is then what is there of it. Members that come
    later than that are discarded. timeout: seconds to wait for a full batch before what is there is
    given, or nothing more; None waits for ever. poll: seconds between looks at the store.
    """

    tokens_per_batch: int | None = None
    rollouts_per_batch: int | None = None
    where: pc.Expression | None = None
    version: Callable[[], int] | None = None
    max_lag: int | None = None
    whole_groups: bool = False
    group_wait: float | None = None
    incomplete: Literal["take", "leave_out"] = "leave_out"
    timeout: float | None = None
    poll: float = 0.2

    def __post_init__(self) -> None:
        arguments.limits(self.tokens_per_batch, self.rollouts_per_batch)
        arguments.flag("whole_groups", self.whole_groups)
        arguments.seconds("group_wait", self.group_wait)
        arguments.seconds("timeout", self.timeout)
        arguments.seconds("poll", self.poll)
        if not self.poll:
            raise ValueError(f"poll: wanted more than 0 seconds, got {self.poll}")
        arguments.function("version", self.version)
        if (self.version is None) != (self.max_lag is None):
            raise ValueError("max_lag: wanted together with version, which says what the current one is")
        if self.max_lag is not None:
            arguments.whole("max_lag", self.max_lag, 0)
        arguments.word("incomplete", self.incomplete, ("take", "leave_out"))


@dataclass(kw_only=True)
class _Rollout:
    """A rollout that is arriving: its rows by segment."""

    id: str
    rows: dict[int, pa.RecordBatch] = field(default_factory=dict[int, pa.RecordBatch])

    @property
    def finished(self) -> bool:
        last = max(self.rows)
        return len(self.rows) == last + 1 and self.rows[last].column("ending")[0].as_py() != "continued"

    @property
    def tokens(self) -> int:
        return sum(len(row.column("action_mask")[0]) for row in self.rows.values())

    def ordered(self) -> list[pa.RecordBatch]:
        return [self.rows[segment] for segment in sorted(self.rows)]

    def oldest(self) -> int | None:
        """The version of the oldest action; None where that of some action is not known."""
        return min(self._versions("weight_version_min"), default=None)

    def _versions(self, name: str) -> list[int]:
        """Of each segment that says it; none where one with actions does not."""
        found: list[int] = []
        for row in self.rows.values():
            version = row.column(name)[0].as_py()
            if version is None and pc.any(row.column("action_mask")[0].values).as_py():
                return []
            found += [] if version is None else [version]
        return found

    def summary(self) -> pa.Table:
        """The last segment, with the versions of all."""
        table = pa.Table.from_batches([self.rows[max(self.rows)]])
        newest = max(self._versions("weight_version_max"), default=None)
        for name, version in (("weight_version_min", self.oldest()), ("weight_version_max", newest)):
            place = table.schema.get_field_index(name)
            table = table.set_column(place, name, pa.array([version], pa.int64()))
        return table


@dataclass(kw_only=True)
class _Unit:
    """What is given together: a rollout, or a group of them. size: 0 while no member says it."""

    size: int
    since: float
    tokens: int = 0
    members: OrderedDict[str, _Rollout] = field(default_factory=OrderedDict[str, _Rollout])
    enqueued_at: datetime | None = None

    @property
    def complete(self) -> bool:
        return 0 < self.size <= sum(member.finished for member in self.members.values())


class Follower:
    """Gives the rollouts of a store as they are finished, as tables of whole rollouts, each once in a training run.

    What became of each is a row of `uses`, written by `commit` once the trainer's step is safe; from them a follower
    that is started again knows what was done. One follower a run at a time; rows that are being waited for are in
    memory, a rollout at a time.
    """

    def __init__(
        self, store: Store, *, train_run: str, rules: Rules, columns: Sequence[str], resume_step: int | None = None,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """resume_step: the `step` that the trainer's checkpoint goes on with; what an earlier attempt of the run did in
        that step or later comes again. Left out, the run goes on after the last step recorded."""
        arguments.text("train_run", train_run)
        if resume_step is not None:
            arguments.whole("resume_step", resume_step)
        self._rules, self._clock = rules, clock or Clock()
        self._ledger = Ledger(store, train_run, resume_step, self._clock.date)
        asked = "" if rules.where is None else str(rules.where)
        with store.snapshot() as snapshot:
            schema = snapshot.schema("rollouts")
        if rules.where is not None:
            check_scalar(rules.where, schema)
        if unknown := [name for name in columns if name not in schema.names]:
            raise ValueError(f"columns: rollouts has no column {', '.join(map(repr, unknown))}")
        # The text of an expression names every column it looks at; a name found by chance is only read in vain.
        tested = [f.name for f in schema if f.name in asked and not pa.types.is_list(f.type)]
        self._arrivals = Arrivals(store, [*dict.fromkeys([*columns, *NEEDED, *tested])])
        self._rows: Iterator[pa.RecordBatch] = iter(())
        self._coming: OrderedDict[Any, _Unit] = OrderedDict()
        self._ready: list[_Unit] = []
        self._closed: set[Any] = set()
        self._placed: dict[str, tuple[int, Any]] = {}

    @property
    def attempt(self) -> int:
        """0, 1, ...: which start of the run this is."""
        return self._ledger.attempt

    @property
    def step(self) -> int:
        """The step that `commit` records next: a commit of nothing is none."""
        return self._ledger.step

    @property
    def waiting(self) -> int:
        """Rollouts that are there and wait: for their group, their last segment, or to be given."""
        return sum(len(unit.members) for unit in (*self._coming.values(), *self._ready))

    def __iter__(self) -> Iterator[pa.Table]:
        while (table := self.next()) is not None:
            yield table

    def next(self) -> pa.Table | None:
        """The next batch; None where nothing came within the timeout. Raises DuplicateError, CorruptionError."""
        begun = self._clock.now()
        while True:
            full = self._fill()
            late = self._rules.timeout is not None and self._clock.now() - begun >= self._rules.timeout
            if full or late:
                chosen = self._take()
                return self._given(chosen) if chosen else None
            pause = self._rules.poll
            if self._rules.timeout is not None:
                pause = min(pause, max(0.0, begun + self._rules.timeout - self._clock.now()))
            self._clock.sleep(pause)

    def commit(self, *, weight_version: int | None = None, recipe: str | None = None, **columns: Any) -> None:
        """The step is done and safe: record all that was given since the last commit as trained, and what was not
        given with the reason. Survives power loss. Raises WriteError; then a later commit tries again.

        columns: more of the step for each of its rows, as step_started_at, step_finished_at, sync_seconds.
        """
        self._ledger.commit(weight_version=weight_version, recipe=recipe, **columns)

    def close(self) -> None:
        """Let the record go. What was given and not committed is given again."""
        self._ledger.close()

    # -- arriving -------------------------------------------------------------------------------------------------

    def _fill(self) -> bool:
        """Look at the store until a full batch is ready; whether it is. Reads no further than it takes."""
        self._settle()
        while not self._enough():
            batch = next(self._rows, None)
            if batch is None:
                self._rows = self._arrivals.new()
                batch = next(self._rows, None)
            if batch is None:
                return False
            for number in range(batch.num_rows):
                self._arrive(batch.take(pa.array([number])))
            self._settle()
        return True

    def _arrive(self, row: pa.RecordBatch) -> None:
        id_, segment, run, step, group = (
            row.column(name)[0].as_py() for name in ("rollout_id", "segment", "run_id", "step", "group_id")
        )
        grouped = self._rules.whole_groups and group is not None
        key = (run, step, group) if grouped else (None, None, id_)
        if self._rules.whole_groups:
            key = self._home(id_, segment, key)
        if id_ in self._ledger.done:
            self._close(key)
            return
        if key in self._closed:
            if all(id_ not in unit.members for unit in self._ready):
                self._ledger.drop(id_, "discarded", _LATE, self._clock.date())
            return
        size = 1 if key == (None, None, id_) and not grouped else row.column("group_size")[0].as_py()
        unit = self._coming.setdefault(key, _Unit(size=0, since=self._clock.now()))
        unit.size = max(unit.size, size or 0)
        rollout = unit.members.setdefault(id_, _Rollout(id=id_))
        known = rollout.rows.get(segment)
        if known is not None and not _same(known, row):
            raise DuplicateError(f"{id_!r}, segment {segment}: wanted one content, got different ones")
        rollout.rows.setdefault(segment, row)

    def _home(self, id_: str, segment: int, key: Any) -> Any:
        """The group of a rollout's first segment that has one, so far; what is there of it moves along."""
        rank = segment if key[2] != id_ or key[:2] != (None, None) else _NO_GROUP
        first, placed = self._placed.get(id_, (rank, key))
        if rank > first or id_ not in self._placed:
            self._placed.setdefault(id_, (rank, key))
            return self._placed[id_][1]
        self._placed[id_] = (rank, key)
        unit = self._coming.get(placed)
        if key != placed and unit is not None and id_ in unit.members:
            there = self._coming.setdefault(key, _Unit(size=0, since=unit.since))
            there.members[id_] = unit.members.pop(id_)
            if not unit.members:
                del self._coming[placed]
        return key

    def _close(self, key: Any) -> None:
        """A member of this group is done, so the group was given before this start: what came first is late."""
        self._closed.add(key)
        unit = self._coming.pop(key, None)
        for id_ in [] if unit is None else list(unit.members):
            self._ledger.drop(id_, "discarded", _LATE, None)

    def _settle(self) -> None:
        """Move what is complete, or has waited long enough, to what is ready; drop what the rules leave out."""
        now, wait = self._clock.now(), self._rules.group_wait
        for key, unit in list(self._coming.items()):
            overdue = wait is not None and now - unit.since >= wait and not unit.complete
            if not unit.complete and not overdue:
                continue
            del self._coming[key]
            self._closed.add(key)
            unit.enqueued_at = self._clock.date()
            if overdue:
                self._close_incomplete(unit)
            self._filter(unit)
            unit.tokens = sum(member.tokens for member in unit.members.values())
            if unit.members and not self._oversize(unit):
                self._ready.append(unit)

    def _close_incomplete(self, unit: _Unit) -> None:
        there = sum(member.finished for member in unit.members.values())
        for id_, member in list(unit.members.items()):
            if (self._rules.incomplete == "leave_out" and unit.size) or not member.finished:
                what = f"its group has {there} of {unit.size}" if member.finished else "unfinished"
                self._drop(unit, id_, "discarded", f"incomplete: {what} after {self._rules.group_wait} s")

    def _filter(self, unit: _Unit) -> None:
        if self._rules.where is None:
            return
        for id_, member in list(unit.members.items()):
            if not member.summary().filter(self._rules.where).num_rows:
                self._drop(unit, id_, "filtered", f"where: {self._rules.where}")

    def _oversize(self, unit: _Unit) -> bool:
        budget = self._rules.tokens_per_batch
        if budget is None or unit.tokens <= budget:
            return False
        for id_ in list(unit.members):
            self._drop(unit, id_, "discarded", f"oversize: {unit.tokens} tokens, wanted at most {budget}")
        return True

    def _drop(self, unit: _Unit, id_: str, disposition: str, reason: str) -> None:
        del unit.members[id_]
        self._ledger.drop(id_, disposition, reason, unit.enqueued_at)

    # -- giving ---------------------------------------------------------------------------------------------------

    def _enough(self) -> bool:
        """Whether more would not fit into the batch."""
        self._drop_stale()
        return self._fitting() < len(self._ready) or (
            self._rules.rollouts_per_batch is not None and len(self._ready) >= self._rules.rollouts_per_batch
        )

    def _fitting(self) -> int:
        """How many of the units that are ready fit into one batch."""
        tokens = 0
        for count, unit in enumerate(self._ready):
            tokens += unit.tokens
            if count == self._rules.rollouts_per_batch or tokens > (self._rules.tokens_per_batch or tokens):
                return count
        return len(self._ready)

    def _drop_stale(self) -> None:
        if self._rules.version is None or self._rules.max_lag is None:
            return
        current, kept = self._rules.version(), list[_Unit]()
        for unit in self._ready:
            oldest = [member.oldest() for member in unit.members.values()]
            known = [version for version in oldest if version is not None]
            if len(known) == len(oldest) and current - min(known) <= self._rules.max_lag:
                kept.append(unit)
                continue
            lag = f"lag {current - min(known)}" if len(known) == len(oldest) else "an unknown version"
            for id_ in list(unit.members):
                self._drop(unit, id_, "discarded", f"stale: {lag}, wanted at most {self._rules.max_lag}")
        self._ready = kept

    def _take(self) -> list[_Unit]:
        self._drop_stale()
        count = self._fitting()
        chosen, self._ready = self._ready[:count], self._ready[count:]
        return chosen

    def _given(self, units: list[_Unit]) -> pa.Table:
        at, rows = self._clock.date(), list[pa.RecordBatch]()
        for unit in units:
            for member in unit.members.values():
                rows += member.ordered()
                self._ledger.give(member.id, unit.enqueued_at, at, _actions(member))
        return pa.Table.from_batches(rows).combine_chunks()


def _actions(member: _Rollout) -> int:
    """Actions that the record lets be trained on."""
    count = 0
    for row in member.rows.values():
        allowed = row.column("trainable")[0]
        chosen = allowed if allowed.is_valid else row.column("action_mask")[0]
        count += pc.sum(chosen.values.cast(pa.int64())).as_py() or 0
    return count


def _same(first: pa.RecordBatch, second: pa.RecordBatch) -> bool:
    """Whether two rows hold the same, but for where they were written."""
    names = [name for name in first.schema.names if name not in ORIGIN]
    return first.select(names).equals(second.select(names))
