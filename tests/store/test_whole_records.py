"""Whole records, odd ones included, come back bit for bit through `scan` and `get`, from parts and from journals."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings

from rollstore.schema import Rollout, to_table
from rollstore.store.store import open as open_store
from tests.readers.samples import rows, settled
from tests.strategies import rollout_lists, values_of

STAMPS = ("written_at", "flags")
"""Set or added to by the writer."""


@settings(max_examples=25, deadline=None)
@given(sealed=rollout_lists(max_size=3), live=rollout_lists(max_size=2))
def test_what_was_appended_is_what_scan_and_get_give(sealed: list[Rollout], live: list[Rollout]) -> None:
    sealed = [settled(record) for record in sealed]
    live = [settled(record, f"{record.rollout_id}-live") for record in live]
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "store", create=True)
        with store.writer() as writer:
            writer.append(sealed)
        with store.writer() as writer:
            writer.append(live)
            writer.flush()
            written = [*rows(to_table(sealed)), *rows(to_table(live))]
            scanned = rows(store.scan("rollouts").read_all())
            assert scanned == sorted(written, key=lambda row: (row["rollout_id"], row["segment"]))
            for record in (*sealed, *live):
                got = store.get(record.rollout_id, segment=record.segment)
                assert _values(got) == _values(record)


def _values(record: Rollout) -> dict[str, object]:
    return {name: value for name, value in values_of(record).items() if name not in STAMPS}
