"""Tables as Lance datasets: `lance.dataset(FOLDER/<table>.lance)` (pylance 14)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pyarrow as pa

from rollstore.exchange.files import carried, portable
from rollstore.exchange.folder import Exported, Progress, Written, about, new_folder
from rollstore.exchange.gather import runs_of
from rollstore.schema import TABLES
from rollstore.store.snapshot import Snapshot
from rollstore.store.store import Store


def export_lance(
    store: Store,
    folder: str | os.PathLike[str],
    *,
    tables: Sequence[str] = tuple(TABLES),
    snapshot: Snapshot | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write tables as FOLDER/<table>.lance. Needs the package pylance.

    Every column and value; a map is a list of structs `key`, `value`, which Lance reads back. The folder as for every
    export. Raises ImportError without the package, StoreError where the folder is taken, CorruptionError, WriteError.
    """
    try:
        import lance
    except ImportError:
        raise ImportError("lance: wanted the package pylance, found none; pip install 'rollstore[exchange]'") from None

    with new_folder(store, folder, snapshot, "") as (staging, held, exported):
        for table in dict.fromkeys(tables):
            path = staging / f"{table}.lance"
            schema, count, batches = _batches(store, held, table, progress)
            lance.write_dataset(batches, path, schema=schema)
            files = [file for file in path.rglob("*") if file.is_file()]
            exported.tables[table] = Written(count, len(files), sum(file.stat().st_size for file in files))
        about(store, held, exported, staging)
    return exported


def _batches(
    store: Store, snapshot: Snapshot, table: str, progress: Progress | None
) -> tuple[pa.Schema, int, Iterator[pa.RecordBatch]]:
    """The schema of a table, how many rows it has, and the rows."""
    read, count, runs = runs_of(store, snapshot, table)
    schema, size = portable(read), sum(part.size for part in snapshot.parts(table))

    def batches() -> Iterator[pa.RecordBatch]:
        done = 0
        for chunk in (chunk for _, chunks in runs for chunk in chunks):
            yield from _whole(carried(chunk, schema))
            before, done = done, done + chunk.num_rows
            if progress is not None:
                progress(table, size * done // count - size * before // count)

    return schema, count, batches()


def _whole(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """The rows without slices: Lance reads nested arrays past their ends where they do not begin at their buffers'."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    yield from pa.ipc.open_stream(sink.getvalue())
