"""What came from a store that engines still write and waits to be given: for its last segment, its group, its turn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import pyarrow as pa

from rollstore.errors import DuplicateError, RollstoreError
from rollstore.readers import arguments
from rollstore.readers.arrivals import Arrivals
from rollstore.readers.ledger import CONFLICT, UNFINISHED, Ledger, speaks
from rollstore.readers.rules import Clock, Rules
from rollstore.readers.waiting import Key, Rollout, Row, Unit, kept, release, rows_of, together

_LATE = "late: its group was closed"
_NAMED = 8
"""How many rollouts an error names."""


class Pending:
    """All that is in the store and not on record in the ledger, as far as it was read. `fill` reads until a batch is
    full, `take` takes it away, `put_back` and `gone` say what became of it.

    sound: nothing was interrupted on its way. Of one that is not sound nothing can be known; another one begins anew,
    from the store and the ledger. tested: the columns that the filter looks at.
    """

    def __init__(
        self, arrivals: Arrivals, rules: Rules, clock: Clock, ledger: Ledger, tested: Sequence[str]
    ) -> None:  # fmt: skip
        self._arrivals, self._rules, self._clock, self._ledger, self._tested = arrivals, rules, clock, ledger, tested
        self._where = "" if rules.where is None else str(rules.where)
        self.sound = True
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._look, self._looked = -math.inf, -math.inf
        """when the look at the store that is under way began, and the last that came to its end: all that was written
        before has arrived"""
        self._home: dict[str, Unit] = {}
        """of each rollout, by its id: what it is a member of, coming or ready"""
        self._coming: dict[Key, Unit] = {}
        self._touched: set[Key] = set()
        """of what is coming: what something came for since it was last looked at"""
        self._earliest = math.inf
        """when the look began that found the first of what is coming, or before"""
        self._units = 0
        self._ready: list[Unit] = []
        self._groups: dict[Key, Unit] = {}
        """what is ready, by what its members share"""
        self._fresh, self._current = 0, 0
        """how much of what is ready, from its beginning, is known not to be stale, and at which version"""
        self._closed: set[Key] = {*ledger.groups()} if rules.whole_groups else set()
        """groups of which no more is given"""

    def __len__(self) -> int:
        """Rollouts."""
        return sum(len(unit.members) for unit in (*self._coming.values(), *self._ready))

    # -- arriving -------------------------------------------------------------------------------------------------

    def fill(self) -> bool:
        """Look at the store until a full batch is ready; whether it is. Reads no further than it takes."""
        self._settle()
        in_vain = False
        while not self._enough():
            batch = self._next()
            if batch is not None:
                self._arrive_all(rows_of(batch))
            self._settle()
            if batch is None and in_vain:
                return self._enough()
            if batch is None:
                self._look, self._batches = self._clock.now(), together(self._arrivals.new())
            in_vain = batch is None
        return True

    def _next(self) -> pa.RecordBatch | None:
        """More rows of the look that is under way; None at its end."""
        try:
            batch = next(self._batches, None)
        except RollstoreError:  # what came before it has arrived, and the rest is new to the next look
            self._look, self.sound = -math.inf, True
            raise
        if batch is None:
            self._looked = max(self._looked, self._look)
        return batch

    def _arrive_all(self, rows: list[Row]) -> None:
        """All of them, even where one is an error: they do not come again."""
        conflicts = [f"{row.id!r}, segment {row.segment}" for row in rows if not self._arrive(row)]
        rows[0].block.arrived()
        if conflicts:
            self.sound = True
            raise DuplicateError(f"{'; '.join(conflicts)}: wanted one content, got different ones")

    def _arrive(self, row: Row) -> bool:
        """Whether it goes with what came before; what does not is dropped, all of its rollout."""
        if row.id in self._ledger:
            return True
        unit = self._home.get(row.id)
        if unit is None:
            rollout = Rollout(id=row.id, since=self._look)
        else:
            rollout = unit.members[row.id]
            known = rollout.rows.get(row.segment)
            if known is not None:
                return known.equals(row) or self._contradict(unit, row.id)
            if unit.enqueued_at is not None:
                return True
        rollout.add(row)
        row.hold()
        self._place(rollout, unit)
        return True

    def _place(self, rollout: Rollout, unit: Unit | None) -> None:
        """Out of what it is in, if anything, into its group, as far as its segments say which. One that may yet be told
        to be in another waits alone for the segments that say so, where this one is closed."""
        key = rollout.key if self._rules.whole_groups else rollout.id
        if key in self._closed and rollout.settled:
            self._leave(unit, [rollout])
            self._drop_late(rollout)
            return
        if key in self._closed:
            key = rollout.id
        if unit is None or key != unit.key:
            self._leave(unit, [rollout])
            self._house(rollout, key)
        self._touched.add(key)

    def _drop_late(self, rollout: Rollout) -> None:
        """It is on record with the others of its group, where these are not given yet."""
        ready = self._groups.get(rollout.key)
        release([rollout])
        self._ledger.drop(rollout.id, "discarded", _LATE, self._clock.date(), None if ready is None else ready.dropped)

    def _house(self, rollout: Rollout, key: Key) -> None:
        unit = self._coming.get(key)
        if unit is None:
            unit = self._coming[key] = Unit(key=key, number=self._units, since=rollout.since)
            self._units += 1
        unit.since, self._earliest = min(unit.since, rollout.since), min(self._earliest, rollout.since)
        unit.members[rollout.id] = rollout
        self._home[rollout.id] = unit

    def _leave(self, unit: Unit | None, rollouts: Sequence[Rollout]) -> None:
        """They are no members of what is coming, which is as if they had never been."""
        if unit is None:
            return
        for rollout in rollouts:
            del unit.members[rollout.id], self._home[rollout.id]
        self._touched.add(unit.key)
        self._vacate(unit)

    def _vacate(self, unit: Unit) -> None:
        """Nothing is coming where nobody is left, nor was in it for certain."""
        if not unit.members and not unit.contradicted:
            del self._coming[unit.key]
            self._ledger.record(unit.dropped)

    def _contradict(self, unit: Unit, id_: str) -> Literal[False]:
        """Which of the two contents is right nobody knows: neither is given. The group is one that stays incomplete."""
        unit.contradict(id_)
        self._drop(unit, [id_], "discarded", CONFLICT)
        self._touched.add(unit.key)
        if unit.key in self._groups:
            for other, reason in self._left_out(unit, complete=True).items():
                self._drop(unit, [other], "discarded", reason)
            unit.measure()
            self._fresh = 0
            if not unit.members:
                if not any(map(speaks, unit.dropped)):
                    self._closed.discard(unit.key)
                self._ready.remove(unit)
                self._leaves(unit)
        else:
            self._vacate(unit)
        return False

    def _settle(self) -> None:
        """Move what is complete, or has waited long enough, to what is ready; drop what the rules leave out. Raises
        ValueError where the filter fails, once all is moved."""
        for key in self._touched & self._coming.keys():
            self._coming[key].count()
        complete = {key for key in self._touched & self._coming.keys() if self._coming[key].complete}
        closing = complete | self._overdue()
        for key in closing:
            self._set_apart(self._coming[key])
        closing = (closing | self._overdue()) & self._coming.keys()
        units = sorted((self._coming[key] for key in closing), key=lambda unit: unit.number)
        left_out = [self._left_out(unit, unit.key in complete) for unit in units]
        staying = [
            [one for id_, one in unit.members.items() if id_ not in out]
            for unit, out in zip(units, left_out, strict=True)
        ]
        answers = self._answers(staying)
        self._touched.clear()
        for unit, reasons, said in zip(units, left_out, answers, strict=True):
            del self._coming[unit.key]
            if unit.finished and not isinstance(unit.key, str):  # others say nothing for it, here as on record
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
                self._groups[unit.key] = unit
            else:
                self._ledger.record(unit.dropped)
        failing = [(id_, e) for said in answers for id_, e in said.items() if isinstance(e, Exception)]
        if failing:
            more = f"; and {len(failing) - _NAMED} more" if len(failing) > _NAMED else ""
            named = "; ".join(f"{id_!r}: {error}" for id_, error in failing[:_NAMED])
            what = f"where: {self._where} fails on rollouts, which are not given: {named}{more}"
            self.sound = True
            raise ValueError(what) from failing[0][1]

    def _set_apart(self, unit: Unit) -> None:
        """Of a group that is closed what may yet be told to be in another waits alone, as long as it may."""
        if not isinstance(unit.key, str) and (unsettled := [one for one in unit.members.values() if not one.settled]):
            self._leave(unit, unsettled)
            for rollout in unsettled:
                self._house(rollout, rollout.id)

    def _waited(self, since: float) -> bool:
        """Whether it is long enough: all that was written until then has arrived, however long that took to read."""
        return self._rules.group_wait is not None and self._looked - since >= self._rules.group_wait

    def _overdue(self) -> set[Key]:
        """What has waited long enough."""
        if not self._waited(self._earliest):
            return set()
        found = {key for key, unit in self._coming.items() if self._waited(unit.since)}
        self._earliest = min((unit.since for key, unit in self._coming.items() if key not in found), default=math.inf)
        return found

    def _left_out(self, unit: Unit, complete: bool) -> dict[str, str]:
        """Members of a unit that is closed which do not stay, with the reason. Those that are unfinished never do."""
        whole = self._rules.incomplete == "leave_out" and unit.size > 0
        after = "when its group was closed" if complete else f"after {self._rules.group_wait} s"
        out = {id_: f"{UNFINISHED} {after}" for id_, member in unit.members.items() if not member.finished}
        if whole and unit.contradicted:
            why = "incomplete: a member of its group came with different contents"
        elif whole and not complete:
            why = f"incomplete: its group has {unit.finished} of {unit.size} {after}"
        else:
            return out
        return {id_: out.get(id_, why) for id_ in unit.members}

    def _answers(self, groups: list[list[Rollout]]) -> list[dict[str, bool | Exception]]:
        """Of each group what the filter says to its members: nothing where there is none."""
        if self._rules.where is None:
            return [{} for _ in groups]
        said = iter(kept([one for group in groups for one in group], self._rules.where, self._tested))
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
            del self._home[id_]
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
        self.sound = True  # nothing is on its way, should the caller's function fail
        current = self._rules.version()
        arguments.whole("version", current)
        self.sound = False
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

    def take(self) -> list[Unit]:
        self._drop_stale()
        count = self._fitting()
        chosen, self._ready = self._ready[:count], self._ready[count:]
        self._fresh = max(0, self._fresh - count)
        return chosen

    def put_back(self, units: list[Unit]) -> None:
        """They were not given after all, and are the next ones again."""
        self._ready[:0], self._fresh = units, 0

    def gone(self, units: list[Unit]) -> None:
        """They were given."""
        members = [member for unit in units for member in unit.members.values()]
        for member in members:
            del self._home[member.id]
        for unit in units:
            self._leaves(unit)
        release(members)

    def _leaves(self, unit: Unit) -> None:
        """It is not ready any more: what was left out of it belongs to this step."""
        del self._groups[unit.key]
        self._ledger.record(unit.dropped)
