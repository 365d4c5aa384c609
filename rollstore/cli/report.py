"""The command that draws one page about a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollstore.cli import console
from rollstore.cli.arguments import AsJson, StorePath, examples
from rollstore.cli.counting import counting
from rollstore.cli.document import document
from rollstore.cli.look import Memory
from rollstore.cli.text import visible

app = typer.Typer()


@app.command(
    epilog=examples(
        "rollstore report runs/math -o report.html",
        "rollstore report runs/math -o report.html --evaluation trainer-6 --evaluation trainer-7",
        "rollstore report runs/math --json",
    )
)
def report(
    store: StorePath,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the page there, as HTML (the extra `plot`)."),
    ] = None,
    evaluation: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Whose log-probs are the trainer's; may be repeated. All of role trainer."),
    ] = None,
    memory: Memory = "512MB",
    as_json: AsJson = False,
) -> None:
    """Say on one page what a run looks like, each plot with what it shows and its margin.

    Ratio tails by version lag, KL by position, reward and length by weight version, endings and signal by step, queue
    and lag by training step, quality against wall time beside what was discarded, and the bytes of the record. What
    was not recorded is said, not drawn. Without -o the sentences alone.
    """
    from rollstore.diagnose.report import report as reported
    from rollstore.store.store import open as open_store

    if output is not None:
        from rollstore.diagnose.plots import figure

        figure()  # a missing package is said before anything is read
        if output.is_dir() or not output.absolute().parent.is_dir():
            raise ValueError(f"{output}: wanted a file in a folder that is there")
    with counting("asking") as progress:
        found = reported(open_store(store), evaluations=evaluation or (), memory=memory, progress=progress)
    if output is not None:
        with console.waiting("drawing"):
            output.write_text(found.html(), encoding="utf-8")
    if as_json:
        console.emit(document(found.to_dict()))
        return
    for line in found.lines():
        console.emit(visible(line))
