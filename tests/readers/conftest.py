"""Stores to read from, and rollouts whose numbers follow from their names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollstore.store.store import Store
from rollstore.store.store import open as open_store

sys.path.insert(0, str(Path(__file__).parent.parent))  # strategies.py serves all folders of tests


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)
