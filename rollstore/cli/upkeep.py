"""The commands that look after a store: check it, finish what the dead left, make its parts bigger, throw away."""

from __future__ import annotations

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
    with opened.snapshot() as snapshot, console.progress("verifying", _bytes(snapshot)) as read:
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


@app.command(epilog=examples("rollstore compact runs/math"))
def compact(
    store: StorePath,
    part_mib: Annotated[
        int, typer.Option(metavar="MIB", min=1, help="Merge parts smaller than this, into parts of about this size.")
    ] = 256,
    codec: Annotated[
        Codec, typer.Option(metavar="|".join(Codec), help="How the new parts are compressed.")
    ] = Codec.ZSTD,
    as_json: AsJson = False,
) -> None:
    """Merge small parts into bigger ones, the rows of a group together.

    The old parts stay until `vacuum` removes them, for readers that still use them.
    """
    from rollstore.store.store import open as open_store

    opened = open_store(store)
    with opened.snapshot() as snapshot:
        total = _bytes(snapshot)
    with console.progress("compacting", total) as read:
        report = opened.compact(part_bytes=part_mib << 20, codec=codec.value, progress=read)
    if as_json:
        console.emit(document({"path": opened.path, "report": report}))
        return
    for table, names in report.added.items():
        into = f"{_count(len(report.replaced[table]), 'part')} merged into {len(names)}"
        console.emit(visible(f"{opened.path}: {table}: {into}"))
    if not report.added:
        console.emit(visible(f"{opened.path}: nothing to merge"))


@app.command(epilog=examples("rollstore vacuum runs/math", "rollstore vacuum runs/math --days 0.5"))
def vacuum(
    store: StorePath,
    days: Annotated[
        float, typer.Option(metavar="DAYS", min=0, help="Keep what was replaced less than this ago.")
    ] = 7.0,
    as_json: AsJson = False,
) -> None:
    """Delete parts that compaction replaced and no reader needs.

    Readers on this machine are known; those elsewhere are safe only while they take less than --days.
    """
    from rollstore.store.store import open as open_store

    opened = open_store(store)
    with console.waiting("vacuuming"):
        deleted = opened.vacuum(grace=days * _DAY)
    if as_json:
        console.emit(document({"path": opened.path, "deleted": deleted}))
        return
    for file in deleted:
        console.emit(visible(f"deleted: {file}"))
    console.emit(visible(f"{opened.path}: {_count(len(deleted), 'file')} deleted"))


def _bytes(snapshot: Snapshot) -> int | None:
    """Bytes of all parts; None where one is too damaged to be opened."""
    from rollstore.schema import TABLES

    try:
        return sum(part.size for table in TABLES for part in snapshot.parts(table))
    except (RollstoreError, OSError):
        return None


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
