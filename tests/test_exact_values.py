"""Numbers, times, texts and absent values come out of every path as they went in."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rollstore.cli import app
from rollstore.errors import SchemaError
from rollstore.exchange.parquet import export
from rollstore.readers.duckdb import connect
from rollstore.readers.polars import scan
from rollstore.readers.torch import RolloutLoader
from rollstore.schema import Rollout
from rollstore.store.store import Store
from rollstore.store.store import open as open_store

BASE: dict[str, Any] = {"tokens": [1, 2, 3], "action_mask": [False, True, True]}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


def rollout(name: str, **fields: Any) -> Rollout:
    return Rollout(rollout_id=name, **{**BASE, **fields})


def append(store: Store, *rollouts: Rollout) -> None:
    with store.writer() as writer:
        writer.append(list(rollouts))


def column(store: Store, name: str) -> list[Any]:
    return store.scan("rollouts", ["rollout_id", name]).read_all().sort_by("rollout_id")[name].to_pylist()


def refused(store: Store, data: Any) -> str:
    with store.writer() as writer, pytest.raises(SchemaError) as error:
        writer.append(data)
    return str(error.value)


# Types are declared, not guessed from what came first.

HEADS = [[], [], [-0.75, -1.5]]
REWARDS = [None, None, 0.5]


@pytest.mark.parametrize("first", ["the empty ones first", "the full one first"])
@pytest.mark.parametrize("apart", ["one part", "two parts"])
def test_batches_without_values_have_the_types_of_batches_with_values(first: str, apart: str, store: Store) -> None:
    def table(names: range) -> pa.Table:
        """As a caller would make it without naming types: an all-empty column is a list of nulls to Arrow."""
        rows = [
            {
                "rollout_id": f"r{n}", "segment": 0, "tokens": [1, 2], "action_mask": [False, n == 2],
                "head_logprobs": HEADS[n], "head_counts": [2] if n == 2 else [], "reward": REWARDS[n],
                "head_tokens": [4, 5] if n == 2 else [],
            }
            for n in names
        ]  # fmt: skip
        return pa.Table.from_pylist(rows)

    batches = [table(range(2)), table(range(2, 3))]
    assert pa.types.is_null(batches[0].schema.field("reward").type)
    batches = batches if first == "the empty ones first" else batches[::-1]
    if apart == "two parts":
        for batch in batches:
            store.append("rollouts", batch)
    else:
        with store.writer() as writer:
            for batch in batches:
                writer.append(batch)
    for _ in range(2):
        assert column(store, "head_logprobs") == HEADS
        assert column(store, "reward") == REWARDS
        schema = store.scan("rollouts").schema
        assert (schema.field("head_logprobs").type, schema.field("reward").type) == (
            pa.list_(pa.float32()),
            pa.float64(),
        )
        store.compact()


def test_a_field_that_first_appears_in_a_later_row_is_refused_by_name_or_kept_as_the_callers_own(store: Store) -> None:
    append(store, rollout("r0", extra={"x_a": 1}), rollout("r1", extra={"x_a": 2, "x_seed_cur": 9}))
    assert column(store, "x_seed_cur") == [None, 9]
    message = refused(store, [rollout("r2", extra={"seed_cur": 9})])
    assert message.startswith("seed_cur: unknown_column:")
    row = {"rollout_id": "r3", "segment": 0, **BASE}
    names = pa.schema([("rollout_id", pa.string()), ("segment", pa.int32()), ("tokens", pa.list_(pa.int32())),
                       ("action_mask", pa.list_(pa.bool_())), ("seed_cur", pa.int64())])  # fmt: skip
    assert "seed_cur: unknown_column:" in refused(store, pa.Table.from_pylist([row, {**row, "seed_cur": 9}], names))


def test_a_struct_without_fields_is_refused_since_parquet_has_none(store: Store) -> None:
    for value in ({}, [{}], {"a": {}}):
        assert "a struct without fields" in refused(store, rollout("a", extra={"x_a": value}))


def test_routing_of_some_tokens_is_not_filled_up_with_expert_nought(store: Store) -> None:
    experts = np.array([3, 0, 1, 2, 7, 5], np.uint16)
    routed = {"routed_experts": experts, "routed_start": 0, "routed_count": 3, "routed_layers": 1, "routed_k": 2}
    append(store, rollout("r", tokens=[1, 2, 3, 4, 5], action_mask=[False] * 5, **routed), rollout("s"))
    assert column(store, "routed_experts") == [experts.tolist(), None]
    assert column(store, "routed_count") == [3, None]


def test_wider_integers_are_taken_as_far_as_they_fit_and_refused_by_row_beyond(store: Store) -> None:
    store.append("rollouts", _wide([5, 2**31 - 1]))
    assert column(store, "tokens") == [[5, 2**31 - 1]]
    message = refused(store, _wide([5, 2**31]))
    assert message == "tokens: out_of_range: row 0 has 2147483648, wanted int32: -2147483648 to 2147483647"
    append(store, rollout("x", extra={"x_n": 1}))
    other = _wide([5, 6]).append_column("x_n", pa.array([1], pa.int32()))
    assert "x_n: wrong_type: int32, wanted int64, its type since its first use" in refused(store, other)


def _wide(tokens: list[int]) -> pa.Table:
    return pa.table({"rollout_id": ["w"], "segment": [0], "tokens": pa.array([tokens], pa.list_(pa.int64())),
                     "action_mask": [[False, False]]})  # fmt: skip


# Integers past 2^53.

SEEDS = [9007199254740993, None, 9223372036854775807]
KEY = 18446744073709551615


def seeded() -> list[Rollout]:
    keyed = {"replay_key": KEY, "replay_sample": 0, "noise": "gumbel-philox4x32/1"}
    return [rollout(f"r{n}", step=seed, extra={"x_seed": seed, "x_some": n / 2}, run_id=f"run {n}", **keyed)
            for n, seed in enumerate(SEEDS)]  # fmt: skip


@pytest.fixture
def seeds(store: Store) -> Store:
    append(store, *seeded())
    table = store.scan("rollouts").read_all().slice(0, 1).select(["rollout_id", "segment", "tokens", "action_mask"])
    wide = pa.array([KEY], pa.uint64())
    store.append("rollouts", table.set_column(0, "rollout_id", [["u"]]).append_column("x_wide", wide))
    return store


def test_integers_are_exact_through_arrow_duckdb_polars_and_get(seeds: Store) -> None:
    for name in ("step", "x_seed"):
        assert column(seeds, name) == [*SEEDS, None]
        with connect(seeds) as connection:
            query = f"SELECT {name} FROM rollouts ORDER BY rollout_id"
            assert connection.sql(query).fetchall() == [*((seed,) for seed in SEEDS), (None,)]
            frame = connection.sql(query).df()
            assert [None if pd.isna(v) else int(v) for v in frame[name]] == [*SEEDS, None]
        assert scan(seeds).sort("rollout_id").collect()[name].to_list() == [*SEEDS, None]
    assert column(seeds, "replay_key") == [KEY] * 3 + [None]
    assert column(seeds, "x_wide") == [None] * 3 + [KEY]
    for number, seed in enumerate(SEEDS):
        (read,) = seeds.get(f"r{number}")
        assert (read.step, read.replay_key, (read.extra or {}).get("x_seed")) == (seed, KEY, seed)


def test_integers_are_exact_in_pandas_where_its_nullable_arrow_types_are_asked_for(seeds: Store) -> None:
    table = seeds.scan("rollouts", ["rollout_id", "step", "x_wide"]).read_all().sort_by("rollout_id")
    frame = table.to_pandas(types_mapper=pd.ArrowDtype)
    assert [None if pd.isna(v) else int(v) for v in frame["step"]] == [*SEEDS, None]
    assert [None if pd.isna(v) else int(v) for v in frame["x_wide"]] == [None] * 3 + [KEY]


def test_integers_are_exact_through_the_parquet_export(seeds: Store, tmp_path: Path) -> None:
    export(seeds, tmp_path / "out", tables=["rollouts"])
    source = f"'{tmp_path / 'out' / 'rollouts'}/**/*.parquet'"
    found = duckdb.sql(f"SELECT step, x_seed, replay_key, x_wide FROM {source} ORDER BY rollout_id").fetchall()
    assert found == [(s, s, KEY, None) for s in SEEDS] + [(None, None, None, KEY)]
    wanted = ["rollout_id", "step", "x_wide"]
    table = pq.read_table(tmp_path / "out" / "rollouts", columns=wanted).sort_by("rollout_id")
    assert (table["step"].to_pylist(), table["x_wide"].to_pylist()) == ([*SEEDS, None], [None] * 3 + [KEY])
    frame = pl.read_parquet(tmp_path / "out" / "rollouts").sort("rollout_id")
    assert (frame["step"].to_list(), frame["x_wide"].to_list()) == ([*SEEDS, None], [None] * 3 + [KEY])


def strictly(text: str) -> Any:
    """As a strict parser of JSON reads it: NaN and Infinity are no JSON, and a key stands once."""

    def no(word: str) -> None:
        raise ValueError(word)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({name for name, _ in pairs}) == len(pairs)
        return dict(pairs)

    text.encode("ascii")
    return json.loads(text, parse_constant=no, object_pairs_hook=once)


def test_integers_are_exact_in_every_json_document_and_back(seeds: Store) -> None:
    def run(*arguments: str) -> Any:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0, result.stderr
        return strictly(result.stdout)

    for number, seed in enumerate(SEEDS):
        (segment,) = run("show", seeds.path, f"r{number}", "--json")["segments"]
        assert (segment["step"], segment.get("x_seed"), segment["replay_key"]) == (seed, seed, KEY)
    rows = run("sql", seeds.path, "SELECT step, replay_key, x_some FROM rollouts ORDER BY rollout_id", "--json")
    assert [row["step"] for row in rows] == [*SEEDS, None]
    assert rows[0]["replay_key"] == KEY


def test_an_integer_that_fits_no_column_is_refused_with_the_range(store: Store) -> None:
    said = refused(store, rollout("a", replay_key=2**64, replay_sample=0, noise="n"))
    assert "replay_key: out_of_range: row 0 has 18446744073709551616, wanted uint64: 0 to 18446744073709551615" in said
    said = refused(store, rollout("a", replay_key=-1, replay_sample=0, noise="n"))
    assert "replay_key: out_of_range: row 0 has -1" in said
    said = refused(store, [rollout("a"), rollout("b", extra={"x_seed": KEY})])
    assert said == (
        f"x_seed: out_of_range: row 1 has {KEY}, wanted int64: -9223372036854775808 to 9223372036854775807, "
        "or uint64 in an Arrow table"
    )
    assert "step: wrong_type: row 0 has 3.0" in refused(store, rollout("a", step=3.0))
    assert "x_mix: wrong_type" in refused(
        store, [rollout("a", extra={"x_mix": 2**53 + 1}), rollout("b", extra={"x_mix": 0.5})]
    )


def test_metadata_keeps_numbers_numbers_and_truths_truths(store: Store, tmp_path: Path) -> None:
    given = {"n": np.int64(3), "t": np.bool_(True), "f": np.float32(0.1), "big": SEEDS[2], "huge": KEY, "text": "3"}
    append(store, rollout("a", metadata=given))
    wanted = {"n": 3, "t": True, "f": float(np.float32(0.1)), "big": SEEDS[2], "huge": KEY, "text": "3"}
    read = store.get("a")[0].metadata or {}
    assert read == wanted
    assert [type(value) for value in read.values()] == [int, bool, float, int, int, str]
    shown = strictly(CliRunner().invoke(app, ["show", store.path, "a", "--json"]).stdout)
    assert shown["segments"][0]["metadata"] == wanted
    # Elsewhere every value is text, and the flags say which is JSON.
    export(store, tmp_path / "out", tables=["rollouts"])
    (row,) = pq.read_table(tmp_path / "out" / "rollouts").to_pylist()
    texts = {entry["key"]: entry["value"] for entry in row["metadata"]}
    assert texts == {
        "n": "3",
        "t": "true",
        "f": repr(float(np.float32(0.1))),
        "big": str(SEEDS[2]),
        "huge": str(KEY),
        "text": "3",
    }
    as_json = {flag["index"] for flag in row["flags"] if flag["kind"] == "json_value"}
    assert {name for n, name in enumerate(texts) if n in as_json} == {"n", "t", "f", "big", "huge"}
    assert "metadata: wrong_type" in refused(store, rollout("b", metadata={"n": math.nan}))


# NaN.

VALUES = [0.25, math.nan, None, 0.25]
CONDITIONS = {
    "isnan(x_value)": [1], "x_value > 0.1": [0, 1, 3], "x_value <> 0.25": [1], "x_value <= 0.25": [0, 3],
    "x_value IS NULL": [2], "NOT isnan(x_value)": [0, 3], "x_value >= 'nan'": [1], "x_value BETWEEN 0 AND 1": [0, 3],
    "len(list_filter(x_list, lambda v: isnan(v))) > 0": [1],
    "(SELECT count(*) FROM unnest(x_list) AS t(v) WHERE isnan(v)) > 0": [1],
}  # fmt: skip


def test_nan_is_found_by_sql_over_the_views_and_the_export_as_over_a_table_in_memory(
    store: Store, tmp_path: Path
) -> None:
    append(store, *[rollout(f"r{n}", extra={"x_value": v, "x_list": [v, 0.5]}) for n, v in enumerate(VALUES[:2])])
    append(store, *[rollout(f"r{n}", extra={"x_value": v, "x_list": [v, 0.5]}) for n, v in enumerate(VALUES[2:], 2)])
    export(store, tmp_path / "out", tables=["rollouts"])
    exported = f"'{tmp_path / 'out' / 'rollouts'}/**/*.parquet'"
    with connect(store) as connection:
        connection.execute("CREATE TABLE memory AS SELECT * FROM rollouts")
        for condition, ids in CONDITIONS.items():
            for source in ("memory", "rollouts", exported):
                query = f"SELECT rollout_id FROM {source} WHERE {condition} ORDER BY rollout_id"
                assert connection.sql(query).fetchall() == [(f"r{n}",) for n in ids], (source, condition)
        for source in ("memory", "rollouts", exported):
            (row,) = connection.sql(
                f"SELECT avg(x_value), max(x_value), min(x_value), count(x_value) FROM {source}"
            ).fetchall()
            assert [str(value) for value in row] == ["nan", "nan", "0.25", "3"]
    frame = scan(store).filter(pl.col("x_value").is_nan()).collect()
    assert frame["rollout_id"].to_list() == ["r1"]


def test_a_reward_or_a_score_is_never_nan(store: Store) -> None:
    assert refused(store, rollout("a", reward=math.nan)).startswith("reward: nan: row 0")
    scores = pa.table({"rollout_id": ["a"], "scorer": ["s"], "value": [math.nan]})
    with store.writer(table="scores") as writer, pytest.raises(SchemaError, match="value: nan"):
        writer.append(scores)


# Times.

NIGHT = datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
MICROSECONDS = 1774747800000000
ZONES = ("Europe/Berlin", "America/Los_Angeles")

WRITE = """
import rollstore, sys
from datetime import datetime, UTC
from zoneinfo import ZoneInfo
zone = ZoneInfo(sys.argv[2])
night = datetime(2026, 3, 29, 1, 30, tzinfo=UTC).astimezone(zone)
row = rollstore.Rollout(rollout_id=sys.argv[2], tokens=[1, 2], action_mask=[False, True], started_at=night,
                        extra={"x_at": night.astimezone(UTC)})
with rollstore.open(sys.argv[1]).writer() as writer:
    writer.append(row)
"""

READ = """
import json, rollstore, sys
from rollstore.readers.duckdb import connect
from rollstore.readers.polars import scan
import polars as pl
store = rollstore.open(sys.argv[1])
with connect(store) as connection:
    days = connection.sql("SELECT DISTINCT started_at::date::varchar, x_at::date::varchar FROM rollouts").fetchall()
    micros = connection.sql("SELECT DISTINCT epoch_us(started_at), epoch_us(x_at) FROM rollouts").fetchall()
    zone = str(connection.sql("SELECT started_at FROM rollouts").to_arrow_table().schema.field(0).type)
frame = scan(store).select(pl.col("started_at").dt.date().cast(pl.String), pl.col("x_at").dt.epoch("us")).unique()
got = [str(store.get(name)[0].started_at) for name in ("Europe/Berlin", "America/Los_Angeles")]
print(json.dumps([days, micros, zone, frame.collect().rows(), got]))
"""


def in_both_zones(code: str, store: Store) -> list[str]:
    """What a program prints on machines in either zone."""
    running = [
        subprocess.Popen([sys.executable, "-c", code, store.path, zone], env={**os.environ, "TZ": zone},
                         stdout=subprocess.PIPE, text=True)
        for zone in ZONES
    ]  # fmt: skip
    shown = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    return shown


def test_an_instant_is_the_same_whatever_zone_the_machines_are_in(store: Store, tmp_path: Path) -> None:
    in_both_zones(WRITE, store)
    assert store.scan("rollouts").schema.field("started_at").type == pa.timestamp("us", "UTC")
    assert set(store.scan("rollouts").read_all()["started_at"].cast(pa.int64()).to_pylist()) == {MICROSECONDS}
    for shown in in_both_zones(READ, store):
        assert json.loads(shown) == [
            [["2026-03-29", "2026-03-29"]], [[MICROSECONDS, MICROSECONDS]], "timestamp[us, tz=UTC]",
            [["2026-03-29", MICROSECONDS]], ["2026-03-29 01:30:00+00:00"] * 2,
        ]  # fmt: skip
    export(store, tmp_path / "out", tables=["rollouts"])
    source = f"'{tmp_path / 'out' / 'rollouts'}/**/*.parquet'"
    for zone in ZONES:
        with duckdb.connect() as connection:
            connection.execute(f"SET TimeZone = '{zone}'")
            assert connection.sql(f"SELECT DISTINCT epoch_us(started_at) FROM {source}").fetchall() == [(MICROSECONDS,)]
            day = f"SELECT DISTINCT (started_at AT TIME ZONE 'UTC')::date::varchar FROM {source}"
            assert connection.sql(day).fetchall() == [("2026-03-29",)]
    assert set(pl.read_parquet(tmp_path / "out" / "rollouts")["started_at"].dt.epoch("us")) == {MICROSECONDS}


def test_what_another_session_gives_in_its_own_zone_is_taken_as_the_same_instant(store: Store) -> None:
    append(store, rollout("a", started_at=NIGHT))
    with connect(store) as connection:
        connection.execute("SET TimeZone = 'Europe/Berlin'")
        table = connection.sql(
            "SELECT 'b' AS rollout_id, * EXCLUDE (rollout_id, written_by, written_row) FROM rollouts"
        ).to_arrow_table()
    assert str(table.schema.field("started_at").type) == "timestamp[us, tz=Europe/Berlin]"
    store.append("rollouts", table)
    assert column(store, "started_at") == [NIGHT, NIGHT]
    assert store.scan("rollouts").schema.field("started_at").type == pa.timestamp("us", "UTC")


def test_a_time_without_a_zone_is_refused_on_every_machine(store: Store) -> None:
    naive = datetime(2026, 3, 29, 2, 30)  # in Berlin there is no such hour
    assert "started_at: naive_timestamp: row 0 has" in refused(store, rollout("a", started_at=naive))
    assert "x_at: naive_timestamp" in refused(store, rollout("a", extra={"x_at": naive}))
    zoned = naive.replace(tzinfo=ZoneInfo("Europe/Berlin"))
    append(store, rollout("a", started_at=zoned))
    assert column(store, "started_at") == [NIGHT]


# Texts.


def test_a_lone_surrogate_stops_no_row_and_comes_back(store: Store, tmp_path: Path) -> None:
    text = "ok \ud83d end"
    given = {
        "messages": text,
        "metadata": {"said": text, "from json": json.loads('"\\ud83d"')},
        "extra": {"x_said": text},
    }
    append(store, rollout("a", messages="plain"), rollout("b", **given), rollout("c", messages="nul \x00 and \\"))
    read = store.get("b")[0]
    assert {name: getattr(read, name) for name in given} == given
    assert [store.get(name)[0].messages for name in ("a", "c")] == ["plain", "nul \x00 and \\"]
    flags = column(store, "flags")
    assert {(f["kind"], f["column"]) for f in flags[1]} >= {("text_escaped", "messages"), ("text_escaped", "x_said")}
    assert (flags[0], flags[2]) == (None, None)
    for arguments in (["show", store.path, "b", "--json"], ["show", store.path, "b"], ["ls", store.path]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0
        result.stdout.encode("utf-8")
    shown = strictly(CliRunner().invoke(app, ["show", store.path, "b", "--json"]).stdout)
    assert shown["segments"][0]["messages"] == text
    with connect(store) as connection:
        stored = connection.sql("SELECT messages FROM rollouts ORDER BY rollout_id").fetchall()
    assert stored == [("plain",), ("ok \\ud83d end",), ("nul \x00 and \\",)]
    export(store, tmp_path / "out", tables=["rollouts"])
    found = pq.read_table(tmp_path / "out" / "rollouts").sort_by("rollout_id")["messages"].to_pylist()
    assert found == [row[0] for row in stored]
    assert store.verify() == []


def test_an_id_with_a_lone_surrogate_is_found_again(store: Store) -> None:
    append(store, rollout("id \ud83d"))
    assert store.get("id \ud83d")[0].rollout_id == "id \ud83d"


def test_a_character_split_over_tokens_is_whole_in_their_joined_bytes(store: Store, tmp_path: Path) -> None:
    pieces = (b"", b"\xf0\x9f", b"\x98\x8a")
    append(store, rollout("a", token_bytes=pieces))
    assert store.get("a")[0].token_bytes == pieces
    assert b"".join(column(store, "token_bytes")[0]).decode() == "\U0001f60a"
    assert store.scan("rollouts").schema.field("token_bytes").type == pa.list_(pa.binary())
    assert "\U0001f60a" in CliRunner().invoke(app, ["show", store.path, "a"]).stdout
    export(store, tmp_path / "out", tables=["rollouts"])
    assert pq.read_table(tmp_path / "out" / "rollouts")["token_bytes"].to_pylist() == [list(pieces)]
    assert next(iter(RolloutLoader(store, rollouts_per_batch=1))).tokens.tolist() == BASE["tokens"]
