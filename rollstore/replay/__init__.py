"""Keyed noise, replay to the token, and where two runs come apart. Importing this loads no torch."""

from rollstore.replay import noise
from rollstore.replay.compare import Comparison, compare
from rollstore.replay.diff import Diff, by_draw, by_id, diff
from rollstore.replay.difference import Difference
from rollstore.replay.evaluate import evaluate
from rollstore.replay.replay import Replayed, replay

__all__ = [
    "Comparison",
    "Diff",
    "Difference",
    "Replayed",
    "by_draw",
    "by_id",
    "compare",
    "diff",
    "evaluate",
    "noise",
    "replay",
]
