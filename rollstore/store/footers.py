"""What the ends of many parts say, in a few files: so that a store of thousands of parts opens without reading each.

Derived and disposable. A part opened through them reads its own end before the first of its rows, and is refused where
the two differ.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from contextlib import suppress

import pyarrow as pa

from rollstore.errors import RollstoreError
from rollstore.store.derived import derived_files, load_derived, save_derived
from rollstore.store.filesystem import Filesystem
from rollstore.store.part import Part, check_versions

WORTH_KEEPING = 64
"""So many parts are opened one by one before a file is read or written for them."""

_KIND, _SCHEMAS_KEY = "footers", "rollstore.footers.schemas"
_FEW_FILES = 8
_SCHEMA = pa.schema(
    [
        ("table", pa.string()), ("name", pa.string()), ("size", pa.int64()), ("schema", pa.int32()),
        ("format", pa.string()), ("source", pa.string()), ("summary", pa.string()),
    ]
)  # fmt: skip


def load_footers(filesystem: Filesystem) -> dict[tuple[str, str], Part]:
    """The parts that files in cache/ describe, by table and name."""
    found: dict[tuple[str, str], Part] = {}
    for path, rows, metadata in load_derived(filesystem, _KIND):
        with suppress(RollstoreError, KeyError, IndexError, ValueError):  # of another version of this library
            schemas = [
                pa.ipc.read_schema(pa.py_buffer(base64.b64decode(s))) for s in json.loads(metadata[_SCHEMAS_KEY])
            ]
            checked: set[tuple[str, int]] = set()
            for table, name, size, schema, format_, source, summary in zip(
                *(column.to_pylist() for column in rows.columns), strict=True
            ):
                if (format_, schema) not in checked:
                    check_versions(format_, schemas[schema], path)
                    checked.add((format_, schema))
                found[table, name] = Part(filesystem, table, name, size, schemas[schema], format_, source, summary)
    return found


def save_footers(filesystem: Filesystem, parts: Sequence[Part], live: Sequence[Part]) -> None:
    """Keep what the ends of `parts` say. Where the files become many, one with all that are `live` replaces them.

    A folder that may only be read stays as it is.
    """
    with suppress(OSError):
        old = derived_files(filesystem, _KIND)
        merged = len(old) >= _FEW_FILES
        kept = live if merged else parts
        numbers: dict[bytes, int] = {}
        known: dict[int, int] = {}  # parts that came from one file share their schema objects
        for part in kept:
            if id(part.held) not in known:
                known[id(part.held)] = numbers.setdefault(part.held.serialize().to_pybytes(), len(numbers))
        values = [
            (p.table, p.name, p.size, known[id(p.held)], p.format, p.source, p.summary) for p in kept
        ]  # fmt: skip
        columns = [pa.array(column, f.type) for column, f in zip(zip(*values, strict=True), _SCHEMA, strict=True)]
        schemas = json.dumps([base64.b64encode(schema).decode() for schema in numbers])
        rows = pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
        save_derived(filesystem, _KIND, rows, {_SCHEMAS_KEY: schemas})
        for path in old if merged else ():
            filesystem.delete(path)
