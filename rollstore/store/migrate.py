"""Parts of older schema versions, rewritten in the newest one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rollstore.schema import TABLES, VERSION
from rollstore.schema.upgrade import parse, read_version
from rollstore.store import commits, frame
from rollstore.store.compact import rewrite
from rollstore.store.names import new_id, part_name
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot

Progress = Callable[[str, int], None]


@dataclass
class Report:
    """What was, or with `dry_run` would be, rewritten.

    `rows`: rows by table and schema version, of the older ones. `added`, `replaced`: names of parts by table.
    `journals`: those of an older version; they are rewritten when they are sealed, by their writer or by `recover`.
    """

    rows: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    added: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    replaced: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    journals: list[str] = field(default_factory=list[str])


def migrate(
    snapshot: Snapshot, *, dry_run: bool = False, codec: frame.Codec = "zstd", progress: Progress | None = None
) -> Report:
    """Rewrite each part of an older schema version in this one. Readers need it not: they see the same rows before it.

    Each part is one entry of the log, as in a compaction: a crash leaves the old part or the new one, and running it
    again goes on. The old files stay until `vacuum`. Raises CorruptionError where a part is damaged, VersionError where
    nothing upgrades it, OSError where the disk refuses.
    """
    report = Report()
    writer, sequence, log = new_id(), 0, snapshot.log
    for table in TABLES:
        report.journals += [view.name for view in snapshot.views(table) if _is_old(read_version(view.held.metadata))]
        for part in older(snapshot, table):
            counts = report.rows.setdefault(table, {})
            counts[part.schema_version] = counts.get(part.schema_version, 0) + part.rows
            if dry_run or (table, part.name) in log.replaced:
                continue
            sequence += 1
            name = part_name(writer, sequence, compacted=True)
            after = rewrite(snapshot, log, [part], name, codec=codec, progress=progress, reason="migrate")
            log = after or commits.read_log(snapshot.filesystem, log)
            if after is not None:
                report.added.setdefault(table, []).append(name)
                report.replaced.setdefault(table, []).append(part.name)
    return report


def older(snapshot: Snapshot, table: str) -> list[Part]:
    """The parts of a table that were written in an older schema version, minor ones included."""
    return [part for part in snapshot.parts(table) if _is_old(part.schema_version)]


def _is_old(version: str) -> bool:
    return parse(version) < parse(VERSION)
