"""What a query of a locked connection cannot reach: files, also where DuckDB would spill to, and what comes after."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollstore.readers.duckdb import connect, lock
from rollstore.store.store import Store
from tests.readers.samples import rollout, write

SECRET = "hunter2"
FILES = ("s.csv", "s.json", "s.parquet", "s.db", "*")

READING = {
    "glob", "parquet_kv_metadata", "parquet_metadata", "parquet_schema", "parquet_scan", "read_blob", "read_csv",
    "read_csv_auto", "read_json", "read_ndjson", "read_parquet", "read_text", "sniff_csv",
}  # fmt: skip
"""Functions that read files where they may: what the search below finds on a connection that is open."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, whose `.tmp`, where DuckDB would spill to, holds a secret in every format it reads."""
    spilled = tmp_path / "here" / ".tmp"
    spilled.mkdir(parents=True)
    (spilled / "s.csv").write_text(f"{SECRET}\n{SECRET}\n", encoding="utf-8")
    (spilled / "s.json").write_text(json.dumps({SECRET: SECRET}), encoding="utf-8")
    pq.write_table(pa.table({SECRET: [SECRET]}).replace_schema_metadata({SECRET: SECRET}), spilled / "s.parquet")
    with duckdb.connect(str(spilled / "s.db")) as other:
        other.execute(f"CREATE TABLE {SECRET} AS SELECT '{SECRET}' AS {SECRET}")
    (spilled / f"{SECRET}.txt").touch()
    monkeypatch.chdir(spilled.parent)
    return spilled.parent


def _value(type_: str | None, path: str) -> str:
    """An argument of a function: the path wherever it may stand."""
    word = (type_ or "ANY").upper()
    if word.endswith("[]"):
        return f"['{path}']"
    if word in ("VARCHAR", "ANY", "VARIANT", "JSON", "T"):
        return f"'{path}'"
    return f"'{path}'::BLOB" if word == "BLOB" else "true" if word == "BOOLEAN" else "1"


def _calls(connection: duckdb.DuckDBPyConnection, path: str) -> Iterator[tuple[str, str]]:
    """(function, query) of every function of this DuckDB that takes a text, with the path in place of the texts."""
    forms = {
        "table": "SELECT * FROM {}({})", "table_macro": "SELECT * FROM {}({})", "pragma": "PRAGMA {}({})",
        "scalar": 'SELECT "{}"({})', "macro": 'SELECT "{}"({})',
    }  # fmt: skip
    known = connection.execute(
        "SELECT DISTINCT function_type, function_name, parameter_types FROM duckdb_functions() "
        "WHERE len(parameter_types) > 0 AND function_name NOT IN ('repeat', 'sleep_ms') ORDER BY ALL"
    ).fetchall()
    for kind, name, types in known:
        # Of a function of tables the options are listed too, which are not given by place.
        for count in {1, len(types)} if kind.startswith("table") else {len(types)}:
            given = [_value(type_, path) for type_ in types[:count]]
            if kind in forms and count < 5 and any(path in value for value in given):
                yield name, forms[kind].format(name, ", ".join(given))


def _reached(connection: duckdb.DuckDBPyConnection, among: set[str] | None = None) -> set[str]:
    """The functions (all, or some) whose answer has the secret."""
    found: set[str] = set()
    for file in FILES:
        for name, query in list(_calls(connection, f".tmp/{file}")):
            if among is not None and name not in among:
                continue
            try:
                answer = connection.execute(query).fetchall()
            except (duckdb.Error, RuntimeError):
                continue
            if SECRET in str(answer):
                found.add(name)
    return found


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def test_no_function_of_duckdb_reads_or_writes_the_folder_of_spilled_rows(store: Store, here: Path) -> None:
    write(store, rollout("a"))
    with duckdb.connect() as free:
        assert _reached(free, READING) == READING  # else the search would find nothing anywhere
    before = _tree(here)
    with connect(store) as connection:
        lock(connection)
        assert _reached(connection) == set()
    assert _tree(here) == before


@pytest.mark.parametrize("folder", [".tmp", "."])
@pytest.mark.parametrize(
    "statement",
    [
        "COPY (SELECT 1 AS a) TO '{}/out.csv'",
        "COPY (SELECT 1 AS a) TO '{}/out.parquet'",
        "COPY (SELECT 1 AS a) TO '{}/out' (FORMAT csv, PER_THREAD_OUTPUT)",
        "EXPORT DATABASE '{}'",
        "IMPORT DATABASE '{}'",
        "ATTACH '{}/evil.db' AS evil",
        "ATTACH '{}/s.db' AS evil",
        "CREATE TABLE t AS SELECT '' AS a; COPY t FROM '{}/s.csv'",
        "FROM '{}/s.csv'",
        "FROM query('FROM read_text(''{}/s.csv'')')",
        "SET VARIABLE f = '{}/s.csv'; FROM read_text(getvariable('f'))",
        "PREPARE q AS SELECT * FROM read_text($1); EXECUTE q('{}/s.csv')",
        "CREATE MACRO m(f) AS TABLE SELECT * FROM read_text(f); FROM m('{}/s.csv')",
        "SET temp_directory = '{}'",
        "RESET temp_directory",
        "SET allowed_directories = ['{}']",
        "SET secret_directory = '{}'",
        "CREATE PERSISTENT SECRET s IN local_file (TYPE http, BEARER_TOKEN 'x')",
        "PRAGMA profiling_output = '{}/profile.json'",
        "CALL enable_logging(storage = 'file', storage_config = {{'path': '{}'}})",
    ],
)
def test_no_statement_reads_or_writes_it_either(statement: str, folder: str, store: Store, here: Path) -> None:
    for file in (here / ".tmp").iterdir():
        (here / file.name).write_bytes(file.read_bytes())
    before = _tree(here)
    with connect(store) as connection:
        lock(connection)
        with pytest.raises(duckdb.Error):
            connection.execute(statement.format(folder)).fetchall()
    assert _tree(here) == before


def test_folders_that_a_connection_was_allowed_before_are_shut_off_too(store: Store, here: Path) -> None:
    with connect(store) as connection:
        connection.execute("SET allowed_directories = ['.tmp']; SET allowed_paths = ['.tmp/s.csv']")
        lock(connection)
        with pytest.raises(duckdb.PermissionException):
            connection.execute("FROM read_text('.tmp/s.csv')")


def test_a_sort_that_memory_does_not_hold_says_so_and_writes_nothing(store: Store, here: Path) -> None:
    before = _tree(here)
    with connect(store) as connection:
        connection.execute("SET threads = 1; SET memory_limit = '64MB'")
        lock(connection)
        assert connection.execute("SELECT i FROM range(500_000) t(i) ORDER BY hash(i) LIMIT 1 OFFSET 9").fetchone()
        with pytest.raises(duckdb.OutOfMemoryException, match="memory"):
            connection.execute(
                "CREATE TABLE t AS SELECT i, repeat('x', 99) || i FROM range(3_000_000) t(i) ORDER BY hash(i)"
            )
        assert connection.execute("SELECT count(*) FROM rollouts").fetchone() == (0,)
    assert _tree(here) == before


def test_a_connection_that_has_spilled_is_not_taken_for_a_locked_one(store: Store, here: Path) -> None:
    with connect(store) as connection:
        connection.execute("SET temp_directory = 'spill'; SET threads = 1; SET memory_limit = '64MB'")
        connection.execute("CREATE TABLE t AS SELECT i, repeat('x', 99) || hash(i) AS v FROM range(1_000_000) t(i)")
        assert any((here / "spill").iterdir())
        with pytest.raises(ValueError, match="lock: wanted a connection that can still be shut off"):
            lock(connection)


def test_a_connection_is_locked_where_the_working_folder_is_gone(store: Store, here: Path) -> None:
    gone = here / "gone"
    gone.mkdir()
    with contextlib.chdir(gone):
        gone.rmdir()
        with connect(store) as connection:
            lock(connection)
            assert connection.execute("SELECT count(*) FROM rollouts").fetchone() == (0,)
