"""Where output goes. Results on stdout, everything else on stderr; colour and wrapping only for a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.text import Text

_UNBOUNDED = 1 << 20  # columns of a pipe: nothing is wrapped or cut for a program


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the error through: rich would exit with status 1, which means a failed check here."""
        raise BrokenPipeError


def stdout() -> Console:
    """The console for results. A pipe gets no colour and no wrapping, unless COLUMNS says how wide it is."""
    return _console(sys.stdout.isatty(), stderr=False)


def stderr() -> Console:
    """The console for progress and errors."""
    return _console(sys.stderr.isatty(), stderr=True)


def _console(is_terminal: bool, *, stderr: bool) -> Console:
    width = None if is_terminal or "COLUMNS" in os.environ else _UNBOUNDED
    return _Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False, legacy_windows=False)


def bounded(console: Console) -> bool:
    """Whether the console has a width that lines should keep to."""
    return console.width < _UNBOUNDED


def coloured(console: Console) -> bool:
    """Whether colours reach the reader. Under NO_COLOR bold and underlined still do, in a terminal."""
    return console.color_system is not None and not console.no_color


def put(out: Console, what: RenderableType) -> None:
    """Print to a console; in a pipe without the blanks that fill a table's last column."""
    if bounded(out):
        out.print(what)
        return
    with out.capture() as caught:
        out.print(what)
    out.file.write("".join(f"{line.rstrip()}\n" for line in caught.get().removesuffix("\n").split("\n")))


def emit(text: str) -> None:
    """Write a result and a line end to stdout."""
    sys.stdout.write(text + "\n")


@contextmanager
def progress(what: str, total: int | None = None) -> Generator[Callable[[str, int], None]]:
    """A bar on stderr while the block runs, in a terminal. The block calls what it gets with each file and its bytes.

    `total`: bytes that are to come, None where nobody knows.
    """
    if not sys.stderr.isatty():
        yield lambda file, size: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), DownloadColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda file, size: bar.advance(task, size)


@contextmanager
def waiting(what: str) -> Generator[None]:
    """A sign of life on stderr while the block runs, in a terminal, for work whose length nobody knows."""
    if not sys.stderr.isatty():
        yield
        return
    with stderr().status(Text(what)):
        yield
