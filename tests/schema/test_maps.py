"""Maps hold each key once: where rows enter, in `verify`, and in what SQL says of a store that has such rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from rollstore.errors import SchemaError
from rollstore.readers.duckdb import connect
from rollstore.schema import prepare
from rollstore.schema.maps import key_problems
from rollstore.store.store import open as open_store
from rollstore.store.verify import verify

TEXTS = pa.map_(pa.string(), pa.string())
ONCE, TWICE = [("k", "1"), ("l", "1")], [("k", "1"), ("l", "2"), ("k", "2")]


def rows(**columns: pa.Array) -> pa.Table:
    """Two rollouts, with more columns."""
    return pa.table(
        {
            "rollout_id": ["a", "b"],
            "segment": [0, 0],
            "tokens": pa.array([[1, 2]] * 2, pa.list_(pa.int32())),
            "action_mask": [[False, True]] * 2,
            **columns,
        }
    )


def scores(metadata: pa.Array) -> pa.Table:
    return pa.table({"rollout_id": ["a", "b"], "scorer": ["s", "s"], "value": [1.0, 2.0], "metadata": metadata})


@pytest.mark.parametrize(
    ("table", "of", "column"),
    [
        (rows(metadata=pa.array([ONCE, TWICE], TEXTS)), "rollouts", "metadata"),
        (
            rows(
                samplers=pa.array(
                    [[{"extra": ONCE}], [{"extra": ONCE}, {"extra": TWICE}]],
                    pa.list_(pa.struct([("extra", TEXTS)])),
                )
            ),
            "rollouts",
            "samplers.extra",
        ),
        (rows(x_m=pa.array([None, TWICE], TEXTS)), "rollouts", "x_m"),
        (
            rows(x_m=pa.array([[], [{"d": ONCE}, None, {"d": TWICE}]], pa.list_(pa.struct([("d", TEXTS)])))),
            "rollouts",
            "x_m.d",
        ),
        (rows(x_m=pa.array([[(1, ONCE)], [(1, TWICE)]], pa.map_(pa.int64(), TEXTS))), "rollouts", "x_m"),
        (rows(x_m=pa.array([[], [((1,), 1), ((1,), 2)]], pa.map_(pa.list_(pa.int8()), pa.int8()))), "rollouts", "x_m"),
        (scores(pa.array([ONCE, TWICE], TEXTS)), "scores", "metadata"),
    ],
    ids=["metadata", "samplers", "own", "own in structs", "own in a map", "own with lists as keys", "scores"],
)
def test_a_key_that_stands_twice_is_refused_by_row_and_column(table: pa.Table, of: str, column: str) -> None:
    with pytest.raises(SchemaError) as refused:
        prepare(table, of)
    (problem,) = refused.value.problems
    assert (problem.column, problem.kind, problem.row, problem.wanted) == (column, "duplicate_key", 1, "each key once")


def test_one_key_in_several_rows_and_samplers_is_no_repetition() -> None:
    samplers = pa.array([[{"extra": ONCE}, {"extra": ONCE}]] * 2, pa.list_(pa.struct([("extra", TEXTS)])))
    table = rows(metadata=pa.array([ONCE, ONCE], TEXTS), samplers=samplers, x_m=pa.array([[], None], TEXTS))
    assert prepare(table, "rollouts").num_rows == 2


def test_entries_of_rows_that_are_null_or_sliced_away_count_for_nothing() -> None:
    keys, items = pa.array(["k", "k", "l", "k", "l"]), pa.array(["1"] * 5)
    whole = pa.MapArray.from_arrays(pa.array([0, 2, 3, 5], pa.int32()), keys, items)
    masked = pa.MapArray.from_buffers(TEXTS, 3, [pa.py_buffer(b"\x06"), whole.buffers()[1]], children=[whole.values])
    for array in (whole.slice(1), masked):
        assert [*key_problems(array, "x_m", np.arange(len(array)))] == []
    assert [p.row for p in key_problems(whole, "x_m", np.arange(3))] == [0]


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store into which something else has put rows with a key twice: b in metadata, a in a column of its own."""

    def none(*_: Any) -> Iterator[Any]:
        return iter(())

    path = str(tmp_path / "held")
    with monkeypatch.context() as patched:
        patched.setattr("rollstore.schema.checks.key_problems", none)
        patched.setattr("rollstore.schema.extras.key_problems", none)
        own = pa.array([TWICE, None], TEXTS)
        open_store(path, create=True).append("rollouts", rows(metadata=pa.array([ONCE, TWICE], TEXTS), x_m=own))
    return path


def test_verify_finds_the_rows_of_a_store_that_has_them(held: str) -> None:
    with open_store(held).snapshot() as snapshot:
        found = {(f.kind, f.row) for f in verify(snapshot)}
    assert found == {("duplicate_key", 0), ("duplicate_key", 1)}


def test_sql_names_the_rows_it_cannot_read_and_reads_the_rest(held: str, tmp_path: Path) -> None:
    with connect(open_store(held)) as connection:
        assert connection.sql("SELECT rollout_id FROM rollouts JOIN tokens USING (rollout_id)").fetchall()
        for column, row in (("metadata", "'b'"), ("x_m", "'a'")):
            with pytest.raises(duckdb.Error, match=f"{column}: wanted each key once in a map, got one twice in {row}:"):
                connection.sql(f"SELECT {column} FROM rollouts").fetchall()
