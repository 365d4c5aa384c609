"""The store's small JSON files: written once, summed, published whole or not at all."""

from __future__ import annotations

import json
from typing import Any

import xxhash

from rollstore.errors import CorruptionError
from rollstore.store.filesystem import Filesystem, read_file
from rollstore.store.names import STAGED, new_id

_SUM = "xxh3"
_ZEROS = "0" * 16


def encode(document: dict[str, Any]) -> bytes:
    """One line of JSON that ends in the sum of itself, the sum's 16 digits counted as zeros."""
    text = json.dumps({**document, _SUM: _ZEROS}, separators=(",", ":"), ensure_ascii=True)
    digits = xxhash.xxh3_64_hexdigest(text.encode())
    return (text[: -len(_ZEROS) - 2] + digits + '"}').encode()


def decode(data: bytes, where: str) -> dict[str, Any]:
    """Raises CorruptionError unless the sum holds."""
    document = parse(data, where)
    digits = document.pop(_SUM, None)
    if encode(document) != data.strip():
        raise CorruptionError(f"{where}: wanted a document that holds its sum, got {digits!r} at its end")
    return document


def parse(data: bytes, where: str) -> dict[str, Any]:
    """As `decode`, the sum not looked at: to tell a newer version from damage."""
    try:
        document = json.loads(data)
    except ValueError as error:
        raise CorruptionError(f"{where}: wanted JSON, got {data[:40]!r}") from error
    if not isinstance(document, dict):
        raise CorruptionError(f"{where}: wanted a JSON object, got {data[:40]!r}")
    return document


def publish(filesystem: Filesystem, path: str, document: dict[str, Any]) -> None:
    """Write, sync and publish. FileExistsError where the name is taken by a different document, OSError otherwise."""
    data = encode(document)
    staged = f"staging/{new_id()}{STAGED}"
    handle = filesystem.create(staged)
    try:
        handle.write(0, data)
        handle.sync()
        try:
            filesystem.publish(staged, path)
        except FileExistsError:
            if read_file(filesystem, path) != data:
                raise
        filesystem.sync_folder(path.rpartition("/")[0])
    finally:
        handle.close()
        filesystem.delete(staged)
