"""Which rollouts other tables speak for or against: by scores, by evaluations, and by what was done with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.readers.arguments import LONG, whole
from rollstore.readers.arrow import dataset
from rollstore.readers.order import Ints
from rollstore.schema import TABLES
from rollstore.store.snapshot import Snapshot
from rollstore.store.where import check_where

Bools = npt.NDArray[np.bool_]
OTHERS = tuple(name for name in TABLES if name != "rollouts")
USE = ("train_run", "train_step", "epoch")
NUMBER = "*"
"""A column that counts rows: no column of a table has such a name."""
_TRIES = 9
"""How often a condition is asked at most until it ends in the same error twice."""


@dataclass(frozen=True, kw_only=True)
class Filters:
    """What a rollout must be like to be loaded.

    where: over scalar columns of its last segment. having, without: table -> condition on its rows; a rollout is kept
    where some row with its id meets the first, and where none meets the second. max_uses: those that were trained on
    so often already are left out. version, max_lag: so are those whose oldest action is of weights more than max_lag
    before `version`, or of unknown ones.
    """

    where: pc.Expression | None = None
    having: Mapping[str, pc.Expression] = field(default_factory=dict[str, pc.Expression])
    without: Mapping[str, pc.Expression] = field(default_factory=dict[str, pc.Expression])
    max_uses: int | None = None
    version: int | None = None
    max_lag: int | None = None

    def __post_init__(self) -> None:
        for name, tables in (("having", self.having), ("without", self.without)):
            if not isinstance(tables, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{name}: wanted a mapping of tables to conditions, got {tables!r}")
            if unknown := [table for table in tables if table not in OTHERS]:
                raise ValueError(f"{name}: wanted conditions on {', '.join(OTHERS)}, got one on {unknown[0]!r}")
        if (self.version is None) != (self.max_lag is None):
            raise ValueError(f"max_lag: wanted together with version, got {self.max_lag} and {self.version}")
        for name, value, least in (("max_uses", self.max_uses, 1), ("version", self.version, None),
                                   ("max_lag", self.max_lag, 0)):  # fmt: skip
            if value is not None:
                object.__setattr__(self, name, whole(name, value, least))

    def at(self, version: int | None) -> Filters:
        """The same filters for other current weights."""
        return replace(self, version=version)

    @property
    def condition(self) -> pc.Expression | None:
        """What is asked of the columns of rollouts."""
        if self.version is None or self.max_lag is None:
            return self.where
        fresh = pc.field("weight_version_min") >= max(self.version - self.max_lag, -LONG - 1)
        return fresh if self.where is None else self.where & fresh

    def __str__(self) -> str:
        said = [f"{self.condition}" if self.condition is not None else ""]
        said += [f"having {name} {which}" for name, which in self.having.items()]
        said += [f"without {name} {which}" for name, which in self.without.items()]
        said += [] if self.max_uses is None else [f"fewer than {self.max_uses} uses"]
        return ", ".join(filter(None, said))


def check_scalar(where: pc.Expression, schema: pa.Schema) -> None:
    """Raises ValueError where `where` names a column that rollouts lack, or a list; TypeError where it is no filter."""
    check_where(where, schema, "rollouts")
    lists = [column.name for column in schema if pa.types.is_list(column.type)]
    try:
        check_where(where, pa.schema([column for column in schema if column.name not in lists]), "rollouts")
    except ValueError:
        named = next((name for name in lists if name in str(where)), None)
        if named is None:
            raise
        raise ValueError(f"where: wanted scalar columns of rollouts, got the list {named!r}") from None


def check_named(name: str, which: pc.Expression, snapshot: Snapshot, table: str) -> None:
    """As `check_where`, for a condition on another table that the caller knows by another name."""
    try:
        check_where(which, snapshot.schema(table), table)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {str(error).removeprefix('where: ')}") from None


def outcome(rows: pa.Table, where: pc.Expression) -> Ints | Exception:
    """int64: the numbers of the rows that a condition keeps, or the error it ends in, whatever a function of the
    caller's in it raises. rows: with a column `NUMBER` that counts them. Raises MemoryError.

    An error is one of the condition where it comes again. Another is of a signal's handler, or of something that was so
    for a moment, and is raised.
    """
    errors: list[Exception] = []
    while len(errors) < 2 or (len(errors) < _TRIES and type(errors[-1]) is not type(errors[-2])):
        try:
            found = rows.filter(where)[NUMBER].to_numpy()
        except MemoryError:
            raise
        except Exception as error:
            errors.append(error)
        else:
            if errors:
                raise errors[-1]
            return found
    passing = [error for error in errors if type(error) is not type(errors[-1])]
    if passing:
        raise passing[-1]
    return errors[-1]


def rows_where(snapshot: Snapshot, table: str, columns: list[str], which: pc.Expression, name: str) -> pa.Table:
    """The rows of a table that a condition keeps, which the caller knows by a name. Raises ValueError where it fails on
    them."""
    try:
        return dataset(snapshot, table).to_table(columns=columns, filter=which)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{name}: {which} fails on rows of {table}: {error}") from error


def answers(rows: pa.Table, where: pc.Expression) -> list[bool | Exception]:
    """Whether a condition keeps each row, or the error it ends in there; otherwise as `outcome`."""
    return [*_answers(rows, where)]


def failing(rows: pa.Table, where: pc.Expression, most: int) -> list[int]:
    """The first rows, at most so many, that a condition ends in an error on; otherwise as `outcome`."""
    wrong = (row for row, answer in enumerate(_answers(rows, where)) if isinstance(answer, Exception))
    return [*islice(wrong, most)]


def _answers(rows: pa.Table, where: pc.Expression) -> Iterator[bool | Exception]:
    """An error says nothing of the row it is about, so halves are asked apart, when it is their turn, until it is
    alone."""
    half, found = rows.num_rows // 2, outcome(rows, where)
    if not isinstance(found, Exception):
        yield from np.isin(rows[NUMBER].to_numpy(), found).tolist()
    elif half:
        yield from _answers(rows.slice(0, half), where)
        yield from _answers(rows.slice(half), where)
    else:
        yield found


def by_others(snapshot: Snapshot, rollout_ids: pa.Array, filters: Filters) -> Bools:
    """bool [n]: which rollouts the other tables leave in."""
    kept = np.ones(len(rollout_ids), bool)
    for name, wanted, tables in (("having", True, filters.having), ("without", False, filters.without)):
        for table, which in tables.items():
            check_named(name, which, snapshot, table)
            ids = rows_where(snapshot, table, ["rollout_id"], which, name)["rollout_id"].combine_chunks()
            found = pc.is_in(rollout_ids, value_set=ids.unique()).to_numpy(zero_copy_only=False)
            kept &= found if wanted else ~found
    if filters.max_uses is not None:
        used = uses(snapshot).filter(pc.field("uses") >= filters.max_uses)["rollout_id"].combine_chunks()
        kept &= ~pc.is_in(rollout_ids, value_set=used).to_numpy(zero_copy_only=False)
    return kept


def uses(snapshot: Snapshot) -> pa.Table:
    """How often each rollout was trained on: rollout_id, uses int64.

    A use is one step of one epoch of a run, however many segments or rows it has. An attempt that resumed at a step
    supersedes what earlier attempts of its run did from there on.
    """
    trained = pc.field("disposition").isin(["trained"]) | pc.field("disposition").is_null()
    columns = ["rollout_id", "attempt", *USE]
    rows = dataset(snapshot, "uses").to_table(columns=columns, filter=trained)
    attempt = pc.fill_null(rows["attempt"], 0)
    rows = rows.set_column(rows.schema.get_field_index("attempt"), "attempt", attempt)
    kept = rows.filter(pa.array(_current(snapshot, rows)))
    return kept.group_by(["rollout_id", *USE]).aggregate([]).group_by("rollout_id").aggregate(
        [([], "count_all")]
    ).rename_columns(["rollout_id", "uses"])  # fmt: skip


def _current(snapshot: Snapshot, rows: pa.Table) -> Bools:
    """Which rows no later attempt of their run supersedes."""
    every = dataset(snapshot, "uses").to_table(columns=["train_run", "attempt", "train_step"])
    first = every.group_by(["train_run", "attempt"]).aggregate([("train_step", "min")]).to_pylist()
    begins: dict[str, list[tuple[int, int]]] = {}
    for found in first:  # a row an attempt
        begins.setdefault(found["train_run"], []).append((found["attempt"] or 0, found["train_step_min"]))
    kept = np.ones(rows.num_rows, bool)
    step, attempt = rows["train_step"].to_numpy(), rows["attempt"].to_numpy()
    for run, attempts in begins.items():
        own = pc.equal(rows["train_run"], run).to_numpy()
        for number, begin in attempts:
            kept &= ~(own & (attempt < number) & (step >= begin))
    return kept
