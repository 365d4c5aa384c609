"""The script of zsh: installed, it answers the first key of a session too."""

from __future__ import annotations

import importlib
from typing import Any

_REGISTERS = "compdef %(complete_func)s %(prog_name)s"
_ANSWERS = """
if [[ $funcstack[1] == _%(prog_name)s ]]; then
  %(complete_func)s
fi
"""


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
