"""What an import says of itself: the options it takes, its report, and the file of what it refused."""

from __future__ import annotations

import base64
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import msgspec

from rollstore.errors import StoreError, WriteError
from rollstore.exchange.records import OTHER_SHAPE, Record

_BEGINS = b'{"file":'  # how a file of refused rows begins, and no other is written anew

CAUSES = 50
"""Different causes that a report counts one by one."""

OTHERS = "others"
"""What the rest is counted under."""

_DIFFERENT = 1000  # causes that are told apart while the import runs: files may have a new one in every row
_LENGTH = re.compile(r"\d+ values")


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
    unmet: dict[str, str] = field(default_factory=dict[str, str])
    """Of a mapping: column -> the field that it names and no record had."""

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
        """What an earlier import refused stays until `begin`.

        Raises StoreError where the file is there and is not from an import that goes on, OSError.
        """
        self._causes: Counter[str] = Counter()
        self._file: BinaryIO | None = None
        self.path = None if path is None else str(path)
        if path is not None:
            there = _beginning(Path(path))
            if there is not None and not (again and _BEGINS.startswith(there)):
                raise StoreError(f"{path}: wanted a new file for refused rows, found one; nothing is overwritten")
            self._is_new = there is None
            self._file = Path(path).open("xb" if self._is_new else "r+b")  # noqa: SIM115 # closed by `close`

    def begin(self) -> None:
        """From here on rows are refused anew."""
        if self.path is not None and not self._is_new:
            self.close()
            self._file = Path(self.path).open("wb")  # noqa: SIM115 # closed by `close`

    def give_up(self) -> None:
        """Leave no file of an import that did not begin, and what was there."""
        self.close()
        if self.path is not None and self._is_new:
            Path(self.path).unlink(missing_ok=True)

    def add(self, file: str, record: Record, reason: str) -> None:
        """Count one, and write it. Raises WriteError."""
        cause = reason[:200] if record.row is None else _cause(reason)  # a file is one, and says what it is
        self._causes[cause if cause in self._causes or len(self._causes) < _DIFFERENT else OTHERS] += 1
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
        most = [(cause, count) for cause, count in self._causes.most_common() if cause != OTHERS]
        rest = sum(count for _, count in most[CAUSES:]) + self._causes[OTHERS]
        return dict(most[:CAUSES]) | ({OTHERS: rest} if rest else {})

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _cause(reason: str) -> str:
    """What a reason says of every row that is refused for it, without what this one has."""
    wanted, _, got = reason.partition(", got")
    if wanted == OTHER_SHAPE:  # what was met is all that tells one such cause from another
        kind, _, said = got.partition(": ")
        wanted += f", got{kind}: {said.partition(': ')[0]}"  # a value stands behind the next colon
    return _LENGTH.sub("n values", wanted)[:200]


def _beginning(path: Path) -> bytes | None:
    """The first bytes of a file; None where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(len(_BEGINS))
    except FileNotFoundError:
        return None
