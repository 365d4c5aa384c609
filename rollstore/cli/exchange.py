"""The commands that carry a store to and from other programs."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated, Any

import typer

from rollstore.cli import console
from rollstore.cli.arguments import AsJson, StorePath, examples
from rollstore.cli.document import document
from rollstore.cli.text import visible

app = typer.Typer()


class To(StrEnum):
    """What a store can be exported as."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    ATIF = "atif"
    VERL = "verl"
    TRL = "trl"
    TINKER = "tinker"
    DATASETS = "datasets"
    LANCE = "lance"


_BY_TABLE = (To.PARQUET, To.JSONL, To.DATASETS, To.LANCE)
"""Formats that hold tables; the others hold rollouts in their own way."""


class Compression(StrEnum):
    """How JSONL is packed."""

    ZST = "zst"
    GZ = "gz"
    NONE = "none"


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
        "rollstore export jsonl runs/math lines --compression gz",
        "rollstore export atif runs/math trajectories --tokenizer checkpoints/0",
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
    compression: Annotated[
        Compression, typer.Option(metavar="NAME", help=f"jsonl: one of {', '.join(Compression)}.", show_choices=False)
    ] = Compression.ZST,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="atif, verl: a folder with the tokenizer that makes text of ids.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the rows of this moment for other programs. Nothing is overwritten.

    parquet: FOLDER/TABLE/run=RUN/part-00000.parquet, for DuckDB, Polars, Spark, Ray, pandas and datasets as they are.
    jsonl: FOLDER/TABLE.jsonl.zst, every value exact, which `import jsonl` reads back as the same rows.
    atif, verl, trl, tinker: files of these programs. datasets, lance: tables of these libraries.
    docs/export.md says what survives of each. The folder gets its name when everything is in it: an export that is cut
    short leaves nothing there.
    """
    from rollstore import exchange
    from rollstore.schema import TABLES
    from rollstore.store.store import open as open_store

    options: dict[str, Any] = {}
    chosen = [table.value for table in tables or ()]
    if form in _BY_TABLE:
        chosen = options["tables"] = chosen or list(TABLES)
    elif chosen not in ([], ["rollouts"]):
        raise ValueError(f"export {form.value}: --table: wanted none, it holds rollouts only, got {chosen[0]}")
    if form is To.JSONL:
        options["compression"] = compression.value
    if form in (To.ATIF, To.VERL):
        options["tokenizer"] = None if tokenizer is None else _tokenizer(tokenizer)
    if form in (To.DATASETS, To.LANCE):
        _require_text(folder, form.value)
    opened = open_store(store)
    with opened.snapshot() as snapshot:
        sources = [table if table in TABLES else "rollouts" for table in chosen or ["rollouts"]]
        total = sum(part.size for table in sources for part in snapshot.parts(table))
        with console.progress(f"exporting {form.value}", total) as done:
            write = getattr(exchange, f"export_{form.value}")
            exported = write(opened, folder, snapshot=snapshot, progress=done, **options)
    if as_json:
        console.emit(document({"path": opened.path, "export": exported}))
        return
    for table, written in exported.tables.items():
        files = f"{written.files} file{'' if written.files == 1 else 's'}"
        console.emit(visible(f"{exported.folder}: {table}: {written.rows:,} rows in {files}, {written.bytes:,} bytes"))


def _tokenizer(path: str) -> Any:
    from rollstore.cli.transformers import tokenizer

    return tokenizer(path)


def _require_text(folder: str, form: str) -> None:
    """These libraries take a path as text. Raises ValueError where it is none."""
    try:
        os.path.abspath(folder).encode()
    except UnicodeEncodeError:
        raise ValueError(f"export {form}: {folder}: wanted a path in UTF-8, got other bytes") from None
