"""Polars over one snapshot of a store: any table as a LazyFrame that reads the columns a query names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
from polars.io.plugins import register_io_source

from rollstore.readers.arrow import dataset, leased
from rollstore.readers.repeats import repeats, without
from rollstore.schema import table_of
from rollstore.store.snapshot import Snapshot

if TYPE_CHECKING:
    from rollstore.store.store import Store


def scan(store: Store, table: str = "rollouts", *, snapshot: Snapshot | None = None) -> pl.LazyFrame:
    """A table of one snapshot, in the newest columns, as a LazyFrame that may be collected any number of times.

    The snapshot is the store's own at this moment, kept until the frame and all made from it are gone; one that is
    given stays the caller's to close. A (rollout_id, segment) stored more than once with equal content counts once.
    Maps become lists of key and value. Raises ValueError on an unknown table, CorruptionError here or while collecting.
    """
    table_of(table)
    source = leased(store, snapshot)
    data = dataset(source, table)
    left_out = repeats(data.snapshot).left_out if table == "rollouts" else None
    # Not polars' own scan of a dataset: it hands predicates to Arrow, to which a NaN is not above any number.
    return register_io_source(_reader(data, left_out), schema=_schema(data.schema), is_pure=True)


def _schema(schema: pa.Schema) -> pl.Schema:
    frame = pl.from_arrow(schema.empty_table())
    return frame.schema if isinstance(frame, pl.DataFrame) else pl.Schema()


class _reader:
    """What polars calls to read: the columns it needs, batch by batch, its predicate applied by itself."""

    def __init__(self, data: ds.Dataset, left_out: pa.Table | None) -> None:
        self._data, self._left_out = data, left_out

    def __call__(
        self, with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        names = self._data.schema.names if with_columns is None else with_columns
        for batch in without(self._data, names, self._left_out):
            frame = pl.DataFrame(pl.from_arrow(batch))
            if predicate is not None:
                frame = frame.filter(predicate)
            if n_rows is not None:
                frame = frame.head(n_rows)
                n_rows -= frame.height
            yield frame
            if n_rows == 0:
                return
