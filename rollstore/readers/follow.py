"""A store that engines are still writing, as a queue: each rollout once, groups whole, what became of it on record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from rollstore.readers import arguments
from rollstore.readers.arrivals import ORIGIN, Arrivals
from rollstore.readers.filters import check_scalar
from rollstore.readers.ledger import Ledger
from rollstore.readers.pending import Pending
from rollstore.readers.rules import Clock, Rules
from rollstore.readers.waiting import NEEDED, Unit, gather
from rollstore.store.store import Store

__all__ = ["Clock", "Follower", "Rules"]

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
        columns = arguments.names("columns", columns)
        if resume_step is not None:
            arguments.whole("resume_step", resume_step, None, arguments.LONG)
        self._rules, self._clock = rules, Clock() if clock is None else clock
        for name in ("now", "sleep", "date"):
            arguments.function(f"clock: {name}", getattr(clock, name, clock))
        self._ledger = Ledger(store, train_run, resume_step, self._clock.date)
        with store.snapshot() as snapshot:
            schema = snapshot.schema("rollouts")
        if rules.where is not None:
            check_scalar(rules.where, schema)
        if unknown := [name for name in columns if name not in schema.names]:
            raise ValueError(f"columns: rollouts has no column {', '.join(map(repr, unknown))}")
        # The text of an expression names every column it looks at; a name found by chance is only read in vain.
        where = "" if rules.where is None else str(rules.where)
        tested = [f.name for f in schema if f.name in where and not pa.types.is_list(f.type)]
        read = [*dict.fromkeys([*columns, *NEEDED, *ORIGIN, *tested])]
        self._giving: list[str] = []
        """what goes on record with a batch that is still on its way to the caller"""
        self._anew = lambda: Pending(Arrivals(store, read), rules, self._clock, self._ledger, tested)
        self._pending = self._anew()

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
        return len(self._pending)

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
        self._mend()
        self._giving = []
        end = math.inf if self._rules.timeout is None else self._clock.now() + self._rules.timeout
        while True:
            self._pending.sound = False
            ends = self._pending.fill() or self._clock.now() >= end
            chosen = self._pending.take() if ends else []
            made = self._given(chosen, make) if chosen else None
            self._pending.sound = True
            if ends:
                return made
            self._clock.sleep(min(self._rules.poll, max(0.0, end - self._clock.now())))

    def _mend(self) -> None:
        """After an interrupt on the way: what is in the store and not on record comes, anew or for the first time."""
        if not self._pending.sound:
            self._ledger.forget(self._giving)
            self._pending = self._anew()

    def _given(self, units: list[Unit], make: Callable[[pa.Table], T]) -> T:
        at, members = self._clock.date(), [(unit, member) for unit in units for member in unit.members.values()]
        try:
            made = make(gather([row for _, member in members for row in member.ordered()]))
        except BaseException:
            self._pending.put_back(units)
            self._pending.sound = True
            raise
        self._giving = [member.id for _, member in members]
        self._giving += [row["rollout_id"] for unit in units for row in unit.dropped]
        for unit, member in members:
            self._ledger.give(member.id, unit.enqueued_at, at, member.actions)
        self._pending.gone(units)
        return made

    def commit(self, *, weight_version: int | None = None, recipe: str | None = None, **columns: Any) -> None:
        """The step is done and safe: record all that was given since the last commit as trained, and what was not
        given with the reason. Survives power loss. Raises WriteError; then a later commit tries again; StoreError where
        another follower of the run began when this one did, as every rank would.

        columns: more of the step for each of its rows, as step_started_at, step_finished_at, sync_seconds.
        """
        self._mend()
        self._ledger.commit(weight_version=weight_version, recipe=recipe, **columns)

    def close(self) -> None:
        """Let the record go. What was given and not committed is given again."""
        self._ledger.close()
