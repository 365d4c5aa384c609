"""One section of a report: a question, one sentence that answers it, and the numbers behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Interval = tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Section:
    """`says`: what the numbers show and how sure that is; where nothing was recorded, what is missing.

    rows: the numbers, in `columns`; None where a number is not known. draw: makes the plot of them, as SVG text; None
    where there is nothing to draw. note: what the numbers leave out.
    """

    name: str
    title: str
    says: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    note: str = ""
    draw: Callable[[], str] | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON, without the plot."""
        return {
            "name": self.name, "title": self.title, "says": self.says, "note": self.note,
            "columns": list(self.columns), "rows": [list(row) for row in self.rows],
        }  # fmt: skip


def missing(name: str, title: str, what: str) -> Section:
    """A section for which something was not recorded."""
    return Section(name=name, title=title, says=f"Cannot be told: {what}.")


def between(interval: Interval, form: str = ".4g") -> str:
    """An interval in brackets, or that there is none."""
    return "no interval" if interval is None else f"95% {interval[0]:{form}} to {interval[1]:{form}}"
