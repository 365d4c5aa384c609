"""Parquet files that every reader reads right: which types, encodings, statistics and row groups they have.

Each choice answers a defect that was met: see docs/export.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rollstore.errors import WriteError
from rollstore.exchange.folder import STAGED
from rollstore.schema.flat import Flat
from rollstore.store.batching import row_bytes

Floats = npt.NDArray[np.float64]
t = pa.types

ROW_GROUP_BYTES, ROW_GROUP_ITEMS = 64 << 20, 1 << 24
"""The most that one row group holds, decoded, and the most list items in any column of it; one row may be more.
Readers hold a chunk of nested texts in one array, and fail past 2 GiB or 2^31 items."""

FILE_BYTES = 128 << 20
"""Bytes after which the next file begins. A file is made in memory: pyarrow goes on writing on a full disk."""

TOKEN_IDS = {"tokens", "head_tokens", "support_tokens", "token"}
"""Columns of ids too many for a dictionary: plain and compressed they are smaller."""


def portable(schema: pa.Schema) -> pa.Schema:
    """The schema without types that some reader lacks: a map becomes a list of structs of key and value."""
    return pa.schema([field.with_type(_portable(field.type)) for field in schema], schema.metadata)


def _portable(type_: pa.DataType) -> pa.DataType:
    if t.is_map(type_):
        entry = pa.struct([("key", _portable(type_.key_type)), ("value", _portable(type_.item_type))])
        return pa.list_(entry)
    if t.is_struct(type_):
        return pa.struct([field.with_type(_portable(field.type)) for field in type_])
    if t.is_large_list(type_):
        return pa.large_list(_portable(type_.value_type))
    if t.is_list(type_):
        return pa.list_(_portable(type_.value_type))
    return type_


def carried(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows in a portable schema."""
    arrays = [
        column
        if column.type.equals(field.type)
        else pa.chunked_array([_carried(chunk, field.type) for chunk in column.chunks], field.type)
        for column, field in zip(table.columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _carried(array: pa.Array, type_: pa.DataType) -> pa.Array:
    if array.type.equals(type_):
        return array
    if t.is_struct(type_):
        children = [_carried(child, f.type) for child, f in zip(array.flatten(), type_, strict=True)]
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=array.is_null())
    lists = Flat(array)
    large = t.is_large_list(type_)
    offsets = pa.array(lists.offsets, pa.int64() if large else pa.int32())
    kind = pa.LargeListArray if large else pa.ListArray
    return kind.from_arrays(offsets, _carried(lists.values, type_.value_type), type=type_, mask=pa.array(~lists.valid))


class Files:
    """The files of one folder, written one after the other under staged names, in bounded row groups."""

    def __init__(self, folder: Path, form: Form) -> None:
        self.folder, self.form = folder, form
        self.written: list[Path] = []
        self.rows = 0
        self._writer: pq.ParquetWriter | None = None
        self._sink = pa.BufferOutputStream()
        self._pending: list[pa.Table] = []
        self._held = np.zeros(2)
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, table: pa.Table) -> None:
        """Rows of the form's schema, behind those before. Raises OSError."""
        weights = np.cumsum(_weights(table), axis=0)
        start = 0
        while start < table.num_rows:
            before = weights[start - 1] if start else np.zeros(2)
            room = np.array([ROW_GROUP_BYTES, ROW_GROUP_ITEMS]) - self._held + before
            stop = min(int(np.searchsorted(weights[:, n], room[n], side="right")) for n in (0, 1))
            if stop <= start and self._pending:
                self._flush()
                continue
            stop = max(stop, start + 1)
            self._pending.append(table.slice(start, stop - start))
            self._held += weights[stop - 1] - before
            start = stop

    def close(self) -> None:
        """Finish the last file; there is one even without rows, for its schema. Raises OSError."""
        if self._pending or not self.written:
            self._flush()
        self._end()

    def _flush(self) -> None:
        if self._writer is None:
            self._begin()
        writer: Any = self._writer
        if self._pending:
            group = pa.concat_tables(self._pending).combine_chunks()
            writer.write_table(group, row_group_size=group.num_rows)
            self.rows += group.num_rows
        self._pending, self._held = [], np.zeros(2)
        if self._sink.tell() > FILE_BYTES:
            self._end()

    def _begin(self) -> None:
        self._sink = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(self._sink, self.form.schema, **self.form.options)

    def _end(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        path = self.folder / f"part-{len(self.written):05d}{STAGED}"
        data = self._sink.getvalue()
        check(data, path.name)
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.written.append(path)


class Form:
    """How the files of a table are written: the same for each, so that readers see one table."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        columns = leaves(schema)
        floats = [path for path, physical in columns if _is_float(physical)]
        plain = [path for path, physical in columns if _is_id(path) and not _is_float(physical)]
        others = [path for path, _ in columns if path not in (*floats, *plain)]
        self.options: dict[str, Any] = {
            "compression": "zstd",
            "use_dictionary": others or False,
            "column_encoding": dict.fromkeys(floats, "BYTE_STREAM_SPLIT") | dict.fromkeys(plain, "PLAIN"),
            # Smallest and largest values leave NaN out, and readers then drop rows that hold one.
            "write_statistics": [*plain, *others] or False,
            "write_page_checksum": True,
            "store_schema": True,
        }


def check(file: pa.Buffer, name: str) -> None:
    """Raises WriteError where a finished file is not written as it should: by what it says itself, not by `options`."""
    metadata = pq.read_metadata(pa.BufferReader(file))
    for group in range(metadata.num_row_groups):
        read = metadata.row_group(group)
        for column in (read.column(number) for number in range(metadata.num_columns)):
            path, found = column.path_in_schema, column.encodings
            is_float = _is_float(column.physical_type)
            asked = {
                "compressed by zstd": column.compression == "ZSTD",
                "BYTE_STREAM_SPLIT": not is_float or "BYTE_STREAM_SPLIT" in found,
                "no statistics of floats": not is_float or not column.is_stats_set,
                "no dictionary of token ids": is_float or not _is_id(path) or not column.has_dictionary_page,
            }
            for wanted, holds in asked.items():
                if not holds:
                    raise WriteError(f"{name}: {path}: wanted {wanted}, got {column.compression} {found}")


def _is_float(physical: str) -> bool:
    return physical in ("FLOAT", "DOUBLE")


def _is_id(path: str) -> bool:
    return path.partition(".")[0] in TOKEN_IDS


def leaves(schema: pa.Schema) -> list[tuple[str, str]]:
    """(path, physical type) of every column that Parquet makes of a schema, as `logprobs.list.element`.

    Asked of Parquet itself: a path that is none is ignored there without a word.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    read = pq.ParquetFile(pa.py_buffer(sink.getvalue())).schema
    return [(read.column(i).path, read.column(i).physical_type) for i in range(len(read))]


def _weights(table: pa.Table) -> Floats:
    """float64 [rows, 2]: decoded bytes of each row, and the items of its longest column."""
    sizes, items = np.zeros(table.num_rows), np.zeros(table.num_rows)
    for column in table.columns:
        chunks = column.chunks
        if chunks:
            sizes += np.concatenate([row_bytes(chunk) for chunk in chunks])
            items = np.maximum(items, np.concatenate([_items(chunk) for chunk in chunks]))
    return np.stack([sizes, items], axis=1)


def _items(array: pa.Array) -> Floats:
    """float64 [rows]: values of each row in its longest leaf."""
    if t.is_struct(array.type):
        return np.max([np.ones(len(array)), *(_items(child) for child in array.flatten())], axis=0)
    if t.is_list(array.type) or t.is_large_list(array.type):
        lists = Flat(array)
        sums = np.concatenate([[0.0], np.cumsum(_items(lists.values))])
        return np.maximum(sums[lists.offsets[1:]] - sums[lists.offsets[:-1]], 1)
    return np.ones(len(array))
