"""docs/sql.md names the columns there are, and its queries run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from rollstore.readers.duckdb import VIEWS, connect
from rollstore.store.store import open as open_store
from tests.readers.samples import group, rollout

TEXT = (Path(__file__).parents[2] / "docs" / "sql.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[duckdb.DuckDBPyConnection]:
    store = open_store(tmp_path_factory.mktemp("docs") / "store", create=True)
    at = datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
    times = {"requested_at": at, "started_at": at + timedelta(seconds=1), "finished_at": at + timedelta(seconds=9)}
    members = group("g", [1.0, 0.0, 1.0], environment="math", **times)
    with store.writer(run="run") as writer:
        writer.append(members)
    ids = [member.rollout_id for member in members]
    gaps = [(member.logprobs.values + np.float32(0.25)).tolist() for member in members]
    segments = pa.array([0] * 3, pa.int32())
    store.append(
        "evaluations",
        pa.table({"evaluation_id": ["trainer@7"] * 3, "rollout_id": ids, "segment": segments, "logprobs": gaps}),
    )
    store.append(
        "scores",
        pa.table({"rollout_id": ids, "scorer": ["judge"] * 3, "value": [0.9, 0.1, 0.8], "status": ["scored"] * 3}),
    )
    store.append(
        "uses",
        pa.table(
            {"train_run": ["t"] * 3, "train_step": [4] * 3, "rollout_id": ids, "weight_version": [9] * 3,
             "disposition": ["trained"] * 3}
        ),
    )  # fmt: skip
    with store.writer(run="run") as writer:
        writer.append(rollout("twice", reward=1.0))
        writer.append(rollout("twice", reward=0.0))
    with pytest.warns(UserWarning, match="different contents"):
        opened = connect(store)
    with opened:
        yield opened


def test_there_are_a_dozen_queries() -> None:
    assert len(QUERIES) >= 12


@pytest.mark.parametrize("query", QUERIES)
def test_each_query_runs_and_finds_something(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    assert connection.sql(query).fetchall()


def test_the_gap_is_the_one_that_was_written(connection: duckdb.DuckDBPyConnection) -> None:
    (query,) = (query for query in QUERIES if "trainer@7" in query)
    assert connection.sql(query).fetchall() == [(12, 0.25, 0.25)]


@pytest.mark.parametrize("view", ["actions", "tokens", "spans", "groups"])
def test_the_columns_listed_are_those_of_the_view(connection: duckdb.DuckDBPyConnection, view: str) -> None:
    section = TEXT.split(f"## {view}:")[1].split("\n## ")[0]
    listed = [name for names in re.findall(r"^\| ([a-z_, ]+) \|", section, re.MULTILINE) for name in names.split(", ")]
    assert listed[0] == "column"
    assert sorted(listed[1:]) == sorted(connection.sql(f"SELECT * FROM {view}").columns)


def test_every_view_is_described() -> None:
    assert all(f"`{view}`" in TEXT or f"## {view}:" in TEXT for view in VIEWS)
