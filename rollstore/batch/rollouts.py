"""Which rows of a table are segments of one rollout, and what then holds for all of them. No loop over rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rollstore.errors import DuplicateError, UnsupportedRecordError
from rollstore.schema.flat import Rows

Ints = npt.NDArray[np.int64]


class Rollouts:
    """The rollouts of a table, told apart by rollout_id alone.

    ids [rows]: texts; index int64 [rows]: the rollout of each row; segment int64 [rows]; single: every row is a
    rollout of its own. Raises `UnsupportedRecordError` for a row without an id, `DuplicateError` where an id stands
    for two rollouts, or one (rollout_id, segment) stands twice: either would be trained on twice, or with the reward
    of another.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        ids = rows.objects("rollout_id")
        if None in ids:
            raise UnsupportedRecordError(f"row {ids.index(None)}: rollout_id: wanted an id, got null")
        self.ids: npt.NDArray[np.object_] = np.array([*ids, None], object)[:-1]
        self.index = self._codes("rollout_id")
        found = rows.numbers("segment", 0)
        self.segment: Ints = np.zeros(rows.count, np.int64) if found is None else found[0].astype(np.int64)
        self.single = bool(self.index.max(initial=-1) + 1 == rows.count)
        self._order = np.arange(rows.count) if self.single else np.lexsort((self.segment, self.index))
        if not self.single:
            self._refuse_runs()
            self._refuse_repeats()

    def last(self) -> Ints:
        """int64 [rows]: the row of the last segment of each row's rollout."""
        return self._end(self._order)

    def first(self, known: npt.NDArray[np.bool_]) -> Ints:
        """int64 [rows]: the row of the first segment of each row's rollout that has a value, as `known` [rows] says;
        the row itself where none has."""
        return self._end(self._order[known[self._order]][::-1])

    def _end(self, order: Ints) -> Ints:
        """The last row of each rollout in an order."""
        if self.single:
            return self._order
        end = np.full(self._rows.count, -1, np.int64)
        end[self.index[order]] = order  # the last write wins
        return np.where(end[self.index] < 0, np.arange(self._rows.count), end[self.index])

    def _refuse_runs(self) -> None:
        known = self._rows.known("run_id")
        if not known.any():
            return
        run, first = self._codes("run_id"), self.first(known)
        wrong = np.flatnonzero(known & (run != run[first]))
        if len(wrong):
            row = int(wrong[0])
            runs = self._rows.objects("run_id")
            raise DuplicateError(
                f"rollout {self.ids[row]!r}: wanted rows of one run, got some of {runs[int(first[row])]!r} and of "
                f"{runs[row]!r}: a rollout_id stands for one rollout, whatever its run"
            )

    def _refuse_repeats(self) -> None:
        index, segment = self.index[self._order], self.segment[self._order]
        again = np.flatnonzero((index[1:] == index[:-1]) & (segment[1:] == segment[:-1]))
        if len(again):
            row = int(self._order[again[0]])
            raise DuplicateError(
                f"{self.ids[row]!r}, segment {self.segment[row]}: wanted once in the table, got it twice; a loader, "
                "and SQL on the store's views, give rows that were written twice once"
            )

    def _codes(self, name: str) -> Ints:
        """Equal texts -> one number; null is a value."""
        texts = self._rows.array(name)
        if texts is None:
            return np.arange(self._rows.count)
        encoded: Any = texts.dictionary_encode(null_encoding="encode")
        return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
