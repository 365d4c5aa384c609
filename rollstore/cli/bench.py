"""The command that measures this machine and one place."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import typer

from rollstore import __version__
from rollstore.cli import console
from rollstore.cli.arguments import examples
from rollstore.cli.counting import counting
from rollstore.cli.document import document
from rollstore.cli.text import visible

if TYPE_CHECKING:
    from rollstore.bench import Figure

app = typer.Typer()


class Size(StrEnum):
    """How much is written and read."""

    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"


@app.command(
    epilog=examples(
        "rollstore bench", "rollstore bench /mnt/scratch --size medium", "rollstore bench s3://bucket/tmp --json"
    )
)
def bench(
    place: Annotated[
        str,
        typer.Argument(metavar="PLACE", help="Folder or URL to measure in; the working folder where none is named."),
    ] = ".",
    size: Annotated[
        Size, typer.Option(metavar="|".join(Size), help="Tokens in the store: 1, 20 or 200 million.")
    ] = Size.SMALL,
    tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="About so many tokens instead.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Write one JSON document, with every run.")
    ] = False,
) -> None:
    """Measure writing and reading here, beside plain files.

    Appends, syncs, seals, opens, looks up and loads made-up rollouts, in turn with Parquet files of the same rows that
    survive the same, and with bare bytes. Everything goes into a new folder `rollstore-bench-...` in PLACE, which is
    removed at the end, after an error, after Ctrl-C and where the process is told to end. A store, or a folder in one,
    is refused. Speed depends on what else the machine does: trust ratios more than times. Room needed: about 30 bytes a
    token.
    """
    from rollstore.bench import SIZES, Place, measure

    plan = SIZES[size] if tokens is None else replace(SIZES[size], tokens=tokens)
    with _in_order(), Place(place, tokens=plan.tokens) as made, counting("measuring") as count:
        found = list(measure(made, plan, lambda case, done, of: count(done, of)))
    versions = {"rollstore": __version__, **{name: version(name) for name in ("pyarrow", "numpy")}}
    if as_json:
        console.emit(document({"place": place, "tokens": plan.tokens, "versions": versions, "figures": found}))
        return
    _show(found)
    if "load" not in [figure.case for figure in found]:
        console.emit("load: not measured, for torch is not installed (pip install 'rollstore[torch]')")
    console.emit(visible(f"{place}: about {plan.tokens:,} tokens; {', '.join(map(' '.join, versions.items()))}"))


@contextmanager
def _in_order() -> Generator[None]:
    """A process that is told to end, or whose terminal closes, removes what it made."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _show(figures: list[Figure]) -> None:
    from rich.table import Table

    table = Table("case", "of", "p50", "p99", "/ ours", "rate", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for figure in figures:
        for row in _rows(figure):
            table.add_row(*row)
    out = console.stdout()
    console.put(out, table)
    for figure in figures:
        console.emit(f"{figure.case}: {figure.what}")


def _rows(figure: Figure) -> Iterator[tuple[str, ...]]:
    for number, (name, runs) in enumerate(figure.contestants.items()):
        rate = ""
        if figure.rate is not None and runs.p50:
            rate = f"{figure.rate[1] / runs.p50 * 1e3:,.0f} {figure.rate[0]}"
        ratio = f"{figure.ratio(name):.2f}" if number else ""
        p99 = _number(runs.p99) if len(runs.runs) > 1 else ""
        yield ("" if number else figure.case, name, f"{_number(runs.p50)} {figure.unit}", p99, ratio, rate)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
