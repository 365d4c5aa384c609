"""The commands that look after a store: check it, finish what the dead left, make its parts bigger, throw away."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from rollstore.cli import console
from rollstore.cli.arguments import AsJson, StorePath, examples
from rollstore.cli.document import document
from rollstore.cli.failure import CHECK_FAILED
from rollstore.cli.text import visible
from rollstore.errors import RollstoreError

if TYPE_CHECKING:
    from rollstore.store.retention import Keep
    from rollstore.store.snapshot import Snapshot

app = typer.Typer()

_DAY = 24 * 3600.0


class Codec(StrEnum):
    """How a compacted part is compressed."""

    ZSTD = "zstd"
    LZ4 = "lz4"


@app.command(epilog=examples("rollstore verify runs/math"))
def verify(store: StorePath, as_json: AsJson = False) -> None:
    """Check every byte and every row.

    Writes one line for each finding, with its part and batch. Exit status 1 if anything is wrong; notes are not.
    """
    from rollstore.store.store import open as open_store
    from rollstore.store.verify import verify as check

    opened = open_store(store)
    with opened.snapshot() as snapshot, _progress("verifying", _bytes(snapshot), as_json) as read:
        findings = check(snapshot, read)
    wrong = [finding for finding in findings if finding.level != "note"]
    if as_json:
        console.emit(document({"path": opened.path, "ok": not wrong, "findings": findings}))
    else:
        for finding in findings:
            console.emit(visible(f"{finding.level}: {finding}"))
        noted = len(findings) - len(wrong)
        console.emit(visible(f"{opened.path}: {_count(len(wrong), 'problem')}, {_count(noted, 'note')}"))
    if wrong:
        raise typer.Exit(CHECK_FAILED)


@app.command(epilog=examples("rollstore recover runs/math"))
def recover(
    store: StorePath,
    force: Annotated[
        bool, typer.Option("--force", metavar="", help="Go past locks, where they do not work. No writer may be alive.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Finish what dead writers left.

    Seals their journals and moves aside what is no part. Journals of living writers are left alone.
    """
    from rollstore.store.store import open as open_store

    opened = open_store(store)
    with console.waiting("recovering"):
        report = opened.recover(force=force)
    if as_json:
        console.emit(document({"path": opened.path, "report": report}))
        return
    for what in ("sealed", "deleted", "moved"):
        for name in getattr(report, what):
            console.emit(visible(f"{what}: {name}"))
    for name, why in report.kept.items():
        console.emit(visible(f"kept: {name}: {why}"))
    done = f"{len(report.sealed)} sealed, {len(report.deleted)} deleted, {len(report.moved)} moved aside"
    console.emit(visible(f"{opened.path}: {done}, {len(report.kept)} kept"))


@app.command(
    epilog=examples(
        "rollstore compact runs/math",
        "rollstore compact runs/math --drop-row 20260131T235959-0123456789abcdef0123456789abcdef-000001:7",
    )
)
def compact(
    store: StorePath,
    part_mib: Annotated[
        int, typer.Option(metavar="MIB", min=1, help="Merge parts smaller than this, into parts of about this size.")
    ] = 256,
    codec: Annotated[
        Codec, typer.Option(metavar="|".join(Codec), help="How the new parts are compressed.")
    ] = Codec.ZSTD,
    drop_row: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART:ROW",
            help="Only drop this row, by its written_by and written_row: the one of two contents of a rollout that is "
            "wrong. Again for more rows.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Merge small parts into bigger ones, the rows of a group together.

    The old parts stay until `vacuum` removes them, for readers that still use them.
    """
    from rollstore.store.store import open as open_store

    opened = open_store(store)
    if drop_row:
        with console.waiting("dropping rows"):
            opened.drop_rows([_origin(row) for row in drop_row])
        if as_json:
            console.emit(document({"path": opened.path, "dropped": drop_row}))
        else:
            console.emit(visible(f"{opened.path}: {_count(len(set(drop_row)), 'row')} dropped"))
        return
    with opened.snapshot() as snapshot:
        total = _bytes(snapshot)
    with _progress("compacting", total, as_json) as read:
        report = opened.compact(part_bytes=part_mib << 20, codec=codec.value, progress=read)
    if as_json:
        console.emit(document({"path": opened.path, "report": report}))
        return
    for table, names in report.added.items():
        into = f"{_count(len(report.replaced[table]), 'part')} merged into {len(names)}"
        console.emit(visible(f"{opened.path}: {table}: {into}"))
    if not report.added:
        console.emit(visible(f"{opened.path}: nothing to merge"))


@app.command(
    epilog=examples(
        "rollstore vacuum runs/math",
        "rollstore vacuum runs/math --days 0.5",
        "rollstore vacuum runs/math --keep 30d --keep run=baseline --keep version=40.. --dry-run",
    )
)
def vacuum(
    store: StorePath,
    days: Annotated[
        float, typer.Option(metavar="DAYS", min=0, help="Keep what was replaced less than this ago.")
    ] = 7.0,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="First let go of every rollout but those: written in the last 30d (or 12h), run=NAME, version=40..50 "
            "(or 40.. or ..50 or 40). Again for more: a rollout stays if one of them wants it.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Change nothing, only say what would go.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete parts that were replaced and that no reader needs.

    Readers on this machine are known; those elsewhere are safe only while they take less than --days. With --keep
    rollouts go, whole, with the scores, evaluations and uses of their ids; their files go --days later.
    """
    from rollstore.store.store import open as open_store

    wanted = _keep(keep) if keep else None
    opened = open_store(store)
    gone = None
    if wanted is not None:
        with opened.snapshot() as snapshot:
            total = _bytes(snapshot)
        with _progress("letting go", total, as_json) as read:
            gone = opened.retain(wanted, dry_run=dry_run, progress=read)
    with console.waiting("vacuuming"):
        deleted = opened.vacuum(grace=days * _DAY, dry_run=dry_run)
    if as_json:
        tables = {} if gone is None else {"retired": gone.tables}
        console.emit(document({"path": opened.path, "dry_run": dry_run, **tables, "deleted": deleted}))
        return
    would = "would be " if dry_run else ""
    for table, what in gone.tables.items() if gone is not None else ():
        parts = f"{_count(what.parts, 'part')} whole, {what.rewritten} in part, {what.bytes / 1e6:.1f} MB"
        console.emit(visible(f"{would}retired: {table}: {_count(what.rows, 'row')} ({parts})"))
    for file in deleted:
        console.emit(visible(f"{would}deleted: {file}"))
    if gone is not None and not gone.tables:
        console.emit(visible(f"{opened.path}: everything stays"))
    console.emit(visible(f"{opened.path}: {_count(len(deleted), 'file')} {would}deleted"))


def _keep(rules: list[str]) -> Keep:
    """What stays, from the texts given. Raises BadParameter."""
    from rollstore.store.retention import Keep

    age: timedelta | None = None
    runs: list[str] = []
    versions: tuple[int | None, int | None] | None = None
    for rule in rules:
        if rule.startswith("run=") and rule != "run=":  # as a shell makes it of a variable that is not set
            runs.append(rule.removeprefix("run="))
        elif (found := re.fullmatch(r"(\d+(?:\.\d+)?)([dh])", rule)) and age is None:
            try:
                age = timedelta(hours=float(found[1]) * (24 if found[2] == "d" else 1))
            except OverflowError:
                raise typer.BadParameter(f"wanted an age of at most {timedelta.max.days}d, got {rule!r}") from None
        elif (found := re.fullmatch(r"version=(-?\d{1,99})?(?:(\.\.)(-?\d{1,99})?)?", rule)) and versions is None:
            first, last = (None if end is None else int(end) for end in (found[1], found[3]))
            versions = (first, first if not found[2] else last)
        else:
            raise typer.BadParameter(f"wanted one age as 30d, runs as run=NAME, one version=40..50, got {rule!r}")
    try:
        return Keep(age=age, runs=tuple(runs), versions=versions)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _origin(text: str) -> tuple[str, int]:
    name, _, row = text.rpartition(":")
    if not name or not re.fullmatch(r"\d{1,18}", row):
        raise typer.BadParameter(f"wanted a row's written_by and written_row as PART:ROW, got {text!r}")
    return name, int(row)


def _progress(what: str, total: int | None, as_json: bool) -> AbstractContextManager[Callable[[str, int], None]]:
    """A bar while the work runs; for a program, nothing."""
    return nullcontext(lambda file, size: None) if as_json else console.progress(what, total)


def _bytes(snapshot: Snapshot) -> int | None:
    """Bytes of all parts; None where one is too damaged to be opened."""
    from rollstore.schema import TABLES

    try:
        return sum(part.size for table in TABLES for part in snapshot.parts(table))
    except (RollstoreError, OSError):
        return None


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
