"""One thing that a check of the store found, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`level` error: something is wrong; note: worth knowing. `part` is a file of the store; batch, row where known."""

    level: Literal["error", "note"]
    kind: str
    table: str
    part: str
    message: str
    batch: int | None = None
    row: int | None = None

    def __str__(self) -> str:
        places = (("batch", self.batch), ("row", self.row))
        where = "".join(f", {name} {value}" for name, value in places if value is not None)
        return f"{self.part}{where}: {self.kind}: {self.message}"
