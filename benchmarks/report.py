"""The figures of a run as the tables of docs/benchmarks.md: `python -m benchmarks.report FILE.json ...`.

A line a case and size: the median of ours, each contestant as a multiple of it, and how far ours is from its marks.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.contest import OURS


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| case | ours | contestants, as multiples of ours | marks on ours |", "|---|---|---|---|"]
    for result in results:
        middle = {name: statistics.median(runs) for name, runs in result["runs"].items()}
        others = ", ".join(f"{name} {value / middle[OURS]:.2g}x" for name, value in middle.items() if name != OURS)
        marks = "; ".join(
            f"{mark['mark']}{' ' + mark['against'] if mark['against'] else ''}: "
            + ("met" if mark["off"] <= 1 else f"**{mark['off']:.1f}x off**")
            for mark in result["marks"]
        )
        what = f"{result['case']}, {result['size']}".rstrip(", ")
        lines.append(f"| {what} | {middle[OURS]:.3g} {result['unit']} | {others} | {marks} |")
    return "\n".join(lines)


def main() -> int:
    documents = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    print(table([result for document in documents for result in document["results"]]))
    found = documents[-1]["versions"] if documents else {}
    print("\n" + ", ".join(f"{name} {version}" for name, version in found.items() if version))
    return 0


if __name__ == "__main__":
    sys.exit(main())
