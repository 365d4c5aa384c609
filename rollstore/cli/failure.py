"""How commands end: one line on stderr and an exit status that scripts can rely on.

* 0: done.
* 1: the check failed: `verify` found something, `diff` or `replay` differ, stored bytes do not hold their sum, or one
  rollout is stored with two contents.
* 2: it could not be done as asked: no store, a newer major version, no such id, bad arguments, a missing package.
* 70: a defect of rollstore, with its traceback.
* 130: interrupted. 141: the reader of the pipe went away.

With `ROLLSTORE_TRACEBACK` set, the line comes with the traceback. A stream that is closed from the start (`>&-`) takes
what is written to it, as /dev/null does.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
import warnings
from typing import Any, cast

import typer
from typer.core import TyperGroup

from rollstore.cli.text import visible
from rollstore.errors import CorruptionError, DuplicateError, RollstoreError

CHECK_FAILED, BAD_USE, DEFECT, INTERRUPTED, PIPE_CLOSED = 1, 2, 70, 130, 141

# Older typers take click's class, newer ones have their own: this is the one in use, without naming either.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])


class Commands(TyperGroup):
    """The group of all commands. Turns what they raise into one line and an exit status."""

    def main(self, args: Any = None, prog_name: Any = None, *_: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run a command line. Leaves through SystemExit with the exit status, or returns it if not standalone."""
        _take_any_text()
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _warn
                status = super().main(args, prog_name or "rollstore", standalone_mode=False, **extra) or 0
            sys.stdout.flush()
        except BrokenPipeError:
            status = PIPE_CLOSED
        except SystemExit as error:  # how rich and typer answer to a closed pipe, and how completion ends
            status = PIPE_CLOSED if isinstance(error.__context__, BrokenPipeError) else error.code
        except KeyboardInterrupt:  # while the answer to another error was written
            status = INTERRUPTED
        except _UsageError as error:
            status = _usage(error)
        except Exception as error:
            status = _failed(error)
        if status == PIPE_CLOSED:
            _silence()
        if standalone_mode:
            sys.exit(status)
        return status


def _warn(message: Warning | str, *_: Any) -> None:
    _say(f"warning: {message}")


def _usage(error: typer.BadParameter) -> int:
    context = error.ctx
    where = context.command_path if context else "rollstore"
    name = where.removeprefix("rollstore").strip()
    _say(": ".join(filter(None, (name, error.format_message().rstrip(".")))) + f" (see {where} --help)")
    return BAD_USE


def _failed(error: Exception) -> int:
    if not _expected(error):
        traceback.print_exception(error)
        _say("this is a defect of rollstore; please report it with the lines above")
        return DEFECT
    if "ROLLSTORE_TRACEBACK" in os.environ:
        traceback.print_exception(error)
    _say(_message(error))
    return CHECK_FAILED if isinstance(error, CorruptionError | DuplicateError) else BAD_USE


def _expected(error: Exception) -> bool:
    """Whether the message is meant for the user: ours, the system's, or a query's."""
    if isinstance(error, RollstoreError | OSError):
        return True
    module = type(error).__module__
    if module in ("duckdb", "duckdb.duckdb", "_duckdb"):  # it has moved
        return True
    return isinstance(error, ValueError | TypeError | KeyError | ImportError) and _raised_by_us(error)


def _raised_by_us(error: Exception) -> bool:
    """Whether the line that raised is in rollstore: the same kinds from inside a library are defects."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    name = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__", ""))
    return name == "rollstore" or name.startswith("rollstore.")


def _message(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and not os.path.isabs(str(error.filename or "")) and _nowhere():
        return f"{error.filename or 'a relative path'}: wanted a working folder to start from, got one that is gone"
    if isinstance(error, OSError) and not isinstance(error, RollstoreError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    # A database points at the place in the query on further lines; the sentences before it say what is wrong.
    # What one of our readers raised inside of it, it repeats with the traceback.
    text = text.split("\n\nLINE ")[0].split(". Detail: Python exception: ")[0]
    return " ".join(line.strip() for line in text.splitlines() if line.strip()) or type(error).__name__


def _nowhere() -> bool:
    """Whether the working folder was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _say(message: str) -> None:
    print(visible(f"rollstore: {message}"), file=sys.stderr)


def _take_any_text() -> None:
    """Let stdout write what its encoding lacks, and lone surrogates, as escapes: half an answer would be worse."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _silence() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # no file descriptor behind it: nothing will be flushed into a pipe
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 # stands in for stdout until the process ends
