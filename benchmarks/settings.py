"""How much is measured: sizes by name, runs, and which peers are there."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

SMALL, MEDIUM, LARGE = 1_000_000, 20_000_000, 200_000_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Three sizes of each kind, growing by four or ten, so that growth is seen; the last is what the size's name says.

    tokens: of the data. actions: with heads of 32. rollouts: of the stores that rows are looked up in. parts: of the
    stores that are opened. writes: appends of each of 16 writers.
    """

    name: str
    tokens: tuple[int, ...]
    actions: tuple[int, ...]
    rollouts: tuple[int, ...]
    parts: tuple[int, ...]
    writes: tuple[int, ...]
    compacted: int
    runs: int = 5


SIZES = {
    "tiny": Settings(
        name="tiny", tokens=(20_000, 40_000), actions=(10_000, 20_000), rollouts=(400, 800), parts=(10, 20),
        writes=(2, 4), compacted=20, runs=1,
    ),
    "small": Settings(
        name="small", tokens=(SMALL // 16, SMALL // 4, SMALL), actions=(60_000, 250_000, 1_000_000),
        rollouts=(1_000, 10_000, 100_000), parts=(100, 300, 1_000), writes=(4, 8, 16), compacted=1_000,
    ),
    "medium": Settings(
        name="medium", tokens=(SMALL, MEDIUM // 4, MEDIUM), actions=(300_000, 1_200_000, 5_000_000),
        rollouts=(10_000, 100_000, 1_000_000), parts=(300, 1_000, 5_000), writes=(8, 32, 128), compacted=10_000,
    ),
    "large": Settings(
        name="large", tokens=(MEDIUM, LARGE // 4, LARGE), actions=(1_200_000, 5_000_000, 20_000_000),
        rollouts=(10_000, 100_000, 1_000_000), parts=(300, 1_000, 5_000), writes=(8, 32, 128), compacted=10_000,
    ),
}  # fmt: skip


def installed(module: str) -> bool:
    """Whether a peer can be imported."""
    return importlib.util.find_spec(module) is not None
