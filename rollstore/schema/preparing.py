"""What an append does to rows before they are written: fit the schema, derive what follows, flag, and find problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import SchemaError
from rollstore.schema.checks import problems
from rollstore.schema.column import Table
from rollstore.schema.extras import extra_problems
from rollstore.schema.fitting import Fitted, assembled, fit_table
from rollstore.schema.flags import add_warnings, nan_to_null
from rollstore.schema.flat import Flat, Rows
from rollstore.schema.nesting import deep_columns
from rollstore.schema.structs import Rollout
from rollstore.schema.to_arrow import converted


def to_table(rollouts: Sequence[Rollout], of: Table) -> pa.Table:
    """Records as rows of the newest schema. Raises SchemaError with every problem of every row."""
    return _prepared(converted(rollouts), of)


def prepare(data: pa.RecordBatch | pa.Table, of: Table) -> pa.Table:
    """Arrow data as rows of the newest schema. Raises SchemaError with every problem of every row."""
    if isinstance(data, pa.RecordBatch | pa.Table) and (deep := deep_columns(data.schema)):
        raise SchemaError(deep)  # at once: what looks into such a type further on fails
    return _prepared(fit_table(data, of), of)


def _prepared(fitted: Fitted, of: Table) -> pa.Table:
    derive(fitted, of)
    if of.name == "rollouts":
        nan_to_null(fitted)
    blank = {p.column for p in fitted.problems}  # what did not fit is null here: do not report that null again
    rows = Rows(fitted.columns, fitted.count)
    found = [p for p in problems(rows, of) if not (p.kind in _FOLLOWS and p.column in blank)]
    found.extend(extra_problems(fitted.extra))
    if fitted.problems or found:
        raise SchemaError([*fitted.problems, *found])
    if of.name == "rollouts":
        add_warnings(fitted, rows)
    return assembled(fitted, of)


_FOLLOWS = {"null", "null_item", "missing_partner", "score_missing"}


def derive(fitted: Fitted, of: Table) -> None:
    """Fill what follows from other columns and only that.

    The status scored where there is a reward or a score; bootstrap false where the ending is terminated; the version
    range where every action's version is known.
    """
    columns, rows = fitted.columns, Rows(fitted.columns, fitted.count)
    if of.name == "rollouts":
        if "reward" in columns:
            _fill(columns, "reward_status", _texts(rows.known("reward")))
        ending = rows.array("ending")
        if ending is not None:
            over = np.array([word == "terminated" for word in ending.to_pylist()], bool)
            _fill(columns, "bootstrap", pa.array(np.zeros(rows.count, bool), mask=~over))
        versions = rows.list("weight_versions")
        if versions is not None and len(versions.values):
            _fill_range(columns, versions)
    if of.name == "scores":
        _fill(columns, "status", _texts(rows.known("value") | rows.known("values")))


def _texts(scored: Any) -> pa.Array:
    return pc.if_else(pa.array(scored), pa.scalar("scored", pa.string()), pa.scalar(None, pa.string()))


def _fill_range(columns: dict[str, pa.Array], versions: Flat) -> None:
    some = versions.lengths > 0
    complete = some & (versions.totals(~versions.known) == 0)
    starts, values = versions.offsets[:-1][some], versions.numpy()
    for name, ufunc in (("weight_version_min", np.minimum), ("weight_version_max", np.maximum)):
        bound = np.zeros(len(some), np.int64)
        bound[some] = ufunc.reduceat(values, starts)
        _fill(columns, name, pa.array(bound, mask=~complete))


def _fill(columns: dict[str, pa.Array], name: str, derived: pa.Array) -> None:
    """The derived value where the caller gave none."""
    given = columns.get(name)
    if given is None:
        if derived.null_count < len(derived):
            columns[name] = derived
    elif given.null_count:
        columns[name] = pc.coalesce(given, derived)
