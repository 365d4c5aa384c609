"""The folder on this machine in which rows wait for a remote store: journals, unfinished files, the id index."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import xxhash

from rollstore.errors import CorruptionError
from rollstore.store.filesystem import LocalFilesystem

VARIABLE = "ROLLSTORE_SPOOL"


def spools(given: str | os.PathLike[str] | None = None) -> Path:
    """The folder of all spools: the one given, that of ROLLSTORE_SPOOL, or one for state that programs keep by XDG.

    State, not cache: people delete caches, and a spool may hold the only copy of rows that were acknowledged.
    """
    if given is not None:
        return Path(given).absolute()
    if named := os.environ.get(VARIABLE):
        return Path(named).absolute()
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "rollstore"


def name_of(store_id: str, address: str) -> str:
    """What the state of a store at an address is called on this machine. A copy has the id of its original, and is
    another store: neither may take the other's rows.

    Raises CorruptionError where the id is none: it becomes a path.
    """
    if not re.fullmatch(r"[0-9a-f]{32}", store_id):
        raise CorruptionError(f"store_id: wanted 32 hexadecimal digits, got {store_id[:40]!r}")
    return f"{store_id}-{xxhash.xxh3_64_hexdigest(address.encode('utf-8', 'surrogatepass'))}"


def spool_of(store_id: str, address: str, spools: Path) -> Path:
    """The spool of the store at an address. Warns where rows wait in the spool of the same store elsewhere."""
    own = spools / name_of(store_id, address)
    waiting = [path for path in sorted(spools.glob(f"{store_id}-*/journal/*.arrows")) if path.parent.parent != own]
    if waiting and not any(own.glob("journal/*.arrows")):
        warnings.warn(
            f"{waiting[0].parent.parent}: {len(waiting)} journals of a store with this id wait there, written under "
            "another address: of a copy, or of this one spelt otherwise; `rollstore recover` that address",
            stacklevel=4,
        )
    return own


class Spool(LocalFilesystem):
    """A spool: folders are made when the first file is, for their owner alone, and survive power loss."""

    def make_folder(self, folder: str) -> None:
        path = self.root / folder
        missing: list[Path] = []
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for new in reversed(missing):
            new.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(new.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
