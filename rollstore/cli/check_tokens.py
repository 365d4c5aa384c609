"""The command that says which ids a way through text would have changed."""

from __future__ import annotations

from typing import Annotated

import typer

from rollstore.cli import console
from rollstore.cli.arguments import AsJson, StorePath, examples
from rollstore.cli.document import document
from rollstore.cli.failure import CHECK_FAILED
from rollstore.cli.text import visible

app = typer.Typer()


@app.command(
    "check-tokens",
    epilog=examples(
        "rollstore check-tokens runs/math --tokenizer checkpoints/0",
        "rollstore check-tokens runs/math --tokenizer checkpoints/0 --most 0.01 --json",
    ),
)
def check_tokens(
    store: StorePath,
    tokenizer: Annotated[
        str, typer.Option(metavar="PATH", help="A folder with the tokenizer that made the ids.", show_default=False)
    ],
    most: Annotated[
        float, typer.Option(metavar="SHARE", min=0, max=1, help="Segments that may change before the check fails.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Decode and encode every span, and say where ids would have changed. Nothing is rewritten.

    The fingerprints of tokenizer and template that a record names are compared first; segments of another tokenizer
    are counted and not decoded. Exit status 1 if more than --most of the segments would change, or if any is of
    another tokenizer.
    """
    from rollstore.cli.transformers import tokenizer as load
    from rollstore.replay.tokens import check_tokens as checked
    from rollstore.store.store import open as open_store

    opened, loaded = open_store(store), load(tokenizer)
    with console.waiting("checking tokens"):
        found = checked(opened, loaded)
    if as_json:
        console.emit(document(found.to_dict()))
    else:
        for line in found.lines():
            console.emit(visible(line))
    if found.share > most or found.other_tokenizer:
        raise typer.Exit(CHECK_FAILED)
