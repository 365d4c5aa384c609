"""The versioned schema: four tables declared once, the records, and what makes a row right or wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from rollstore.schema import checks, fitting, preparing
from rollstore.schema.column import SYSTEM_COLUMNS, VERSION, Column, Table
from rollstore.schema.evaluations import EVALUATIONS
from rollstore.schema.extras import extra_problems
from rollstore.schema.flags import FLAG_KINDS
from rollstore.schema.flat import Rows
from rollstore.schema.from_arrow import from_table
from rollstore.schema.known import Known
from rollstore.schema.problem import KINDS, Problem
from rollstore.schema.rollouts import ROLLOUTS
from rollstore.schema.scores import SCORES
from rollstore.schema.structs import (
    Edit,
    Engine,
    Flag,
    Heads,
    LogitBias,
    Media,
    Numerics,
    Rollout,
    Sampler,
    Span,
)  # fmt: skip
from rollstore.schema.upgrade import parse, read_version
from rollstore.schema.upgrade import upgrade as _upgrade
from rollstore.schema.uses import USES

TABLES: dict[str, Table] = {table.name: table for table in (ROLLOUTS, SCORES, EVALUATIONS, USES)}
"""The four tables by name."""


def table_of(name: str) -> Table:
    """One table by name. Raises ValueError on a name that is none."""
    if name not in TABLES:
        raise ValueError(f"table: wanted one of {', '.join(TABLES)}, got {name!r}")
    return TABLES[name]


def conform(data: pa.RecordBatch | pa.Table, table: str = "rollouts", *, unknown: str = "refuse") -> pa.Table:
    """Cast to the newest schema: missing columns null, `x_*` kept. Raises SchemaError with every misfit."""
    return fitting.conform(data, table_of(table), unknown=unknown)


def problems(table: pa.Table, name: str = "rollouts") -> list[Problem]:
    """Every problem of the rows of a table, as data; wrong types included. Changes nothing and derives nothing.

    Enum values that this version does not know are no problem in a table that says it is of a newer minor version.
    """
    fitted = fitting.fit_table(table, table_of(name), unknown="keep")
    rows = Rows(fitted.columns, fitted.count)
    found = [*fitted.problems, *checks.problems(rows, table_of(name)), *extra_problems(fitted.extra)]
    metadata = table.schema.metadata or {}
    newer = b"rollstore.schema" in metadata and parse(read_version(metadata)) > parse(VERSION)
    return [problem for problem in found if not (newer and problem.kind == "unknown_enum")]


def upgrade(table: pa.Table, version: str, name: str = "rollouts") -> pa.Table:
    """A table of another schema version as one of this: what a reader does. VersionError where it cannot be read."""
    return _upgrade(table, version, table_of(name))


def prepare(data: pa.RecordBatch | pa.Table, table: str = "rollouts") -> pa.Table:
    """What an append does: conform, derive what follows, flag. Raises SchemaError with every problem of every row."""
    return preparing.prepare(data, table_of(table))


def to_table(rollouts: Sequence[Rollout]) -> pa.Table:
    """Records as rows of the rollouts table. Raises SchemaError with every problem of every row."""
    return preparing.to_table(rollouts, ROLLOUTS)


__all__ = [
    "FLAG_KINDS", "KINDS", "SYSTEM_COLUMNS", "TABLES", "VERSION", "Column", "Edit", "Engine", "Flag", "Heads", "Known",
    "LogitBias", "Media", "Numerics", "Problem", "Rollout", "Sampler", "Span", "Table", "conform", "from_table",
    "prepare", "problems", "read_version", "table_of", "to_table", "upgrade",
]  # fmt: skip
