"""Rows to write, stores to write them to, and what a store must hold afterwards."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rollstore.schema import Rollout
from rollstore.store.store import Store, open_on
from rollstore.store.store import open as open_store
from rollstore.testing import MemoryFilesystem

Make = Callable[..., list[Rollout]]


def rounds(usual: int, thorough: int) -> int:
    """How often a test that draws at random does it: with ROLLSTORE_THOROUGH set, as often as one should once."""
    return thorough if os.environ.get("ROLLSTORE_THOROUGH") else usual


def rollout(name: str, tokens: int = 6, **fields: object) -> Rollout:
    """A rollout whose tokens follow from its name, so that a mixed-up row is seen."""
    seed = sum(name.encode())
    mask = np.zeros(tokens, bool)
    mask[tokens // 2 :] = True
    return Rollout(rollout_id=name, tokens=np.arange(seed, seed + tokens, dtype=np.int32), action_mask=mask, **fields)


def ids(store: Store) -> Counter[str]:
    """How often each rollout id stands in the store."""
    return Counter(store.scan("rollouts", ["rollout_id"]).read_all().column(0).to_pylist())


def once(*names: str) -> Counter[str]:
    return Counter(dict.fromkeys(names, 1))


def errors(store: Store) -> list[str]:
    return [str(finding) for finding in store.verify() if finding.level == "error"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


@pytest.fixture
def disk() -> MemoryFilesystem:
    filesystem = MemoryFilesystem(seed=7)
    open_on(filesystem, create=True)
    return filesystem


def batch_of(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)
