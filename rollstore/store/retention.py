"""Which rollouts stay: by age, run and version. What nobody asked to keep goes, with all that was said about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import reduce

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import StoreError
from rollstore.schema import TABLES
from rollstore.store.compact import Progress
from rollstore.store.dropping import without
from rollstore.store.journal import JournalView
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot
from rollstore.store.vacuum import now

_Bools = npt.NDArray[np.bool_]
_ID = "rollout_id"
_COLUMNS = (_ID, "run_id", "written_at", "weight_version_min", "weight_version_max")


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What stays: a rollout of which some segment is wanted by at least one of these.

    age: written at most so long ago, by the row's own written_at and the store's clock. runs: of one of these run_ids.
    versions: sampled with a weight version from the first to the last, both included, None for no end. A rule cannot
    tell where the value it asks for is null; a row of which no rule can tell stays: what is not known is kept.
    """

    age: timedelta | None = None
    runs: tuple[str, ...] = ()
    versions: tuple[int | None, int | None] | None = None

    def __post_init__(self) -> None:
        if self.age is None and not self.runs and self.versions is None:
            raise ValueError("keep: wanted an age, runs or versions, got none of them: nothing would stay")
        if isinstance(self.runs, str):
            raise TypeError(f"keep: runs: wanted a tuple of names, got the text {self.runs!r}")
        if not all(self.runs):
            raise ValueError(f"keep: runs: wanted names, got an empty one among {self.runs!r}")
        if self.age is not None and self.age < timedelta(0):
            raise ValueError(f"keep: age: wanted a time that is not negative, got {self.age}")
        first, last = self.versions or (None, None)
        if self.versions is not None and first is None and last is None:
            raise ValueError("keep: versions: wanted a first or a last one, got neither")
        for end in (first, last):
            if end is not None and not -(2**63) <= end < 2**63:
                raise ValueError(f"keep: versions: wanted integers of 64 bits, got {end}")
        if first is not None and last is not None and first > last:
            raise ValueError(f"keep: versions: wanted a first one that is not after the last, got {first} and {last}")

    def __str__(self) -> str:
        return " ".join([*([] if self.age is None else [f"age={self.age.total_seconds():g}s"]), *self.named])

    @property
    def named(self) -> list[str]:
        """The runs and versions, each as a text."""
        runs = [f"run={run}" for run in self.runs]
        if self.versions is None:
            return runs
        return [*runs, "version={}..{}".format(*("" if end is None else end for end in self.versions))]


@dataclass(frozen=True, kw_only=True)
class Gone:
    """What goes of one table: rows, parts that go whole, parts written anew without some rows, bytes on disk.

    The bytes of a part that is written anew are counted by the share of its rows.
    """

    rows: int = 0
    parts: int = 0
    rewritten: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Report:
    """What goes, by table; empty where everything stays."""

    tables: dict[str, Gone] = field(default_factory=dict[str, Gone])


def retain(snapshot: Snapshot, keep: Keep, *, dry_run: bool = False, progress: Progress | None = None) -> Report | None:
    """Retire the rollouts that `keep` does not want, whole, and the scores, evaluations and uses of their ids.

    One entry of the log, so all of it or nothing; the files stay until vacuum removes them. Rows in journals stay, and
    so do the other segments of their rollouts; rows about rollouts that are not in the snapshot stay too. None where
    another compaction was faster. Raises StoreError where rollouts would go and no row is of some run or version that
    is to be kept, which a slip of the pen is known by; CorruptionError where a part is damaged, OSError where the disk
    refuses. Nothing is changed then.
    """
    since = None if keep.age is None else _before(datetime.fromtimestamp(now(snapshot.filesystem), UTC), keep.age)
    held = [*snapshot.parts("rollouts"), *snapshot.views("rollouts")]
    ids: list[pa.Array] = []
    wanted: list[_Bools] = [np.zeros(0, bool)]
    unmet = dict.fromkeys(keep.named)
    for source in held:
        for batch in source.batches(_COLUMNS):
            ids.append(batch.column(_ID))
            own = _rows(batch, keep, since, unmet)
            wanted.append(own if isinstance(source, Part) else np.ones(batch.num_rows, bool))
    every = _texts(ids)
    staying = _within(every, every.filter(pa.array(np.concatenate(wanted))))
    gone = every.filter(pa.array(~staying))
    if unmet and len(gone):
        raise StoreError(
            f"{snapshot.filesystem.locate('').rstrip('/')}: keep: wanted runs and versions that are there, "
            f"got {', '.join(unmet)}, which no row has: nothing is retired"
        )
    dropped = {"rollouts": _by_part(held, ~staying)}
    for table in TABLES:
        if table != "rollouts" and len(gone):
            parts = snapshot.parts(table)
            about = _texts([batch.column(_ID) for part in parts for batch in part.batches([_ID])])
            dropped[table] = _by_part(parts, _within(about, gone))
    counts = {table: _count(snapshot, table, masks) for table, masks in dropped.items() if masks}
    if dry_run or not counts:
        return Report(tables=counts)
    done = without(snapshot, dropped, reason="retain", note=str(keep), progress=progress)
    return Report(tables=counts) if done else None


def _before(moment: datetime, age: timedelta) -> datetime:
    """So long before a moment; at most at the beginning of all times that a row may have."""
    try:
        return moment - age
    except OverflowError:
        return datetime.min.replace(tzinfo=UTC)


def _rows(batch: pa.RecordBatch, keep: Keep, since: datetime | None, unmet: dict[str, None]) -> _Bools:
    """bool [rows]: which rows some rule wants, or no rule can tell. Rules that want one are no longer `unmet`."""

    def column(name: str) -> pa.Array:
        known = TABLES["rollouts"].by_name[name].type
        return batch.column(name) if name in batch.schema.names else pa.nulls(batch.num_rows, known)

    wanted, told = np.zeros(batch.num_rows, bool), np.zeros(batch.num_rows, bool)
    for name, rule in _rules(column, keep, since):
        chosen = pc.fill_null(rule, pa.scalar(False, pa.bool_())).to_numpy(zero_copy_only=False)
        if chosen.any():
            unmet.pop(name, None)
        wanted |= chosen
        told |= pc.is_valid(rule).to_numpy(zero_copy_only=False)
    return wanted | ~told


def _rules(column: Callable[[str], pa.Array], keep: Keep, since: datetime | None) -> Iterator[tuple[str, pa.Array]]:
    """(its text, bool [rows]) of each rule, null where the value asked for is."""
    if since is not None:
        yield "age", pc.greater_equal(column("written_at"), pa.scalar(since, pa.timestamp("us", "UTC")))
    for run, text in zip(keep.runs, keep.named, strict=False):
        yield text, pc.equal(column("run_id"), pa.scalar(run, pa.string()))
    first, last = keep.versions or (None, None)
    ends: list[pa.Array] = []
    if first is not None:
        ends.append(pc.greater_equal(column("weight_version_max"), pa.scalar(first, pa.int64())))
    if last is not None:
        ends.append(pc.less_equal(column("weight_version_min"), pa.scalar(last, pa.int64())))
    if ends:
        yield keep.named[-1], reduce(pc.and_kleene, ends)


def _texts(arrays: list[pa.Array]) -> pa.ChunkedArray:
    """Ids chunk by chunk, with offsets that hold any number of them."""
    return pa.chunked_array(arrays, pa.string()).cast(pa.large_string())


def _within(values: pa.ChunkedArray, of: pa.ChunkedArray) -> _Bools:
    """bool [n]: which ids are among others."""
    return np.asarray(pc.is_in(values, value_set=pc.unique(of)).to_numpy(), bool)


def _by_part(sources: Sequence[Part | JournalView], mask: _Bools) -> dict[str, _Bools]:
    """The masks of the parts in which some row is marked, cut out of one over all rows of all sources."""
    ends = np.cumsum([source.rows for source in sources])
    cut = zip(sources, np.split(mask, ends[:-1]) if len(ends) else [], strict=True)
    return {source.name: own for source, own in cut if isinstance(source, Part) and own.any()}


def _count(snapshot: Snapshot, table: str, masks: dict[str, _Bools]) -> Gone:
    whole = sum(bool(mask.all()) for mask in masks.values())
    size = sum(snapshot.part(table, name).size * float(mask.mean()) for name, mask in masks.items())
    rows = sum(int(mask.sum()) for mask in masks.values())
    return Gone(rows=rows, parts=whole, rewritten=len(masks) - whole, bytes=round(size))
