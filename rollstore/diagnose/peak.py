"""The most memory that this process has held."""

from __future__ import annotations

import resource
import sys


def peak_bytes() -> int:
    """Largest resident size since the process began, in bytes; what is mapped from files counts while it is held."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
