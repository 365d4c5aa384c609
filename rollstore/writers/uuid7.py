"""UUIDv7 (RFC 9562, section 5.7): ids that sort by the millisecond they were made in."""

from __future__ import annotations

import os
import time
import uuid


def uuid7() -> str:
    """A fresh id as text: 48 bits of Unix time in milliseconds, 74 random bits."""
    stamp = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10))
    bits = (stamp & (1 << 48) - 1) << 80 | 0x7 << 76 | (random >> 68) << 64 | 0b10 << 62 | random & (1 << 62) - 1
    return str(uuid.UUID(int=bits))
