"""Compaction and verify beside pyarrow reading and copying the same parts: `python -m benchmarks.upkeep`.

All of it in one process, in turn (A B A B ...), on the same parts. `raw` is `pyarrow.ipc` reading every batch of every
part, and writing it to a file with the codec named; it checks no sum, groups no rows and looks at no value.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from rich.console import Console
from rich.table import Table

import rollstore
from benchmarks import data


def store_of(folder: Path, parts: int, tokens: int, head_size: int) -> Path:
    """A store of sealed parts, each as an engine leaves it."""
    store = rollstore.open(folder, create=True)
    each = data.count(tokens) // parts
    for number in range(parts):
        with store.writer() as writer:
            for first in range(0, each, 32):
                rows = min(32, each - first)
                writer.append(data.table(rows, first=number * each + first, head_size=head_size))
                writer.flush()
    return folder


def copied(store: rollstore.Store, target: Path, codec: str) -> None:
    """pyarrow reads every batch of every part and writes it again."""
    options = pa.ipc.IpcWriteOptions(compression=codec)
    for part in store.parts("rollouts"):
        with (
            pa.OSFile(part.path) as source,
            pa.ipc.open_file(source) as reader,
            pa.OSFile(str(target / part.name), "wb") as sink,
            pa.ipc.new_file(sink, reader.schema, options=options) as writer,
        ):
            for number in range(reader.num_record_batches):
                writer.write_batch(reader.get_batch(number))


def cases(whole: Path, folder: Path) -> dict[str, Callable[[], None]]:
    """What is timed, by name; each leaves nothing behind that the next would find."""

    def compacting(codec: str) -> Callable[[], None]:
        def run() -> None:
            shutil.rmtree(folder / "store", ignore_errors=True)
            shutil.copytree(whole, folder / "store")
            store = rollstore.open(folder / "store")
            store.parts("rollouts")
            with timed():
                store.compact(codec=codec)

        return run

    def raw(codec: str) -> Callable[[], None]:
        def run() -> None:
            shutil.rmtree(folder / "raw", ignore_errors=True)
            (folder / "raw").mkdir()
            store = rollstore.open(whole)
            store.parts("rollouts")
            with timed():
                copied(store, folder / "raw", codec)

        return run

    def verifying() -> None:
        store = rollstore.open(whole)
        with timed():
            if store.verify():
                raise SystemExit("the store is not whole")

    return {
        "raw lz4": raw("lz4"),
        "raw zstd": raw("zstd"),
        "compact lz4": compacting("lz4"),
        "compact zstd": compacting("zstd"),
        "verify": verifying,
    }


class timed:
    """Seconds of the block, in `last`."""

    last = 0.0

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        timed.last = time.perf_counter() - self.began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=5_000_000, help="tokens of the data, in all parts together")
    parser.add_argument("--parts", type=int, default=20)
    parser.add_argument("--heads", type=int, default=0, help="entries of a head, for each action")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = store_of(folder / "whole", options.parts, options.tokens, options.heads)
        parts = rollstore.open(whole).parts("rollouts")
        size = sum(part.size for part in parts)
        decoded = sum(batch.nbytes for part in parts for batch in part.batches())
        times: dict[str, list[float]] = {}
        for number in range(options.runs + 1):
            for what, run in cases(whole, folder).items():
                run()
                if number:
                    times.setdefault(what, []).append(timed.last)
    rows = sum(part.rows for part in parts)
    console.print(f"{len(parts)} parts, {rows} rows, {size / 1e6:.1f} MB on disk, {decoded / 1e6:.1f} MB decoded")
    table = Table("what", "median s", "min", "max", "MB/s decoded", "speed, raw = 1")
    for what, seconds in times.items():
        middle = statistics.median(seconds)
        base = statistics.median(times["raw zstd" if what.endswith("zstd") else "raw lz4"])
        ends = (f"{value:.3f}" for value in (middle, min(seconds), max(seconds)))
        table.add_row(what, *ends, f"{decoded / middle / 1e6:.0f}", f"{base / middle:.2f}")
    console.print(table)
    console.print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
