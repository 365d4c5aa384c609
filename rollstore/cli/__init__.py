"""The command line. `main` runs it; every command imports what it needs when it runs.

Nothing slow is imported here: what is, `main` loads where an interrupt ends in silence.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstore.cli.application import app

__all__ = ["app", "main"]

_INTERRUPTED = 130  # as `failure.INTERRUPTED`, whose module takes typer with it


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollstore.cli.application import app

    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line (that of the process by default). Leaves through SystemExit with the exit status."""
    _open_what_is_closed()
    with _silent_interrupt():
        import typer

        from rollstore.cli.application import app

        command = typer.main.get_command(app)
    command.main(None if arguments is None else list(arguments), prog_name="rollstore")


def _open_what_is_closed() -> None:
    """Point a standard stream that the process came without at nothing.

    Else Python has None there, and the next file that is opened would get the stream's number, and what is written to
    the stream by a library.
    """
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 # stands in until the process ends
            setattr(sys, name, stream)


@contextmanager
def _silent_interrupt() -> Generator[None]:
    """While the block runs, Ctrl-C ends the process at once. An exception could be swallowed, or turned into another,
    in the middle of an import; and there is nothing yet to put in order."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or the caller's own
        yield
        return
    try:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    except ValueError:  # not the main thread, which is the one that gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
