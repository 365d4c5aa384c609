"""Rows cut out of larger tables are those rows and no others: appended, written, compacted, filtered."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from rollstore.schema import prepare, to_table
from rollstore.store.batching import BATCH_BYTES, filled
from rollstore.store.filesystem import LocalFilesystem
from rollstore.store.grouping import in_groups
from rollstore.store.lookup import content
from rollstore.store.names import part_name
from rollstore.store.part import open_part, write_part
from rollstore.store.store import Store
from rollstore.store.streamed import PartWriter
from tests.store.conftest import rollout

NAME = part_name("a" * 32, 1, compacted=True)
COLUMNS = {
    "lists": pa.array([[1], [2, 3], [4, 5, 6], [], None, [7]], pa.list_(pa.int32())),
    "with_null": pa.array([[1], None, [4, 5, 6], None, [], [9]], pa.list_(pa.int64())),
    "fixed": pa.array([[1, 2], [3, 4], [5, 6], None, [7, 8], [9, 10]], pa.list_(pa.int16(), 2)),
    "bools": pa.array([[True], [False, True], [], [True] * 9, None, [False]]),
    "texts": pa.array(["a", "bc", "", None, "def", "secret"]),
    "nested": pa.array([[["x"]], [["y", "z"], []], None, [], [None], [["secret"]]]),
    "structs": pa.array([{"a": 1, "b": ["p"]}, None, {"a": 3, "b": None}, {"a": 4}, None, {"a": 6, "b": ["q"]}]),
    "maps": pa.array([[("k", 1)], [], None, [("l", 2), ("m", 3)], [], [("n", 4)]], pa.map_(pa.string(), pa.int32())),
    "numbers": pa.array([1, None, 3, 4, None, 6], pa.int64()),
}  # fmt: skip
WHOLE = pa.table(COLUMNS).replace_schema_metadata({"rollstore.schema": "1.0"})
CHOICES = {
    "slice": (WHOLE.slice(1, 2), [1, 2]),
    "slice of a slice": (WHOLE.slice(1).slice(2, 2), [3, 4]),
    "one row": (WHOLE.slice(4, 1), [4]),
    "no row": (WHOLE.slice(3, 0), []),
    "take": (WHOLE.take([5, 0, 2]), [5, 0, 2]),
    "filter": (WHOLE.filter(pa.array([True, False, False, True, True, False])), [0, 3, 4]),
    "chunks": (pa.concat_tables([WHOLE.slice(4, 2), WHOLE.slice(1, 2)]), [4, 5, 1, 2]),
}


@pytest.fixture
def place(tmp_path: Path) -> LocalFilesystem:
    filesystem = LocalFilesystem(tmp_path)
    for folder in ("scores", "staging"):
        filesystem.make_folder(folder)
    return filesystem


def fresh(rows: list[int]) -> pa.Table:
    """The same rows, built without the others."""
    columns = {name: pa.array([column[row].as_py() for row in rows], column.type) for name, column in COLUMNS.items()}
    return pa.table(columns).replace_schema_metadata(WHOLE.schema.metadata)


def held(place: LocalFilesystem) -> tuple[dict[str, list[object]], int]:
    part = open_part(place, "scores", NAME)
    return pa.Table.from_batches(part.batches(), part.schema).to_pydict(), part.size


@pytest.mark.parametrize("batch_bytes", [1, 60, 1 << 20])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_part_holds_the_rows_of_a_slice_and_is_as_large_as_if_they_were_built_anew(
    place: LocalFilesystem, choice: str, batch_bytes: int
) -> None:
    cut, rows = CHOICES[choice]
    write_part(place, "scores", NAME, cut, batch_bytes=batch_bytes)
    found, size = held(place)
    place.delete(f"scores/{NAME}.arrow")
    write_part(place, "scores", NAME, fresh(rows), batch_bytes=batch_bytes)
    assert (found, size) == held(place)
    assert b"secret" not in (place.root / f"scores/{NAME}.arrow").read_bytes() or 5 in rows


@pytest.mark.parametrize("choice", [name for name in CHOICES if name != "no row"])
def test_rows_of_a_slice_are_put_in_groups_and_packed_as_they_are(place: LocalFilesystem, choice: str) -> None:
    cut, rows = CHOICES[choice]
    keys = pa.array([f"g{row % 2}" for row in rows])
    batches = cut.append_column("group_id", keys).to_batches()
    writer = PartWriter(place, "scores", NAME, batches[0].schema, "lz4")
    for batch in filled(in_groups(batches), BATCH_BYTES):
        writer.write(writer.encode(batch))
    writer.publish()
    writer.close()
    found, _ = held(place)
    ordered = sorted(range(len(rows)), key=lambda n: [row % 2 for row in rows].index(rows[n] % 2))
    assert {name: found[name] for name in COLUMNS} == fresh([rows[n] for n in ordered]).to_pydict()


def test_appended_slices_have_the_content_and_the_size_of_rows_built_anew(store: Store) -> None:
    rows = [rollout(f"r{n:04}", tokens=1000, extra={"x_list": [n, n + 1]}) for n in range(300)]
    found = []
    for table in (to_table(rows).slice(150, 1), to_table([rows[150]])):
        store.append("rollouts", table)
        found.append(max(store.parts("rollouts"), key=lambda part: part.path not in {old.path for old, _ in found}))
        found[-1] = (found[-1], next(found[-1].batches()))
    (cut, row), (built, same) = found
    assert cut.path != built.path
    assert content(row) == content(same)
    assert cut.size == built.size
    assert store.get("r0150")[0].tokens.tolist() == rows[150].tokens.tolist()


def test_a_prepared_slice_is_checked_and_aligned_by_its_own_rows() -> None:
    whole = to_table([rollout(f"r{n}", tokens=4 + n) for n in range(6)])
    cut = prepare(whole.slice(2, 3))
    assert cut.to_pydict() == to_table([rollout(f"r{n}", tokens=4 + n) for n in (2, 3, 4)]).to_pydict()
