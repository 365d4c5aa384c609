"""One question asked of a store by two Ray workers, and by DuckDB: the same answers.

python -m examples.distributed [STORE] [--rollouts 2000]

How likely was what each version of the weights drew, and how far does the tail go? Each task opens its own parts,
checks every byte of them, and gives back a row a version; what is added up here is that much. Without a store, one of
made-up rollouts is asked. On a cluster give `ray.init` its address: its machines must reach the store under the same
path or URL.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile

import duckdb
import pyarrow as pa

import rollstore
from rollstore.readers.duckdb import connect
from rollstore.testing import synthetic

WORKERS, UNLIKELY = 2, -5.0
QUESTION = f"""
SELECT weight_version, count(logprob) AS actions, sum(logprob::DOUBLE) AS total,
    count(*) FILTER (logprob < {UNLIKELY}) AS unlikely
FROM {{actions}} GROUP BY ALL HAVING count(logprob) > 0
"""
Answer = dict[int | None, tuple[int, float, int]]
"""Version of the weights, None where it is not known -> actions with a log-prob, their sum, those below `UNLIKELY`."""


def make(path: str, rollouts: int) -> rollstore.Store:
    """A store of made-up rollouts in eight parts."""
    store = rollstore.open(path, create=True)
    text = synthetic.words(synthetic.texts(400_000))
    for table in synthetic.tables(text, rollouts, block=-(-rollouts // 64) * 8):
        store.append("rollouts", table)
    return store


def by_version(block: pa.Table) -> pa.Table:
    """What a task says of its rows: a row a version. A list that is null stands for values that nobody knows."""
    with duckdb.connect() as connection:
        connection.register("block", block)
        actions = "SELECT unnest(weight_versions) AS weight_version, unnest(logprobs) AS logprob FROM block"
        sums = connection.sql(f"SELECT * FROM ({QUESTION.format(actions=f'({actions})')})").to_arrow_table()
    return sums.append_column("worker", pa.array([os.getpid()] * sums.num_rows, pa.int64()))


def with_ray(store: rollstore.Store) -> tuple[Answer, set[int]]:
    """(the answer, the processes that had a part in it)."""
    import ray

    from rollstore.readers.ray import dataset

    started = not ray.is_initialized()
    if started:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
            object_store_memory=100 << 20, _node_ip_address="127.0.0.1",
        )  # fmt: skip
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        rows = dataset(store, columns=["weight_versions", "logprobs"], override_num_blocks=2 * WORKERS)
        said = rows.map_batches(by_version, batch_format="pyarrow", batch_size=None).take_all()
    finally:
        if started:
            ray.shutdown()
    answer: Answer = {}
    for row in said:
        actions, total, unlikely = answer.get(row["weight_version"], (0, 0.0, 0))
        answer[row["weight_version"]] = (actions + row["actions"], total + row["total"], unlikely + row["unlikely"])
    return answer, {row["worker"] for row in said}


def with_duckdb(store: rollstore.Store) -> Answer:
    with connect(store) as connection:
        rows = connection.execute(QUESTION.format(actions="actions")).fetchall()
    return {version: (actions, total, unlikely) for version, actions, total, unlikely in rows}


def main(arguments: list[str] | None = None) -> int:
    """Ask both, and print what they say; exit status 1 where they differ."""
    parser = argparse.ArgumentParser(description="Ray and DuckDB over one store.")
    parser.add_argument("store", nargs="?", help="path or URL; unless given, one is made up")
    parser.add_argument("--rollouts", type=int, default=2000, help="of the store that is made up")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        given = options.store
        store = rollstore.open(given) if given else make(f"{folder}/store", options.rollouts)
        alone = with_duckdb(store)
        scattered, workers = with_ray(store)
    same = alone.keys() == scattered.keys()
    for version, (actions, total, unlikely) in sorted(alone.items(), key=lambda item: (item[0] is None, item[0])):
        n, added, below = scattered.get(version, (0, 0.0, 0))
        # Sums of floats depend on their order, and on nothing else.
        same &= (n, below) == (actions, unlikely) and abs(added - total) <= 1e-9 * abs(total)
        name = "version not known" if version is None else f"version {version}"
        print(f"{name}: {actions} actions, mean log-prob {total / actions:.4f}, {unlikely} below {UNLIKELY:g}")
    print(f"Ray ({len(workers)} workers) and DuckDB {'say the same' if same else 'DIFFER'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
