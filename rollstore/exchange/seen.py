"""Which rows are there already, by 64-bit sums of their keys: 8 bytes a row, 16 where they are counted.

Among ten million rows two different keys have one sum with a probability of 3e-6; one of them would then be taken for
the other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from rollstore.exchange.texts import lines
from rollstore.schema import TABLES
from rollstore.store.snapshot import Snapshot

Hashes = npt.NDArray[np.uint64]


def key_hashes(table: pa.Table, name: str) -> Hashes:
    """uint64 [n]: a sum over the key columns of each row; an absent column counts as null."""
    keys = table.select([column for column in TABLES[name].key if column in table.column_names])
    return np.array([xxhash.xxh3_64_intdigest(line.encode()) for line in lines(keys)], np.uint64)


class Seen:
    """Sums of keys: those of a snapshot's table, and those added. Sorted runs that are merged as they grow."""

    def __init__(self, snapshot: Snapshot | None, name: str) -> None:
        self._runs: list[Hashes] = []
        if snapshot is not None and snapshot.count(name):
            key = [column for column in TABLES[name].key if column in snapshot.schema(name).names]
            for batch in snapshot.scan(name, key):
                self.add(key_hashes(pa.Table.from_batches([batch]), name))

    def add(self, hashes: Hashes) -> None:
        """Take more in."""
        new = np.sort(hashes)
        while self._runs and len(self._runs[-1]) <= 2 * len(new):
            new = np.sort(np.concatenate([self._runs.pop(), new]))
        if len(new):
            self._runs.append(new)

    def holds(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """bool [n]: whether each was taken in."""
        found = np.zeros(len(hashes), bool)
        for run in self._runs:
            place = np.searchsorted(run, hashes)
            found |= run[np.minimum(place, len(run) - 1)] == hashes
        return found

    def counts(self) -> tuple[Hashes, npt.NDArray[np.int64]]:
        """The different sums, in order, and how often each was taken in."""
        held = np.concatenate(self._runs) if self._runs else np.zeros(0, np.uint64)
        sums, counts = np.unique(held, return_counts=True)
        return sums, counts


class Stored:
    """How many rows of each key a table has, to leave out as many of those that come again.

    In tables where a key may stand several times, on purpose, as in scores.
    """

    def __init__(self, snapshot: Snapshot, name: str) -> None:
        self._sums, self._left = Seen(snapshot, name).counts()

    def takes(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """bool [n]: which of these rows are there; each row that is there is said once."""
        place = np.minimum(np.searchsorted(self._sums, hashes), max(len(self._sums) - 1, 0))
        found = np.zeros(len(hashes), bool)
        if not len(self._sums):
            return found
        for row in np.flatnonzero(self._sums[place] == hashes).tolist():
            if self._left[place[row]]:
                self._left[place[row]] -= 1
                found[row] = True
        return found
