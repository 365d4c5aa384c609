"""The numbered log: which compacted parts count, and which names are retired for ever.

Entry n is `commits/<n, 10 digits>.json`. The log is dense: it ends at the first number that is missing. A checkpoint
sums entries 1 to n up in one document, so that a reader need not read them; entries stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rollstore.errors import CorruptionError
from rollstore.store import document
from rollstore.store.filesystem import Filesystem, read_file
from rollstore.store.part import FORMAT, check_version

FOLDER = "commits"
CHECKPOINT_EVERY = 64
_CHECKPOINT = "-checkpoint.json"


@dataclass(frozen=True)
class Log:
    """The log up to its entry `number`. Names are (table, part); `replaced` gives the entry that retired each."""

    number: int = 0
    added: frozenset[tuple[str, str]] = frozenset()
    replaced: dict[tuple[str, str], int] = field(default_factory=dict)

    def live(self, table: str, listed: list[str]) -> list[str]:
        """Names of the parts that count, of those listed in a table's folder."""
        names = {name for name in listed if not name.startswith("c-")}
        names |= {name for of, name in self.added if of == table}
        return sorted(name for name in names if (table, name) not in self.replaced)

    def knows(self, table: str, name: str) -> bool:
        """Whether the log ever added or retired a name."""
        return (table, name) in self.added or (table, name) in self.replaced


@dataclass(frozen=True)
class Commit:
    """One entry: parts added and parts replaced, by table."""

    add: dict[str, list[str]]
    replace: dict[str, list[str]]
    reason: str = "compact"


def entry(number: int) -> str:
    return f"{FOLDER}/{number:010d}.json"


def read_log(filesystem: Filesystem, known: Log | None = None) -> Log:
    """The log up to its end; `known`, an earlier state, saves reading its entries again."""
    log = known or _checkpoint(filesystem) or Log()
    while True:
        path = entry(log.number + 1)
        try:
            data = read_file(filesystem, path)
        except FileNotFoundError:
            return log
        log = _applied(log, _read(data, path), path)


def append(filesystem: Filesystem, log: Log, commit: Commit) -> Log | None:
    """Write `commit` as the next entry after `log`; None where its inputs are gone by then.

    The entry's number is won by put-if-absent; a loser reads the winner's entry and tries the next number.
    """
    inputs = {(table, name) for table, names in commit.replace.items() for name in names}
    while True:
        if any(name in log.replaced for name in inputs):
            return None
        body = {
            "format": FORMAT,
            "number": log.number + 1,
            "at": datetime.now(UTC).isoformat(timespec="microseconds"),
            "reason": commit.reason,
            "add": commit.add,
            "replace": commit.replace,
        }
        try:
            document.publish(filesystem, entry(log.number + 1), body)
        except FileExistsError:
            log = read_log(filesystem, log)
            continue
        log = read_log(filesystem, log)
        if log.number % CHECKPOINT_EVERY == 0:
            write_checkpoint(filesystem, log)
        return log


def write_checkpoint(filesystem: Filesystem, log: Log) -> None:
    """Sum the log up to its entry `number` in one document. Two writers of one checkpoint write the same."""
    body = {
        "format": FORMAT,
        "number": log.number,
        "added": sorted(map(list, log.added)),
        "replaced": sorted([table, name, number] for (table, name), number in log.replaced.items()),
    }
    try:
        document.publish(filesystem, f"{FOLDER}/{log.number:010d}{_CHECKPOINT}", body)
    except FileExistsError as error:
        raise CorruptionError(
            f"{FOLDER}/{log.number:010d}{_CHECKPOINT}: differs from the entries it sums up"
        ) from error


def _checkpoint(filesystem: Filesystem) -> Log | None:
    for name in reversed(filesystem.list(FOLDER)):
        if not name.endswith(_CHECKPOINT):
            continue
        path = f"{FOLDER}/{name}"
        body = _read(read_file(filesystem, path), path)
        replaced = {(table, part): number for table, part, number in body["replaced"]}
        return Log(body["number"], frozenset((table, part) for table, part in body["added"]), replaced)
    return None


def _read(data: bytes, path: str) -> dict[str, Any]:
    check_version(str(document.parse(data, path).get("format", "")), FORMAT, f"{path}: format")
    return document.decode(data, path)


def _applied(log: Log, body: dict[str, Any], path: str) -> Log:
    if body["number"] != log.number + 1:
        raise CorruptionError(f"{path}: wanted entry {log.number + 1}, got {body['number']}")
    added = {(table, name) for table, names in body["add"].items() for name in names}
    replaced = {(table, name): body["number"] for table, names in body["replace"].items() for name in names}
    return Log(body["number"], frozenset(log.added | added), {**log.replaced, **replaced})
