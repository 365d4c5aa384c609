"""The command that takes other programs' files into a store."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollstore.cli import console
from rollstore.cli.arguments import AsJson, examples
from rollstore.cli.document import document
from rollstore.cli.failure import CHECK_FAILED
from rollstore.cli.text import visible

if TYPE_CHECKING:
    from rollstore.exchange.report import Report
    from rollstore.store.store import Store

app = typer.Typer()

_SHOWN = 10  # causes of refusals that are told one by one


class From(StrEnum):
    """What can be imported."""

    JSONL = "jsonl"
    CHAT = "chat"
    VERL = "verl"
    TRL = "trl"
    SLIME = "slime"
    NEMO_RL = "nemo-rl"
    PRIME_RL = "prime-rl"
    SKYRL = "skyrl"
    AREAL = "areal"
    ATROPOS = "atropos"
    ATIF = "atif"


_IDS_ONLY = (From.SLIME, From.NEMO_RL, From.ATROPOS)
"""Formats that hold ids: a tokenizer has nothing to do there."""


@app.command(
    "import",
    epilog=examples(
        "rollstore import jsonl dump.jsonl.zst --store runs/math --mapping fields.toml",
        "rollstore import jsonl exported --store runs/copy",
        "rollstore import verl rollouts/ --store runs/math --tokenizer checkpoints/0 --rejects bad.jsonl",
        "rollstore import verl rollouts/ --store runs/math --tokenizer checkpoints/0 --rejects bad.jsonl --resume",
    ),
)
def import_(
    form: Annotated[
        From,
        typer.Argument(metavar="FORMAT", help=f"One of {', '.join(From)}.", show_default=False, show_choices=False),
    ],
    files: Annotated[
        list[str], typer.Argument(metavar="FILES...", help="Files, folders of them, or URLs.", show_default=False)
    ],
    store: Annotated[str, typer.Option(metavar="STORE", help="Path or URL of the store; made where there is none.")],
    mapping: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="jsonl: a TOML file, our column = their field.", show_default=False),
    ] = None,
    table: Annotated[str, typer.Option(metavar="NAME", help="jsonl: the table that the rows belong to.")] = "rollouts",
    types: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            metavar="NAME=TYPE",
            help="jsonl: what a column of your own holds, as x_share=float64, several times for several.",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="A folder with the tokenizer, for dumps that hold text.", show_default=False),
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="RUN", help="run_id of rows that have none.", show_default=False)
    ] = None,
    rejects: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where refused rows go, with line and reason.", show_default=False),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Go on with an import: rows that are there are passed over.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Take what another program wrote into a store, every row once. Bad rows never stop the rest.

    What a format does not record is null; docs/import.md says what survives of each. A rollout gets the id that its
    source has, or one made of its file and place, so that an import that was killed goes on with --resume. Exit
    status 1 if rows were refused.
    """
    from rollstore.exchange.source import expand, size_of

    total = sum(map(size_of, expand(files, ("",)))) or None
    options: dict[str, Any] = {"run": run, "rejects": rejects, "resume": resume}
    if tokenizer is not None and form in _IDS_ONLY:
        raise ValueError(
            f"import {form.value}: --tokenizer: wanted none, since these files hold token ids, got {tokenizer}"
        )
    if form is not From.JSONL and (mapping is not None or table != "rollouts"):
        raise ValueError(
            f"import {form.value}: --mapping, --table: wanted them with jsonl only, got {mapping or table}"
        )
    if tokenizer is not None:
        from rollstore.cli.transformers import tokenizer as load

        options["tokenizer"] = load(tokenizer)
    if form is From.JSONL:
        options |= {"mapping": mapping, "table": table}
        options["types"] = _types(types or ())
    elif types:
        raise ValueError(f"import {form.value}: --type: wanted it with jsonl only, got {types[0]}")
    with console.progress(f"importing {form.value}", total) as done:
        report = _importer(form)(_Later(store), files, progress=done, **options)
    for column, field in report.unmet.items():
        said = f"{mapping}: {column}: no record has the field {field!r} that it names"
        hint = "; a name that holds a dot stands in quotes of its own" if "." in field else ""
        print(visible(f"rollstore: warning: {said}{hint}"), file=sys.stderr)
    if as_json:
        console.emit(document({"report": report, "total": report.total}))
    else:
        _tell(report)
    if report.total.refused:
        raise typer.Exit(CHECK_FAILED)


class _Later:
    """The store of a path: opened, and made where there is none, when something is first asked of it.

    An import that fails before it has a row to take makes none.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._store: Store | None = None

    def __getattr__(self, name: str) -> Any:
        from rollstore.store.store import open as open_store

        if self._store is None:
            self._store = open_store(self._path, create=True)
        return getattr(self._store, name)


def _types(given: Iterable[str]) -> dict[str, str]:
    """NAME=TYPE, each once. Raises ValueError."""
    types: dict[str, str] = {}
    for text in given:
        name, sign, word = text.partition("=")
        if not sign or name in types:
            raise ValueError(f"import jsonl: --type: wanted x_NAME=TYPE, each name once, got {text}")
        types[name] = word
    return types


def _importer(form: From) -> Any:
    from rollstore import exchange

    return getattr(exchange, f"import_{form.value.replace('-', '_')}")


def _tell(report: Report) -> None:
    for path, counts in report.files.items():
        there = f", {counts.present:,} were there" if counts.present else ""
        refused = counts.refused - counts.unread
        bad = f", {refused:,} refused" if refused else ""
        if counts.unread:
            bad += f"; the {'rest of the file' if counts.read else 'file'} refused"
        console.emit(visible(f"{path}: {counts.read:,} records: {counts.taken:,} taken{there}{bad}"))
    rows = ", ".join(f"{count:,} rows of {name}" for name, count in report.rows.items())
    console.emit(visible(f"{report.store}: {rows or 'nothing new'}"))
    for cause, count in list(report.causes.items())[:_SHOWN]:
        console.emit(visible(f"refused {count:,}: {cause}"))
    if len(report.causes) > _SHOWN:
        console.emit(f"refused for {len(report.causes) - _SHOWN} other causes")
    if report.rejects is not None and report.total.refused:
        console.emit(visible(f"refused rows are in {report.rejects}"))
    if report.missing:
        console.emit(visible(f"not in these files, and so null: {report.missing}"))
