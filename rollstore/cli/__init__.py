"""The command line. `main` runs it; every command imports what it needs when it runs.

Nothing that takes time to load is imported here: nothing of ours can answer an interrupt before `main` runs. What is
slow, `main` loads where an interrupt ends in silence.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence
    from typing import Any

    from rollstore.cli.application import app
else:
    import _signal as signal  # what of it is built in: the rest names its numbers, and loads five modules for that

__all__ = ["app", "main"]

_INTERRUPTED = 130  # as `failure.INTERRUPTED`, whose module takes typer with it


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollstore.cli.application import app

    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line (that of the process by default). Leaves through SystemExit with the exit status."""
    guarded = _end_at_interrupt()
    try:
        _open_what_is_closed()
        import typer

        from rollstore.cli.application import app

        command = typer.main.get_command(app)
    finally:
        if guarded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command.main(None if arguments is None else list(arguments), prog_name="rollstore")
    except KeyboardInterrupt:  # before it began, or after it had ended
        sys.exit(_INTERRUPTED)


def _end_at_interrupt() -> bool:
    """Have Ctrl-C end the process at once, where it would raise: an exception could be swallowed in the middle of an
    import, or turned into another, and there is nothing yet to put in order. False where nothing was changed."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or the caller's own
        return False
    try:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    except ValueError:  # not the main thread, which is the one that gets signals
        return False
    return True


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
