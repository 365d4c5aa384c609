"""Rows that are refused together: the others are not to blame."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rollstore.errors import SchemaError

BETWEEN_ROWS = ("duplicate_id", "noise_repeated")
"""Problems that rows have with one another: each of them alone would be taken."""


class Apart:
    """Rows that were refused together, which go on alone, one after another.

    Where the rows contradict one another, all stay refused: raises `error`.
    """

    def __init__(self, rows: Sequence[Any], error: SchemaError) -> None:
        if len(rows) < 2 or any(problem.kind in BETWEEN_ROWS for problem in error.problems):
            raise error
        self._rows = deque(rows)
        self._refused: list[SchemaError] = []

    def append(self, append: Callable[[Any], None]) -> None:
        """Append each row, and raise what the first that is refused raises.

        Raises WriteError as `append` does, and goes on from there when called again.
        """
        while self._rows:
            try:
                append([self._rows[0]])
            except SchemaError as own:
                self._refused.append(own)
            self._rows.popleft()
        if self._refused:
            raise self._refused[0]


def append_apart(append: Callable[[Any], None], rows: Sequence[Any], error: SchemaError) -> None:
    """After `error` refused all rows: append each of them alone, and raise what the first that is refused raises.

    Where the rows contradict one another, all stay refused. Raises WriteError as `append` does.
    """
    Apart(rows, error).append(append)
