"""An export is read by pyarrow, DuckDB, Polars and datasets as it is, and holds what the store holds."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from rollstore.errors import StoreError, WriteError
from rollstore.exchange import files
from rollstore.exchange.parquet import ABOUT, export
from rollstore.readers.duckdb import connect
from rollstore.schema import TABLES, Rollout, to_table
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.golden import content
from tests.readers.samples import group, rollout, rows, settled, write
from tests.store.test_versions import newer, put
from tests.strategies import rollout_lists


def glob(folder: Path, table: str) -> str:
    return f"{folder / table}/**/*.parquet"


def by_pyarrow(folder: Path, table: str) -> pa.Table:
    return pq.read_table(folder / table, page_checksum_verification=True)


def by_duckdb(folder: Path, table: str) -> pa.Table:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        return connection.sql(f"SELECT * FROM '{glob(folder, table)}'").to_arrow_table()


def by_polars(folder: Path, table: str) -> pa.Table:
    return pl.read_parquet(folder / table).to_arrow()


def by_datasets(folder: Path, table: str) -> pa.Table:
    with tempfile.TemporaryDirectory() as cache:
        read = datasets.load_dataset(
            "parquet", data_files=glob(folder, table), split="train", cache_dir=cache, keep_in_memory=True
        )
        return read.data.table


READERS = {"pyarrow": by_pyarrow, "duckdb": by_duckdb, "polars": by_polars, "datasets": by_datasets}


@pytest.fixture(autouse=True)
def _quiet_datasets() -> None:
    datasets.disable_progress_bars()


def own(table: pa.Table) -> pa.Table:
    """Without the partition that some readers add."""
    return table.drop_columns([name for name in ("run",) if name in table.column_names])


def filled(store: Store) -> Store:
    """Every table and column, several runs and one rollout without, parts and a journal's rows."""
    for part in content.rollouts():
        write(store, *part, run=None)  # pyright: ignore[reportArgumentType]
    for table, data in content.others().items():
        store.append(table, data)
    return store


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_gets_every_value_of_every_table(reader: str, store: Store, tmp_path: Path) -> None:
    filled(store)
    with store.writer() as writer:
        writer.append(content.dead())
        writer.flush()  # still in a journal
        exported = export(store, tmp_path / "out")
    for table in TABLES:
        wanted = store.scan(table).read_all()
        if table == "rollouts":
            wanted = wanted.filter(pc.invert(pc.equal(wanted["rollout_id"], "said twice")))
        found = own(READERS[reader](tmp_path / "out", table))
        if table == "rollouts":
            said = pc.equal(found["rollout_id"], "said twice")
            assert pc.sum(said).as_py() == 1  # equal rows are one row
            found = found.filter(pc.invert(said))
        assert rows(found) == rows(wanted), table
        assert found.num_rows > 0
        assert exported.tables[table].rows == found.num_rows + (table == "rollouts")


@settings(max_examples=5, deadline=None)
@given(made=rollout_lists(min_size=1, max_size=3))
def test_any_rollouts_come_back_bit_for_bit(made: list[Rollout]) -> None:
    made = [settled(record) for record in made]
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "store", create=True)
        write(store, *made, run=None)  # pyright: ignore[reportArgumentType]
        export(store, Path(folder) / "out", tables=["rollouts"])
        wanted = rows(to_table(made))
        for read in (by_pyarrow, by_polars):
            assert rows(own(read(Path(folder) / "out", "rollouts"))) == wanted


def test_integers_times_and_types_are_the_stores_own(store: Store, tmp_path: Path) -> None:
    filled(store)
    export(store, tmp_path / "out")
    found, held = by_pyarrow(tmp_path / "out", "rollouts"), store.scan("rollouts").schema
    for field in held:
        if not pa.types.is_map(field.type) and not pa.types.is_nested(field.type):
            assert found.schema.field(field.name).type == field.type, field.name
    assert found.schema.field("metadata").type == pa.list_(
        pa.field("element", pa.struct([("key", pa.string()), ("value", pa.string())]))
    )
    full = f"FROM '{glob(tmp_path / 'out', 'rollouts')}' WHERE rollout_id = 'full'"
    for zone in ("Europe/Berlin", "America/Los_Angeles"):
        with duckdb.connect() as connection:
            connection.execute(f"SET TimeZone = '{zone}'")
            row = connection.sql(
                f"SELECT replay_key, samplers[1].seed, step, x_count, epoch_us(started_at), typeof(replay_key) {full}"
            ).fetchall()
        assert row == [(2**64 - 1, 2**64 - 1, 2**53 + 1, 2**53 + 1, 1774747800000000, "UBIGINT")]


# Layout.


def test_a_run_is_a_folder_and_stays_a_column(store: Store, tmp_path: Path) -> None:
    runs = ["math-7b", "a/b=c %é", "2026-01-02", "007", None]
    for number, run in enumerate(runs):
        write(store, rollout(f"r{number}", run_id=run), run=None)  # pyright: ignore[reportArgumentType]
    export(store, tmp_path / "out", tables=["rollouts"])
    folders = sorted(path.name for path in (tmp_path / "out" / "rollouts").iterdir())
    assert folders == sorted(
        ["run=math-7b", "run=a%2Fb%3Dc%20%25%C3%A9", "run=2026-01-02", "run=007", "run=__HIVE_DEFAULT_PARTITION__"]
    )
    for name, read in READERS.items():
        found = read(tmp_path / "out", "rollouts")
        assert sorted(map(str, found["run_id"].to_pylist())) == sorted(map(str, runs)), name
        if name != "datasets":
            assert sorted(map(str, found["run"].to_pylist())) == sorted(map(str, runs)), name


def test_a_run_named_as_a_split_leaves_no_other_run_out(store: Store, tmp_path: Path) -> None:
    runs = ["math-test", "math-train", "plain", "eval_1", "dev", "1-validation", "training.2"]
    for run in runs:
        write(store, rollout(run, run_id=run), run=run)
    export(store, tmp_path / "out", tables=["rollouts"])
    read = datasets.load_dataset("parquet", data_dir=str(tmp_path / "out" / "rollouts"), cache_dir=str(tmp_path / "hf"))
    assert {name: sorted(split["rollout_id"]) for name, split in read.items()} == {"train": sorted(runs)}
    for read_by in (by_pyarrow, by_duckdb, by_polars):
        assert sorted(read_by(tmp_path / "out", "rollouts")["run"].to_pylist()) == sorted(runs)


def test_without_one_named_run_there_is_no_partition_to_guess_a_type_for(store: Store, tmp_path: Path) -> None:
    write(store, rollout("a", run_id=None), run=None)  # pyright: ignore[reportArgumentType]
    export(store, tmp_path / "out", tables=["rollouts"])
    assert [path.name for path in (tmp_path / "out" / "rollouts").iterdir()] == ["part-00000.parquet"]
    for read in READERS.values():
        assert read(tmp_path / "out", "rollouts")["rollout_id"].to_pylist() == ["a"]


def test_an_empty_store_exports_typed_tables_of_no_rows(store: Store, tmp_path: Path) -> None:
    export(store, tmp_path / "out", tables=[*TABLES, "actions", "tokens"])
    for table in (*TABLES, "actions", "tokens"):
        found = [read(tmp_path / "out", table) for name, read in READERS.items() if name != "datasets"]
        # datasets makes no split of no rows, but streams them.
        streamed = datasets.load_dataset(
            "parquet", data_files=glob(tmp_path / "out", table), split="train", streaming=True
        )
        assert [one.num_rows for one in found] == [0, 0, 0]
        assert list(streamed) == []
        if table in TABLES:
            names = store.scan(table).schema.names
            assert all(one.column_names == names for one in found)


def test_one_physical_schema_a_tree_whatever_the_runs_recorded(store: Store, tmp_path: Path) -> None:
    write(store, rollout("a", run_id="one", extra={"x_first": 1}), run="one")
    write(store, rollout("b", run_id="two", reward=1.0, metadata={"k": "v"}), run="two")
    export(store, tmp_path / "out", tables=["rollouts"])
    schemas = [pq.read_schema(path) for path in (tmp_path / "out" / "rollouts").rglob("*.parquet")]
    assert len(schemas) == 2
    assert schemas[0].equals(schemas[1], check_metadata=True)
    assert schemas[0].field("rollout_id").metadata[b"PARQUET:field_id"] == b"1"


def test_groups_stand_together_and_segments_in_order_however_they_were_written(store: Store, tmp_path: Path) -> None:
    first, second = group("g1", [0.0, 1.0, 2.0]), group("g2", [0.0, 1.0])
    late = rollout("g1-0", segment=1, group_id="g1", ending="truncated")
    write(store, first[1], second[0], rollout("alone"))
    write(store, late, second[1], first[0], rollout("alone too"))
    write(store, first[2])
    export(store, tmp_path / "out", tables=["rollouts"])
    files_ = sorted((tmp_path / "out" / "rollouts").rglob("*.parquet"))
    found = [pq.ParquetFile(path).read(["rollout_id", "segment"]).to_pylist() for path in files_]
    order = [(row["rollout_id"], row["segment"]) for row in found[0]]
    where = {key: n for n, key in enumerate(order)}
    assert {n for key, n in where.items() if key[0].startswith("g1")} in [set(range(s, s + 4)) for s in range(5)]
    assert abs(where["g2-0", 0] - where["g2-1", 0]) == 1
    assert where["g1-0", 1] == where["g1-0", 0] + 1
    assert len(order) == 8


def test_the_flat_tables_have_a_row_an_action_and_a_row_a_token(store: Store, tmp_path: Path) -> None:
    for run in ("one", "two"):
        write(store, *[rollout(f"{run}-{n}", run_id=run) for n in range(3)], run=run)
    exported = export(store, tmp_path / "out", tables=["actions", "tokens"])
    with connect(store) as connection:
        for table in ("actions", "tokens"):
            wanted = connection.sql(f"SELECT * FROM {table} ORDER BY rollout_id, position").fetchall()
            found = duckdb.sql(f"SELECT * EXCLUDE (run) FROM '{glob(tmp_path / 'out', table)}' "
                               "ORDER BY rollout_id, position").fetchall()  # fmt: skip
            assert found == wanted
            assert exported.tables[table].rows == len(wanted) > 20
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["actions", ABOUT, "tokens"]
    assert by_datasets(tmp_path / "out", "actions").num_rows == exported.tables["actions"].rows


def test_the_counts_stand_beside_the_tables(store: Store, tmp_path: Path) -> None:
    filled(store)
    exported = export(store, tmp_path / "out")
    about = json.loads((tmp_path / "out" / ABOUT).read_text(encoding="ascii"))
    assert (about["store_id"], about["schema"], about["commit"]) == (store.store_id, "1.0", 0)
    for table, written in exported.tables.items():
        paths = [*(tmp_path / "out" / table).rglob("*.parquet")]
        assert about["tables"][table] == {
            "rows": sum(pq.read_metadata(path).num_rows for path in paths), "files": len(paths),
            "bytes": sum(path.stat().st_size for path in paths),
        }  # fmt: skip
        assert written.files == len(paths)


# What readers get wrong unless the files are written so.


def column_chunks(folder: Path) -> list[Any]:
    found = []
    for path in folder.rglob("*.parquet"):
        metadata = pq.read_metadata(path)
        for group_ in range(metadata.num_row_groups):
            found += [metadata.row_group(group_).column(n) for n in range(metadata.num_columns)]
    return found


def test_floats_have_no_statistics_and_the_rest_has_and_encodings_are_as_asked(store: Store, tmp_path: Path) -> None:
    filled(store)
    export(store, tmp_path / "out")
    chunks = column_chunks(tmp_path / "out")
    floats = [chunk for chunk in chunks if chunk.physical_type in ("FLOAT", "DOUBLE")]
    assert {"logprobs.list.element", "reward", "x_ratio", "samplers.list.element.temperature"} <= {
        chunk.path_in_schema for chunk in floats
    }
    assert not any(chunk.is_stats_set for chunk in floats)
    assert all("BYTE_STREAM_SPLIT" in chunk.encodings for chunk in floats)
    assert all(chunk.is_stats_set for chunk in chunks if chunk.path_in_schema in ("run_id", "step", "rollout_id"))
    ids = [chunk for chunk in chunks if chunk.path_in_schema == "tokens.list.element"]
    assert ids
    assert not any(chunk.has_dictionary_page for chunk in ids)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "encodings": ({"column_encoding": {"logprobs": "BYTE_STREAM_SPLIT"}}, "BYTE_STREAM_SPLIT"),  # no such path
    "statistics": ({"write_statistics": True}, "no statistics of floats"),
    "compression": ({"compression": "snappy"}, "compressed by zstd"),
    "dictionaries": ({"use_dictionary": True, "column_encoding": None}, "BYTE_STREAM_SPLIT|no dictionary of token ids"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_is_not_written_as_asked_is_never_published(
    what: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(store)
    change, wanted = WRONG[what]
    made = files.Form.__init__

    def wrongly(form: files.Form, schema: pa.Schema) -> None:
        made(form, schema)
        form.options.update(change)

    monkeypatch.setattr(files.Form, "__init__", wrongly)
    with pytest.raises(WriteError, match=rf"part-00000\.part: [\w.]+: wanted ({wanted})"):
        export(store, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_rows_with_a_nan_are_found_by_sql_over_the_export(store: Store, tmp_path: Path) -> None:
    values = [0.25, math.nan, None, 0.25]
    write(store, *[rollout(f"r{n}", extra={"x_value": v, "x_list": [v, 1.0]}) for n, v in enumerate(values)])
    export(store, tmp_path / "out", tables=["rollouts"])
    source = glob(tmp_path / "out", "rollouts")
    wanted = {
        "isnan(x_value)": [1], "x_value > 0.1": [0, 1, 3], "x_value <> 0.25": [1], "x_value <= 0.25": [0, 3],
        "len(list_filter(x_list, lambda v: isnan(v))) > 0": [1],
    }  # fmt: skip
    for condition, ids in wanted.items():
        found = duckdb.sql(f"SELECT rollout_id FROM '{source}' WHERE {condition} ORDER BY 1").fetchall()
        assert found == [(f"r{n}",) for n in ids], condition


def test_a_flipped_bit_is_found_by_a_reader_that_looks_at_page_checksums(store: Store, tmp_path: Path) -> None:
    filled(store)
    export(store, tmp_path / "out", tables=["rollouts"])
    path = next(path for path in (tmp_path / "out").rglob("*.parquet") if "math" in str(path))
    metadata = pq.read_metadata(path)
    chunk = next(c for c in column_chunks(path.parent) if c.path_in_schema == "tokens.list.element")
    assert metadata.num_row_groups == 1
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(OSError, match=r"(?i)crc|checksum"):
        pq.read_table(path, page_checksum_verification=True, partitioning=None)


def test_row_groups_are_bounded_by_bytes_and_by_items_and_files_by_bytes(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, *[rollout(f"r{n}", tokens=1000, messages="m" * 5000) for n in range(20)], rollout("huge", tokens=9000))
    tables = {}
    for name, limits in {
        "bytes": {"ROW_GROUP_BYTES": 50_000}, "items": {"ROW_GROUP_ITEMS": 3000}, "files": {"FILE_BYTES": 1},
    }.items():  # fmt: skip
        with monkeypatch.context() as patch:
            for limit, value in {**limits, **({"ROW_GROUP_BYTES": 50_000} if name == "files" else {})}.items():
                patch.setattr(files, limit, value)
            export(store, tmp_path / name, tables=["rollouts"])
        tables[name] = rows(own(by_pyarrow(tmp_path / name, "rollouts")))
        groups = [
            pq.ParquetFile(path).read_row_group(n)
            for path in sorted((tmp_path / name).rglob("*.parquet"))
            for n in range(pq.read_metadata(path).num_row_groups)
        ]
        assert len(groups) > 4
        for one in groups:
            items = len(pc.list_flatten(one["tokens"]))
            assert one.num_rows == 1 or (items <= 3000 if name == "items" else one.num_rows <= 5)
    assert len([*(tmp_path / "files").rglob("*.parquet")]) > 4
    assert tables["bytes"] == tables["items"] == tables["files"] == rows(store.scan("rollouts").read_all())


# Nothing is overwritten, and nothing half is left.


def test_a_folder_with_anything_in_it_is_refused_and_left_alone(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export(store, out)  # an empty one is fine
    before = sorted(path for path in out.rglob("*"))
    with pytest.raises(
        StoreError, match=r"wanted a new or empty folder, found evaluations in it; nothing is overwritten"
    ):
        export(store, out)
    assert sorted(path for path in out.rglob("*")) == before
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="wanted a new or empty folder, found a file"):
        export(store, tmp_path / "file")
    with pytest.raises(StoreError, match="wanted a folder outside the store"):
        export(store, Path(store.path) / "out")
    with pytest.raises(StoreError, match="wanted a local folder, got an address"):
        export(store, "s3://bucket/out")
    with pytest.raises(ValueError, match=r"tables: wanted some of rollouts, scores, .* got 'rollout'"):
        export(store, tmp_path / "other", tables=["rollout"])


def test_an_export_that_fails_midway_leaves_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(store)
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        calls: list[int] = []

        def failing(fd: int, calls: list[int] = calls, error: BaseException = error) -> None:
            calls.append(fd)
            if len(calls) == 4:
                raise error

        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", failing)
            with pytest.raises((WriteError, KeyboardInterrupt)):
                export(store, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
    export(store, tmp_path / "out")


def test_a_killed_export_leaves_nothing_under_its_name_and_no_file_that_a_glob_would_read(
    store: Store, tmp_path: Path
) -> None:
    filled(store)
    code = (
        "import os, signal, rollstore; from rollstore.exchange import parquet; "
        "parquet._about = lambda *_: os.kill(os.getpid(), signal.SIGKILL); "
        f"parquet.export(rollstore.open({store.path!r}), {str(tmp_path / 'out')!r})"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL
    left = sorted(path.name for path in tmp_path.iterdir())
    assert (len(left), left[1]) == (2, "store")
    assert left[0].startswith("out.")
    assert not [*tmp_path.rglob("*.parquet")]
    assert [*tmp_path.rglob("part-00000.part")]
    export(store, tmp_path / "out")
    assert by_pyarrow(tmp_path / "out", "rollouts").num_rows == 9


def test_rows_with_one_id_and_two_contents_are_all_written_and_said(store: Store, tmp_path: Path) -> None:
    write(store, rollout("a"), rollout("b"))
    write(store, rollout("a", tokens=9), rollout("b"))
    with pytest.warns(UserWarning, match="stored with different contents, every row is written: 'a' segment 0"):
        export(store, tmp_path / "out", tables=["rollouts"])
    assert sorted(by_pyarrow(tmp_path / "out", "rollouts")["rollout_id"].to_pylist()) == ["a", "a", "b"]


def test_a_run_that_no_folder_can_be_named_after_is_refused(store: Store, tmp_path: Path) -> None:
    write(store, rollout("a", run_id="x" * 300), run="x" * 300)
    with pytest.raises(StoreError, match=r"run 'xxx.*at most 255 bytes"):
        export(store, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_of_a_newer_minor_schema_version_keep_their_columns(store: Store, tmp_path: Path) -> None:
    write(store, rollout("known"))
    put(store.filesystem, newer("new"), "1.7")
    export(store, tmp_path / "out", tables=["rollouts"])
    found = {row["rollout_id"]: row for row in by_pyarrow(tmp_path / "out", "rollouts").to_pylist()}
    assert (found["new"]["brand_new"], found["new"]["spans"][1]["mood"]) == (2**53 + 1, "keen")
    assert found["known"]["brand_new"] is None
