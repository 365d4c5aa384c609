"""Arguments and options that several commands share, and how a command shows an example of itself."""

from __future__ import annotations

from typing import Annotated

import typer

StorePath = Annotated[str, typer.Argument(metavar="STORE", help="Path or URL of the store.", show_default=False)]
RolloutId = Annotated[str, typer.Argument(metavar="ID", help="The rollout's id.", show_default=False)]
OneSegment = Annotated[
    int | None, typer.Option("--segment", metavar="N", help="Only this segment.", min=0, show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Write one JSON document, for programs.")]


def examples(*lines: str) -> str:
    """The epilog of a command: command lines that work as they stand, once the paths are one's own."""
    return "\n\n".join(("Examples:" if len(lines) > 1 else "Example:", *lines))
