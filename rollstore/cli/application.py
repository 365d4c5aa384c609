"""All commands, as one application."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rollstore import __version__
from rollstore.cli import (
    bench,
    check_tokens,
    console,
    data,
    exchange,
    gate,
    gateway,
    importing,
    look,
    migrate,
    mismatch,
    query,
    replay,
    report,
    upkeep,
    view,
)
from rollstore.cli.command import Command
from rollstore.cli.completion import Completed, answer_at_once
from rollstore.cli.defaults import default_map
from rollstore.cli.failure import BAD_USE
from rollstore.schema import VERSION

answer_at_once()
app = typer.Typer(
    name="rollstore",
    cls=Completed,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
for commands in (
    data,
    query,
    upkeep,
    migrate,
    importing,
    exchange,
    replay,
    mismatch,
    gate,
    gateway,
    look,
    report,
    view,
    check_tokens,
    bench,
):
    for one in commands.app.registered_commands:
        one.cls = Command
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
    commands: dict[str, typer.core.TyperCommand] = getattr(context.command, "commands")  # noqa: B009 # no public type
    context.default_map = default_map(commands, os.environ, Path())
    if context.invoked_subcommand is None:
        with contextlib.redirect_stdout(sys.stderr):  # bad use leaves stdout empty
            print(context.get_help())
        raise typer.Exit(BAD_USE)
