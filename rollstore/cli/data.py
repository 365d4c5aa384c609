"""The commands about a store and what is in it."""

from __future__ import annotations

from typing import Annotated

import typer

from rollstore.cli import console
from rollstore.cli.arguments import AsJson, OneSegment, RolloutId, StorePath, examples
from rollstore.cli.document import document
from rollstore.cli.text import visible
from rollstore.errors import NotFoundError, StoreError

app = typer.Typer()


@app.command(epilog=examples("rollstore init runs/math"))
def init(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Where the store shall be.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Make an empty store. A store that is already there stays as it is."""
    from rollstore.store.store import open as open_store

    try:
        store, created = open_store(path), False
    except StoreError:
        store, created = open_store(path, create=True), True
    if as_json:
        console.emit(document({"path": store.path, "store_id": store.store_id, "created": created}))
    else:
        console.emit(visible(f"{store.path}: {'a new store' if created else 'already a store'}, id {store.store_id}"))


@app.command(
    epilog=examples(
        "rollstore ls runs/math",
        'rollstore ls runs/math --where "reward < 0.5 and step >= 100" --limit 0',
    )
)
def ls(
    store: StorePath,
    limit: Annotated[int, typer.Option(metavar="N", min=0, help="The newest N rollouts; 0 lists all.")] = 20,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="SQL", help="Only rollouts with a segment for which this holds, over the columns of rollouts."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List rollouts, the newest last.

    For each: how many segments, tokens and actions, which weights drew it, how it ended and was judged, its group.
    """
    from rollstore.cli import listing

    listed = listing.newest(store, limit=limit, where=where)
    if as_json:
        console.emit(document({"total": listed.total, "rollouts": listed.rollouts}))
    else:
        listing.show(console.stdout(), listed)


@app.command(epilog=examples("rollstore info runs/math"))
def info(store: StorePath, as_json: AsJson = False) -> None:
    """Say what a store holds.

    Rows and bytes of each table, parts, living journals, tokens and actions, runs, weight versions, format and schema.
    """
    from rollstore.cli import contents

    found = contents.contents(store)
    if as_json:
        console.emit(document(found))
    else:
        contents.show(console.stdout(), found)


@app.command(epilog=examples("rollstore show runs/math 31417", "rollstore show runs/math 31417 --segment 0 --tokens"))
def show(
    store: StorePath,
    rollout_id: RolloutId,
    segment: OneSegment = None,
    as_table: Annotated[
        bool,
        typer.Option(
            "--tokens", metavar="", help="A table with one line for each token, and what the lines add up to."
        ),
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="A tokenizer to read the ids with, where the record has no token bytes."),
    ] = None,
    evaluation: Annotated[
        str | None, typer.Option(metavar="ID", help="The evaluation whose log-probs --tokens shows as the trainer's.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="The training step whose advantages and weights it shows.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show one rollout, as text or token by token.

    First who made it and how it ended, then its turns, each action in the colour of its probability. Without colour,
    a bar behind an unlikely token says how unlikely. A version of the weights that changes is marked. --tokens also has
    what the trainer made of the actions, where it is stored once, or --evaluation and --step say which is meant.
    """
    from rollstore.cli.header import header
    from rollstore.cli.show import turns
    from rollstore.cli.tokens import sums, texts, tokens
    from rollstore.cli.trace import trace
    from rollstore.cli.trained import trained
    from rollstore.cli.transformers import require_folder
    from rollstore.store.store import open as open_store

    if tokenizer is not None:
        require_folder(tokenizer, "tokenizer")
    opened = open_store(store)
    recorded = opened.get(rollout_id)
    chosen = [one for one in recorded if segment is None or one.segment == segment]
    if not chosen:
        have = ", ".join(str(one.segment) for one in recorded)
        raise NotFoundError(f"rollout {rollout_id!r}: wanted segment {segment}, it has {have}")
    if as_json and not as_table:
        console.emit(document({"rollout_id": rollout_id, "segments": chosen}))
        return
    beside = trained(opened, recorded, evaluation=evaluation, step=step) if as_table else {}
    read = [(one, tokens(one, texts(one, tokenizer), beside.get(one.segment))) for one in chosen]
    if as_json:
        tables = [
            {"segment": one.segment, "tokens": rows, "sums": sums(one, rows, beside[one.segment])} for one, rows in read
        ]
        console.emit(document({"rollout_id": rollout_id, "segments": tables}))
        return
    out = console.stdout()
    for n, (one, rows) in enumerate(read):
        if n and as_table:
            out.print()
        header(out, one, of=len(recorded))
        if as_table:
            trace(out, rows, sums(one, rows, beside[one.segment]), beside[one.segment])
        else:
            turns(out, one, rows)
