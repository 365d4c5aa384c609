"""Three questions over a store, beside DuckDB over flat Parquet, nested Parquet and JSON, and Polars.

`version`: mean log-prob and number of actions by weight version. `reward`: mean reward by prompt group. `gap`: mean gap
between the recorded log-probs and a trainer's evaluation of the same rollouts, joined by id. `flat` is a table with a
row an action (and one with a row a rollout), which is the layout that suits `version` and `gap` best; its writer has
numbered the actions. Connections are open and files warm; `connect` is what ours does before the first question, timed
in a fresh process' state.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

import rollstore
from benchmarks import data, peers, place
from benchmarks.contest import OURS, Contestant, Result, fastest, interleaved
from benchmarks.settings import Settings
from rollstore.readers import duckdb as ours_duckdb
from rollstore.readers import polars as ours_polars
from rollstore.schema import from_table

EVALUATION = "e"
BLOCK = 2_000
FLAT, NESTED, JSON = "flat parquet", "nested parquet", "json"
POLARS, POLARS_NESTED = "rollstore, polars", "polars, nested parquet"

_GAP_OF_LISTS = """
SELECT avg(logprob - trainer) FROM (
    SELECT unnest(r.logprobs) AS logprob, unnest(e.logprobs) AS trainer
    FROM {rollouts} r JOIN {evaluations} e ON r.rollout_id = e.rollout_id AND r.segment = e.segment
)"""
_VERSION_OF_LISTS = """
SELECT weight_version, count(*), avg(logprob) FROM (
    SELECT unnest(weight_versions) AS weight_version, unnest(logprobs) AS logprob FROM {rollouts}
) GROUP BY 1 ORDER BY 1"""
_REWARD = "SELECT run_id, step, group_id, avg(reward) FROM {rollouts} GROUP BY ALL ORDER BY step, group_id"

QUESTIONS: dict[str, dict[str, str]] = {
    "version": {
        OURS: "SELECT weight_version, count(*), avg(logprob) FROM actions GROUP BY 1 ORDER BY 1",
        FLAT: "SELECT weight_version, count(*), avg(logprob) FROM actions GROUP BY 1 ORDER BY 1",
        NESTED: _VERSION_OF_LISTS, JSON: _VERSION_OF_LISTS,
    },
    "reward": dict.fromkeys((OURS, FLAT, NESTED, JSON), _REWARD),
    "gap": {
        OURS: _GAP_OF_LISTS,
        FLAT: "SELECT avg(a.logprob - e.logprob) FROM actions a JOIN evaluated e "
        "ON a.rollout_id = e.rollout_id AND a.segment = e.segment AND a.action = e.action",
        NESTED: _GAP_OF_LISTS, JSON: _GAP_OF_LISTS,
    },
}  # fmt: skip


def results(settings: Settings) -> Iterator[Result]:
    for tokens in settings.tokens:
        yield from at(data.count(tokens), f"{tokens / 1e6:g} M tokens", settings.runs)


def at(rollouts: int, size: str, runs: int) -> Iterator[Result]:
    folder = made(rollouts)
    with contextlib.ExitStack() as stack:
        asked = connections(folder, stack)
        for question, texts in QUESTIONS.items():
            answers = {name: _answer(ask, texts[name]) for name, ask in asked.items()}
            if len({str(answer) for answer in answers.values()}) != 1:
                raise ValueError(f"sql: {question}: wanted one answer, got {answers}")
            ways: dict[str, Contestant] = {
                name: partial(lambda ask, text, _: ask(text) and None, ask, texts[name]) for name, ask in asked.items()
            }
            ways |= polars_ways(folder, question)
            times, cpu = interleaved(ways, runs)
            marks = [fastest(FLAT, times=1), fastest(JSON, times=20)]
            yield Result(case=f"sql, {question}", size=size, unit="s", runs=times, marks=marks, details={"cpu": cpu})

    def connecting(_: Path) -> None:
        with ours_duckdb.connect(rollstore.open(folder / OURS)):
            pass

    times, _ = interleaved({OURS: connecting}, runs)
    yield Result(case="sql, connect", size=size, unit="s", runs=times)


def connections(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """What asks each contestant: a text with {rollouts} and {evaluations} in, rows out."""
    store = stack.enter_context(ours_duckdb.connect(rollstore.open(folder / OURS)))
    asked = {OURS: partial(_ask, store, "rollouts", "evaluations")}
    for name, suffix in ((FLAT, "flat.parquet"), (NESTED, "parquet"), (JSON, "jsonl")):
        connection = stack.enter_context(contextlib.closing(duckdb.connect()))
        if name == FLAT:
            for table in ("actions", "evaluated"):
                connection.execute(f"CREATE VIEW {table} AS SELECT * FROM '{folder / table}.{suffix}'")
            files = [f"'{folder / 'scalars.flat.parquet'}'", "evaluated"]
        else:
            files = [f"'{folder / table}.{suffix}'" for table in ("rollouts", "evaluations")]
        asked[name] = partial(_ask, connection, *files)
    return asked


def _ask(connection: duckdb.DuckDBPyConnection, rollouts: str, evaluations: str, text: str) -> list[tuple[Any, ...]]:
    return connection.execute(text.format(rollouts=rollouts, evaluations=evaluations)).fetchall()


def _answer(ask: Any, text: str) -> list[tuple[Any, ...]]:
    """Rows with floats to six digits: sums may be taken in any order."""
    return [tuple(float(f"{v:.6g}") if isinstance(v, float) else v for v in row) for row in ask(text)]


def polars_ways(folder: Path, question: str) -> dict[str, Contestant]:
    store = rollstore.open(folder / OURS)

    def ask(rollouts: pl.LazyFrame, evaluations: pl.LazyFrame) -> None:
        if question == "version":
            lists = rollouts.select("weight_versions", "logprobs").explode("weight_versions", "logprobs")
            lists.group_by("weight_versions").agg(pl.len(), pl.col("logprobs").mean()).collect()
        elif question == "reward":
            rollouts.group_by("run_id", "step", "group_id").agg(pl.col("reward").mean()).collect()
        else:
            joined = rollouts.select("rollout_id", "segment", "logprobs").join(
                evaluations.select("rollout_id", "segment", trainer="logprobs"), on=["rollout_id", "segment"]
            )
            lists = joined.select("logprobs", "trainer").explode("logprobs", "trainer")
            lists.select((pl.col("logprobs") - pl.col("trainer")).mean()).collect()

    def ours(_: Path) -> None:
        ask(ours_polars.scan(store), ours_polars.scan(store, "evaluations"))

    def parquet(_: Path) -> None:
        ask(pl.scan_parquet(folder / "rollouts.parquet"), pl.scan_parquet(folder / "evaluations.parquet"))

    return {POLARS: ours, POLARS_NESTED: parquet}


def made(rollouts: int) -> Path:
    """The rows and an evaluation of each, in every layout, made unless they are there."""
    folder = place.folder() / f"sql-{rollouts}"
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    store = rollstore.open(folder / OURS, create=True)
    rng = np.random.default_rng(0)
    held: dict[str, pq.ParquetWriter] = {}
    encoder = msgspec.json.Encoder()
    with (
        store.writer() as writer, store.writer(table="evaluations") as evaluator, contextlib.ExitStack() as stack,
        (folder / "rollouts.jsonl").open("wb") as lines, (folder / "evaluations.jsonl").open("wb") as evaluation_lines,
    ):  # fmt: skip

        def parquet(name: str, table: pa.Table) -> None:
            if name not in held:
                held[name] = stack.enter_context(pq.ParquetWriter(folder / name, table.schema, compression="zstd"))
            held[name].write_table(table)

        for table in data.tables(rollouts, block=BLOCK):
            evaluations = _evaluations(table, rng)
            writer.append(table)
            evaluator.append(evaluations)
            parquet("rollouts.parquet", table)
            parquet("evaluations.parquet", evaluations)
            lines.write(encoder.encode_lines(list(map(peers.plain, from_table(table)))))
            evaluation_lines.write(encoder.encode_lines(evaluations.to_pylist()))
            scalars = [field.name for field in table.schema if not pa.types.is_list(field.type)]
            parquet("scalars.flat.parquet", table.select(scalars))
            parquet("actions.flat.parquet", _flat(table, ("weight_versions", "weight_version")))
            parquet("evaluated.flat.parquet", _flat(evaluations))
    (folder / "done").touch()
    return folder


def _evaluations(table: pa.Table, rng: np.random.Generator) -> pa.Table:
    logprobs = table["logprobs"].combine_chunks()
    values = logprobs.values.to_numpy() + rng.normal(0, 0.01, len(logprobs.values)).astype(np.float32)
    made = pa.ListArray.from_arrays(logprobs.offsets, pa.array(np.minimum(values, 0), pa.float32()))
    rows = table.select(["run_id", "rollout_id", "segment"])
    rows = rows.append_column("evaluation_id", pa.repeat(pa.scalar(EVALUATION), table.num_rows))
    return rows.append_column("kind", pa.repeat(pa.scalar("behavior"), table.num_rows)).append_column("logprobs", made)


def _flat(table: pa.Table, *more: tuple[str, str]) -> pa.Table:
    """A row an action: the rollout's id and segment, its number, its log-prob."""
    logprobs = table["logprobs"].combine_chunks()
    owner = pa.compute.list_parent_indices(logprobs)
    starts = logprobs.offsets.to_numpy()[owner.to_numpy()]
    columns = {
        "rollout_id": table["rollout_id"].combine_chunks().take(owner),
        "segment": table["segment"].combine_chunks().take(owner),
        "action": pa.array(np.arange(len(owner)) - starts, pa.int32()),
        "logprob": logprobs.flatten(),
    }
    columns |= {new: table[old].combine_chunks().flatten() for old, new in more}
    return pa.table(columns)
