"""UUIDv7 (RFC 9562, section 5.7): ids that sort by the millisecond they were made in."""

from __future__ import annotations

import os
import time
import uuid

import xxhash


def uuid7() -> str:
    """A fresh id as text: 48 bits of Unix time in milliseconds, 74 random bits."""
    return _made(time.time_ns() // 1_000_000, int.from_bytes(os.urandom(10)))


def derived(name: str, word: str) -> str:
    """The id that belongs to a word under another id: of its millisecond, and the same whenever it is asked for."""
    return _made(uuid.UUID(name).int >> 80, xxhash.xxh3_128_intdigest(f"{name} {word}".encode()))


def _made(stamp: int, random: int) -> str:
    high, low = random >> 68 & 0xFFF, random & (1 << 62) - 1
    return str(uuid.UUID(int=(stamp & (1 << 48) - 1) << 80 | 0x7 << 76 | high << 64 | 0b10 << 62 | low))
