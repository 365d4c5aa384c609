"""The commands that look at a store as a whole: its audit, its statistics, and the noise floor of its scorers."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import xxhash

from rollstore.cli import console
from rollstore.cli.arguments import AsJson, StorePath, examples
from rollstore.cli.counting import counting
from rollstore.cli.document import document
from rollstore.cli.failure import CHECK_FAILED
from rollstore.cli.text import visible

if TYPE_CHECKING:
    from rollstore.diagnose.floor import Floor
    from rollstore.diagnose.rules import Rule

app = typer.Typer()

Memory = Annotated[
    str, typer.Option(metavar="SIZE", help="What the queries may hold before they write to disk, as 512MB.")
]


class By(StrEnum):
    """What statistics are taken by."""

    RUN = "run"
    ENVIRONMENT = "environment"
    ENGINE = "engine"


class Task(StrEnum):
    """What discards are shown by."""

    ENVIRONMENT = "environment"
    PROMPT = "prompt_id"


@app.command(
    epilog=examples(
        "rollstore audit runs/math",
        "rollstore audit runs/math --skip engines-gated --config audit.toml --junit audit.xml --sarif audit.sarif",
        "rollstore audit --list",
    )
)
def audit(
    store: Annotated[
        str | None, typer.Argument(metavar="STORE", help="Path or URL of the store.", show_default=False)
    ] = None,
    rule: Annotated[list[str] | None, typer.Option(metavar="ID", help="Ask this rule; may be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(metavar="ID", help="Leave this rule out; may be repeated.")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A TOML file: only, skip, and a section a rule with its limits.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", metavar="", help="List the rules, and ask none.")] = False,
    strict: Annotated[bool, typer.Option("--strict", metavar="", help="Fail also where a rule cannot tell.")] = False,
    sarif: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a SARIF file.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a JUnit file.")] = None,
    memory: Memory = "512MB",
    as_json: AsJson = False,
) -> None:
    """Ask a store what a careful person asks before a run is scaled up.

    Each rule answers ok, problem or cannot tell (what it needs was not recorded, which is not ok), with counts, ids of
    examples and what to do. Exit status 1 if a rule finds a problem.
    """
    from rollstore import __version__
    from rollstore.diagnose.audit import audit as audited
    from rollstore.diagnose.audit import choose
    from rollstore.diagnose.ci import junit as as_junit
    from rollstore.diagnose.ci import sarif as as_sarif
    from rollstore.store.store import open as open_store

    chosen = choose(only=rule or (), skip=skip or (), path=config)
    if listed:
        _list(chosen.rules, as_json)
        return
    if store is None:
        raise typer.BadParameter("wanted a STORE, or --list, got neither")
    with counting("asking") as progress:
        found = audited(open_store(store), rules=chosen.rules, limits=chosen.limits, memory=memory, progress=progress)
    if sarif is not None:
        sarif.write_text(as_sarif(found, version=__version__), encoding="utf-8")
    if junit is not None:
        junit.write_text(as_junit(found), encoding="utf-8")
    _emit(found.to_dict() if as_json else found.lines(), as_json)
    if not found.passed or (strict and found.unknown):
        raise typer.Exit(CHECK_FAILED)


@app.command(
    epilog=examples(
        "rollstore stats runs/math",
        "rollstore stats runs/math --by run --by engine --json",
        "rollstore stats runs/math --follow --every 30",
    )
)
def stats(
    store: StorePath,
    by: Annotated[
        list[By] | None, typer.Option(metavar="|".join(By), help="One slice for each of these; may be repeated.")
    ] = None,
    task: Annotated[Task, typer.Option(metavar="|".join(Task), help="What discards are shown by.")] = Task.ENVIRONMENT,
    follow: Annotated[
        bool, typer.Option("--follow", metavar="", help="Say it again whenever the store has grown.")
    ] = False,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=86_400, help="How often --follow looks.")
    ] = 5.0,
    memory: Memory = "512MB",
    as_json: AsJson = False,
) -> None:
    """Say where the time goes and what becomes of the rollouts.

    Tokens generated and with a loss per second, waits from the queue to the trainer, version lag before and in the
    queue, rates of timeouts, aborts, discards and reuse, reward by version, discards by length and task, and the stages
    of a step one by one and side by side. With --follow and --json each report is one line.
    """
    from rollstore.diagnose.stats import follow as followed
    from rollstore.diagnose.stats import stats as counted
    from rollstore.diagnose.summary import stats_lines
    from rollstore.store.store import open as open_store

    opened, names = open_store(store), [name.value for name in by or ()]
    if not follow:
        with console.waiting("counting"):
            found = counted(opened, by=names, task=task.value, memory=memory)
        _emit(found.to_dict() if as_json else stats_lines(found), as_json)
        return
    for found in followed(opened, every=every, by=names, task=task.value, memory=memory):
        if as_json:
            console.emit(document(found.to_dict(), indent=None))
        else:
            _emit(stats_lines(found), as_json)
        console.stdout().file.flush()


@app.command(
    epilog=examples(
        "rollstore floor runs/math",
        "rollstore floor runs/math --scorer judge --card cards --plot plots",
        "rollstore floor runs/before --scorer judge --against runs/after",
    )
)
def floor(
    store: StorePath,
    scorer: Annotated[str | None, typer.Option(metavar="NAME", help="Only this scorer.")] = None,
    scorer_version: Annotated[
        str | None, typer.Option("--scorer-version", metavar="VERSION", help="Only this version of it.")
    ] = None,
    setting: Annotated[str | None, typer.Option(metavar="SETTING", help="Only this setting.")] = None,
    card: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write a card of each floor there, as JSON and Markdown.")
    ] = None,
    items: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write how far each item moved there, as CSV.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw the movements there, as SVG (the extra `plot`).")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="STORE", help="Hold the rewards of the same rollouts in another store against the floor."),
    ] = None,
    resamples: Annotated[int, typer.Option(metavar="N", min=0, help="Of the bootstrap interval; 0 takes none.")] = 1000,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the bootstrap.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Say how well the scorers of a store repeat themselves.

    From the repeats in its scores: how far an item's score moves when it is scored again in other company, three times
    the 95th percentile of that, and an interval; for each scorer, version and setting. A floor without repeats is
    unknown, not 0. With --against, differences of rewards up to the floor are counted apart.
    """
    from rollstore.diagnose.floor import floors
    from rollstore.diagnose.gaps import gaps, paired
    from rollstore.diagnose.peak import peak_bytes
    from rollstore.diagnose.summary import floor_lines
    from rollstore.store.store import open as open_store

    opened, written = open_store(store), _Written(items=items, plot=plot, card=card)
    with console.waiting("measuring"):
        found = floors(
            opened,
            scorer=scorer,
            version=scorer_version,
            setting=setting,
            resamples=resamples,
            seed=seed,
            each=written.add,
        )
    if not found:
        raise ValueError(f"{store}: wanted scores{'' if scorer is None else f' of {scorer!r}'}, found none")
    compared = None
    if against is not None:
        if len(found) != 1:
            raise ValueError(f"--against: wanted one scorer and setting, got {len(found)}: choose with --scorer")
        compared = gaps(*paired(opened, open_store(against)), found[0].floor)
    peak = peak_bytes()
    if as_json:
        told = {"floors": [one.to_dict() for one in found], "against": compared, "peak_memory_bytes": peak}
        _emit(told, as_json)
        return
    lines = [line for one in found for line in floor_lines(one)]
    if compared is not None:
        lines.append("rewards against it: " + ", ".join(f"{name} {count:,}" for name, count in compared.items()))
    _emit([*lines, f"peak memory {peak / 2**20:.0f} MiB"], as_json)


class _Written:
    """Writes what was asked for of each floor, in folders that are made if need be."""

    def __init__(self, *, items: Path | None, plot: Path | None, card: Path | None) -> None:
        self._items, self._plot, self._card = items, plot, card
        if plot is not None:
            from rollstore.diagnose.plots import figure

            figure()  # a missing package is said before anything is measured
        for folder in (items, plot, card):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)

    def add(self, one: Floor, moved: Any) -> None:
        name = _file_name(one)
        if self._items is not None:
            import pyarrow.csv

            from rollstore.diagnose.floor import per_item

            pyarrow.csv.write_csv(per_item(moved), self._items / f"{name}.csv")
        if self._plot is not None:
            from rollstore.diagnose.plots import floor_svg

            (self._plot / f"{name}.svg").write_text(floor_svg(one, moved.sizes()), encoding="utf-8")
        if self._card is not None:
            from rollstore.diagnose.card import card_json, card_markdown

            (self._card / f"{name}.json").write_text(card_json(one), encoding="utf-8")
            (self._card / f"{name}.md").write_text(card_markdown(one), encoding="utf-8")


def _file_name(one: Floor) -> str:
    """The scorer's name in plain letters, and a digest that tells versions and settings apart."""
    key = "\0".join(str(part) for part in (one.scorer, one.scorer_version, one.setting))
    plain = re.sub(r"[^a-z0-9]+", "-", one.scorer.lower()).strip("-")[:40]
    return f"{plain or 'scorer'}-{xxhash.xxh3_64_hexdigest(key.encode(errors='surrogatepass'))[:8]}"


def _list(rules: tuple[Rule, ...], as_json: bool) -> None:
    if as_json:
        rows = [
            {"id": one.id, "question": one.question, "advice": one.advice, "limits": dict(one.limits)} for one in rules
        ]
        _emit({"rules": rows}, as_json)
        return
    width = max(len(one.id) for one in rules)
    for one in rules:
        limits = ", ".join(f"{name} = {value!r}" for name, value in one.limits.items())
        console.emit(f"{one.id:{width}}  {one.question}" + (f" [{limits}]" if limits else ""))


def _emit(told: Any, as_json: bool) -> None:
    if as_json:
        console.emit(document(told))
        return
    for line in told:
        console.emit(visible(line))
