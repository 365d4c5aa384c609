"""What came from a store that engines still write and waits to be given: for its last segment, its group, its turn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from rollstore.errors import DuplicateError, RollstoreError
from rollstore.readers import arguments
from rollstore.readers.arrivals import Arrivals
from rollstore.readers.ledger import Ledger
from rollstore.readers.rules import Clock, Rules
from rollstore.readers.waiting import Rollout, Row, Unit, kept, release, rows_of, together

_LATE = "late: its group was closed"
_CONFLICT = "conflict: one segment came with different contents"
_NAMED = 8
"""How many rollouts an error names."""
_NO_SEGMENT = 1 << 62
"""After every segment that says something."""

_Key: TypeAlias = str | tuple[Any, Any, Any]
"""Of what is given together: the id of a rollout, or (run_id, step, group_id)."""


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
        self._coming: dict[_Key, Unit] = {}
        self._touched: set[_Key] = set()
        """of what is coming: what something came for since it was last looked at"""
        self._earliest = math.inf
        """when the look began that found the first of what is coming, or before"""
        self._units = 0
        self._ready: list[Unit] = []
        self._queued: dict[str, Unit] = {}
        """what is ready, by the ids of its members"""
        self._groups: dict[_Key, Unit] = {}
        """what is ready, by what its members share"""
        self._fresh, self._current = 0, 0
        """how much of what is ready, from its beginning, is known not to be stale, and at which version"""
        self._closed: set[_Key] = {*ledger.groups()} if rules.whole_groups else set()
        self._placed: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {}
        """of what is coming or ready: run_id, step and group_id, each of the first segment that says it, and which"""

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
        key = self._home(row) if self._rules.whole_groups else row.id
        if row.id in self._queued:
            unit = self._queued[row.id]
            known = unit.members[row.id].rows.get(row.segment)
            return known is None or known.equals(row) or self._contradict(unit, row.id)
        if key in self._closed:
            ready = self._groups.get(key)
            kept = None if ready is None else ready.dropped
            self._ledger.drop(row.id, "discarded", _LATE, self._clock.date(), kept)
            self._placed.pop(row.id, None)
            unit = self._coming.pop(key, None)
            if unit is not None:  # earlier segments, which had no group
                self._drop(unit, list(unit.members), "discarded", _LATE)
                self._ledger.record(unit.dropped)
            return True
        unit = self._coming.get(key) or self._begin(key, self._look)
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
        """The group of a rollout, so far: what a row says that comes first among its segments counts, field by field.
        What is there of it moves along."""
        segments, said = self._placed.get(row.id, ((_NO_SEGMENT,) * 3, (None,) * 3))
        before = _key(row.id, said)
        if row.id in self._queued:
            return before
        earlier = [value is not None and row.segment < segment for segment, value in zip(segments, row.of, strict=True)]
        if any(earlier):  # of one segment that is there already the first row counts, and another contradicts it
            segments = tuple(row.segment if first else at for first, at in zip(earlier, segments, strict=True))
            said = tuple(new if first else old for first, new, old in zip(earlier, row.of, said, strict=True))
        self._placed[row.id] = segments, said
        key, unit = _key(row.id, said), self._coming.get(before)
        if key != before and unit is not None and row.id in unit.members:
            there = self._coming.get(key) or self._begin(key, unit.since)
            member = there.members[row.id] = unit.members.pop(row.id)
            there.size = max(there.size, *(one.size or 0 for one in member.rows.values()))
            if not unit.members and not unit.contradicted:
                del self._coming[before]
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
            self.sound = True
            raise ValueError(what) from failing[0][1]

    def _overdue(self) -> set[_Key]:
        """What has waited long enough: all that was written until then has arrived, however long that took to read."""
        wait = self._rules.group_wait
        if wait is None or self._looked - self._earliest < wait:
            return set()
        found = {key for key, unit in self._coming.items() if self._looked - unit.since >= wait}
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
            self._queued.pop(id_, None)
            self._placed.pop(id_, None)
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
            self._queued.pop(member.id, None)
            self._placed.pop(member.id, None)
        for unit in units:
            self._leaves(unit)
        release(members)

    def _leaves(self, unit: Unit) -> None:
        """It is not ready any more: what was left out of it belongs to this step."""
        del self._groups[unit.key]
        self._ledger.record(unit.dropped)


def _key(id_: str, said: tuple[Any, ...]) -> _Key:
    """What a rollout shares with the others of its group (run_id, step, group_id); its own id, where it is in none."""
    run, step, group = said
    return id_ if group is None else (run, step, group)
