"""One problem of one row, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

SHOWN_PER_KIND = 100
"""Rows listed for one kind of problem in one column; a last problem counts the rest."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong. `row` is None where the whole column is meant."""

    column: str
    kind: str
    row: int | None
    found: str
    wanted: str

    def __str__(self) -> str:
        where = "" if self.row is None else f"row {self.row} has "
        wanted = self.wanted if self.kind == "wrong_length" else f"wanted {self.wanted}"
        return f"{self.column}: {self.kind}: {where}{self.found}, {wanted}"


def at(
    column: str, kind: str, rows: Any, found: Callable[[int], str], wanted: str | Callable[[int], str]
) -> Iterator[Problem]:
    """One problem for each row number in `rows` [n], at most SHOWN_PER_KIND of them, then one that counts the rest."""
    numbers: list[int] = np.asarray(rows).tolist()
    for row in numbers[:SHOWN_PER_KIND]:
        needed = wanted if isinstance(wanted, str) else wanted(row)
        yield Problem(column=column, kind=kind, row=row, found=found(row), wanted=needed)
    if len(numbers) > SHOWN_PER_KIND:
        rest = f"{len(numbers) - SHOWN_PER_KIND} more rows"
        yield Problem(column=column, kind=kind, row=None, found=rest, wanted="as above")
