"""What the rules of an audit and the statistics ask: DuckDB over one snapshot, with the facts of every segment."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rollstore.diagnose.facts import COLUMNS, SCHEMA, segment_facts
from rollstore.readers.duckdb import connect
from rollstore.readers.repeats import Repeats, repeats
from rollstore.store.journal import JournalView
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot, fit
from rollstore.store.store import Store

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MEMORY = "512MB"
"""How much DuckDB may hold before it writes to disk."""

_SIZE = re.compile(r"[0-9]+(\.[0-9]+)? ?[KMGT]i?B")

EXAMPLES = 5
"""Ids that a rule names."""

_LOOKED_AT = 200
"""Rows among which distinct ids are looked for."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A connection with the store's views and the table `facts`, one row a segment (see `facts.segment_facts`)."""

    store: Store
    snapshot: Snapshot
    connection: DuckDBPyConnection
    repeats: Repeats

    def one(self, query: str, *given: Any) -> dict[str, Any]:
        """The first row of a query by column name. Raises duckdb.Error."""
        found = self.connection.execute(query, list(given))
        names = [column[0] for column in found.description or ()]
        row = found.fetchone()
        return dict.fromkeys(names) if row is None else dict(zip(names, row, strict=True))

    def rows(self, query: str, *given: Any) -> list[tuple[Any, ...]]:
        """All rows of a query that has few."""
        return self.connection.execute(query, list(given)).fetchall()

    def ids(self, where: str, *, of: str = "facts", name: str = "rollout_id", most: int = EXAMPLES) -> tuple[str, ...]:
        """The first few ids for which a condition holds, in order."""
        # The first of all are found without holding all, which DISTINCT would.
        query = f"SELECT {name} AS id FROM {of} WHERE {where} ORDER BY id LIMIT {_LOOKED_AT}"
        return tuple(dict.fromkeys(str(id_) for (id_,) in self.rows(query)))[:most]

    def count(self, **conditions: str) -> dict[str, int]:
        """How many segments each condition holds for."""
        chosen = ", ".join(f'count(*) FILTER ({condition}) AS "{name}"' for name, condition in conditions.items())
        return self.one(f"SELECT {chosen} FROM facts")


@contextmanager
def evidence(store: Store, *, memory: str = MEMORY, kept: dict[str, pa.Table] | None = None) -> Generator[Evidence]:
    """The evidence of a store as it is now.

    What does not fit `memory` (as DuckDB writes it: `512MB`) goes to a folder that is gone afterwards. `kept`: the
    facts of parts by name, from an earlier time; what is new is added and what is gone is removed. Raises
    CorruptionError, and ValueError for a size that is none.
    """
    if not _SIZE.fullmatch(memory):
        raise ValueError(f"memory: wanted a size as 512MB, got {memory!r}")
    with (
        tempfile.TemporaryDirectory(prefix="rollstore-") as spill,
        store.snapshot() as snapshot,
        warnings.catch_warnings(),
    ):
        # Two contents of one id are a rule's to say, with its verdict.
        warnings.filterwarnings("ignore", message=".*stored with different contents")
        connection = connect(store, snapshot=snapshot)
        try:
            connection.execute(f"SET memory_limit = '{memory}'")
            connection.execute("SET temp_directory = $1", [spill])
            connection.execute("SET preserve_insertion_order = false")
            found = repeats(snapshot)
            connection.register("facts_stream", pa.RecordBatchReader.from_batches(SCHEMA, _facts(snapshot, kept)))
            connection.execute("CREATE TABLE facts AS SELECT * FROM facts_stream")
            connection.unregister("facts_stream")
            if found.left_out.num_rows:
                connection.register("copies", found.left_out)
                connection.execute(
                    "DELETE FROM facts USING copies WHERE facts.written_by = copies.written_by "
                    "AND facts.written_row = copies.written_row"
                )
                connection.unregister("copies")
            yield Evidence(store=store, snapshot=snapshot, connection=connection, repeats=found)
        finally:
            connection.close()


def _facts(snapshot: Snapshot, kept: dict[str, pa.Table] | None) -> Iterator[pa.RecordBatch]:
    """The facts of every live row, one batch in memory at a time (a dataset would read ahead)."""
    full = snapshot.schema("rollouts")
    wide = pa.schema([full.field(name) for name in COLUMNS], full.metadata)

    def of(source: Part | JournalView) -> Iterator[pa.RecordBatch]:
        return (segment_facts(fit(batch, wide, "rollouts")) for batch in source.batches(COLUMNS) if batch.num_rows)

    parts = snapshot.parts("rollouts")
    if kept is not None:
        for name in kept.keys() - {part.name for part in parts}:
            del kept[name]
    for part in parts:
        if kept is None:
            yield from of(part)
            continue
        if part.name not in kept:
            kept[part.name] = pa.Table.from_batches(of(part), SCHEMA)
        yield from kept[part.name].to_batches()
    for view in snapshot.views("rollouts"):
        yield from of(view)
