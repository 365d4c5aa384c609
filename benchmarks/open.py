"""Opening a store of many parts: how long until it is fixed which rows there are, until they are counted, until some
are read.

Stores of so many parts, 16 rollouts each, as they are left by appends that each became a part; and a store of many
after compaction, the retired parts not yet vacuumed. Every run opens anew. A filter matches one step, which is 32
parts. What a store keeps in its cache folder stays between runs.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import rollstore
from benchmarks import data, place
from benchmarks.contest import OURS, Contestant, Mark, Result, interleaved
from benchmarks.settings import Settings, installed

EACH, SCALE, STEP = 16, 0.3, 0
PEERS = ("lance", "delta-rs")
TOGETHER = 100


def results(settings: Settings) -> Iterator[Result]:
    for parts in settings.parts:
        yield from at(made(parts), f"{parts:,} parts", parts * EACH, settings.runs)
    folder = made(settings.compacted, compacted=True)
    yield from at(folder, f"{settings.compacted:,} parts, compacted", settings.compacted * EACH, settings.runs)


def at(folder: Path, size: str, rows: int, runs: int) -> Iterator[Result]:
    matching = min(rows, data.GROUP * data.STEP_GROUPS)
    one = data.ids(np.array([rows // 2]))[0].as_py()
    for case, contestants, marks in (
        ("open", opening(folder), [Mark(limit=1.0, against=PEERS)]),
        ("open and count", counting(folder, rows), [Mark(limit=1.0, against=PEERS)]),
        ("open and read one step", filtering(folder, matching), []),
        ("open and find one id", finding(folder, one), []),
    ):
        times, cpu = interleaved(contestants, runs)
        yield Result(case=case, size=size, unit="s", runs=times, marks=marks, details={"cpu": cpu})


def opening(folder: Path) -> dict[str, Contestant]:
    """Until it is fixed which rows there are: a snapshot, a manifest, the state of a log."""

    def ours(_: Path) -> None:
        rollstore.open(folder / OURS).snapshot().close()

    found: dict[str, Contestant] = {OURS: ours}
    if installed("lance"):
        import lance

        def by_lance(_: Path) -> None:
            lance.dataset(str(folder / "lance"))

        found["lance"] = by_lance
    if installed("deltalake"):
        import deltalake

        def by_delta(_: Path) -> None:
            deltalake.DeltaTable(folder / "delta-rs")

        found["delta-rs"] = by_delta
    return found


def counting(folder: Path, rows: int) -> dict[str, Contestant]:
    def ours(_: Path) -> None:
        with rollstore.open(folder / OURS).snapshot() as snapshot:
            _check(snapshot.count("rollouts"), rows)

    found: dict[str, Contestant] = {OURS: ours}
    if installed("lance"):
        import lance

        found["lance"] = lambda _: _check(lance.dataset(str(folder / "lance")).count_rows(), rows)
    if installed("deltalake"):
        import deltalake

        found["delta-rs"] = lambda _: _check(deltalake.DeltaTable(folder / "delta-rs").count(), rows)
    return found


def filtering(folder: Path, rows: int) -> dict[str, Contestant]:
    columns = ["rollout_id", "reward"]

    def ours(_: Path) -> None:
        reader = rollstore.open(folder / OURS).scan("rollouts", columns=columns, where=pc.field("step") == STEP)
        _check(reader.read_all().num_rows, rows)

    found: dict[str, Contestant] = {OURS: ours}
    if installed("lance"):
        import lance

        def by_lance(_: Path) -> None:
            dataset = lance.dataset(str(folder / "lance"))
            _check(dataset.to_table(columns=columns, filter=f"step = {STEP}").num_rows, rows)

        found["lance"] = by_lance
    if installed("deltalake"):
        import deltalake

        def by_delta(_: Path) -> None:
            table = deltalake.DeltaTable(folder / "delta-rs")
            # Their fastest reader: partitions and files pruned by the log's own statistics.
            reader = deltalake.QueryBuilder().register("rows", table)
            found = reader.execute(f"SELECT rollout_id, reward FROM rows WHERE step = {STEP}").read_all()
            _check(found.num_rows, rows)

        found["delta-rs"] = by_delta
    return found


def finding(folder: Path, one: str) -> dict[str, Contestant]:
    def ours(_: Path) -> None:
        _check(len(rollstore.open(folder / OURS).get(one)), 1)

    found: dict[str, Contestant] = {OURS: ours}
    if installed("lance"):
        import lance

        def by_lance(_: Path) -> None:
            _check(lance.dataset(str(folder / "lance")).to_table(filter=f"rollout_id = '{one}'").num_rows, 1)

        found["lance"] = by_lance
    if installed("deltalake"):
        import deltalake

        def by_delta(_: Path) -> None:
            reader = deltalake.QueryBuilder().register("rows", deltalake.DeltaTable(folder / "delta-rs"))
            _check(reader.execute(f"SELECT * FROM rows WHERE rollout_id = '{one}'").read_all().num_rows, 1)

        found["delta-rs"] = by_delta
    return found


def made(parts: int, *, compacted: bool = False) -> Path:
    """The stores of that many parts, made unless they are there: 16 rollouts a part, a fragment, a file.

    Ours is left by as many appends. The peers' files are committed a hundred at a time: one by one they would take the
    better part of an hour, and their logs would be longer.
    """
    folder = place.folder() / f"open-{parts}{'-compacted' if compacted else ''}"
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    store = rollstore.open(folder / OURS, create=True)
    held: list[pa.Table] = []
    for number, table in enumerate(data.tables(parts * EACH, block=EACH, scale=SCALE), 1):
        store.append("rollouts", table)
        held.append(table)
        if len(held) == TOGETHER or number == parts:
            if installed("lance"):
                _lance(folder / "lance", held)
            if installed("deltalake"):
                _delta(folder / "delta-rs", held)
            held = []
    if compacted:
        store.compact()
    if installed("lance"):
        import lance

        dataset = lance.dataset(str(folder / "lance"))
        if compacted:
            dataset.optimize.compact_files()
        dataset.create_scalar_index("rollout_id", "BTREE")
    if installed("deltalake"):
        import deltalake

        table = deltalake.DeltaTable(folder / "delta-rs")
        if compacted:
            table.optimize.compact()
        table.create_checkpoint()
    (folder / "done").touch()
    return folder


def _lance(target: Path, tables: list[pa.Table]) -> None:
    import lance
    from lance.fragment import write_fragments

    if not target.exists():
        lance.write_dataset(tables[0].slice(0, 0), str(target))
    dataset = lance.dataset(str(target))
    fragments = [fragment for table in tables for fragment in write_fragments(table, dataset)]
    lance.LanceDataset.commit(dataset, lance.LanceOperation.Append(fragments), read_version=dataset.version)


def _delta(target: Path, tables: list[pa.Table]) -> None:
    import deltalake
    from deltalake.transaction import AddAction

    if not target.exists():
        deltalake.DeltaTable.create(target, tables[0].schema)
    actions: list[AddAction] = []
    for table in tables:
        file = f"{uuid.uuid4()}.parquet"
        pq.write_table(table, target / file, compression="zstd")
        ends = {name: pc.min_max(table[name]).as_py() for name in ("rollout_id", "step")}
        statistics = {
            "numRecords": table.num_rows,
            "minValues": {name: end["min"] for name, end in ends.items()},
            "maxValues": {name: end["max"] for name, end in ends.items()},
            "nullCount": dict.fromkeys(ends, 0),
        }
        size, changed = (target / file).stat().st_size, int(time.time() * 1000)
        actions.append(AddAction(file, size, {}, changed, True, json.dumps(statistics)))
    deltalake.DeltaTable(target).create_write_transaction(actions, "append", tables[0].schema)


def _check(found: int, wanted: int) -> None:
    if found != wanted:
        raise ValueError(f"open: wanted {wanted} rows, got {found}")
