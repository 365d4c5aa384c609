"""Bytes on disk a token (with heads: an action), the same columns everywhere.

Ours is measured compacted, and beside it sealed. `parquet` is the same table in one file, zstd at pyarrow's settings.
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

import rollstore
from benchmarks import data, peers, place
from benchmarks.contest import OURS, Mark, Result
from benchmarks.settings import Settings, installed
from rollstore.schema import from_table

HEAD = 32
BLOCK = 2_000
SEALED = "rollstore, sealed"
LARGE = ("tokens", "logprobs", "head_tokens", "head_logprobs")


def results(settings: Settings) -> Iterator[Result]:
    for tokens in settings.tokens:
        yield at(data.count(tokens), 0, f"{tokens / 1e6:g} M tokens")
    for actions in settings.actions:
        yield at(data.of_actions(actions), HEAD, f"{actions / 1e6:g} M actions")


def at(rollouts: int, head_size: int, size: str) -> Result:
    folder = Path(tempfile.mkdtemp(dir=place.folder()))
    try:
        sizes, units, held = measured(folder, rollouts, head_size)
    finally:
        shutil.rmtree(folder)
    return Result(
        case="size, heads of 32" if head_size else "size",
        size=size,
        unit="bytes an action" if head_size else "bytes a token",
        runs={name: [bytes_ / units] for name, bytes_ in sizes.items()},
        marks=[
            Mark(limit=0.6, against=("lance",)),
            Mark(limit=0.35, against=("jsonl.zst",)),
            Mark(limit=1.1, against=("parquet",)),
        ],
        notes=[
            "order-0 entropy, bytes of a value, and how many there are of them: "
            + ", ".join(f"{name} {entropy:.2f} x {count / units:.2f}" for name, (entropy, count) in held.items())
        ],
    )


def measured(folder: Path, rollouts: int, head_size: int) -> tuple[dict[str, int], int, dict[str, tuple[float, int]]]:
    """(bytes of each contestant, tokens or actions of the data, entropy and number of values of the large columns).

    All are written block by block of 2,000 rollouts.
    """
    encoder, compressor = msgspec.json.Encoder(), zstandard.ZstdCompressor()
    store = rollstore.open(folder / "store", create=True)
    parquet: pq.ParquetWriter | None = None
    units = 0
    with (
        (folder / "rows.jsonl").open("wb") as jsonl,
        (folder / "rows.jsonl.zst").open("wb") as zst,
        (folder / "rows.pickle").open("wb") as pickled,
        store.writer() as writer,
    ):
        stream = compressor.stream_writer(zst)
        for table in data.tables(rollouts, block=BLOCK, head_size=head_size):
            writer.append(table)
            rows = from_table(table)
            same = peers.columns(rows)
            lines = encoder.encode_lines([peers.plain(row) for row in rows])
            jsonl.write(lines)
            stream.write(lines)
            pickle.dump([peers.arrays(row) for row in rows], pickled, pickle.HIGHEST_PROTOCOL)
            parquet = parquet or pq.ParquetWriter(folder / "rows.parquet", same.schema, compression="zstd")
            parquet.write_table(same)
            _append_elsewhere(folder, same)
            units += sum(int(row.action_mask.sum()) if head_size else len(row.tokens) for row in rows)
        stream.close()
        if parquet is not None:
            parquet.close()
    sealed = _held(folder / "store" / "rollouts")
    whole = store.scan("rollouts", columns=LARGE[: None if head_size else 2]).read_all()
    copy = rollstore.open(folder / "store")
    # One part is not compacted by itself: a second, tiny one makes it two.
    copy.append("rollouts", data.table(data.GROUP, first=1 << 30, head_size=head_size))
    copy.compact()
    found = {OURS: sum(part.size for part in copy.parts("rollouts")), SEALED: sealed}
    found |= {name: _held(folder / f"rows.{name}") for name in ("parquet", "jsonl", "jsonl.zst", "pickle")}
    for name in ("lance", "delta-rs"):
        if (folder / f"rows.{name}").exists():
            found[name] = _held(folder / f"rows.{name}")
    return found, units, {name: entropy(whole[name]) for name in whole.column_names}


def entropy(column: pa.ChunkedArray) -> tuple[float, int]:
    """(bytes that a value takes if each is drawn by itself, number of values) of a column of lists.

    Of a float32 the upper half, sign, exponent and seven bits, counts as one symbol and the other bytes as one each.
    """
    values = pa.concat_arrays([chunk.flatten() for chunk in column.chunks]).to_numpy(zero_copy_only=False)
    if values.dtype == np.int32:
        return _bits(values) / 8, len(values)
    words = values.view(np.uint32)
    return (_bits(words >> 16) + _bits(words >> 8 & 255) + _bits(words & 255)) / 8, len(values)


def _bits(symbols: np.ndarray) -> float:
    shares = np.unique(symbols, return_counts=True)[1] / len(symbols)
    return float(-(shares * np.log2(shares)).sum())


def _append_elsewhere(folder: Path, same: pa.Table) -> None:
    if installed("lance"):
        import lance

        lance.write_dataset(same, str(folder / "rows.lance"), mode="append")
    if installed("deltalake"):
        import deltalake

        deltalake.write_deltalake(str(folder / "rows.delta-rs"), same, mode="append")


def _held(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
