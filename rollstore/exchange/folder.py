"""A folder that an export fills: nothing is overwritten, and it gets its name when everything is in it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rollstore.errors import RollstoreError, StoreError, WriteError
from rollstore.readers.arrow import Lease, leased
from rollstore.schema import VERSION
from rollstore.store.snapshot import Snapshot

if TYPE_CHECKING:
    from rollstore.store.store import Store

Progress = Callable[[str, int], object]

STAGED = ".part"
"""How a file's name ends until it is whole."""

ABOUT = "rollstore-export.json"


@dataclass
class Written:
    """What was written of one table."""

    rows: int = 0
    files: int = 0
    bytes: int = 0


@dataclass
class Exported:
    """What was written where. `tables`: rows, files and bytes by table."""

    folder: str
    tables: dict[str, Written] = field(default_factory=dict[str, Written])


@contextmanager
def new_folder(
    store: Store, folder: str | os.PathLike[str], snapshot: Snapshot | None, suffix: str
) -> Generator[tuple[Path, Snapshot, Exported]]:
    """A staging folder to write in, the snapshot (one of this moment where None is given), and what to fill in.

    Files are written as `<name>.part`; when the block ends well they end in `suffix` and the folder gets its name, else
    everything is deleted. Raises StoreError where the folder is taken or is the store's own, WriteError.
    """
    target = _free(store, folder)
    staging = target.with_name(f"{target.name}.{secrets.token_hex(4)}{STAGED}")
    source = leased(store, snapshot)
    held = source.snapshot if isinstance(source, Lease) else source
    try:
        staging.mkdir(parents=True)
        yield staging, held, Exported(str(target))
        _publish(staging, target, suffix)
    except OSError as error:
        if isinstance(error, RollstoreError):
            raise
        raise WriteError(f"{target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def new_file(path: Path) -> Generator[BinaryIO]:
    """A new file to write to; synced when the block ends. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _free(store: Store, folder: str | os.PathLike[str]) -> Path:
    """The folder, if nothing is in it."""
    text = os.fspath(folder)
    if "://" in text:
        raise StoreError(f"{text}: wanted a local folder, got an address; export to a folder and copy it")
    target = Path(text).absolute()
    if target.is_relative_to(Path(store.path).absolute()):
        raise StoreError(f"{target}: wanted a folder outside the store")
    if target.exists() and not target.is_dir():
        raise StoreError(f"{target}: wanted a new or empty folder, found a file")
    if target.exists() and (there := sorted(os.listdir(target))):
        raise StoreError(f"{target}: wanted a new or empty folder, found {there[0]} in it; nothing is overwritten")
    return target


def _publish(staging: Path, target: Path, suffix: str) -> None:
    """Give every file its name, and then the folder its own: at once, and only if nothing is there by now."""
    for path in sorted(staging.rglob(f"*{STAGED}")):
        path.rename(path.with_suffix(suffix))
    for path in (*(p for p in staging.rglob("*") if p.is_dir()), staging):
        sync(path)
    staging.rename(target)  # a folder with something in it refuses
    sync(target.parent)


def sync(path: Path) -> None:
    """A file, or the names in a folder, survive power loss. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def about(store: Store, snapshot: Snapshot, exported: Exported, staging: Path, **more: Any) -> None:
    """What the folder is, with the counts that a reader can compare: beside the tables, never among their files."""
    about: dict[str, Any] = {"store_id": store.store_id, "commit": snapshot.log.number, "schema": VERSION}
    about["tables"] = {name: asdict(written) for name, written in exported.tables.items()}
    about |= more
    with (staging / ABOUT).open("x", encoding="ascii") as file:
        file.write(json.dumps(about, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
