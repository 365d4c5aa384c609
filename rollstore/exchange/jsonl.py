"""JSONL that reads back bit for bit: one file a table, one object a row. `texts.py` says how values are written."""

from __future__ import annotations

import base64
import gzip
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec
import pyarrow as pa
import zstandard

from rollstore.errors import CorruptionError
from rollstore.exchange.declared import declared
from rollstore.exchange.folder import ABOUT, STAGED, Exported, Progress, Written, about, new_file, new_folder
from rollstore.exchange.gather import runs_of
from rollstore.exchange.intake import Intake, Report
from rollstore.exchange.mapping import mapped, read_mapping
from rollstore.exchange.pieces import Texts
from rollstore.exchange.records import Made, Place
from rollstore.exchange.source import expand, is_url
from rollstore.exchange.texts import lines
from rollstore.schema import TABLES
from rollstore.store.snapshot import Snapshot

if TYPE_CHECKING:
    from rollstore.store.store import Store

SUFFIXES = {"zst": ".jsonl.zst", "gz": ".jsonl.gz", "none": ".jsonl"}
"""Compression -> how the files end."""

_PIECE_BYTES = 4 << 20  # decoded bytes that are text at a time: their text takes several times as many


def export(
    store: Store,
    folder: str | os.PathLike[str],
    *,
    tables: Sequence[str] = tuple(TABLES),
    compression: str = "zst",
    snapshot: Snapshot | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write tables of one snapshot as FOLDER/<table>.jsonl.zst, every column of every row.

    `tables`: names of the four. `compression`: zst, gz or none. The folder as for `parquet.export`: new or empty, and
    it gets its name when everything is in it; equal rows of one (rollout_id, segment) are written once.
    `rollstore-export.json` beside the files holds the counts, and the types of the caller's x_ columns, which JSON
    cannot say. `progress` is called with a table and bytes done.

    Raises StoreError where the folder is taken or is the store's own, ValueError on an unknown table or compression,
    CorruptionError, WriteError.
    """
    if unknown := [name for name in tables if name not in TABLES]:
        raise ValueError(f"tables: wanted some of {', '.join(TABLES)}, got {unknown[0]!r}")
    if compression not in SUFFIXES:
        raise ValueError(f"compression: wanted one of {', '.join(SUFFIXES)}, got {compression!r}")
    with new_folder(store, folder, snapshot, SUFFIXES[compression]) as (staging, held, exported):
        types: dict[str, str] = {}
        for table in dict.fromkeys(tables):
            path = staging / f"{table}{STAGED}"
            schema, rows = _write(store, held, table, path, compression, progress)
            exported.tables[table] = Written(rows=rows, files=1, bytes=path.stat().st_size)
            types[table] = base64.b64encode(memoryview(_undeclared(schema, table).serialize())).decode()
        about(store, held, exported, staging, types=types)
    return exported


def _undeclared(schema: pa.Schema, table: str) -> pa.Schema:
    """The columns whose types a reader cannot know."""
    return pa.schema([field for field in schema if field.name.startswith("x_") and table in TABLES])


def _write(
    store: Store, snapshot: Snapshot, table: str, path: Path, compression: str, progress: Progress | None
) -> tuple[pa.Schema, int]:
    size = sum(part.size for part in snapshot.parts(table))
    schema, count, runs = runs_of(store, snapshot, table)
    done = 0
    with _compressed(path, compression) as file:
        for chunk in (chunk for _, chunks in runs for chunk in chunks):
            step = max(1, chunk.num_rows * _PIECE_BYTES // max(chunk.nbytes, 1))
            for at in range(0, chunk.num_rows, step):
                file.write("".join(f"{line}\n" for line in lines(chunk.slice(at, step))).encode())
            before, done = done, done + chunk.num_rows
            if progress is not None:
                progress(table, size * done // count - size * before // count)
    return schema, count


@contextmanager
def _compressed(path: Path, compression: str) -> Generator[BinaryIO]:
    """A new file to write to; synced when the block ends."""
    with new_file(path) as file, ExitStack() as stack:
        into: Any = file
        if compression == "zst":
            zstd = zstandard.ZstdCompressor(write_checksum=True)
            into = stack.enter_context(zstd.stream_writer(file, closefd=False))
        elif compression == "gz":
            into = stack.enter_context(gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0))
        yield cast("BinaryIO", into)


def import_jsonl(
    store: Store,
    paths: Sequence[str | os.PathLike[str]],
    *,
    table: str = "rollouts",
    mapping: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    run: str | None = None,
    rejects: str | os.PathLike[str] | None = None,
    resume: bool = False,
    types: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Take JSONL (plain, zstd or gzip) whose fields are named as our columns, as an export writes it.

    paths: files, URLs, and folders with such files. A file named after one of the four tables holds rows of it, any
    other rows of `table`. A row of rollouts without an id gets one from its file and number, without a segment it is
    segment 0. `mapping`: a TOML file that says which of their fields is which column of rollouts (`mapping.py`), with
    `tokenizer` where it names texts; fields that it does not name are left out. Bad rows go to `rejects`, and the rest
    goes on. With `resume` rows that are in the store are passed over; without it a rollout that is there is refused.
    `run` fills run_id where it is null. `types` says what the caller's x_ columns hold, as {"x_share": "float64"},
    where the first rows would not show it; a mapping's own go before them.

    Raises ValueError on an unknown table, a wrong mapping or type, or one that the store has otherwise, StoreError
    where `rejects` is there already, OSError of a file, WriteError.
    """
    if table not in TABLES:
        raise ValueError(f"table: wanted one of {', '.join(TABLES)}, got {table!r}")
    said = declared(types or {}, "types")
    fields = None if mapping is None else read_mapping(mapping)
    texts = None if fields is None or "response_text" not in fields.columns else Texts(tokenizer, "jsonl")
    with Intake(store, "jsonl", run=run, rejects=rejects, resume=resume) as intake:
        intake.declare(said)
        if fields is not None:
            intake.declare(fields.types, fields.own)
            intake.lines(paths, lambda record, place: mapped(record, place, fields, texts), progress)
            intake.report.unmet = dict(fields.unmet) if intake.report.total.read else {}
            return intake.report
        for path in expand(paths, tuple(SUFFIXES.values())):
            name = Path(path).name.partition(".")[0]
            into = name if name in TABLES else table
            intake.types = {**types_beside(path, into), **intake.types}
            intake.lines([path], lambda record, place, into=into: _row(record, place, into), progress)
        return intake.report


def _row(record: dict[str, Any], place: Place, table: str) -> Made:
    if table == "rollouts":
        record.setdefault("rollout_id", place.id())
        record.setdefault("segment", 0)
    return Made(others={table: [record]})


def types_beside(path: str, table: str) -> Mapping[str, pa.DataType]:
    """The types of the caller's columns that an export wrote beside its files; none where there is no such note.

    Raises CorruptionError where it cannot be read.
    """
    note = Path(path).parent / ABOUT
    if is_url(path) or not note.is_file():
        return {}
    try:
        text = msgspec.json.decode(note.read_bytes()).get("types", {}).get(table)
        schema = pa.schema([]) if text is None else pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
    except (AttributeError, TypeError, ValueError, OSError, msgspec.DecodeError, pa.ArrowException) as error:
        raise CorruptionError(f"{note}: wanted the types of columns as an export notes them: {error}") from error
    return {field.name: field.type for field in schema}
