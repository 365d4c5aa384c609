"""What an import says of itself: the options it takes, its report, and the file of what it refused."""

from __future__ import annotations

import base64
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import msgspec

from rollstore.errors import StoreError, WriteError
from rollstore.exchange.records import Record

_BEGINS = b'{"file":'  # how a file of refused rows begins, and no other is written anew

CAUSES = 50
"""Different causes that a report counts one by one."""


@dataclass
class Counts:
    """Records of a file: how many there were, were taken, were in the store before, and were refused.

    unread: what was refused and is no record: the file, or the rest of it, where it cannot be read. So `read` and
    `unread` together are `taken`, `present` and `refused` together.
    """

    read: int = 0
    taken: int = 0
    present: int = 0
    refused: int = 0
    unread: int = 0


@dataclass
class Report:
    """What an import did. `rows`: rows appended, by table. `causes`: why records were refused, and how many."""

    format: str
    store: str
    files: dict[str, Counts] = field(default_factory=dict[str, Counts])
    rows: dict[str, int] = field(default_factory=dict[str, int])
    causes: dict[str, int] = field(default_factory=dict[str, int])
    rejects: str | None = None
    missing: str = ""
    """What this format never records, so that it is null."""

    @property
    def total(self) -> Counts:
        """All files together."""
        each = self.files.values()
        names = ("read", "taken", "present", "refused", "unread")
        return Counts(*(sum(getattr(one, name) for one in each) for name in names))


class Options(TypedDict, total=False):
    """What every import takes.

    run: fills run_id where it is null. rejects: where refused rows go; a new file, unless the import goes on. resume:
    rows that are in the store are passed over, so that an import that was killed goes on.
    """

    run: str | None
    rejects: str | os.PathLike[str] | None
    resume: bool


class Rejects:
    """The side file: one JSON object a refused record, with file, row (from 1), reason and the line itself."""

    def __init__(self, path: str | os.PathLike[str] | None, *, again: bool) -> None:
        """Raises StoreError where the file is there and is not from an import that goes on."""
        self._causes: Counter[str] = Counter()
        self._file: BinaryIO | None = None
        self.path = None if path is None else str(path)
        if path is not None:
            there = _beginning(Path(path))
            if there is not None and not (again and _BEGINS.startswith(there)):
                raise StoreError(f"{path}: wanted a new file for refused rows, found one; nothing is overwritten")
            self._file = Path(path).open("wb")  # noqa: SIM115 # closed by `close`

    def add(self, file: str, record: Record, reason: str) -> None:
        """Count one, and write it. Raises WriteError."""
        self._causes[reason.partition(", got")[0][:200]] += 1
        if self._file is None:
            return
        entry: dict[str, Any] = {"file": file, "row": record.row, "reason": reason}
        if record.raw is not None:
            try:
                entry["line"] = record.raw.decode()
            except UnicodeDecodeError:
                entry["line_base64"] = base64.b64encode(record.raw).decode("ascii")
        try:
            self._file.write(msgspec.json.encode(entry) + b"\n")
        except OSError as error:
            raise WriteError(f"{self.path}: {error.strerror or error}") from error

    def causes(self) -> dict[str, int]:
        """How many records were refused for each cause, the commonest first."""
        most = self._causes.most_common()
        rest = sum(count for _, count in most[CAUSES:])
        return dict(most[:CAUSES]) | ({"others": rest} if rest else {})

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _beginning(path: Path) -> bytes | None:
    """The first bytes of a file; None where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(len(_BEGINS))
    except FileNotFoundError:
        return None
