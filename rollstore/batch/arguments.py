"""Arguments of what takes a batch, checked one by one: what is wrong is said by its name, and before it is used."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollstore.batch.token_batch import TokenBatch

LEAST, MOST = -(2**63), 2**63 - 1
"""What a tensor of ids holds."""


def check_batch(got: Any) -> None:
    """Raise `TypeError` on what is no `TokenBatch`."""
    if not isinstance(got, TokenBatch):
        raise TypeError(f"batch: wanted a TokenBatch, got {type(got).__name__}")


def check_whole(name: str, got: Any, least: int = LEAST) -> None:
    """Raise `TypeError` on what is no whole number, `ValueError` on one below `least` or of more than 64 bits."""
    if isinstance(got, bool) or not isinstance(got, int | np.integer):
        raise TypeError(f"{name}: wanted a whole number, got {got!r}")
    if got < least:
        raise ValueError(f"{name}: wanted at least {least}, got {got}")
    if got > MOST:
        raise ValueError(f"{name}: wanted at most {MOST}, got {got}")
