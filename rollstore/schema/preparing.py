"""What an append does to rows before they are written: fit the schema, derive what follows, flag, and find problems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import SchemaError
from rollstore.schema.checks import problems
from rollstore.schema.column import SYSTEM_COLUMNS, Table
from rollstore.schema.fitting import conformed
from rollstore.schema.flat import Flat, Rows, flat, plain
from rollstore.schema.problem import Problem
from rollstore.schema.rules.heads import STAND_IN
from rollstore.schema.rules.lengths import totals
from rollstore.schema.structs import Rollout
from rollstore.schema.to_arrow import converted

LOGPROB_TOLERANCE = 1e-5
"""A log-prob above zero by more than this is flagged; it is kept as it is."""

Flags = Iterator[tuple[int, str, str, int]]
"""(row, kind, column, index) of each flag."""


def to_table(rollouts: Sequence[Rollout], of: Table) -> pa.Table:
    """Records as rows of the newest schema. Raises SchemaError with every problem of every row."""
    table, found = converted(rollouts)
    return _prepared(table, of, found)


def prepare(data: pa.RecordBatch | pa.Table, of: Table) -> pa.Table:
    """Arrow data as rows of the newest schema. Raises SchemaError with every problem of every row."""
    return _prepared(data, of, [])


def _prepared(data: pa.RecordBatch | pa.Table, of: Table, found: list[Problem]) -> pa.Table:
    table, misfits = conformed(data, of)
    found = [*found, *misfits]
    if of.name == "rollouts":
        table = with_derived(table)
    if of.name in ("rollouts", "evaluations"):
        table = _without_nan(table, of, found)
    blank = {p.column for p in found}  # what did not fit is null here: do not report that null again
    found += [p for p in problems(table, of) if not (p.kind in ("null", "missing_partner") and p.column in blank)]
    if found:
        raise SchemaError(found)
    return _flagged(table) if of.name == "rollouts" else table


def with_derived(table: pa.Table) -> pa.Table:
    """Fill what follows from other columns and only that.

    reward_status scored where there is a reward; bootstrap false where the ending is terminated; the version range
    where every action's version is known.
    """
    rows = Rows(table)
    reward, ending, versions = rows.array("reward"), rows.array("ending"), rows.list("weight_versions")
    if reward is not None:
        status = plain(table.column("reward_status"))
        scored = pc.if_else(reward.is_valid(), pa.scalar("scored"), pa.scalar(None, pa.string()))
        table = _replace(table, "reward_status", pc.coalesce(status, scored))
    if ending is not None:
        over = pc.if_else(
            pc.equal(ending, "terminated").fill_null(False), pa.scalar(False), pa.scalar(None, pa.bool_())
        )
        table = _replace(table, "bootstrap", pc.coalesce(plain(table.column("bootstrap")), over))
    if versions is not None and len(versions.values):
        complete = versions.valid & (versions.lengths > 0) & (totals(versions, ~versions.known) == 0)
        some = versions.lengths > 0
        for name, ufunc in (("weight_version_min", np.minimum), ("weight_version_max", np.maximum)):
            bound = np.zeros(table.num_rows, np.int64)
            bound[some] = ufunc.reduceat(versions.numpy(), versions.offsets[:-1][some])
            known = pa.array(bound, pa.int64(), mask=~complete)
            table = _replace(table, name, pc.coalesce(plain(table.column(name)), known))
    return table


def _replace(table: pa.Table, name: str, array: pa.Array) -> pa.Table:
    number = table.schema.get_field_index(name)
    return table.set_column(number, table.schema.field(number), array)


def _without_nan(table: pa.Table, of: Table, found: list[Problem]) -> pa.Table:
    """A NaN log-prob is an unknown one: null, and flagged (in the rollouts table, which has flags)."""
    for name in ("logprobs", "token_logprobs", "entropies"):
        column = of.by_name.get(name)
        if column is None:
            continue
        lists = flat(table.column(name))
        values = lists.numpy(np.float32(0))
        nan = np.isnan(values)
        if not nan.any():
            continue
        items = pa.array(values, column.type.value_type, mask=nan | ~lists.known)
        array = pa.ListArray.from_arrays(
            pa.array(lists.offsets, pa.int32()), items, type=column.type, mask=pa.array(~lists.valid)
        )
        table = _replace(table, name, array)
        if "flags" in of.by_name:
            table = _add_flags(table, _each(lists, nan, "nan_logprob" if name == "logprobs" else "nan", name))
    return table


def _each(lists: Flat, chosen: Any, kind: str, column: str) -> Flags:
    for item in np.flatnonzero(chosen).tolist():
        row = int(lists.rows[item])
        yield row, kind, column, item - int(lists.offsets[row])


def _flagged(table: pa.Table) -> pa.Table:
    return _add_flags(table, _warnings(Rows(table)))


def _warnings(rows: Rows) -> Flags:
    """Log-probs above zero, stand-ins for minus infinity, draws of probability zero, ids outside the tokenizer."""
    logprobs = rows.list("logprobs")
    if logprobs is not None:
        values = logprobs.numpy(np.float32(0))
        yield from _each(logprobs, values > LOGPROB_TOLERANCE, "logprob_above_zero", "logprobs")
        yield from _each(logprobs, (values <= STAND_IN) & np.isfinite(values), "floored_logprob", "logprobs")
        yield from _each(logprobs, np.isneginf(values), "impossible_draw", "logprobs")
    heads = rows.list("head_logprobs")
    if heads is not None:
        values = heads.numpy(np.float32(0))
        yield from _each(heads, (values <= STAND_IN) & np.isfinite(values), "floored_logprob", "head_logprobs")
        yield from _each(heads, values > LOGPROB_TOLERANCE, "logprob_above_zero", "head_logprobs")
    tokens, size = rows.list("tokens"), rows.numbers("tokenizer_size")
    if tokens is not None and size is not None:
        limit = np.where(size[1], size[0], np.iinfo(np.int32).max)
        yield from _each(tokens, tokens.numpy() >= limit[tokens.rows], "id_outside_tokenizer", "tokens")


def _add_flags(table: pa.Table, flags: Flags) -> pa.Table:
    added: dict[int, list[dict[str, Any]]] = {}
    for row, kind, column, index in flags:
        added.setdefault(row, []).append({"kind": kind, "column": column, "index": index})
    if not added:
        return table
    number = table.schema.get_field_index("flags")
    current = table.column(number).to_pylist()
    for row, new in added.items():
        kept = current[row] or []
        current[row] = kept + [flag for flag in new if flag not in kept]
    return _replace(table, "flags", pa.array(current, table.schema.field(number).type))


def without_system(table: pa.Table) -> pa.Table:
    """The table without the store's own columns."""
    present = [c.name for c in SYSTEM_COLUMNS if c.name in table.column_names]
    return table.drop_columns(present)
