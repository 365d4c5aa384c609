"""Appending rollouts as an engine does: batches of 8 to 64 records, each flushed, so that it survives the process.

Every contestant begins with the same records and writes the same columns. The Arrow peers get a conversion that checks
nothing (`benchmarks.peers.columns`), which is faster than any of their own; ours checks every rule of every row. Ours
also seals: what it leaves is synced parts. The peers sync nothing. `durable` are those whose reader finds, after a
crash anywhere, whole batches and only those: Lance and delta-rs by their logs, Parquet by a rename.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

import rollstore
from benchmarks import data, peers
from benchmarks.contest import OURS, Contestant, Result, fastest, interleaved
from benchmarks.settings import Settings, installed
from rollstore import Rollout

DURABLE = ("parquet", "lance", "delta-rs")


def results(settings: Settings) -> Iterator[Result]:
    for tokens in settings.tokens:
        yield at(tokens, settings.runs)


def at(tokens: int, runs: int) -> Result:
    rows = data.rows(data.count(tokens))
    batches = deliveries(rows)
    times, cpu = interleaved(contestants(batches), runs)
    return Result(
        case="write",
        size=f"{tokens / 1e6:g} M tokens",
        unit="s",
        runs=times,
        marks=[fastest(*DURABLE, times=3), fastest("jsonl", times=10)],
        notes=[f"{len(rows)} rollouts in {len(batches)} batches"],
        details={"cpu": cpu},
    )


def deliveries(rows: Sequence[Rollout], seed: int = 0) -> list[list[Rollout]]:
    """Batches of 8, 16, ... 64 rollouts, whole groups."""
    rng = np.random.default_rng(seed)
    batches: list[list[Rollout]] = []
    at = 0
    while at < len(rows):
        size = data.GROUP * int(rng.integers(1, 9))
        batches.append(list(rows[at : at + size]))
        at += size
    return batches


def contestants(batches: list[list[Rollout]]) -> dict[str, Contestant]:
    tables = [peers.columns(batch) for batch in batches]
    found: dict[str, Contestant] = {OURS: lambda folder: ours(folder, batches)}
    found["rollstore, Arrow tables"] = lambda folder: ours(folder, tables)
    found |= {"jsonl": lambda folder: jsonl(folder, batches), "jsonl.zst": lambda folder: jsonl_zst(folder, batches)}
    found |= {"pickle": lambda folder: pickled(folder, batches), "parquet": lambda folder: parquet(folder, batches)}
    if installed("torch"):
        found["torch.save"] = lambda folder: torch_saved(folder, batches)
    if installed("lance"):
        found["lance"] = lambda folder: lance(folder, batches)
    if installed("deltalake"):
        found["delta-rs"] = lambda folder: delta(folder, batches)
    return found


def ours(folder: Path, batches: Sequence[list[Rollout] | pa.Table]) -> None:
    with rollstore.open(folder / "store", create=True).writer() as writer:
        for batch in batches:
            writer.append(batch)
            writer.flush()


def jsonl(folder: Path, batches: list[list[Rollout]]) -> None:
    encoder = msgspec.json.Encoder()
    with (folder / "rows.jsonl").open("wb") as file:
        for batch in batches:
            file.write(encoder.encode_lines([peers.plain(row) for row in batch]))
            file.flush()


def jsonl_zst(folder: Path, batches: list[list[Rollout]]) -> None:
    encoder, compressor = msgspec.json.Encoder(), zstandard.ZstdCompressor()
    with (folder / "rows.jsonl.zst").open("wb") as file:
        for batch in batches:
            file.write(compressor.compress(encoder.encode_lines([peers.plain(row) for row in batch])))
            file.flush()


def pickled(folder: Path, batches: list[list[Rollout]]) -> None:
    with (folder / "rows.pickle").open("wb") as file:
        for batch in batches:
            pickle.dump([peers.arrays(row) for row in batch], file, pickle.HIGHEST_PROTOCOL)
            file.flush()


def torch_saved(folder: Path, batches: list[list[Rollout]]) -> None:
    import torch

    for number, batch in enumerate(batches):
        rows = [
            {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in row.items()}
            for row in map(peers.arrays, batch)
        ]
        torch.save(rows, folder / f"{number}.pt")


def parquet(folder: Path, batches: list[list[Rollout]]) -> None:
    for number, batch in enumerate(batches):
        pq.write_table(peers.columns(batch), folder / ".staged", compression="zstd")
        os.rename(folder / ".staged", folder / f"{number}.parquet")


def lance(folder: Path, batches: list[list[Rollout]]) -> None:
    import lance

    dataset = lance.write_dataset(peers.columns(batches[0]), str(folder / "rows.lance"), mode="create")
    for batch in batches[1:]:
        dataset.insert(peers.columns(batch))


def delta(folder: Path, batches: list[list[Rollout]]) -> None:
    import deltalake

    target: str | deltalake.DeltaTable = str(folder / "rows")
    for batch in batches:
        deltalake.write_deltalake(target, peers.columns(batch), mode="append")
        target = deltalake.DeltaTable(folder / "rows") if isinstance(target, str) else target
