"""What is new in a store that others write: each row once, however often it is sealed and compacted meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollstore.readers.arrow import Lease
from rollstore.readers.rows import TABLE
from rollstore.store.journal import JournalView
from rollstore.store.part import Part
from rollstore.store.snapshot import Snapshot, fit
from rollstore.store.store import Store

ORIGIN = ("written_by", "written_row")


class Arrivals:
    """Hands out the rows of a store's rollouts that it has not handed out yet.

    A row is known by its origin, which sealing and compaction keep; a batch that was looked through is not opened
    again. A byte or two for each row stays in memory.
    """

    def __init__(self, store: Store, columns: Sequence[str]) -> None:
        self._store, self._columns = store, columns
        self._through: dict[tuple[str, str], int] = {}
        self._seen: dict[str, npt.NDArray[np.bool_]] = {}

    def new(self) -> Iterator[pa.RecordBatch]:
        """The rows that are new at this moment, batch by batch, with their origin. What is not taken is new again."""
        # A lease and no `with`: who leaves this half-way and ends the program has it closed while there still is a way.
        lease = Lease(self._store.snapshot())
        snapshot = lease.snapshot
        full = snapshot.schema(TABLE)
        known = [name for name in dict.fromkeys([*self._columns, *ORIGIN]) if name in full.names]
        schema = pa.schema([full.field(name) for name in known])
        for source in (*snapshot.parts(TABLE), *snapshot.views(TABLE)):
            yield from self._of(source, schema, snapshot)

    def _of(self, source: Part | JournalView, schema: pa.Schema, snapshot: Snapshot) -> Iterator[pa.RecordBatch]:
        key = (type(source).__name__, source.name)
        for number in range(self._through.get(key, 0), source.batch_count):
            batch = fit(source.batch(number, schema.names), schema, TABLE)
            fresh = self._fresh(batch)
            self._through[key] = number + 1
            if len(fresh):
                yield batch if len(fresh) == batch.num_rows else batch.take(pa.array(fresh))

    def _fresh(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Numbers of the rows that were not seen; from now on they are."""
        encoded = batch.column("written_by").dictionary_encode()
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        numbers = batch.column("written_row").to_numpy(zero_copy_only=False).astype(np.int64)
        fresh = np.zeros(batch.num_rows, bool)
        for code, name in enumerate(encoded.dictionary.to_pylist()):
            own = np.flatnonzero(codes == code)
            seen = self._seen.get(name, np.zeros(0, bool))
            if len(seen) <= (highest := int(numbers[own].max())):
                seen = np.concatenate([seen, np.zeros(highest + 1, bool)])  # twice as long at least: seldom again
            fresh[own] = ~seen[numbers[own]]
            seen[numbers[own]] = True
            self._seen[name] = seen
        return np.flatnonzero(fresh)
