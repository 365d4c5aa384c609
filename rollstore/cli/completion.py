"""Completion: for which shell a script is asked for, and that of zsh, which answers the first key of a session too."""

from __future__ import annotations

import importlib
from typing import Any

import typer

from rollstore.cli import console
from rollstore.cli.failure import Commands

_REGISTERS = "compdef %(complete_func)s %(prog_name)s"
_ANSWERS = """
if [[ $funcstack[1] == _%(prog_name)s ]]; then
  %(complete_func)s
fi
"""


class Completed(Commands):
    """The group of all commands, whose two options of completion may name a shell: `--show-completion zsh`.

    Typer's own take none, and would silently go on with the shell that one is in.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Answer where a shell is named, else do as typer does. Raises BadParameter for a shell without a script."""
        for number, word in enumerate(args):
            option, _, shell = word.partition("=")
            if option in ("--show-completion", "--install-completion"):
                named = [shell] if shell else args[number + 1 :]
                if named:
                    _answer(ctx, option, named)
            if not word.startswith("-"):
                break  # a command: what follows is its own
        return super().parse_args(ctx, args)


def _answer(ctx: Any, option: str, named: list[str]) -> None:
    shared: Any = importlib.import_module("typer._completion_shared")
    shells = [str(shell) for shell in shared.Shells]
    if len(named) != 1 or named[0] not in shells:
        raise typer.BadParameter(f"{option}: wanted one of {', '.join(shells)}, got {' '.join(named)!r}", ctx=ctx)
    program, variable = str(ctx.info_name), f"_{ctx.info_name}_COMPLETE".upper()
    if option == "--show-completion":
        console.emit(shared.get_completion_script(prog_name=program, complete_var=variable, shell=named[0]))
    else:
        shell, path = shared.install(shell=named[0], prog_name=program, complete_var=variable)
        console.emit(f"{shell} completion installed in {path}; it begins with the next session")
    raise typer.Exit


def answer_at_once() -> None:
    """Make typer's script complete when zsh loads it.

    `--install-completion` puts it into a folder from which zsh loads a function when it is first wanted. Typer's script
    then only registers what is to be asked from the second time on, and the first key does nothing. Where typer keeps
    its scripts elsewhere, it stays so.
    """
    scripts: Any = getattr(importlib.import_module("typer._completion_shared"), "_completion_scripts", {})
    script = scripts.get("zsh", "")
    if script.rstrip().endswith(_REGISTERS):
        scripts["zsh"] = script.rstrip() + _ANSWERS
