"""Names of parts and journals: who wrote it and the how-manieth, never who, where or when in any way that matters."""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime

_NAME = re.compile(r"(c-)?\d{8}T\d{6}-[0-9a-f]{32}-\d{6,}")

PART = ".arrow"
JOURNAL = ".arrows"
STAGED = ".part"
FOLDERS = ("journal", "commits", "columns", "staging", "cache")
ORPHANS = "orphans"


def new_id() -> str:
    """A fresh random 128-bit id, 32 hexadecimal digits."""
    return secrets.token_hex(16)


def part_name(writer: str, sequence: int, *, compacted: bool = False) -> str:
    """The name of one part, and of the journal it grows from. The time in it is for people: nothing reads it."""
    return f"{'c-' if compacted else ''}{datetime.now(UTC):%Y%m%dT%H%M%S}-{writer}-{sequence:06d}"


def stem(file: str, suffix: str) -> str | None:
    """The part's name in a file name, or None where the file cannot be one of ours."""
    name = file.removesuffix(suffix)
    return name if name != file and _NAME.fullmatch(name) else None


def writer_of(name: str) -> tuple[str, int]:
    """The writer's id and the sequence number in a part's name."""
    _, writer, sequence = name.removeprefix("c-").split("-")
    return writer, int(sequence)
