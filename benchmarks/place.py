"""Where the benchmarks keep what they make: data, stores and the peers' files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def folder() -> Path:
    """`ROLLSTORE_BENCH`, or a folder of the user's among the temporary files; made if need be."""
    found = Path(os.environ.get("ROLLSTORE_BENCH") or Path(tempfile.gettempdir()) / f"rollstore-bench-{os.getuid()}")
    found.mkdir(parents=True, exist_ok=True)
    return found
