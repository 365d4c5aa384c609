"""Stores to export, and the Hugging Face cache out of the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstore.store.store import Store
from rollstore.store.store import open as open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)
