"""Where it is measured: a new folder in a folder or under a URL, that goes with all that was put into it."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from rollstore.errors import StoreError
from rollstore.store.filesystem import MARK
from rollstore.store.objects import Objects
from rollstore.store.store import Store
from rollstore.store.store import open as open_store

BYTES_A_TOKEN = 30
"""Room that all cases need together."""


class Place:
    """A folder of our own in an existing one, or under a URL; `with` removes it, however the block ends.

    tokens: how many will be measured with, for which there must be room. Files have names relative to it. Raises
    StoreError where the folder is missing, is a store or in one, or has not the room.
    """

    def __init__(self, where: str, *, tokens: int = 0) -> None:
        if not where:
            raise StoreError("place: wanted a folder or a URL, got no text")
        name = f"rollstore-bench-{secrets.token_hex(8)}"
        self.remote = "://" in where and not where.startswith(("file://", "local://"))
        self._here: Path | None = None
        if self.remote:
            self._refuse_remote(where.rstrip("/"))
            self.path = f"{where.rstrip('/')}/{name}"
            import fsspec

            found: tuple[Any, str] = fsspec.url_to_fs(self.path, skip_instance_cache=True, use_listings_cache=False)
            self._remote, self._root = found
            self._files: Any = pafs.PyFileSystem(pafs.FSSpecHandler(self._remote))
        else:
            folder = Path(where.removeprefix("file://").removeprefix("local://"))
            _refuse_local(folder, tokens * BYTES_A_TOKEN)
            self.path = self._root = str(folder.absolute() / name)
            self._files = pafs.LocalFileSystem()

    def _refuse_remote(self, url: str) -> None:
        """Nothing is written into a store: neither at the URL, nor at one of the folders above it."""
        scheme, _, path = url.partition("://")
        for folder in (path, *(str(parent) for parent in PurePosixPath(path).parents)):
            if folder.strip("/.") and MARK in Objects(f"{scheme}://{folder}").list(""):
                raise _taken(url, f"{scheme}://{folder}")

    def __enter__(self) -> Place:
        self._here = Path(tempfile.mkdtemp(prefix="rollstore-bench-")) if self.remote else Path(self.path)
        self._here.mkdir(exist_ok=self.remote)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.remote and self._remote.exists(self._root):
                self._remote.rm(self._root, recursive=True)
        except Exception as error:  # each implementation has its own
            raise StoreError(f"{self.path}: wanted to remove what was made there, got {error}") from error
        finally:
            shutil.rmtree(self.here)

    @property
    def here(self) -> Path:
        """A folder on this machine, in which a writer's rows wait: the place itself where that is local."""
        if self._here is None:
            raise StoreError(f"{self.path}: wanted a place that was entered")
        return self._here

    def store(self, name: str, *, create: bool = False) -> Store:
        """A store at the place; at a URL its spool is ours too."""
        url, spool = f"{self.path}/{name}", self.here / "spool"
        return open_store(url, create, spool=spool) if self.remote else open_store(url, create)

    def put(self, name: str, data: bytes | pa.Buffer) -> None:
        """A file that survives power loss: renamed into its place and synced, or uploaded."""
        if self.remote:
            with self._files.open_output_stream(f"{self._root}/{name}") as file:
                file.write(data)
        else:
            keep(self.here / name, data, sync=True)

    def read(self, name: str) -> pa.Buffer:
        """All bytes of a file."""
        with self._files.open_input_file(f"{self._root}/{name}") as file:
            return file.read_buffer()

    def size(self, name: str) -> int:
        return int(self._files.get_file_info(f"{self._root}/{name}").size)

    def tables(self, names: list[str], **options: Any) -> pa.Table:
        """Parquet files as one table; `options` of `pyarrow.parquet.read_table`."""
        return pq.read_table([f"{self._root}/{name}" for name in names], filesystem=self._files, **options)

    def rows(self, names: list[str]) -> int:
        """Rows of Parquet files, by their footers."""
        return sum(pq.read_metadata(f"{self._root}/{name}", filesystem=self._files).num_rows for name in names)


def keep(path: Path, data: bytes | pa.Buffer, *, sync: bool) -> None:
    """A file of this machine, whole under its name or not there; with `sync` it survives power loss."""
    staged = path.with_name(f".{path.name}")
    with staged.open("wb") as file:
        file.write(memoryview(data))
        if sync:
            file.flush()
            os.fsync(file.fileno())
    staged.rename(path)
    if sync:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def parquet(table: pa.Table) -> pa.Buffer:
    """The bytes of a Parquet file, zstd at pyarrow's settings."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _refuse_local(folder: Path, needed: int) -> None:
    if not folder.is_dir():
        raise StoreError(f"{folder}: wanted a folder that is there, to measure in")
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StoreError(f"{folder}: wanted room for about {needed / 1e9:.3g} GB, got {free / 1e9:.3g} GB free")
    for above in (folder.resolve(), *folder.resolve().parents):
        if (above / MARK).exists():
            raise _taken(str(folder), str(above))


def _taken(where: str, store: str) -> StoreError:
    return StoreError(f"{where}: wanted a place outside any store, got one in the store {store}")
