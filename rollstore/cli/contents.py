"""What a store holds, counted: the answer of `rollstore info`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollstore.cli.console import progress, put
from rollstore.cli.text import visible

_COLUMNS = ("tokens", "action_mask", "run_id", "environment", "weight_version_min", "weight_version_max")
_LISTED = 8  # runs shown to a person


@dataclass
class Tally:
    """Sums over rows of the rollouts table."""

    tokens: int = 0
    actions: int = 0
    runs: Counter[str] = field(default_factory=Counter)
    environments: Counter[str] = field(default_factory=Counter)
    weight_version_min: int | None = None
    weight_version_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A store in numbers. `tables`: rows, parts, bytes and rows still in journals by table; `runs`: segments by run.

    `bytes_per_token`: bytes of the rollouts' parts over the tokens in them; None where there are none.
    """

    path: str
    store_id: str
    created_at: datetime
    format: str
    schemas: list[str]
    commits: int
    tables: dict[str, Any]
    journals: int
    orphans: tuple[str, ...]
    tokens: int
    actions: int
    bytes_per_token: float | None
    runs: dict[str, int]
    environments: dict[str, int]
    weight_version_min: int | None
    weight_version_max: int | None


def contents(path: str) -> Contents:
    """Count a store. Rows come from the parts' statistics; tokens, runs and versions from six columns of every part."""
    from rollstore.store.store import open as open_store

    store = open_store(path)
    about = store.info()
    tally = Tally()
    with store.snapshot() as snapshot:
        parts = snapshot.parts("rollouts")
        size = sum(part.size for part in parts)
        with progress("reading", size) as read:
            for part in parts:
                add(tally, part.batches(_COLUMNS))
                read(part.file, part.size)
        in_parts = tally.tokens
        for view in snapshot.views("rollouts"):
            add(tally, view.batches(_COLUMNS))
        schemas = {part.schema_version for name in about.tables for part in snapshot.parts(name)}
    return Contents(
        path=store.path,
        store_id=store.store_id,
        created_at=store.created_at,
        format=store.format,
        schemas=sorted(schemas),
        commits=about.commits,
        tables=about.tables,
        journals=about.journals,
        orphans=about.orphans,
        tokens=tally.tokens,
        actions=tally.actions,
        bytes_per_token=size / in_parts if in_parts else None,
        runs=dict(tally.runs),
        environments=dict(tally.environments),
        weight_version_min=tally.weight_version_min,
        weight_version_max=tally.weight_version_max,
    )


def add(tally: Tally, batches: Iterable[pa.RecordBatch]) -> None:
    """Add rows to a tally. Columns that the rows lack count nothing."""
    for batch in batches:
        names = set(batch.schema.names)
        if "tokens" in names:
            tally.tokens += len(pc.list_flatten(batch["tokens"]))
        if "action_mask" in names:
            tally.actions += pc.sum(pc.list_flatten(batch["action_mask"])).as_py() or 0
        for name, counts in (("run_id", tally.runs), ("environment", tally.environments)):
            if name in names:
                for entry in pc.value_counts(batch[name]).to_pylist():
                    if entry["values"] is not None:
                        counts[entry["values"]] += entry["counts"]
        for name in ("weight_version_min", "weight_version_max"):
            if name in names:
                ends = pc.min_max(batch[name]).as_py()
                low, high = tally.weight_version_min, tally.weight_version_max
                tally.weight_version_min = min((v for v in (low, ends["min"]) if v is not None), default=None)
                tally.weight_version_max = max((v for v in (high, ends["max"]) if v is not None), default=None)


def show(console: Console, found: Contents) -> None:
    """Print it for a person."""
    put(console, Text(visible(found.path), style="bold"))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    each = "" if found.bytes_per_token is None else f" · {found.bytes_per_token:.2f} bytes a token in parts"
    low, high = found.weight_version_min, found.weight_version_max
    versions = "none recorded" if low is None and high is None else str(high) if low == high else f"{low} to {high}"
    lines = (
        ("store", f"{found.store_id} · format {found.format} · created {found.created_at:%Y-%m-%d %H:%M:%S}Z"),
        ("schema", ", ".join(found.schemas) or "no parts yet"),
        ("tokens", f"{found.tokens:,} · {found.actions:,} actions{each}"),
        ("runs", _most(found.runs)),
        ("environments", _most(found.environments)),
        ("weights", versions),
        ("journals", f"{found.journals} · {found.commits} commits in the log"),
        ("orphans", ", ".join(found.orphans)),
    )
    for name, value in lines:
        if value:
            facts.add_row(f"  {name}", Text(visible(value)))
    put(console, facts)
    put(console, "")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("  table")
    for name in ("rows", "parts", "bytes", "in journals"):
        table.add_column(name, justify="right")
    for name, sizes in found.tables.items():
        numbers = (sizes.rows, sizes.parts, sizes.bytes, sizes.rows_in_journals)
        table.add_row(f"  {name}", *(f"{number:,}" for number in numbers))
    put(console, table)


def _most(counts: dict[str, int]) -> str:
    most = sorted(counts.items(), key=lambda item: -item[1])
    more = f" · and {len(most) - _LISTED} more" if len(most) > _LISTED else ""
    return " · ".join(f"{name} ({count:,})" for name, count in most[:_LISTED]) + more
