"""Derived files in cache/: one summed batch each. What is torn or damaged is thrown away and made again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pyarrow as pa

from rollstore.errors import CorruptionError
from rollstore.store import frame
from rollstore.store.filesystem import Filesystem, read_file
from rollstore.store.names import STAGED, new_id


def derived_files(filesystem: Filesystem, kind: str) -> list[str]:
    """The files of one kind, as `index` or `footers`; none where the folder cannot be read."""
    try:
        names = filesystem.list("cache")
    except OSError:
        return []
    return [f"cache/{name}" for name in names if name.startswith(f"{kind}-") and name.endswith(f".{kind}")]


def load_derived(filesystem: Filesystem, kind: str) -> Iterator[tuple[str, pa.RecordBatch, dict[str, str]]]:
    """(file, rows, metadata) of each file that can be read; another process may delete one meanwhile."""
    for path in derived_files(filesystem, kind):
        try:
            data = read_file(filesystem, path)
            length = frame.tail_length(data[-10:])
            tail = frame.read_tail(data[len(data) - length :] if 0 < length <= len(data) else b"", len(data), path)
            (batch,) = tail.batches
            message = data[batch.offset :][: batch.length]
            frame.check_message(message, batch, path)
            yield path, frame.Decoder(tail.schema).decode(message, path), tail.metadata
        except OSError:
            continue
        except (CorruptionError, ValueError):
            with suppress(OSError):
                filesystem.delete(path)


def save_derived(filesystem: Filesystem, kind: str, rows: pa.RecordBatch, metadata: dict[str, str]) -> str:
    """Keep rows in a new file and return its path. Not synced. Raises OSError, as in a folder that may only be read."""
    file = frame.encode_file(rows.schema, [rows], metadata, None)
    staged, target = f"staging/{new_id()}{STAGED}", f"cache/{kind}-{new_id()}.{kind}"
    handle = filesystem.create(staged)
    try:
        handle.write(0, file)
        filesystem.publish(staged, target)
    finally:
        handle.close()
        filesystem.delete(staged)
    return target
