"""The file verbs for a remote store: what grows lies in a spool on this machine, what is finished at the remote place.

journal/, staging/ and cache/ are in the spool; parts, the log, the columns' types and rollstore.json are files at the
URL. Locks and leases hold on this machine only.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstore.errors import StoreError
from rollstore.schema import TABLES
from rollstore.store import columns
from rollstore.store.distant import Distant, at_once
from rollstore.store.ends import Ends, RemoteReadHandle
from rollstore.store.filesystem import ReadHandle, WriteHandle, read_file
from rollstore.store.objects import Entry, Objects, Patience
from rollstore.store.spool import Spool, spool_of, spools

if TYPE_CHECKING:
    from rollstore.store.store import Store

_HERE = ("journal", "staging", "cache")


class RemoteFilesystem(Distant):
    """An fsspec URL and a spool. `single_compactor` is the caller's word that no other compaction ever runs."""

    def __init__(self, objects: Objects, spool: Path, *, single_compactor: bool = False) -> None:
        self.spool = Spool(spool)
        self._objects = objects
        self._ends = Ends(objects)
        self._single_compactor = single_compactor
        self._committed: dict[str, float] = {}
        self._columns: dict[str, tuple[Entry, bytes]] = {}

    def make_folder(self, folder: str) -> None:
        """Nothing: a folder is there with its first file."""

    def list(self, folder: str) -> list[str]:
        if _is_here(folder):
            return self.spool.list(folder)
        files = self._objects.list(folder)
        if folder in TABLES:
            self._ends.listed(folder, files)
        elif folder == columns.FOLDER:
            self._read_columns(files)
        return [*files]

    def threads(self) -> int:
        return self._objects.threads()

    def expect(self, files: Sequence[str]) -> None:
        for folder, paths in groupby(files, lambda path: path.partition("/")[0]):
            self._ends.expect(folder, [path.rpartition("/")[2] for path in paths])

    def _read_columns(self, files: Mapping[str, Entry]) -> None:
        """The types of columns are read after they were listed: all at once then, and again only where the listing says
        that there is another file of the name."""
        ours = {
            f"{columns.FOLDER}/{name}": e for name, e in files.items() if columns.is_ours(name) and e.tag is not None
        }
        kept = {path: found for path, found in self._columns.items() if found[0] == ours.get(path)}
        new = [path for path in ours if path not in kept]
        read = at_once(self, self._objects.document, new)
        self._columns = kept | {path: (ours[path], data) for path, data in zip(new, read, strict=True)}

    def open(self, path: str) -> ReadHandle:
        if _is_here(path):
            return self.spool.open(path)
        if path.endswith(".json"):
            kept = self._columns.get(path)
            data = self._objects.document(path) if kept is None else kept[1]
            return RemoteReadHandle(self._ends, path, len(data), data)
        return RemoteReadHandle(self._ends, path, self._ends.size(path))

    def create(self, path: str) -> WriteHandle:
        self.spool.make_folder(path.rpartition("/")[0])
        return self.spool.create(path)

    def lock(self, path: str) -> WriteHandle | None:
        return self.spool.lock(path)

    def publish(self, source: str, target: str) -> None:
        """Upload from the spool under a name that nobody has.

        Where the place has no put-if-absent, the name is looked for and then taken. That keeps unique names apart, and
        nothing else: StoreError for what compaction writes, unless there is a single compactor.
        """
        if _is_here(target):
            self.spool.make_folder(target.rpartition("/")[0])
            self.spool.publish(source, target)
            return
        folder, _, name = target.rpartition("/")
        compacting = folder == "commits" or name.startswith("c-")
        if compacting and not self._single_compactor and not self._objects.puts_if_absent():
            raise StoreError(
                f"{self.locate(target)}: wanted put-if-absent, which {self._objects.protocol} does not have here, so "
                "that two compactions may undo each other; open the store with single_compactor=True if there is one"
            )
        self._objects.put(target, read_file(self.spool, source))

    def sync_folder(self, folder: str) -> None:
        """In the spool as anywhere; what a remote place has answered for, it keeps."""
        if _is_here(folder):
            self.spool.make_folder(folder)
            self.spool.sync_folder(folder)

    def delete(self, path: str) -> None:
        if _is_here(path):
            self.spool.delete(path)
        else:
            self._objects.delete(path)

    def move(self, path: str, folder: str) -> str:
        if _is_here(path):
            return self.spool.move(path, folder)
        target = f"{folder}/{secrets.token_hex(4)}-{path.rpartition('/')[2]}"
        self._objects.move(path, target)
        return target

    def modified(self, path: str) -> float:
        """By the server's clock, files of the spool too: their age here is taken from the time there."""
        if path.startswith("commits/"):  # written once: vacuum asks for the time of one entry as often as it has parts
            if path not in self._committed:
                self._committed[path] = self._objects.modified(path)
            return self._committed[path]
        if not _is_here(path):
            listed = self._ends.modified(path)
            return self._objects.modified(path) if listed is None else listed
        age = time.time() - self.spool.modified(path)
        return self._objects.clock() - max(0.0, age)

    def stamp(self, folder: str) -> int | None:
        """None: nothing cheap tells whether a remote folder has changed."""
        del folder
        return None

    def locate(self, path: str) -> str:
        return self.spool.locate(path) if _is_here(path) else self._objects.locate(path)


def open_remote(
    url: str,
    *,
    create: bool = False,
    options: Mapping[str, Any] | None = None,
    spool: str | os.PathLike[str] | None = None,
    single_compactor: bool = False,
    patience: Patience | None = None,
) -> Store:
    """Open the store at an fsspec URL, as `rollstore.open` says; `patience` is that with the server."""
    from rollstore.store.store import open_on  # the door of the room, which leads here

    objects = Objects(url, options, patience)
    base = spools(spool)
    filesystem = RemoteFilesystem(objects, base / "new", single_compactor=single_compactor)
    store = open_on(filesystem, create=create)
    # The spool is named after the store, and a new store has its name only when it is made.
    filesystem.spool = Spool(spool_of(store.store_id, objects.address, base))
    return store


def _is_here(path: str) -> bool:
    return path.partition("/")[0] in _HERE
