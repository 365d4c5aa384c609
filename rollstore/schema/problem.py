"""One problem of one row, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

Kind = Literal[
    "action_at_zero",
    "duplicate_head",
    "duplicate_id",
    "duplicate_key",
    "duplicate_support",
    "ending_mismatch",
    "head_disagrees",
    "head_mass",
    "head_order",
    "incomplete_fork",
    "incomplete_key",
    "invalid_data",
    "mask_mismatch",
    "missing_partner",
    "naive_timestamp",
    "nan",
    "negative",
    "no_such_sampler",
    "noise_repeated",
    "not_a_partition",
    "not_boolean",
    "not_scored",
    "null",
    "null_item",
    "origin_mismatch",
    "out_of_range",
    "outside_vocabulary",
    "repeated_column",
    "score_missing",
    "scored_at_zero",
    "time_order",
    "too_large",
    "too_small",
    "two_targets",
    "unknown_column",
    "unknown_enum",
    "version_range",
    "version_source",
    "wrong_length",
    "wrong_type",
]

KINDS: tuple[Kind, ...] = get_args(Kind)
"""Every kind of problem there is. What each means stands in spec/README.md."""

SHOWN_PER_KIND = 100
"""Rows listed for one kind of problem in one column; a last problem counts the rest."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong. `row` is None where the whole column is meant."""

    column: str
    kind: Kind
    row: int | None
    found: str
    wanted: str

    def __str__(self) -> str:
        where = "" if self.row is None else f"row {self.row} has "
        wanted = self.wanted if self.kind == "wrong_length" else f"wanted {self.wanted}"
        return f"{self.column}: {self.kind}: {where}{self.found}, {wanted}"


def at(
    column: str, kind: Kind, rows: Any, found: str | Callable[[int], str], wanted: str | Callable[[int], str]
) -> Iterator[Problem]:
    """One problem for each row number in `rows` [n], at most SHOWN_PER_KIND of them, then one that counts the rest.

    A row named several times counts once.
    """
    numbers: list[int] = np.unique(np.asarray(rows, np.int64)).tolist() if len(rows) else []
    for row in numbers[:SHOWN_PER_KIND]:
        has = found if isinstance(found, str) else found(row)
        needs = wanted if isinstance(wanted, str) else wanted(row)
        yield Problem(column=column, kind=kind, row=row, found=has, wanted=needs)
    if len(numbers) > SHOWN_PER_KIND:
        rest = f"{len(numbers) - SHOWN_PER_KIND} more rows"
        yield Problem(column=column, kind=kind, row=None, found=rest, wanted="the same")


def first_of_each(rows: Any, values: Iterable[Any]) -> dict[int, Any]:
    """The first of the `values` [n] that each row of `rows` [n] has."""
    firsts: dict[int, Any] = {}
    for row, value in zip(np.asarray(rows).tolist(), values, strict=True):
        firsts.setdefault(row, value)
    return firsts
