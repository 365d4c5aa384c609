"""The numbered log: which compacted parts count, and which names are retired for ever.

Entry n is `commits/<n, 10 digits>.json`. The log is dense: it ends at the first number that is missing. A checkpoint
sums entries 1 to n up in one document, so that a reader need not read them; entries stay.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, count
from typing import Any

from rollstore.errors import CorruptionError, StoreError
from rollstore.schema import TABLES
from rollstore.store import document
from rollstore.store.distant import Distant, at_once
from rollstore.store.filesystem import Filesystem, read_file
from rollstore.store.names import PART, stem
from rollstore.store.part import FORMAT, check_version

FOLDER = "commits"
CHECKPOINT_EVERY = 64
_CHECKPOINT = "-checkpoint.json"
_ENTRY = re.compile(r"(\d{10})\.json")
_CHECKPOINT_FILE = re.compile(r"\d{10}" + re.escape(_CHECKPOINT))


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
    """One entry: parts added and parts replaced, by table; why, and more about it for people (`note`)."""

    add: dict[str, list[str]]
    replace: dict[str, list[str]]
    reason: str = "compact"
    note: str | None = None


def entry(number: int) -> str:
    return f"{FOLDER}/{number:010d}.json"


def read_log(
    filesystem: Filesystem, known: Log | None = None, listed: list[str] | None = None, *, whole: bool = False
) -> Log:
    """The log up to its end; `known`, an earlier state, saves reading its entries again.

    `listed` are the names in its folder, where the caller has just looked. With `whole` every entry is read, also those
    that a checkpoint sums up. Raises CorruptionError where an entry is damaged, or missing before another.
    """
    if known is not None and known.number:
        return _read_on(filesystem, known)
    # Listed before it is read: entries are never removed, so every one that is listed must be met on the way.
    names = filesystem.list(FOLDER) if listed is None else listed
    last = _newest(names)
    log = _read_on(filesystem, (None if whole else _checkpoint(filesystem, names)) or Log(), last)
    if last > log.number:
        raise CorruptionError(
            f"{entry(log.number + 1)}: wanted an entry of the log, got none, and {entry(last)} is there"
        )
    return log


def reached(filesystem: Filesystem, known: Log | None) -> tuple[Log | None, int, list[str] | None]:
    """An entry up to which the log will have been read whatever comes: (log so far, its number, names where listed).

    The last one; at a distant place the last that is known or, where none is, listed: a look for another is a request.
    """
    if isinstance(filesystem, Distant):
        if known is not None:
            return known, known.number, None
        names = filesystem.list(FOLDER)
        return None, _newest(names), names
    log = read_log(filesystem, known)
    return log, log.number, None


def _newest(names: list[str]) -> int:
    """The number of the last entry that is listed, 0 where there is none."""
    return max((int(match[1]) for name in names if (match := _ENTRY.fullmatch(name))), default=0)


def _read_on(filesystem: Filesystem, log: Log, last: int = 0) -> Log:
    """The log from an earlier state to its end; where entries up to `last` were listed, it most often ends there."""

    def content(number: int) -> bytes | None:
        path = entry(number)
        try:
            return read_file(filesystem, path)
        except FileNotFoundError:
            return None
        except IsADirectoryError as error:
            raise StoreError(f"{filesystem.locate(path)}: wanted an entry of the log, got a folder") from error

    following = log.number + 1
    known = range(following, last + 2 if last >= following else following)
    contents = chain(at_once(filesystem, content, known), map(content, count(known.stop)))
    while (data := next(contents)) is not None:
        path = entry(log.number + 1)
        log = _applied(log, _read(data, path), path)
    return log


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
            **({} if commit.note is None else {"note": commit.note}),
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


def _checkpoint(filesystem: Filesystem, names: list[str]) -> Log | None:
    for name in reversed(names):
        if not _CHECKPOINT_FILE.fullmatch(name):
            continue
        path = f"{FOLDER}/{name}"
        body = _read(read_file(filesystem, path), path)
        with _as_claimed(path):
            number = _number(body["number"])
            if path != f"{FOLDER}/{number:010d}{_CHECKPOINT}":
                raise ValueError(f"that of entry {number}")
            added = frozenset(_name(table, part) for table, part in body["added"])
            replaced = {_name(table, part): _number(entry) for table, part, entry in body["replaced"]}
            return Log(number, added, replaced)
    return None


def is_ours(file: str) -> bool:
    """Whether a file of this folder has the name of an entry or of a checkpoint."""
    return bool(_ENTRY.fullmatch(file) or _CHECKPOINT_FILE.fullmatch(file))


def _read(data: bytes, path: str) -> dict[str, Any]:
    check_version(str(document.parse(data, path).get("format", "")), FORMAT, f"{path}: format")
    return document.decode(data, path)


def _applied(log: Log, body: dict[str, Any], path: str) -> Log:
    with _as_claimed(path):
        number = _number(body["number"])
        if number != log.number + 1:
            raise CorruptionError(f"{path}: wanted entry {log.number + 1}, got {number}")
        added = {_name(table, name) for table, names in body["add"].items() for name in names}
        replaced = {_name(table, name): number for table, names in body["replace"].items() for name in names}
        return Log(number, frozenset(log.added | added), {**log.replaced, **replaced})


def _number(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} as a number")
    return value


def _name(table: Any, name: Any) -> tuple[str, str]:
    """A table and a part's name. A name becomes a path: nothing else may stand there."""
    if table not in TABLES or not isinstance(name, str) or stem(name + PART, PART) is None:
        raise ValueError(f"{name!r} as a part of {table!r}")
    return table, name


@contextmanager
def _as_claimed(path: str) -> Generator[None]:
    """A document whose sum holds may still hold anything: what does not fit is damage, not a defect."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(f"{path}: wanted an entry or a checkpoint of the log, got {error}") from error
