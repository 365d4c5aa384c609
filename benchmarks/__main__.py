"""Measure this library beside what people use instead: `make bench`, or `python -m benchmarks [CASE ...]`.

Every case runs its contestants in one process, in turn (A B A B ...), on the same rows, and shows medians of at least
five runs with the extremes, ours first. On a machine that others use, only the ratios count. What is measured, how and
against which mark stands in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import rollstore
from benchmarks.contest import OURS, Result
from benchmarks.settings import SIZES, Settings

CASES = (
    "write", "tax", "size", "load", "get", "sql", "many_writers", "open", "noise", "from_hidden_states", "imports",
)  # fmt: skip
LIBRARIES = (
    "pyarrow", "numpy", "msgspec", "zstandard", "duckdb", "polars", "torch", "pylance", "deltalake", "datasets",
    "litdata", "mosaicml-streaming",
)  # fmt: skip
RESULTS = Path(__file__).parent / "results"


def results_of(case: str, settings: Settings) -> Iterator[Result]:
    found: Callable[[Settings], Iterator[Result]] = importlib.import_module(f"benchmarks.{case}").results
    return found(settings)


def versions() -> dict[str, str | None]:
    """Of every library that takes part; None where it is not installed."""
    found: dict[str, str | None] = {"rollstore": rollstore.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def rows_of(result: Result) -> Iterator[tuple[str, ...]]:
    """A line for each contestant: median, extremes, both times as multiples of ours, its marks, how far off ours is."""
    ours = result.middle(OURS)
    cpu = result.details.get("cpu", {})
    against: dict[str, list[tuple[str, float]]] = {}
    for mark in result.marks:
        off = result.off(mark)
        if off is not None:
            against.setdefault(off[0] or OURS, []).append((str(mark), off[1]))
    for name, runs in result.runs.items():
        marks = against.get(name, [])
        yield (
            name,
            f"{result.middle(name):.4g}",
            f"{min(runs):.4g}",
            f"{max(runs):.4g}",
            "" if name == OURS else f"{result.middle(name) / ours:.2f}",
            f"{cpu[name] / cpu[OURS]:.2f}" if cpu.get(OURS) and name != OURS else "",
            "\n".join(text for text, _ in marks),
            "\n".join("met" if off <= 1 else f"{off:.1f}x off" for _, off in marks),
        )


def shown(results: list[Result]) -> Table:
    """One table of everything."""
    table = Table("case", "contestant", "median", "min", "max", "/ ours", "CPU / ours", "mark on ours", "reached")
    for result in results:
        what = [f"{result.case} [dim]{result.unit}[/dim]", f"[dim]{result.size}[/dim]", *("" for _ in result.runs)]
        for label, row in zip(what, rows_of(result), strict=False):
            table.add_row(label, *row)
        table.add_section()
    return table


def as_json(result: Result) -> dict[str, Any]:
    """The figures of one case, with what became of its marks."""
    marks = [
        {"mark": str(mark), "name": mark.name, "against": found[0] or None, "off": round(found[1], 3)}
        for mark in result.marks
        if (found := result.off(mark)) is not None
    ]
    runs = {name: [float(f"{value:.4g}") for value in values] for name, values in result.runs.items()}
    return asdict(replace(result, marks=())) | {"runs": runs, "marks": marks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all without")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--runs", type=int, help="of each contestant; at least 5 for figures to quote")
    parser.add_argument("--json", type=Path, help="where the figures go; without, a new file in benchmarks/results/")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"cases: wanted some of {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    settings = SIZES[options.size] if options.runs is None else replace(SIZES[options.size], runs=options.runs)
    console = Console(width=None if sys.stdout.isatty() else 140)
    results: list[Result] = []
    for case in options.cases or CASES:
        began = time.perf_counter()
        for result in results_of(case, settings):
            results.append(result)
            if sys.stdout.isatty():
                console.print(f"[dim]{result.case}, {result.size}: done[/dim]")
        console.print(f"[dim]{case}: {time.perf_counter() - began:.0f} s[/dim]")
    console.print(shown(results))
    for result in results:
        for note in result.notes:
            console.print(f"[dim]{result.case}, {result.size}: {note}[/dim]")
    found = versions()
    missing = [name for name, version in found.items() if version is None]
    console.print(", ".join(f"{name} {version}" for name, version in found.items() if version))
    if missing:
        console.print(f"not installed, so not measured: {', '.join(missing)} (`make bench` installs them)")
    now = datetime.now(UTC)
    target = options.json or RESULTS / f"run-{now:%Y%m%dT%H%M%S}-{settings.name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "system": platform.system()}
    document = {"at": now.isoformat(timespec="seconds"), "size": settings.name, "machine": machine, "versions": found}
    document["results"] = [as_json(result) for result in results]
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(f"figures: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
