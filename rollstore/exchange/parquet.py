"""A snapshot as plain Parquet for the rest of the world: a folder a table, partitioned by run, readable by anything."""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pyarrow as pa

from rollstore.errors import StoreError
from rollstore.exchange.files import Files, Form, carried, portable
from rollstore.exchange.folder import ABOUT, Exported, Progress, Written, new_folder
from rollstore.exchange.folder import about as _about
from rollstore.exchange.gather import RUN, Runs, runs_of
from rollstore.schema import TABLES
from rollstore.store.snapshot import Snapshot

if TYPE_CHECKING:
    from rollstore.store.store import Store

__all__ = ["ABOUT", "Exported", "Progress", "Written", "export"]

KEY = "run"
"""Name of the partition in the path. No column has it: two of one name break pyarrow's readers."""

FLAT = ("actions", "tokens")
"""Made from rollouts: one row an action, one row a token."""

_NO_RUN = "__HIVE_DEFAULT_PARTITION__"
_SPLIT = re.compile(r"(?=train|val|dev|test|eval).")
"""Where a word begins that `datasets` takes for the name of a split: it would leave the other folders out."""

_LONGEST = 255  # bytes of a folder's name


def export(
    store: Store,
    folder: str | os.PathLike[str],
    *,
    tables: Sequence[str] = tuple(TABLES),
    snapshot: Snapshot | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write tables of one snapshot as Parquet under `folder`: FOLDER/<table>/run=<run>/part-00000.parquet.

    `tables`: names of the four tables, and `actions` and `tokens` for one row an action or a token. The folder must not
    exist, or be empty: nothing is overwritten. It gets its name when everything is in it, so an export that is cut
    short leaves nothing under it. A (rollout_id, segment) stored more than once with equal content is written once;
    with different contents every row is, and a warning says so. `progress` is called with a table and bytes done.

    Raises StoreError where the folder is taken or is the store's own, ValueError on an unknown table, CorruptionError,
    WriteError.
    """
    known = (*TABLES, *FLAT)
    if unknown := [name for name in tables if name not in known]:
        raise ValueError(f"tables: wanted some of {', '.join(known)}, got {unknown[0]!r}")
    with new_folder(store, folder, snapshot, ".parquet") as (staging, held, exported):
        for table in dict.fromkeys(tables):
            written: list[Path] = []
            rows = 0
            for files in _table(store, held, table, staging / table, progress):
                written += files.written
                rows += files.rows
            size = sum(path.stat().st_size for path in written)
            exported.tables[table] = Written(rows=rows, files=len(written), bytes=size)
        _about(store, held, exported, staging)
    return exported


def _table(store: Store, snapshot: Snapshot, table: str, folder: Path, progress: Progress | None) -> Iterator[Files]:
    """The files of a table, a run after the other, each finished."""
    size = sum(part.size for part in snapshot.parts("rollouts" if table in FLAT else table))
    with _views(store, snapshot, table) if table in FLAT else nullcontext(runs_of(store, snapshot, table)) as found:
        read, count, runs = found
        form, done = Form(portable(read)), 0
        # Without one run that has a name, a reader could not tell the type of the partition.
        apart = table in RUN and any(run is not None for run, _ in runs)
        for run, chunks in runs or [(None, iter(()))]:
            files = Files(folder / _segment(run) if apart else folder, form)
            for chunk in chunks:
                files.add(carried(chunk, form.schema))
                before, done = done, done + chunk.num_rows
                if progress is not None:
                    progress(table, size * done // count - size * before // count)
            files.close()
            yield files


def _segment(run: str | None) -> str:
    """Name of the folder of a run. Raises StoreError where no file system holds it."""
    word = _NO_RUN if run is None else _SPLIT.sub(lambda letter: f"%{ord(letter[0]):02X}", quote(run, safe=""))
    name = f"{KEY}={word}"
    if len(name) > _LONGEST:
        raise StoreError(f"run {run[:40] if run else ''!r}...: wanted at most {_LONGEST} bytes as a folder's name")
    return name


@contextmanager
def _views(store: Store, snapshot: Snapshot, table: str) -> Generator[tuple[pa.Schema, int, Runs]]:
    """As `runs_of`, of a view."""
    from rollstore.readers.duckdb import connect  # loaded only where a view is asked for

    with connect(store, snapshot=snapshot) as connection:
        schema = pa.schema(connection.sql(f"SELECT * FROM {table} LIMIT 0").to_arrow_table().schema)
        counts = connection.sql(f"SELECT run_id, count(*) FROM {table} GROUP BY run_id ORDER BY run_id").fetchall()

        def rows(run: str | None) -> Iterator[pa.Table]:
            query = f"SELECT * FROM {table} WHERE run_id IS NOT DISTINCT FROM $run"
            for batch in pa.RecordBatchReader.from_stream(connection.sql(query, params={"run": run})):
                yield pa.Table.from_batches([batch], schema)

        yield schema, sum(count for _, count in counts), [(run, rows(run)) for run, _ in counts]
