"""The commands that carry a store to and from other programs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from rollstore.cli import console
from rollstore.cli.arguments import AsJson, StorePath, examples
from rollstore.cli.document import document
from rollstore.cli.text import visible

app = typer.Typer()


class To(StrEnum):
    """What a store can be exported as."""

    PARQUET = "parquet"


class Exportable(StrEnum):
    """The tables, and two views with one row an action or a token."""

    ROLLOUTS = "rollouts"
    SCORES = "scores"
    EVALUATIONS = "evaluations"
    USES = "uses"
    ACTIONS = "actions"
    TOKENS = "tokens"


@app.command(
    epilog=examples(
        "rollstore export parquet runs/math exported",
        "rollstore export parquet runs/math flat --table actions --table scores",
    )
)
def export(
    form: Annotated[
        To, typer.Argument(metavar="FORMAT", help=f"One of {', '.join(To)}.", show_default=False, show_choices=False)
    ],
    store: StorePath,
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Where to write: a new or empty folder.", show_default=False)
    ],
    tables: Annotated[
        list[Exportable] | None,
        typer.Option(
            "--table",
            metavar="NAME",
            help=f"What to write, several times for several: {', '.join(Exportable)}. Without it the first four.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the rows of this moment for other programs. Nothing is overwritten.

    parquet: FOLDER/TABLE/run=RUN/part-00000.parquet, for DuckDB, Polars, Spark, Ray, pandas and datasets as they are.
    The folder gets its name when everything is in it: an export that is cut short leaves nothing there.
    """
    from rollstore.exchange.parquet import export as write
    from rollstore.schema import TABLES
    from rollstore.store.store import open as open_store

    opened = open_store(store)
    chosen = [table.value for table in tables or ()] or list(TABLES)
    with opened.snapshot() as snapshot:
        total = sum(part.size for table in chosen for part in snapshot.parts(table if table in TABLES else "rollouts"))
        with console.progress(f"exporting {form.value}", total) as done:
            exported = write(opened, folder, tables=chosen, snapshot=snapshot, progress=done)
    if as_json:
        console.emit(document({"path": opened.path, "export": exported}))
        return
    for table, written in exported.tables.items():
        files = f"{written.files} file{'' if written.files == 1 else 's'}"
        console.emit(visible(f"{exported.folder}: {table}: {written.rows:,} rows in {files}, {written.bytes:,} bytes"))
