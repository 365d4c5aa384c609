"""Files of an older major schema version: their columns, and their rows, as of this one.

Minor versions need nothing here: readers fill in what an older one lacks, and keep what a newer one has.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from rollstore.schema import upgrade
from rollstore.schema.upgrade import is_older, read_version
from rollstore.store import frame

_MOST = 64
_decoders: dict[tuple[int, str], tuple[pa.Schema, frame.Decoder | Upgrading]] = {}
"""Of schema objects, each held so that its id stays its own: making one takes a third of what a `get` does."""


def newest(held: pa.Schema, table: str) -> pa.Schema:
    """The columns in which rows of a file are read; the file's own, unless it is older by a major version."""
    if not is_older(read_version(held.metadata)):
        return held
    return _upgraded(pa.Table.from_batches([], held), table).schema


def decoder(held: pa.Schema, table: str) -> frame.Decoder | Upgrading:
    """What reads the messages of a file with these columns; one for all files that share the schema object."""
    key = (id(held), table)
    known = _decoders.get(key)
    if known is None:
        made = Upgrading(held, table) if is_older(read_version(held.metadata)) else frame.Decoder(held)
        for oldest in [*_decoders][: max(0, len(_decoders) + 1 - _MOST)]:
            _decoders.pop(oldest, None)
        known = _decoders[key] = (held, made)
    return known[1]


class Upgrading:
    """As `frame.Decoder`, with every batch upgraded whole: a new column may be made from several old ones."""

    def __init__(self, held: pa.Schema, table: str) -> None:
        self._decoder, self._table = frame.Decoder(held), table

    def decode(self, message: bytes | memoryview, where: str, fields: Sequence[int] | None = None) -> pa.RecordBatch:
        """`fields` picks columns by their place in the schema after the upgrade. Raises CorruptionError."""
        old = pa.Table.from_batches([self._decoder.decode(message, where)])
        made = _upgraded(old, self._table).combine_chunks()
        return made.to_batches()[0] if fields is None else made.select(list(fields)).to_batches()[0]


def _upgraded(old: pa.Table, table: str) -> pa.Table:
    return upgrade(old, read_version(old.schema.metadata), table)
