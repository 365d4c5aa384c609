"""Rows into a store: whole records or none, bad ones to a side file with the reason, none twice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import CorruptionError, SchemaError
from rollstore.exchange.folder import Progress
from rollstore.exchange.records import Made, Place, Record, decoded, made
from rollstore.exchange.report import Counts, Options, Rejects, Report
from rollstore.exchange.seen import Seen, Stored, key_hashes
from rollstore.exchange.settle import rows_of, settled
from rollstore.exchange.source import Lines, expand, opened
from rollstore.schema import TABLES, Rollout
from rollstore.store.columns import read_types
from rollstore.store.store import Store

__all__ = ["LINES", "Intake", "Make", "Options", "Paths", "Progress", "Report"]

Make = Callable[[dict[str, Any], Place], Made]
"""What an importer is: one record to the rows it becomes. Raises UnsupportedRecordError where it is none."""

BATCH_RECORDS, BATCH_BYTES = 512, 8 << 20
"""Records that are taken at a time, or their bytes in the file, whichever is less."""

SAMPLE_RECORDS = 8192
"""Records that are taken at once where a column of the caller's is new: what these hold is what gives it its type."""

LINES = (".jsonl", ".jsonl.zst", ".jsonl.gz")
"""How files of lines end."""

Paths = Sequence[str | os.PathLike[str]]
"""Files, folders of them, URLs; a URL may have `*`."""

Rows = dict[str, tuple[pa.Table, npt.NDArray[np.int64]]]
"""Table -> its rows, and the record that each belongs to."""

_TAKEN = "rollout_id: wanted an id that is not in the store yet, got one that is"


class Intake:
    """One import into one store. Use it in a `with` block, file after file."""

    def __init__(
        self, store: Store, format: str, *, run: str | None = None, rejects: str | os.PathLike[str] | None = None,
        resume: bool = False, missing: str = "",
    ) -> None:  # fmt: skip
        self.report = Report(format=format, store="", missing=missing)
        self.types: dict[str, pa.DataType] = {}
        """Types of the caller's columns: those of the store, and what an export or the caller says."""
        self._declared: dict[str, pa.DataType] = {}
        self._named: list[str] = []
        self._store, self._run, self._resume, self._begun = store, run, resume, False
        self._rejects = Rejects(rejects, again=resume)
        self.report.rejects = self._rejects.path
        self._writers: dict[str, Any] = {}
        self._rollouts: Seen | None = None
        self._stored: dict[str, Stored] = {}

    def __enter__(self) -> Intake:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._begun and kind is not None:
            self._rejects.give_up()
            return
        try:
            self._begin()
            for writer in self._writers.values():
                writer.close()
        finally:
            self._rejects.close()
        self.report.causes = self._rejects.causes()

    def declare(self, types: Mapping[str, pa.DataType], names: Iterable[str] = ()) -> None:
        """Types that the caller's columns shall have, and names that every row may have, before the first is taken."""
        self._declared |= types
        self._named += [*types, *names]
        self.types |= types

    def _begin(self) -> None:
        """Look into the store, not before there is something to take: what is asked of it first may make it.

        Raises ValueError where a column that was declared has another type there, or its name in another case.
        """
        if self._begun:
            return
        held = read_types(self._store.filesystem)
        cases = {name.lower(): name for name in held}
        for name in self._named:
            if (there := cases.get(name.lower(), name)) != name:
                raise ValueError(f"{name}: wanted {there}, its name in the store: SQL knows no upper and lower case")
        for name, type_ in self._declared.items():
            if held.get(name, type_) != type_:
                raise ValueError(f"{name}: wanted {held[name]}, its type in the store, got {type_}")
        self.types |= held
        self.report.store, self._begun = self._store.path, True
        self._rejects.begin()

    def lines(self, paths: Paths, make: Make, progress: Progress | None = None) -> None:
        """Take the lines of JSONL files; of a folder those that say so. Raises WriteError, and what opening raises."""
        for path in expand(paths, LINES):
            with opened(path, None if progress is None else lambda size, path=path: progress(path, size)) as file:
                lines = Lines(file, path)
                self.take(path, self._made(path, lines, make))

    def _made(self, path: str, lines: Lines, make: Make) -> Iterator[Record]:
        try:
            for row, line in lines:
                if line is None:
                    yield Record(row=row, reason="line: wanted at most 256 MiB, got more")
                    continue
                place = Place(format=self.report.format, file=path, fingerprint=lines.fingerprint, row=row, raw=line)
                yield made(row, line, lambda line=line, place=place: make(decoded(line), place))
        except CorruptionError as error:
            yield Record(row=None, reason=str(error))

    def take(self, path: str, records: Iterator[Record]) -> None:
        """Take the records of one file, batch by batch; after each, what was taken survives the end of this process."""
        counts = self.report.files.setdefault(path, Counts())
        batch: list[Record] = []
        size, most = 0, BATCH_RECORDS
        for record in records:
            counts.read += record.row is not None
            batch.append(record)
            size += len(record.raw or b"")
            if len(batch) >= most or size >= BATCH_BYTES:
                if most == BATCH_RECORDS and size < BATCH_BYTES and self._are_new(batch):
                    most = SAMPLE_RECORDS
                    continue
                self._batch(path, batch, counts)
                batch, size, most = [], 0, BATCH_RECORDS
        self._batch(path, batch, counts)

    def _are_new(self, batch: Sequence[Record]) -> bool:
        """Whether some row has a column of the caller's of which no type is known."""
        self._begin()
        return any(name.startswith("x_") and name not in self.types for record in batch for name in _names(record))

    def _batch(self, path: str, batch: Sequence[Record], counts: Counts) -> None:
        if not batch:
            return
        self._begin()
        sound = [record for record in batch if record.made is not None]
        for record in batch:
            if record.made is None:
                self._refuse(path, record, record.reason or "no rows", counts)
        for kept, tables in settled(
            sound, self.types, lambda record, reason: self._refuse(path, record, reason, counts)
        ):
            self._append(path, kept, tables, counts)
        for writer in self._writers.values():
            writer.flush()
        self._rejects.flush()

    def _append(self, path: str, records: Sequence[Record], tables: dict[str, pa.Table], counts: Counts) -> None:
        """What is new of the records' rows, once what is there was passed over or refused."""
        new = {name: ~self._there(name, table) for name, table in tables.items()}
        owners = {name: np.repeat(np.arange(len(records)), [len(rows_of(r, name)) for r in records]) for name in tables}
        fresh, taken = np.zeros(len(records), bool), np.zeros(len(records), bool)
        for name, mask in new.items():
            fresh[owners[name][mask]] = True
        if not self._resume and "rollouts" in new:  # an id that is taken: nothing of that record
            taken[owners["rollouts"][~new["rollouts"]]] = True
        for n in np.flatnonzero(taken).tolist():
            self._refuse(path, records[n], _TAKEN, counts)
        counts.present += int((~fresh & ~taken).sum())
        rows: Rows = {}
        for name, mask in new.items():
            kept = mask & ~taken[owners[name]]
            table = self._with_run(name, tables[name] if kept.all() else tables[name].filter(pa.array(kept)))
            place = np.cumsum(fresh & ~taken) - 1
            rows[name] = (table, place[owners[name][kept]])
        self._write(path, [records[n] for n in np.flatnonzero(fresh & ~taken).tolist()], rows, counts)

    def _write(self, path: str, records: Sequence[Record], rows: Rows, counts: Counts) -> None:
        """Rows of records into the store. One that the store refuses, as by the name of a column, is refused alone."""
        if not records:
            return
        try:
            for name, (table, _) in rows.items():
                if table.num_rows:
                    self._writer(name).append(_named(table))
        except SchemaError as error:
            if len(records) == 1:
                self._refuse(path, records[0], str(error), counts)
                return
            half = len(records) // 2
            for first, last in ((0, half), (half, len(records))):
                part: Rows = {}
                for name, (table, owners) in rows.items():
                    cut = (owners >= first) & (owners < last)
                    part[name] = (table.filter(pa.array(cut)), owners[cut] - first)
                self._write(path, records[first:last], part, counts)
            return
        counts.taken += len(records)
        for name, (table, _) in rows.items():
            self.types |= {field.name: field.type for field in _named(table).schema if field.name.startswith("x_")}
            if table.num_rows:
                self.report.rows[name] = self.report.rows.get(name, 0) + table.num_rows
            if name == "rollouts":
                self._known().add(key_hashes(table, name))

    def _with_run(self, name: str, table: pa.Table) -> pa.Table:
        if name != "rollouts" or self._run is None:
            return table
        place = table.schema.get_field_index("run_id")
        filled = pc.fill_null(table["run_id"], pa.scalar(self._run, pa.string()))
        return table.set_column(place, table.schema.field(place), filled)

    def _there(self, name: str, table: pa.Table) -> Any:
        """bool [n]: rows that the store, or an earlier record of this import, has."""
        if name == "rollouts":
            hashes = key_hashes(table, name)
            _, first = np.unique(hashes, return_index=True)
            again = np.ones(len(hashes), bool)
            again[first] = False
            return self._known().holds(hashes) | again
        if not self._resume:
            return np.zeros(table.num_rows, bool)
        if name not in self._stored:
            with self._store.snapshot() as snapshot:
                self._stored[name] = Stored(snapshot, name)
        return self._stored[name].takes(key_hashes(table, name))

    def _known(self) -> Seen:
        if self._rollouts is None:
            with self._store.snapshot() as snapshot:
                self._rollouts = Seen(snapshot, "rollouts")
        return self._rollouts

    def _writer(self, name: str) -> Any:
        if name not in self._writers:
            self._writers[name] = self._store.writer(table=name, source=f"import {self.report.format}")
        return self._writers[name]

    def _refuse(self, path: str, record: Record, reason: str, counts: Counts) -> None:
        counts.refused += 1
        counts.unread += record.row is None
        self._rejects.add(path, record, reason)


def _names(record: Record) -> Iterator[str]:
    """The columns of the rows that a record becomes; of rollouts the caller's own."""
    if record.made is not None:
        for name in TABLES:
            for row in rows_of(record, name):
                yield from (row.extra or ()) if isinstance(row, Rollout) else row


def _named(table: pa.Table) -> pa.Table:
    """The rows without columns of the caller's that are null in all of them: their names are other rows' matter."""
    empty = [
        field.name for field in table.schema
        if field.name.startswith("x_") and table[field.name].null_count == table.num_rows
    ]  # fmt: skip
    return table.drop_columns(empty) if empty else table
