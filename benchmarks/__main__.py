"""Measure this library beside what people use instead: `python -m benchmarks [--tokens N] [--json FILE]`.

Every case runs its contestants in one process, in turn (A B A B ...), on the same rows. Shown are medians with the
extremes, and ratios to ours; on a shared machine only the ratios count.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from rich.console import Console
from rich.table import Table

import rollstore
from benchmarks.data import rollouts
from rollstore import Rollout
from rollstore.schema import to_table

BATCH = 32
"""Rollouts of one append, as an engine delivers them."""

Contestants = dict[str, Callable[[Path], None]]


def interleaved(contestants: Contestants, runs: int) -> dict[str, list[float]]:
    """Seconds of each run of each contestant, one after the other within a round; the first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(runs + 1):
        for name, run in contestants.items():
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                run(Path(folder))
                if number:
                    times[name].append(time.perf_counter() - began)
    return times


def chunks(rows: list[Rollout]) -> list[list[Rollout]]:
    return [rows[n : n + BATCH] for n in range(0, len(rows), BATCH)]


def plain(row: Rollout) -> dict[str, Any]:
    """What people put into a JSON line."""
    logprobs = row.logprobs.values if row.logprobs is not None else np.zeros(0)
    return {
        "rollout_id": row.rollout_id, "group_id": row.group_id, "step": row.step, "reward": row.reward,
        "tokens": row.tokens.tolist(), "action_mask": row.action_mask.tolist(), "logprobs": logprobs.tolist(),
        "weight_version": row.step, "temperature": 1.0, "ending": row.ending,
    }  # fmt: skip


def writing(rows: list[Rollout]) -> Contestants:
    """Append in batches, flush each so that it survives the process; the peers write the same batches."""

    def ours(folder: Path) -> None:
        with rollstore.open(folder / "store", create=True).writer() as writer:
            for batch in chunks(rows):
                writer.append(batch)
                writer.flush()

    def jsonl(folder: Path) -> None:
        encoder = msgspec.json.Encoder()
        with (folder / "rows.jsonl").open("wb") as file:
            for batch in chunks(rows):
                file.write(encoder.encode_lines([plain(row) for row in batch]))
                file.flush()

    def jsonl_zst(folder: Path) -> None:
        encoder, compressor = msgspec.json.Encoder(), zstandard.ZstdCompressor()
        with (folder / "rows.jsonl.zst").open("wb") as file:
            for batch in chunks(rows):
                file.write(compressor.compress(encoder.encode_lines([plain(row) for row in batch])))
                file.flush()

    def parquet(folder: Path) -> None:
        for number, batch in enumerate(chunks(rows)):
            pq.write_table(to_table(batch), folder / f"{number}.parquet", compression="zstd")

    def pickled(folder: Path) -> None:
        for number, batch in enumerate(chunks(rows)):
            (folder / str(number)).write_bytes(pickle.dumps([plain(row) for row in batch]))

    return {"rollstore": ours, "jsonl": jsonl, "jsonl.zst": jsonl_zst, "parquet": parquet, "pickle": pickled}


def noise(rows: int = 4, vocabulary: int = 49_152) -> Contestants:
    """Gumbel noise of [rows, vocabulary]; the peer draws exponentials, which is what an engine does per token."""
    import torch

    from rollstore.replay.noise import gumbel

    generator = torch.Generator().manual_seed(0)
    out = torch.empty(rows, vocabulary)

    def ours(_: Path) -> None:
        gumbel(key=1, sample=0, positions=np.arange(rows), vocab_size=vocabulary)

    def exponential(_: Path) -> None:
        out.exponential_(generator=generator)

    return {"rollstore": ours, "torch exponential_": exponential}


def importing() -> Contestants:
    """A fresh process each time."""

    def run(code: str) -> Callable[[Path], None]:
        return lambda _: subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ}) and None

    return {"rollstore": run("import rollstore"), "pyarrow": run("import pyarrow")}


def getting(rows: list[Rollout], folder: Path) -> Contestants:
    """100 rollouts by id, of one sealed part; beside it pyarrow reading the whole part once."""
    store = rollstore.open(folder / "get", create=True)
    with store.writer() as writer:
        writer.append(rows)
    ids = [rows[int(n)].rollout_id for n in np.random.default_rng(0).integers(0, len(rows), 100)]
    (part,) = store.parts("rollouts")

    def ours(_: Path) -> None:
        for rollout_id in ids:
            store.get(rollout_id)

    def whole(_: Path) -> None:
        pa.ipc.open_file(part.path).read_all()

    return {"rollstore": ours, "pyarrow reads it all once": whole}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens of the data (1,000,000 is the small size)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    console = Console()
    rows = rollouts(options.tokens)
    figures: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        cases: dict[str, Contestants] = {
            f"write, flush each of {len(chunks(rows))} batches": writing(rows),
            "get 100 rollouts by id": getting(rows, Path(folder)),
            "noise [4, 49152]": noise(),
            "import": importing(),
        }
        for case, contestants in cases.items():
            console.print(f"[dim]{case} ...[/dim]")
            figures[case] = interleaved(contestants, options.runs)
    table = Table("case", "what", "median ms", "min", "max", "x ours")
    for case, times in figures.items():
        ours = statistics.median(times["rollstore"])
        for name, seconds in times.items():
            middle = statistics.median(seconds)
            row = (middle * 1e3, min(seconds) * 1e3, max(seconds) * 1e3)
            table.add_row(case, name, *(f"{value:.2f}" for value in row), f"{middle / ours:.2f}")
        table.add_section()
    console.print(table)
    versions = {
        name: importlib.metadata.version(name) for name in ("pyarrow", "msgspec", "zstandard", "numpy", "torch")
    }
    console.print(f"rollstore {rollstore.__version__}, {versions}, {sum(len(r.tokens) for r in rows)} tokens")
    if options.json:
        options.json.write_text(json.dumps({"seconds": figures, "versions": versions}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
