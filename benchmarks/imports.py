"""`import rollstore` beside `import pyarrow`, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.contest import OURS, Contestant, Mark, Result, interleaved
from benchmarks.settings import Settings

OPENED = "rollstore, opened"


def results(settings: Settings) -> Iterator[Result]:
    contestants = {
        OURS: _process("import rollstore"),
        # Names load when they are first used, so this is what a program waits for at the latest.
        OPENED: _process("import rollstore; rollstore.open, rollstore.Rollout"),
        "pyarrow": _process("import pyarrow"),
    }
    times, _ = interleaved(contestants, 2 * settings.runs)
    yield Result(case="import", size="", unit="s", runs=times, marks=[Mark(limit=1.3, against=("pyarrow",))])


def _process(code: str) -> Contestant:
    def run(_: Path) -> None:
        subprocess.run([sys.executable, "-c", code], check=True)

    return run
