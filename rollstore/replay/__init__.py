"""Keyed noise, replay to the token, and where two runs come apart. Importing this loads no torch."""

from rollstore.replay import noise
from rollstore.replay.compare import Comparison, compare
from rollstore.replay.diff import Diff, by_draw, by_id, diff
from rollstore.replay.difference import Difference
from rollstore.replay.evaluate import evaluate
from rollstore.replay.forks import Forks, forks
from rollstore.replay.mismatch import Mismatch, mismatch
from rollstore.replay.paired import Paired, last_mean, paired, smallest_difference
from rollstore.replay.replay import Replayed, replay

__all__ = [
    "Comparison",
    "Diff",
    "Difference",
    "Forks",
    "Mismatch",
    "Paired",
    "Replayed",
    "by_draw",
    "by_id",
    "compare",
    "diff",
    "evaluate",
    "forks",
    "last_mean",
    "mismatch",
    "noise",
    "paired",
    "replay",
    "smallest_difference",
]
