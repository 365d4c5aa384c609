"""Rows that are refused together: the others are not to blame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollstore.errors import SchemaError

BETWEEN_ROWS = ("duplicate_id", "noise_repeated")
"""Problems that rows have with one another: each of them alone would be taken."""


def append_apart(append: Callable[[Any], None], rows: Sequence[Any], error: SchemaError) -> None:
    """After `error` refused all rows: append each of them alone, and raise what the first that is refused raises.

    Where the rows contradict one another, all stay refused. Raises WriteError as `append` does.
    """
    if len(rows) < 2 or any(problem.kind in BETWEEN_ROWS for problem in error.problems):
        raise error
    refused: list[SchemaError] = []
    for row in rows:
        try:
            append([row])
        except SchemaError as own:
            refused.append(own)
    if refused:
        raise refused[0]
