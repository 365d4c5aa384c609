"""What stands in for a store where only the rows matter."""

from __future__ import annotations

from typing import Any

from rollstore.schema import Rollout, to_table


class Sink:
    """A writer that refuses what a store would refuse."""

    def __init__(self) -> None:
        self.rows: list[Rollout] = []

    def append(self, data: Any) -> None:
        rows = data if isinstance(data, list) else [data]
        to_table(rows)
        self.rows += rows

    def flush(self, *, sync: bool = False) -> None: ...

    def close(self) -> None: ...
