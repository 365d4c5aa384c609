"""Which records of a batch hold, all their rows together, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import pyarrow as pa

from rollstore.errors import SchemaError
from rollstore.exchange.records import Made, Record, first_line
from rollstore.exchange.values import REFUSALS, array, rows_to_table
from rollstore.schema import TABLES, Problem, to_table


def settled(
    records: Sequence[Record], types: Mapping[str, pa.DataType], refuse: Callable[[Record, str], object]
) -> Iterator[tuple[Sequence[Record], dict[str, pa.Table]]]:
    """Records whose rows hold, with their tables; `refuse` is called with each other one and the reason.

    `types`: those of the caller's columns, where known.
    """
    while records:
        try:
            tables = {name: _build(name, records, types) for name in TABLES if any(rows_of(r, name) for r in records)}
        except _Unfit as unfit:
            if not unfit.reasons and len(records) > 1:  # no row is named: look for it by halves
                half = len(records) // 2
                yield from settled(records[:half], types, refuse)
                yield from settled(records[half:], types, refuse)
                return
            for n, record in enumerate(records):
                if reason := unfit.reasons.get(n) or (unfit.said if len(records) == 1 else None):
                    refuse(record, reason)
            records = [r for n, r in enumerate(records) if n not in unfit.reasons and len(records) > 1]
        else:
            yield records, tables
            return


class _Unfit(Exception):
    """Rows that do not hold: reasons by record, and all in one where no row is named."""

    def __init__(self, reasons: Mapping[int, str], said: str) -> None:
        self.reasons, self.said = reasons, said


def rows_of(record: Record, name: str) -> Sequence[Any]:
    """The rows of one table that a record becomes."""
    held = cast("Made", record.made)
    if name in held.others:
        return held.others[name]
    return held.rollouts if name == "rollouts" else held.scores if name == "scores" else ()


def _build(name: str, records: Sequence[Record], types: Mapping[str, pa.DataType]) -> pa.Table:
    """The rows of one table of all records. Raises _Unfit."""
    owners = [n for n, record in enumerate(records) for _ in rows_of(record, name)]
    rows = [row for record in records for row in rows_of(record, name)]
    try:
        if isinstance(rows[0], Mapping):
            table = rows_to_table(rows, TABLES[name], types)
        else:
            table = _in_their_types(to_table(rows), rows, types)
    except SchemaError as error:
        reasons: dict[int, list[str]] = {}
        for problem in error.problems:
            if problem.row is not None:
                reasons.setdefault(owners[problem.row], []).append(_said(problem))
        said = "; ".join(_said(problem) for problem in error.problems[:5])
        raise _Unfit({n: "; ".join(lines[:5]) for n, lines in reasons.items()}, said) from error
    except (*REFUSALS, RecursionError) as error:  # values that no column can be made of
        raise _Unfit({}, f"record: wanted values for {name}, got: {first_line(error)}") from error
    return table


def _in_their_types(table: pa.Table, rows: Sequence[Any], types: Mapping[str, pa.DataType]) -> pa.Table:
    """The rows of records, with the caller's columns in the types that they have: 1 is a float among floats."""
    for place, field in enumerate(table.schema):
        type_ = types.get(field.name, field.type)
        if field.name.startswith("x_") and type_ != field.type:
            try:
                made = array([(row.extra or {}).get(field.name) for row in rows], type_)
            except REFUSALS as error:
                wanted = f"what JSON has for {type_}"
                problem = Problem(
                    column=field.name, kind="wrong_type", row=None, found=first_line(error), wanted=wanted
                )
                raise SchemaError([problem]) from error
            table = table.set_column(place, field.name, made)
    return table


def _said(problem: Problem) -> str:
    wanted = problem.wanted if problem.kind == "wrong_length" else f"wanted {problem.wanted}"
    return f"{problem.column}: {problem.kind}: {wanted}, got {problem.found}"
