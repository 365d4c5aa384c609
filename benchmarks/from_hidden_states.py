"""Score centering and PPO from hidden states beside the plain computation with all logits.

The figures are those of `benchmarks.losses`. Each way runs in a process of its own, so that its peak of memory is its
own; width 896, vocabulary 151,936.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.contest import OURS, Mark, Result
from benchmarks.settings import Settings, installed

ACTIONS = {"tiny": (64,), "small": (128, 256, 512), "medium": (512, 1024, 2048), "large": (512, 1024, 2048)}
PLAIN = "plain [A, V]"


def results(settings: Settings) -> Iterator[Result]:
    if not installed("torch"):
        return
    for actions in ACTIONS[settings.name]:
        found = measured(actions)
        for case in dict.fromkeys(name.rpartition(" / ")[0] for name in found):
            plain, ours = (found[f"{case} / {way}"] for way in (PLAIN, OURS))
            objective, _, matrix = case.partition(" / ")
            for unit, key, limit in (("bytes", "peak", 0.1), ("s of CPU", "cpu", 1.3)):
                runs = {OURS: _runs(ours[key]), PLAIN: _runs(plain[key])}
                yield Result(
                    case=f"{objective}, output matrix {matrix}",
                    size=f"{actions:,} actions",
                    unit=unit,
                    runs=runs,
                    marks=[Mark(limit=limit, against=(PLAIN,))],
                )


def measured(actions: int) -> dict[str, Any]:
    """Figures by `objective / matrix / way`."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.losses", "--only", "hidden", "--actions", str(actions)]
        subprocess.run([*command, "--json", str(target)], check=True, stdout=subprocess.DEVNULL)
        return json.loads(target.read_text(encoding="utf-8"))["hidden"]


def _runs(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]
