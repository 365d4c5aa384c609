"""A bar for work that is counted in pieces, where `console.progress` counts bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rollstore.cli.console import stderr


@contextmanager
def counting(what: str) -> Generator[Callable[[int, int], None]]:
    """A bar on stderr while the block runs, in a terminal. The block calls what it gets with (done, of)."""
    if not sys.stderr.isatty():
        yield lambda done, of: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
