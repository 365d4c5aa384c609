"""What became of the rollouts of a training run, kept in its `uses`: the cursor that survives the trainer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import reduce
from operator import and_
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import StoreError
from rollstore.readers import arguments
from rollstore.readers.arrow import dataset
from rollstore.schema import TABLES
from rollstore.store.store import Store

_OF_A_STEP = (
    "epoch", "weight_version", "anchor_version", "recipe", "step_started_at", "step_finished_at", "sync_seconds",
)  # fmt: skip

_CHECKED = 2
"""So many commits look for another follower: two that commit at once see each other with the second."""

CONFLICT = "conflict: one segment came with different contents"
UNFINISHED = "incomplete: unfinished"
"""Reasons, or how they begin, of what says nothing for its group: that may have been open, or another one."""

_GROUP = ("run_id", "step", "group_id")


class Ledger:
    """Rows of `uses` of one attempt of a run: collected as rollouts are given or dropped, written with the step.

    It contains the ids that need not come again: recorded by an earlier attempt before the step that this one begins
    with, or given or dropped by this one. `attempt` is one above the last; `step` is the one that the next commit
    records.
    """

    def __init__(self, store: Store, train_run: str, resume_step: int | None, date: Callable[[], datetime]) -> None:
        self._store, self._run, self._date = store, train_run, date
        with store.snapshot() as snapshot:
            rows = dataset(snapshot, "uses").to_table(
                columns=["attempt", "train_step", "rollout_id", "reason"], filter=pc.field("train_run") == train_run
            )
        attempts = pc.fill_null(rows["attempt"], 0)
        self.attempt: int = (pc.max(attempts).as_py() if rows.num_rows else -1) + 1
        self.step: int = _after(rows, attempts) if resume_step is None else int(resume_step)
        if self.step < 0:
            raise ValueError(f"resume_step: wanted at least 0, got {resume_step}")
        kept = rows.filter(_current(rows, attempts)).filter(pc.field("train_step") < self.step)
        self._done: set[str] = set(kept["rollout_id"].to_pylist())
        silent = pc.or_(pc.starts_with(kept["reason"], CONFLICT), pc.starts_with(kept["reason"], UNFINISHED))
        self._silent: set[str] = set(kept["rollout_id"].filter(pc.fill_null(silent, False)).to_pylist())
        """of what is done: what says nothing for its group"""
        self._rows: dict[str, dict[str, Any]] = {}
        self._kept: set[str] = set()
        """of what was dropped: whose rows are kept elsewhere until `record`"""
        self._writer: Any = None
        self._unsafe = False
        """whether rows of this step are with the writer, and may not survive power loss yet"""
        self._unsure = False
        """whether it is not known which of those collected are with the writer"""
        self._written, self._commits = 0, 0

    def groups(self) -> set[tuple[Any, Any, Any]]:
        """(run_id, step, group_id) of what is done, each of the first segment that says it.

        What was unfinished, or came with different contents, says nothing for its group; nor does an id that is stored
        with one segment in two groups: which of them was given is not on record. Raises CorruptionError.
        """
        done = [id_ for id_ in (*self._done, *self._rows) if id_ not in self._silent]
        if not done:
            return set()
        with self._store.snapshot() as snapshot:
            rows = dataset(snapshot, "rollouts").to_table(columns=["rollout_id", "segment", *_GROUP])
        # Numbers in place of words: for a million rollouts 0.25 GB instead of 0.45.
        runs, groups = (rows[name].dictionary_encode().combine_chunks() for name in ("run_id", "group_id"))
        ids = pc.index_in(rows["rollout_id"], value_set=pa.array(done, pa.string()))
        rows = pa.table(
            [ids, rows["segment"], runs.indices, rows["step"], groups.indices],
            ["id", "segment", "run", "step", "group"],
        )
        rows = rows.filter(rows["id"].is_valid()).group_by(rows.column_names).aggregate([])
        contents = rows.group_by(["id", "segment"]).aggregate([([], "count_all")])
        several = contents.filter(pc.field("count_all") > 1)["id"].combine_chunks()
        unclear = pc.is_in(rows["id"], value_set=several)
        said = rows.filter(pc.invert(unclear)).sort_by("segment")
        first = said.group_by("id", use_threads=False).aggregate([(name, "first") for name in ("run", "step", "group")])
        first = first.select(["run_first", "step_first", "group_first"]).filter(pc.field("group_first").is_valid())
        run, step, group = first.group_by(first.column_names).aggregate([]).columns
        names = (runs.dictionary.take(run).to_pylist(), step.to_pylist(), groups.dictionary.take(group).to_pylist())
        return set(zip(*names, strict=True))

    def __contains__(self, id_: str) -> bool:
        return id_ in self._done or id_ in self._rows or id_ in self._kept

    def forget(self, ids: Iterable[str]) -> None:
        """These were not given after all, nor was anything dropped that was not recorded: they may come again."""
        for id_ in ids:
            self._rows.pop(id_, None)
        self._kept.clear()

    def give(self, id_: str, enqueued_at: datetime | None, consumed_at: datetime, actions: int) -> None:
        """A rollout was given to the trainer."""
        self._note(id_, disposition="trained", enqueued_at=enqueued_at, consumed_at=consumed_at, tokens_trained=actions)

    def drop(
        self, id_: str, disposition: str, reason: str, enqueued_at: datetime | None,
        rows: list[dict[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        """A rollout will not be given. rows: where that is kept until `record`; this step's, when left out."""
        self._note(
            id_, rows, disposition=disposition, reason=reason, enqueued_at=enqueued_at, consumed_at=self._date(),
            tokens_trained=0,
        )  # fmt: skip

    def record(self, rows: list[dict[str, Any]]) -> None:
        """What was kept belongs to this step; nothing is kept any more."""
        self._rows.update({row["rollout_id"]: row for row in rows})
        self._kept.difference_update(row["rollout_id"] for row in rows)
        rows.clear()

    def _note(self, id_: str, rows: list[dict[str, Any]] | None = None, **columns: Any) -> None:
        if id_ in self:
            return
        row = {"rollout_id": id_, **columns}
        (self._silent.discard if speaks(row) else self._silent.add)(id_)
        if rows is None:
            self._rows[id_] = row
        else:
            self._kept.add(id_)
            rows.append(row)

    def commit(self, **columns: Any) -> None:
        """Write the rows collected as those of this step; they survive power loss. Without rows nothing happens.

        columns: of a step, the same in each row. Raises ValueError, TypeError on others, WriteError, SchemaError, and
        StoreError where another follower of the run began when this one did: nothing is written then.
        """
        _check(columns)
        if not self._rows and not self._unsafe:
            return  # A step of which nothing is on record could not be told, later, from one that was never made.
        if self._rows:
            same = {"train_run": self._run, "attempt": self.attempt, "train_step": self.step, "epoch": 0, **columns}
            if self._writer is None:
                self._writer = self._store.writer(table="uses", source=self._run)
                weakref.finalize(self, self._writer.close).atexit = False  # whoever lets go of a follower without close
            if self._unsure:
                self._leave_out_written()
            elif self._commits < _CHECKED:
                self._check_alone()
            self._unsafe = self._unsure = True
            if self._rows:
                self._writer.append(_table([*self._rows.values()], same))
            self._done.update(self._rows)
            self._written, self._rows = self._written + len(self._rows), {}
            self._unsure = False
        self._writer.flush(sync=True)
        self.step, self._commits, self._unsafe = self.step + 1, self._commits + 1, False

    def _leave_out_written(self) -> None:
        """Of what is collected, what a commit that was interrupted, or failed, wrote."""
        self._writer.flush()
        written = self._of_attempt(pc.field("train_step") == self.step)
        self._written += len(written)
        self._done.update(written)
        for id_ in written:
            self._rows.pop(id_, None)

    def _check_alone(self) -> None:
        """Every rank that follows, by mistake, began as the same attempt, and would be given everything."""
        if len(self._of_attempt()) > self._written:
            raise StoreError(
                f"train_run {self._run!r}: wanted one follower at a time, which hands batches to others, got another "
                f"that began as attempt {self.attempt} as well, or an earlier one that was not closed"
            )

    def _of_attempt(self, *more: pc.Expression) -> list[str]:
        """The ids that rows of this attempt name."""
        where = reduce(and_, more, (pc.field("train_run") == self._run) & (pc.field("attempt") == self.attempt))
        with self._store.snapshot() as snapshot:
            return dataset(snapshot, "uses").to_table(columns=["rollout_id"], filter=where)["rollout_id"].to_pylist()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def speaks(row: dict[str, Any]) -> bool:
    """Whether a row of `uses` says that its rollout's group was closed."""
    return not row.get("reason", "").startswith((CONFLICT, UNFINISHED))


def _check(columns: dict[str, Any]) -> None:
    known = TABLES["uses"].by_name
    for name, value in columns.items():
        if name not in known:
            raise ValueError(f"uses has no column {name!r}")
        if name not in _OF_A_STEP:
            raise ValueError(f"{name}: wanted columns of a step ({', '.join(_OF_A_STEP)}), got one of a rollout's use")
        try:
            if pa.types.is_integer(known[name].type) and value is not None:
                arguments.whole(name, value)  # Arrow takes 1.5 for 1
            pa.scalar(value, known[name].type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise TypeError(f"{name}: wanted {known[name].type}, got {value!r}") from None


def _table(rows: list[dict[str, Any]], same: dict[str, Any]) -> pa.Table:
    """Rows of `uses`; `same`: what stands in each."""
    by_name = TABLES["uses"].by_name
    columns = {name: pa.repeat(pa.scalar(value, by_name[name].type), len(rows)) for name, value in same.items()}
    for name in dict.fromkeys(name for row in rows for name in row):
        columns[name] = pa.array([row.get(name) for row in rows], by_name[name].type)
    return pa.table(columns)


def _current(rows: pa.Table, attempts: pa.ChunkedArray) -> pa.Array:
    """Which rows no later attempt supersedes: those before the first step of each attempt after theirs."""
    first = rows.set_column(0, "attempt", attempts).group_by("attempt").aggregate([("train_step", "min")])
    kept: Any = pa.array([True] * rows.num_rows, pa.bool_())
    for attempt, begin in zip(first["attempt"].to_pylist(), first["train_step_min"].to_pylist(), strict=True):
        superseded = pc.and_(pc.less(attempts, attempt), pc.greater_equal(rows["train_step"], begin))
        kept = pc.and_not(kept, superseded)
    return kept


def _after(rows: pa.Table, attempts: pa.ChunkedArray) -> int:
    """The step after the last one that still counts."""
    steps = rows.filter(_current(rows, attempts))["train_step"]
    return pc.max(steps).as_py() + 1 if len(steps) else 0
