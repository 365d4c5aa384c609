"""A snapshot as plain Parquet for the rest of the world: a folder a table, partitioned by run, readable by anything."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from rollstore.errors import RollstoreError, StoreError, WriteError
from rollstore.exchange.files import STAGED, Files, Form, carried, portable
from rollstore.exchange.gather import Rows, places, together
from rollstore.readers.arrow import Lease
from rollstore.readers.repeats import repeats
from rollstore.schema import TABLES, VERSION
from rollstore.store.snapshot import Snapshot

if TYPE_CHECKING:
    from rollstore.store.store import Store

Progress = Callable[[str, int], None]

RUN = {"rollouts": "run_id", "evaluations": "run_id", "uses": "train_run", "actions": "run_id", "tokens": "run_id"}
"""Table -> the column whose value names the folder. The others are not partitioned."""

KEY = "run"
"""Name of the partition in the path. No column has it: two of one name break pyarrow's readers."""

FLAT = ("actions", "tokens")
"""Made from rollouts: one row an action, one row a token."""

ABOUT = "rollstore-export.json"

_TOGETHER: dict[str, list[list[str]]] = {
    "rollouts": [["run_id", "step", "group_id"], ["rollout_id"]],
    "evaluations": [["run_id", "evaluation_id"], ["rollout_id"]],
    "scores": [["rollout_id"]],
    "uses": [],
}
"""Table -> keys of rows that stand together. Rows of one group share their prompt: apart they take twice the bytes."""

_NO_RUN = "__HIVE_DEFAULT_PARTITION__"
_SPLIT = re.compile(r"(?=train|val|dev|test|eval).")
"""Where a word begins that `datasets` takes for the name of a split: it would leave the other folders out."""

_LONGEST = 255  # bytes of a folder's name


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
    target = _free(store, folder)
    staging = target.with_name(f"{target.name}.{secrets.token_hex(4)}{STAGED}")
    source = Lease(store.snapshot()) if snapshot is None else snapshot
    held = source.snapshot if isinstance(source, Lease) else source
    exported = Exported(str(target))
    try:
        staging.mkdir(parents=True)
        for table in dict.fromkeys(tables):
            written: list[Path] = []
            rows = 0
            for files in _table(store, held, table, staging / table, progress):
                written += files.written
                rows += files.rows
            size = sum(path.stat().st_size for path in written)
            exported.tables[table] = Written(rows=rows, files=len(written), bytes=size)
        _about(store, held, exported, staging)
        _publish(staging, target)
    except OSError as error:
        if isinstance(error, RollstoreError):
            raise
        raise WriteError(f"{target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return exported


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


def _publish(staging: Path, target: Path) -> None:
    """Give every file its name, and then the folder its own: at once, and only if nothing is there by now."""
    for path in sorted(staging.rglob(f"*{STAGED}")):
        path.rename(path.with_suffix(".parquet"))
    for path in (*(p for p in staging.rglob("*") if p.is_dir()), staging):
        _sync(path)
    staging.rename(target)  # a folder with something in it refuses
    _sync(target.parent)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _about(store: Store, snapshot: Snapshot, exported: Exported, staging: Path) -> None:
    """What the folder is, with the counts that a reader can compare: beside the tables, never among their files."""
    about: dict[str, Any] = {"store_id": store.store_id, "commit": snapshot.log.number, "schema": VERSION}
    about["tables"] = {name: asdict(written) for name, written in exported.tables.items()}
    with (staging / ABOUT).open("x", encoding="ascii") as file:
        file.write(json.dumps(about, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _table(store: Store, snapshot: Snapshot, table: str, folder: Path, progress: Progress | None) -> Iterator[Files]:
    """The files of a table, a run after the other, each finished."""
    size = sum(part.size for part in snapshot.parts("rollouts" if table in FLAT else table))
    with (_views if table in FLAT else _rows)(store, snapshot, table) as (read, count, runs):
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


_Runs = list[tuple[str | None, Iterator[pa.Table]]]


@contextmanager
def _rows(store: Store, snapshot: Snapshot, table: str) -> Generator[tuple[pa.Schema, int, _Runs]]:
    """The schema of a table, how many rows it has, and those of each run, chunk by chunk."""
    rows = Rows(snapshot, table)
    run = RUN.get(table)
    wanted = {name for key in _TOGETHER[table] for name in key} | {run or "rollout_id"}
    if table == "rollouts":
        index = _once(store, snapshot, rows.index(sorted(wanted | {"segment", "written_by", "written_row"})))
    else:
        index = rows.index(sorted(wanted))
    order = together(index, _TOGETHER[table], "segment" if table == "rollouts" else None)
    found = places(index)[order]
    if run is None:
        yield rows.schema, len(found), [(None, rows.chunks(found))]
        return
    lots: Any = index[run].combine_chunks().take(pa.array(order)).dictionary_encode(null_encoding="encode")
    codes = lots.indices.to_numpy(zero_copy_only=False)
    names = lots.dictionary.to_pylist()
    ends = np.cumsum(np.bincount(codes, minlength=len(names)))[:-1]
    each = np.split(found[np.argsort(codes, kind="stable")], ends) if names else []
    yield rows.schema, len(found), [(name, rows.chunks(one)) for name, one in zip(names, each, strict=True)]


def _once(store: Store, snapshot: Snapshot, index: pa.Table) -> pa.Table:
    """The index without rows that say again what another says."""
    found = repeats(snapshot)
    if found.conflicts:
        shown = ", ".join(f"{id_!r} segment {segment}" for id_, segment in found.conflicts[:3])
        more = f" and {len(found.conflicts) - 3} more" if len(found.conflicts) > 3 else ""
        warnings.warn(
            f"{store.path}: stored with different contents, every row is written: {shown}{more}", stacklevel=2
        )
    if not found.left_out.num_rows:
        return index
    gone = set(zip(*(found.left_out[name].to_pylist() for name in ("written_by", "written_row")), strict=True))
    origins = zip(index["written_by"].to_pylist(), index["written_row"].to_pylist(), strict=True)
    return index.filter(pa.array(np.array([origin not in gone for origin in origins], bool)))


@contextmanager
def _views(store: Store, snapshot: Snapshot, table: str) -> Generator[tuple[pa.Schema, int, _Runs]]:
    """As `_rows`, of a view."""
    from rollstore.readers.duckdb import connect  # loaded only where a view is asked for

    with connect(store, snapshot=snapshot) as connection:
        schema = pa.schema(connection.sql(f"SELECT * FROM {table} LIMIT 0").to_arrow_table().schema)
        counts = connection.sql(f"SELECT run_id, count(*) FROM {table} GROUP BY run_id ORDER BY run_id").fetchall()

        def rows(run: str | None) -> Iterator[pa.Table]:
            query = f"SELECT * FROM {table} WHERE run_id IS NOT DISTINCT FROM $run"
            for batch in pa.RecordBatchReader.from_stream(connection.sql(query, params={"run": run})):
                yield pa.Table.from_batches([batch], schema)

        yield schema, sum(count for _, count in counts), [(run, rows(run)) for run, _ in counts]
