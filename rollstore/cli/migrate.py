"""The command that brings a store to the newest schema version."""

from __future__ import annotations

from typing import Annotated

import typer

from rollstore.cli import console
from rollstore.cli.arguments import AsJson, StorePath, examples
from rollstore.cli.document import document
from rollstore.cli.text import visible
from rollstore.schema import VERSION

app = typer.Typer()


@app.command(epilog=examples("rollstore migrate runs/math --dry-run", "rollstore migrate runs/math"))
def migrate(
    store: StorePath,
    dry_run: Annotated[bool, typer.Option("--dry-run", metavar="", help="Only say what would be rewritten.")] = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite parts of older schema versions in the newest one.

    Readers understand every released version: this only saves them the upgrading. The old parts stay until `vacuum`.
    """
    from rollstore.schema import TABLES
    from rollstore.store.migrate import older
    from rollstore.store.store import open as open_store

    opened = open_store(store)
    with opened.snapshot() as snapshot:
        total = sum(part.size for table in TABLES for part in older(snapshot, table))
    with console.progress("migrating", total) as read:
        report = opened.migrate(dry_run=dry_run, progress=read)
    if as_json:
        console.emit(document({"path": opened.path, "schema": VERSION, "report": report}))
        return
    would = "would be " if dry_run else ""
    for table, versions in report.rows.items():
        for version, rows in sorted(versions.items()):
            console.emit(visible(f"{opened.path}: {table}: {rows:,} rows {would}rewritten from {version} to {VERSION}"))
    for name in report.journals:
        console.emit(visible(f"waiting: {name}: a journal of an older version is rewritten when it is sealed"))
    if not report.rows:
        console.emit(visible(f"{opened.path}: every part is of schema {VERSION} or newer"))
