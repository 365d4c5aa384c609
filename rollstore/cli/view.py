"""The command that shows rollouts as pages: in a file, or served to this machine."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from rollstore.cli import console
from rollstore.cli.arguments import AsJson, StorePath, examples
from rollstore.cli.document import document
from rollstore.cli.text import visible

if TYPE_CHECKING:
    from rollstore.view.reading import Reader

app = typer.Typer()


@app.command(
    epilog=examples(
        "rollstore view runs/math",
        "rollstore view runs/math 31417 -o page.html",
        "rollstore view runs/math --group g7 -o group.html",
        "rollstore view runs/math --diff 31417 31418 -o diff.html",
        "rollstore view runs/before 31417 --against runs/after -o diff.html",
    )
)
def view(
    store: StorePath,
    rollout_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="A rollout to show.", show_default=False)
    ] = None,
    group: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Show the members of a group side by side.")
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="The run of --group, where several have one.")] = None,
    group_step: Annotated[
        int | None,
        typer.Option("--group-step", metavar="N", min=0, help="The step of --group, where several have one."),
    ] = None,
    diff: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Show two rollouts, and where they come apart.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="STORE", help="The store of B; with an ID, of the rollout of the same name.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the page, and serve nothing.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="A tokenizer to read the ids with, those of heads too."),
    ] = None,
    evaluation: Annotated[
        str | None, typer.Option(metavar="ID", help="The evaluation whose log-probs are shown as the trainer's.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="The training step whose advantages and weights are shown.")
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Where to serve. Only this machine can look unless it is told so.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="Its port; 0 takes a free one.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", metavar="", help="Do not open a browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look at rollouts in a browser: one, a group side by side, two that differ, or a store as a list.

    Tokens in the colour of their log-prob, their ratio, their version or the mask; each tells what is known of it. With
    -o the page is one file that needs nothing else. Without it pages are served until Ctrl-C, at the address that is
    written to stderr. What a model wrote never acts on a page. See docs/view.md for the keys.
    """
    from rollstore.cli.transformers import require_folder
    from rollstore.store.store import open as open_store
    from rollstore.view.reading import Reader

    asked = [name for name, given in (("ID", rollout_id), ("--group", group), ("--diff", diff)) if given is not None]
    if len(asked) > 1:
        raise typer.BadParameter(f"wanted one of ID, --group, --diff, got {' and '.join(asked)}")
    if output is not None and not asked:
        raise typer.BadParameter("-o: wanted an ID, --group or --diff to write, got none")
    if against is not None and group is not None:
        raise typer.BadParameter("--against: wanted an ID or --diff, got --group")
    if group is None and (run is not None or group_step is not None):
        raise typer.BadParameter("--run, --group-step: wanted a --group, got none")
    if tokenizer is not None:
        require_folder(tokenizer, "tokenizer")
    reader = Reader(store=open_store(store), tokenizer=tokenizer, evaluation=evaluation, step=step)
    other = None if against is None else Reader(store=open_store(against), tokenizer=tokenizer)
    if rollout_id is not None and other is not None:
        rollout_id, diff = None, (rollout_id, rollout_id)
    wanted = _Wanted(rollout_id, group, run, group_step, diff)
    # Before anything is served too: what is not there is said here.
    page = _page(reader, other, wanted) if asked else ""
    if output is None:
        _serve(reader, other, path=_path(wanted), host=host, port=port, no_open=no_open, as_json=as_json)
        return
    output.write_text(page, encoding="utf-8")
    size = len(page.encode())
    if as_json:
        console.emit(document({"written": str(output), "bytes": size}))
    else:
        console.emit(visible(f"{output}: {size:,} bytes"))


class _Wanted(NamedTuple):
    """What to show: one of a rollout, a group and a difference; nothing is the list."""

    rollout_id: str | None
    group: str | None
    run: str | None
    step: int | None
    diff: tuple[str, str] | None


def _page(reader: Reader, other: Reader | None, wanted: _Wanted) -> str:
    from rollstore.view.pages import diff_page, group_page, rollout_page
    from rollstore.view.reading import members

    if wanted.group is not None:
        return group_page(reader, members(reader.store, wanted.group, run=wanted.run, step=wanted.step))
    if wanted.diff is not None:
        return diff_page(reader, other or reader, wanted.diff)
    return rollout_page(reader, wanted.rollout_id or "")


def _path(wanted: _Wanted) -> str:
    """Where the browser begins."""
    from rollstore.view.links import address

    if wanted.group is not None:
        return address("/group", group=wanted.group, run=wanted.run, step=wanted.step)
    if wanted.diff is not None:
        return address("/diff", a=wanted.diff[0], b=wanted.diff[1])
    return "/" if wanted.rollout_id is None else address("/rollout", id=wanted.rollout_id)


def _serve(
    reader: Reader, other: Reader | None, *, path: str, host: str, port: int, no_open: bool, as_json: bool
) -> None:
    from rollstore.view.listing import Listing
    from rollstore.view.serve import Pages, serve

    def ready(address: str) -> None:
        if as_json:
            console.emit(document({"address": address + path}, indent=None))
            sys.stdout.flush()
        console.stderr().print(f"serving {address}{path}", soft_wrap=True)
        if not no_open and sys.stderr.isatty():
            import webbrowser

            webbrowser.open(address + path)

    with console.waiting("reading the store"):
        listing = Listing(reader.store)
    with closing(listing):
        serve(Pages(reader, listing, host=host, port=port, against=other), ready)
