"""The command line. `main` runs it; every command imports what it needs when it runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from rollstore import __version__
from rollstore.cli import (
    check_tokens,
    console,
    data,
    exchange,
    gate,
    gateway,
    look,
    migrate,
    mismatch,
    query,
    replay,
    upkeep,
)
from rollstore.cli.failure import BAD_USE, Commands
from rollstore.schema import VERSION

app = typer.Typer(
    name="rollstore",
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
for commands in (data, query, upkeep, migrate, exchange, replay, mismatch, gate, gateway, look, check_tokens):
    app.add_typer(commands.app)


def _version(asked: bool) -> None:
    if asked:
        console.emit(f"rollstore {__version__}, schema {VERSION}")
        raise typer.Exit


@app.callback(epilog="Exit status: 0 done, 1 the check failed, 2 bad use. Errors are one line on stderr.")
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", metavar="", help="Say which version this is.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """The record and the store for language-model rollouts."""
    if context.invoked_subcommand is None:
        with contextlib.redirect_stdout(sys.stderr):  # bad use leaves stdout empty
            print(context.get_help())
        raise typer.Exit(BAD_USE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line (that of the process by default). Leaves through SystemExit with the exit status."""
    typer.main.get_command(app).main(None if arguments is None else list(arguments), prog_name="rollstore")
