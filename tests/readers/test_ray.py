"""Ray Data over a store: two workers read what DuckDB reads, each byte checked, one snapshot for all."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import ray
import torch

from rollstore.batch import TokenBatch, collate
from rollstore.exchange.parquet import export
from rollstore.readers.duckdb import connect
from rollstore.readers.ray import RollstoreDatasource, dataset
from rollstore.readers.torch import COLUMNS, RolloutLoader
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.readers.samples import rollout, rows, write

pytestmark = [
    pytest.mark.ray,
    # Ray's own files, sockets and deprecations: it closes them when the interpreter ends.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
]


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
        object_store_memory=100 << 20, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def some(first: int, count: int, **fields: Any) -> list[Any]:
    return [
        rollout(f"r{n:03}", weight_versions=[n % 3, n % 3, 7, 2**53 + 1], metadata={"n": n}, replay_key=2**64 - 1 - n,
                replay_sample=0, noise="gumbel-philox4x32/1", extra={"x_ratio": [0.5, math.nan, None][n % 3]}, **fields)
        for n in range(first, first + count)
    ]  # fmt: skip


def of_batch(batch: TokenBatch) -> pa.Table:
    """A row each: its tokens, and what its log-probs come to."""
    sums = torch.zeros(batch.rows, dtype=torch.float64).index_add(0, batch.sequence, batch.behavior_logprobs.double())
    tokens = [row.tolist() for row in batch.tokens.split(batch.cu_seqlens.diff().tolist())]
    return pa.table({"rollout_id": batch.rollout_ids, "tokens": tokens, "logprobs": sums.tolist()})


def together(data: Any) -> pa.Table:
    """All rows of a Ray dataset, exactly as they came."""
    blocks = [batch for batch in data.iter_batches(batch_format="pyarrow", batch_size=None) if batch.num_columns]
    return pa.concat_tables(blocks)


@pytest.mark.usefixtures("_cluster")
def test_two_workers_give_duckdbs_answers_over_parts_journals_and_rows_said_twice(store: Store) -> None:
    for first in (0, 10, 20, 30):
        write(store, *some(first, 10))
    write(store, *some(5, 3))  # said again
    with store.writer() as writer:
        writer.append(some(40, 5))
        writer.flush()
        data = dataset(store, override_num_blocks=4)
        with connect(store) as connection:
            wanted = connection.sql("SELECT * FROM rollouts").to_arrow_table()
            sums = connection.sql("SELECT weight_version, count(*), sum(logprob) FROM actions GROUP BY 1").fetchall()
        write(store, *some(90, 5))  # later than the snapshot
    store.compact()
    store.vacuum(grace=0)  # the snapshot's own parts are kept for it

    def measured(block: pa.Table) -> pa.Table:
        versions, logprobs = (pc.list_flatten(block[name]) for name in ("weight_versions", "logprobs"))
        count = len(versions)
        return pa.table({"version": versions, "logprob": logprobs, "worker": pa.array([os.getpid()] * count)})

    found = together(data)
    assert rows(found) == rows(wanted)
    assert found.num_rows == 45
    actions = together(data.map_batches(measured, batch_format="pyarrow", batch_size=None))
    grouped = actions.group_by("version").aggregate([("logprob", "count"), ("logprob", "sum")]).to_pylist()
    assert sorted((r["version"], r["logprob_count"], r["logprob_sum"]) for r in grouped) == sorted(sums)
    assert os.getpid() not in actions["worker"].to_pylist()


@pytest.mark.usefixtures("_cluster")
def test_batches_of_ray_are_collated_in_its_tasks_and_where_they_are_iterated(store: Store) -> None:
    write(store, *some(0, 5), rollout("none", 3, prompt=3, logprobs=None, logprob_kind=None, weight_versions=None))
    write(store, rollout("long", 9, prompt=1))
    data = dataset(store, columns=list(COLUMNS))
    (whole,) = RolloutLoader(store, rollouts_per_batch=9)
    counted = together(
        data.map_batches(lambda table: of_batch(collate(table)), batch_format="pyarrow", batch_size=3)
    )  # fmt: skip
    here = [of_batch(collate(table)) for table in data.iter_batches(batch_format="pyarrow", batch_size=2)]
    for found in (counted, pa.concat_tables(here)):
        assert found.sort_by("rollout_id").equals(of_batch(whole).sort_by("rollout_id"))


@pytest.mark.usefixtures("_cluster")
def test_columns_and_filter_are_the_stores_own(store: Store) -> None:
    write(store, *some(0, 10, step=0))
    write(store, *some(10, 10, step=1))
    where = (pc.field("step") == 1) & (pc.field("x_ratio") < 1.0)
    found = together(dataset(store, columns=["rollout_id", "x_ratio"], where=where))
    assert found.schema.names == ["rollout_id", "x_ratio"]
    assert sorted(found["rollout_id"].to_pylist()) == [f"r{n:03}" for n in range(10, 20) if n % 3 == 0]
    assert dataset(store, "scores").schema().names == store.scan("scores").schema.names
    assert dataset(store, "scores").count() == 0


@pytest.mark.usefixtures("_cluster")
def test_a_damaged_part_is_refused_by_its_task_and_left_closed_where_nothing_in_it_can_match(store: Store) -> None:
    for id_ in ("e1", "e2"):
        row = {"evaluation_id": id_, "rollout_id": "r", "segment": 0, "logprobs": [-0.5] * 500}
        store.append("evaluations", pa.Table.from_pylist([row]))
    (part,) = (one for one in store.parts("evaluations") if one.statistics.single("evaluation_id") == "e2")
    data = bytearray(Path(part.path).read_bytes())
    data[part.tail.batches[0].offset + part.tail.batches[0].length // 2] ^= 1
    Path(part.path).write_bytes(data)
    fresh = open_store(store.path)
    assert together(dataset(fresh, "evaluations", where=pc.field("evaluation_id") == "e1")).num_rows == 1
    with pytest.raises(ray.exceptions.RayError, match=rf"CorruptionError: evaluations/{part.name}\.arrow: batch 0"):
        together(dataset(fresh, "evaluations"))


@pytest.mark.usefixtures("_cluster")
def test_ray_reads_an_export_as_it_is(store: Store, tmp_path: Path) -> None:
    write(store, *some(0, 10))
    write(store, *some(10, 10, run_id="two"), run="two")
    export(store, tmp_path / "exported", tables=["rollouts"])
    found = together(ray.data.read_parquet(str(tmp_path / "exported" / "rollouts")))
    assert sorted(zip(found["run"].to_pylist(), found["rollout_id"].to_pylist(), strict=True)) == [
        ("two" if n >= 10 else "run", f"r{n:03}") for n in range(20)
    ]
    assert rows(found.drop_columns(["run"])) == rows(store.scan("rollouts").read_all())


def test_large_parts_are_read_by_several_tasks_and_small_ones_together(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in (0, 1000, 2000):
        write(store, *[rollout(f"r{n}", tokens=4000) for n in range(first, first + 200)])
    with store.snapshot() as snapshot:
        source = RollstoreDatasource(store.path, snapshot, "rollouts", ["rollout_id"], None)
        assert [len(source.get_read_tasks(n)) for n in (1, 2, 3)] == [1, 2, 3]
        assert [task.metadata.num_rows for task in source.get_read_tasks(1)] == [600]
        monkeypatch.setattr("rollstore.readers.ray.PIECE_BYTES", snapshot.parts("rollouts")[0].size // 4)
        source = RollstoreDatasource(store.path, snapshot, "rollouts", ["rollout_id"], None)
        tasks = source.get_read_tasks(12)
        assert len(tasks) == 12
        read = [[id_ for block in task() for id_ in block["rollout_id"].to_pylist()] for task in tasks]
    assert [id_ for task in read for id_ in task] == store.scan("rollouts", ["rollout_id"]).read_all()[
        "rollout_id"
    ].to_pylist()
    assert sum(map(bool, read)) > 6


def test_a_wrong_table_or_column_is_refused_before_ray_is_asked(store: Store) -> None:
    with pytest.raises(ValueError, match="'rollout'"):
        dataset(store, "rollout")
    with pytest.raises(ValueError, match="rollouts has no column 'rewards'"):
        dataset(store, columns=["rewards"])
    with pytest.raises(TypeError, match="columns: wanted a sequence of names, got the text 'reward'"):
        dataset(store, columns="reward")
    for columns in (5, [None]):
        with pytest.raises(TypeError, match=r"^columns: wanted a sequence of names, got "):
            dataset(store, columns=columns)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"^columns: wanted each name once, got 'step' twice$"):
        dataset(store, columns=("reward", "step", "step"))
    for nothing in (None, store.path):
        with pytest.raises(TypeError, match=r"^store: wanted a store, as rollstore.open gives, got "):
            dataset(nothing)  # pyright: ignore[reportArgumentType]


def test_a_filter_that_cannot_be_asked_is_refused_before_ray_is_asked(store: Store) -> None:
    write(store, *some(0, 3))
    wrong: dict[str, tuple[type[Exception], Any]] = {
        "wanted an expression of pyarrow.compute, got str": (TypeError, "reward > 0"),
        "rollouts has no column 'rewards'": (ValueError, pc.field("rewards") > 0),
        "wanted columns of rollouts by name, got one by number": (ValueError, pc.field(0) == "r000"),
        "wanted a filter over rollouts: ": (TypeError, pc.field("reward") > "x"),
    }
    for said, (kind, where) in wrong.items():
        with pytest.raises(kind, match=f"^where: {said}"):
            dataset(store, columns=["rollout_id"], where=where)


def test_a_filter_that_fails_on_a_row_says_so_in_one_line_of_a_part_and_of_a_journal(store: Store) -> None:
    where = pc.divide(pc.field("step"), pc.field("segment")) == 1
    write(store, *some(0, 3, step=1))
    with store.snapshot() as snapshot:
        (task,) = RollstoreDatasource(store.path, snapshot, "rollouts", ["rollout_id"], where).get_read_tasks(1)
        with pytest.raises(ValueError, match=r"^where: .* fails on rows of rollouts/.*\.arrow: divide by zero$"):
            list(task())
    with store.writer() as writer:
        writer.append(some(40, 1, step=1))
        writer.flush()
        with pytest.raises(ValueError, match=r"^where: .* fails on rows of .*: divide by zero$"):
            dataset(store, where=where)


def test_columns_may_be_given_by_a_generator(store: Store) -> None:
    write(store, *some(0, 3))
    with store.snapshot() as snapshot:
        names: Any = (name for name in ("rollout_id", "step"))
        (task,) = RollstoreDatasource(store.path, snapshot, "rollouts", names, None).get_read_tasks(1)
        assert [block.column_names for block in task()] == [["rollout_id", "step"]]
