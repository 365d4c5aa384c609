"""A store that engines are still writing, as a queue: each rollout once, groups whole, what became of it on record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import pyarrow as pa

from rollstore.errors import DuplicateError
from rollstore.readers import arguments
from rollstore.readers.arrivals import ORIGIN, Arrivals
from rollstore.readers.filters import check_scalar
from rollstore.readers.ledger import Ledger
from rollstore.readers.rules import Clock, Rules
from rollstore.readers.waiting import NEEDED, Rollout, Row, Unit, gather, kept, release, rows_of, together
from rollstore.store.store import Store

__all__ = ["Clock", "Follower", "Rules"]

_LATE = "late: its group was closed"
_CONFLICT = "conflict: one segment came with different contents"
_NAMED = 8
"""How many rollouts an error names."""
_NO_GROUP = 1 << 62
"""After every segment that has a group."""

_Key: TypeAlias = str | tuple[Any, Any, Any]
"""Of what is given together: the id of a rollout, or (run_id, step, group_id)."""

T = TypeVar("T")
"""What is made of a batch."""


def _itself(table: pa.Table) -> pa.Table:
    return table


class Follower:
    """Gives the rollouts of a store as they are finished, as tables of whole rollouts, each once in a training run.

    What became of each is a row of `uses`, written by `commit` once the trainer's step is safe; from them a follower
    that is started again knows what was done. One follower a run at a time; what is being waited for is in memory, at
    most as much again of what came with it, and of each rollout ever given or dropped its id: about 0.55 kB.
    """

    def __init__(
        self, store: Store, *, train_run: str, rules: Rules, columns: Sequence[str], resume_step: int | None = None,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """resume_step: the `step` that the trainer's checkpoint goes on with; what an earlier attempt of the run did in
        that step or later comes again. Left out, the run goes on after the last step recorded. Raises CorruptionError
        where groups are to be whole and it cannot be read which were given."""
        arguments.text("train_run", train_run)
        if resume_step is not None:
            arguments.whole("resume_step", resume_step, None, arguments.LONG)
        self._rules, self._clock = rules, clock or Clock()
        self._ledger = Ledger(store, train_run, resume_step, self._clock.date)
        self._where = "" if rules.where is None else str(rules.where)
        with store.snapshot() as snapshot:
            schema = snapshot.schema("rollouts")
        if rules.where is not None:
            check_scalar(rules.where, schema)
        if unknown := [name for name in columns if name not in schema.names]:
            raise ValueError(f"columns: rollouts has no column {', '.join(map(repr, unknown))}")
        # The text of an expression names every column it looks at; a name found by chance is only read in vain.
        self._tested = [f.name for f in schema if f.name in self._where and not pa.types.is_list(f.type)]
        self._arrivals = Arrivals(store, [*dict.fromkeys([*columns, *NEEDED, *ORIGIN, *self._tested])])
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._coming: dict[_Key, Unit] = {}
        self._touched: set[_Key] = set()
        """of what is coming: what something came for since it was last looked at"""
        self._earliest = math.inf
        """when the first of what is coming came, or before"""
        self._units = 0
        self._ready: list[Unit] = []
        self._queued: dict[str, Unit] = {}
        """what is ready, by the ids of its members"""
        self._groups: dict[_Key, Unit] = {}
        """what is ready, by what its members share"""
        self._fresh, self._current = 0, 0
        """how much of what is ready, from its beginning, is known not to be stale, and at which version"""
        self._closed: set[_Key] = {*self._ledger.groups()} if rules.whole_groups else set()
        self._placed: dict[str, tuple[int, _Key]] = {}

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
        """The next batch; None where nothing came within the timeout.

        Raises CorruptionError; DuplicateError that names what came with different contents since the last call, and
        ValueError that names what the filter fails on: it is not given, and on record as discarded with the next
        commit; the rest is with the next call.
        """
        return self.batch(_itself)

    def batch(self, make: Callable[[pa.Table], T]) -> T | None:
        """What is made of the next batch, as `next`. Where make raises nothing was given, and the batch comes again."""
        begun = self._clock.now()
        while True:
            full = self._fill()
            late = self._rules.timeout is not None and self._clock.now() - begun >= self._rules.timeout
            if full or late:
                chosen = self._take()
                return self._given(chosen, make) if chosen else None
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
            batch = next(self._batches, None)
            if batch is None:
                self._batches = together(self._arrivals.new())
                batch = next(self._batches, None)
            if batch is None:
                return False
            self._arrive_all(rows_of(batch))
            self._settle()
        return True

    def _arrive_all(self, rows: list[Row]) -> None:
        """All of them, even where one is an error: they do not come again."""
        conflicts = [f"{row.id!r}, segment {row.segment}" for row in rows if not self._arrive(row)]
        rows[0].block.arrived()
        if conflicts:
            raise DuplicateError(f"{'; '.join(conflicts)}: wanted one content, got different ones")

    def _arrive(self, row: Row) -> bool:
        """Whether it goes with what came before; what does not is dropped, all of its rollout."""
        if row.id in self._ledger.done:
            return True
        key = self._home(row) if self._rules.whole_groups else row.id
        if row.id in self._queued:
            unit = self._queued[row.id]
            known = unit.members[row.id].rows.get(row.segment)
            return known is None or known.equals(row) or self._contradict(unit, row.id)
        if key in self._closed:
            ready = self._groups.get(key)
            kept = None if ready is None else ready.dropped
            self._ledger.drop(row.id, "discarded", _LATE, self._clock.date(), kept)
            unit = self._coming.pop(key, None)
            if unit is not None:  # earlier segments, which had no group
                self._drop(unit, list(unit.members), "discarded", _LATE)
                self._ledger.record(unit.dropped)
            return True
        unit = self._coming.get(key) or self._begin(key, self._clock.now())
        unit.size = max(unit.size, 1 if isinstance(key, str) else row.size or 0)
        rollout = unit.members.get(row.id)
        if rollout is None:
            rollout = unit.members[row.id] = Rollout(id=row.id)
        known = rollout.rows.get(row.segment)
        if known is None:
            rollout.rows[row.segment] = row
            row.hold()
            self._touched.add(key)
        return known is None or known.equals(row) or self._contradict(unit, row.id)

    def _contradict(self, unit: Unit, id_: str) -> Literal[False]:
        """Which of the two contents is right nobody knows: neither is given. The group is one that stays incomplete."""
        self._drop(unit, [id_], "discarded", _CONFLICT)
        unit.contradicted += 1
        self._touched.add(unit.key)
        if unit.key in self._groups:
            for other, reason in self._left_out(unit, complete=True).items():
                self._drop(unit, [other], "discarded", reason)
            unit.measure()
            self._fresh = 0
            if not unit.members:
                self._ready.remove(unit)
                self._leaves(unit)
        return False

    def _begin(self, key: _Key, since: float) -> Unit:
        unit = self._coming[key] = Unit(key=key, number=self._units, since=since)
        self._units, self._earliest = self._units + 1, min(self._earliest, since)
        return unit

    def _home(self, row: Row) -> _Key:
        """The group of a rollout's first segment that has one, so far; what is there of it moves along."""
        rank, key = (_NO_GROUP, row.id) if row.group is None else (row.segment, row.group)
        first, placed = self._placed.setdefault(row.id, (rank, key))
        if rank > first or row.id in self._queued or (rank == first and key != placed):
            return placed  # The last contradicts: one segment is in one group.
        self._placed[row.id] = (rank, key)
        unit = self._coming.get(placed)
        if key != placed and unit is not None and row.id in unit.members:
            there = self._coming.get(key) or self._begin(key, unit.since)
            there.members[row.id] = unit.members.pop(row.id)
            if not unit.members and not unit.contradicted:
                del self._coming[placed]
        return key

    def _settle(self) -> None:
        """Move what is complete, or has waited long enough, to what is ready; drop what the rules leave out. Raises
        ValueError where the filter fails, once all is moved."""
        complete = {key for key in self._touched if key in self._coming and self._coming[key].complete}
        closing = sorted(complete | self._overdue(), key=lambda key: self._coming[key].number)
        units = [self._coming[key] for key in closing]
        left_out = [self._left_out(unit, unit.key in complete) for unit in units]
        staying = [
            [one for id_, one in unit.members.items() if id_ not in out]
            for unit, out in zip(units, left_out, strict=True)
        ]
        answers = self._answers(staying)
        self._touched.clear()
        for unit, reasons, said in zip(units, left_out, answers, strict=True):
            del self._coming[unit.key]
            self._closed.add(unit.key)
            unit.enqueued_at = self._clock.date()
            for id_, reason in reasons.items():
                self._drop(unit, [id_], "discarded", reason)
            unwanted = [id_ for id_, stays in said.items() if stays is False]
            self._drop(unit, unwanted, "filtered", f"where: {self._where}")
            self._drop_failing(unit, {id_: error for id_, error in said.items() if isinstance(error, Exception)})
            unit.measure()
            if unit.members and not self._oversize(unit):
                self._ready.append(unit)
                self._queued.update(dict.fromkeys(unit.members, unit))
                self._groups[unit.key] = unit
            else:
                self._ledger.record(unit.dropped)
        failing = [(id_, e) for said in answers for id_, e in said.items() if isinstance(e, Exception)]
        if failing:
            more = f"; and {len(failing) - _NAMED} more" if len(failing) > _NAMED else ""
            named = "; ".join(f"{id_!r}: {error}" for id_, error in failing[:_NAMED])
            what = f"where: {self._where} fails on rollouts, which are not given: {named}{more}"
            raise ValueError(what) from failing[0][1]

    def _overdue(self) -> set[_Key]:
        """What has waited long enough."""
        now, wait = self._clock.now(), self._rules.group_wait
        if wait is None or now - self._earliest < wait:
            return set()
        found = {key for key, unit in self._coming.items() if now - unit.since >= wait}
        self._earliest = min((unit.since for key, unit in self._coming.items() if key not in found), default=math.inf)
        return found

    def _left_out(self, unit: Unit, complete: bool) -> dict[str, str]:
        """Members of a unit that is closed which do not stay, with the reason."""
        whole = self._rules.incomplete == "leave_out" and unit.size > 0
        if whole and unit.contradicted:
            return dict.fromkeys(unit.members, "incomplete: a member of its group came with different contents")
        if complete:
            return {}
        what = f"its group has {unit.finished} of {unit.size}"
        return {
            id_: f"incomplete: {what if member.finished else 'unfinished'} after {self._rules.group_wait} s"
            for id_, member in unit.members.items()
            if whole or not member.finished
        }

    def _answers(self, groups: list[list[Rollout]]) -> list[dict[str, bool | Exception]]:
        """Of each group what the filter says to its members: nothing where there is none."""
        if self._rules.where is None:
            return [{} for _ in groups]
        try:
            said = iter(kept([one for group in groups for one in group], self._rules.where, self._tested))
        except BaseException:  # Nothing is closed: all is asked again.
            self._earliest = -math.inf
            raise
        return [{one.id: next(said) for one in group} for group in groups]

    def _drop_failing(self, unit: Unit, errors: dict[str, Exception]) -> None:
        """What the filter fails on is not known to be wanted, and its group is one that stays incomplete."""
        for id_, error in errors.items():
            self._drop(unit, [id_], "discarded", f"where fails: {error}")
        if errors and unit.size and self._rules.incomplete == "leave_out":
            self._drop(unit, list(unit.members), "discarded", "incomplete: where fails on a member of its group")

    def _oversize(self, unit: Unit) -> bool:
        budget = self._rules.tokens_per_batch
        if budget is None or unit.tokens <= budget:
            return False
        what = f"oversize: {unit.tokens} tokens, wanted at most {budget}"
        self._drop(unit, list(unit.members), "discarded", what)
        return True

    def _drop(self, unit: Unit, ids: Sequence[str], disposition: str, reason: str) -> None:
        for id_ in ids:
            self._queued.pop(id_, None)
            self._ledger.drop(id_, disposition, reason, unit.enqueued_at, unit.dropped)
        release([unit.members.pop(id_) for id_ in ids])

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
        current = self._rules.version()
        if current != self._current:
            self._fresh, self._current = 0, current
        stay = self._ready[: self._fresh]
        for unit in self._ready[self._fresh :]:
            if unit.oldest is not None and current - unit.oldest <= self._rules.max_lag:
                stay.append(unit)
                continue
            lag = "an unknown version" if unit.oldest is None else f"lag {current - unit.oldest}"
            what = f"stale: {lag}, wanted at most {self._rules.max_lag}"
            self._drop(unit, list(unit.members), "discarded", what)
            self._leaves(unit)
        self._ready, self._fresh = stay, len(stay)

    def _take(self) -> list[Unit]:
        self._drop_stale()
        count = self._fitting()
        chosen, self._ready = self._ready[:count], self._ready[count:]
        self._fresh = max(0, self._fresh - count)
        return chosen

    def _given(self, units: list[Unit], make: Callable[[pa.Table], T]) -> T:
        at, members = self._clock.date(), [(unit, member) for unit in units for member in unit.members.values()]
        try:
            made = make(gather([row for _, member in members for row in member.ordered()]))
        except BaseException:
            self._ready[:0], self._fresh = units, 0
            raise
        for unit, member in members:
            self._ledger.give(member.id, unit.enqueued_at, at, member.actions)
            self._queued.pop(member.id, None)
        for unit in units:
            self._leaves(unit)
        release(member for _, member in members)
        return made

    def _leaves(self, unit: Unit) -> None:
        """It is not ready any more: what was left out of it belongs to this step."""
        del self._groups[unit.key]
        self._ledger.record(unit.dropped)
