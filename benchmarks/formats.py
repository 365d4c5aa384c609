"""The formats that training data is loaded from: how each is written, and read as packed batches in a given order."""

from __future__ import annotations

import contextlib
import importlib.machinery
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import rollstore
from benchmarks import data, peers
from benchmarks.contest import OURS
from benchmarks.settings import installed
from rollstore.schema import from_table

Writer = Callable[[pa.Table], None]
COLUMNS = ("rollout_id", "tokens", "action_mask", "logprobs", "weight_versions", "reward")
HEADS = ("head_tokens", "head_logprobs")
BY_ROW = ("jsonl", "pickle", "streaming", "litdata")


@dataclass(frozen=True)
class Plan:
    """The groups of each batch of an epoch, shuffled, and the tokens of it all."""

    batches: list[list[int]]
    tokens: int

    @staticmethod
    def of(lengths: np.ndarray, budget: int, seed: int = 0) -> Plan:
        """`lengths` [rollouts]: tokens of each; eight neighbours are a group."""
        groups = lengths.astype(np.int64).reshape(-1, data.GROUP).sum(1)
        batches: list[list[int]] = []
        used = budget
        for group in np.random.default_rng(seed).permutation(len(groups)).tolist():
            if used + groups[group] > budget:
                batches.append([])
                used = 0
            batches[-1].append(group)
            used += int(groups[group])
        return Plan(batches, int(lengths.sum()))


def names() -> list[str]:
    """Those whose library is installed; ours and `raw` among them."""
    needs = {"hf datasets": "datasets", "lance": "lance", "streaming": "streaming", "litdata": "litdata"}
    everyone = (OURS, "raw", "jsonl", "pickle", "parquet", "hf datasets", "lance", "streaming", "litdata")
    return [name for name in everyone if name not in needs or installed(needs[name])]


def writers(folder: Path, stack: contextlib.ExitStack, by_row: bool) -> list[Writer]:
    """What writes a table in each format into `folder`; `stack` closes them."""
    writer = stack.enter_context(rollstore.open(folder / OURS, create=True).writer())
    made: list[Writer] = [writer.append, partial(_parquet, folder / "rows.parquet", {}, stack)]
    if installed("lance"):
        made.append(partial(_lance, folder / "lance"))
    if installed("datasets"):
        made.append(partial(_arrow, folder / "datasets.arrow", {}, stack))
    if not by_row:
        return made
    lines = stack.enter_context((folder / "rows.jsonl").open("wb"))
    encoder = msgspec.json.Encoder()
    made.append(lambda table: _write(lines, encoder.encode_lines(list(map(peers.plain, from_table(table))))))
    pickled = stack.enter_context((folder / "rows.pickle").open("wb"))
    made.append(lambda table: pickle.dump(list(map(peers.arrays, from_table(table))), pickled, 5))
    if installed("streaming"):
        made.append(_streaming(folder / "streaming", stack))
    if installed("litdata"):
        made.append(_litdata(folder / "litdata", stack))
    return made


def load(name: str, folder: Path, plan: Plan, heads: bool, rank: int, world_size: int) -> int:
    """Tokens of all batches that this rank loaded, each made into tensors."""
    if name == OURS:
        return _ours(folder, heads, rank, world_size)
    if name == "raw":
        return _raw(folder, heads)
    if name == "litdata":
        return sum(len(batch.tokens) for batch in _from_litdata(folder, rank, world_size))
    batches = plan.batches[rank::world_size]
    return sum(len(batch.tokens) for batch in READERS[name](folder, batches, (*COLUMNS, *HEADS) if heads else COLUMNS))


def _ours(folder: Path, heads: bool, rank: int, world_size: int) -> int:
    from benchmarks.load import BUDGET
    from rollstore.readers.torch import RolloutLoader

    loader = RolloutLoader(
        rollstore.open(folder / OURS), tokens_per_batch=BUDGET, whole_groups=True, heads=heads, rank=rank,
        world_size=world_size, oversize="raise",
    )  # fmt: skip
    return sum(len(batch.tokens) for batch in loader)


def _raw(folder: Path, heads: bool) -> int:
    import torch

    tokens = 0
    columns = (*COLUMNS[1:], *HEADS) if heads else COLUMNS[1:]
    for part in rollstore.open(folder / OURS).parts("rollouts"):
        fields = [i for i, name in enumerate(part.schema.names) if name in columns]
        with pa.memory_map(part.path) as source:
            file = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
            for number in range(file.num_record_batches):
                batch = file.get_batch(number)
                for name in batch.schema.names:
                    column = batch.column(name)
                    values = column.flatten() if pa.types.is_list(column.type) else column
                    torch.from_numpy(np.array(values.to_numpy(zero_copy_only=False)))
                tokens += len(batch.column("tokens").flatten())
    return tokens


def _rows_of(batch: list[int]) -> np.ndarray:
    return (np.array(batch)[:, None] * data.GROUP + np.arange(data.GROUP)).ravel()


def _jsonl(folder: Path, batches: list[list[int]], columns: tuple[str, ...]) -> Iterator[Any]:
    from benchmarks.packing import of_rows

    fields = {"rollout_id": str, "reward": float, "action_mask": list[bool]}
    fields |= {"logprobs": list[float], "head_logprobs": list[float]}
    # A struct of the fields that are wanted: the decoder skips the others, as its guide advises.
    row = msgspec.defstruct("Row", [(name, fields.get(name, list[int])) for name in columns])
    rows = msgspec.json.Decoder(row).decode_lines((folder / "rows.jsonl").read_bytes())
    for batch in batches:
        yield of_rows([msgspec.structs.asdict(rows[number]) for number in _rows_of(batch)])


def _pickle(folder: Path, batches: list[list[int]], columns: tuple[str, ...]) -> Iterator[Any]:
    from benchmarks.packing import of_rows

    rows: list[dict[str, Any]] = []
    with (folder / "rows.pickle").open("rb") as file, contextlib.suppress(EOFError):
        while True:
            rows += pickle.load(file)
    for batch in batches:
        yield of_rows([rows[number] for number in _rows_of(batch)])


def _from_parquet(folder: Path, batches: list[list[int]], columns: tuple[str, ...]) -> Iterator[Any]:
    from benchmarks.packing import of_table

    table = pq.read_table(folder / "rows.parquet", columns=list(columns))
    for batch in batches:
        yield of_table(table.take(_rows_of(batch)))


def _from_lance(folder: Path, batches: list[list[int]], columns: tuple[str, ...]) -> Iterator[Any]:
    import lance

    from benchmarks.packing import of_table

    dataset = lance.dataset(str(folder / "lance"))
    for batch in batches:
        yield of_table(dataset.take(_rows_of(batch).tolist(), columns=list(columns)))


def _from_datasets(folder: Path, batches: list[list[int]], columns: tuple[str, ...]) -> Iterator[Any]:
    import datasets

    from benchmarks.packing import of_table

    rows = datasets.Dataset.from_file(str(folder / "datasets.arrow")).select_columns(list(columns)).with_format("arrow")
    for batch in batches:
        yield of_table(rows[_rows_of(batch).tolist()])


def _from_streaming(folder: Path, batches: list[list[int]], columns: tuple[str, ...]) -> Iterator[Any]:
    from benchmarks.packing import of_groups

    streaming = _import_streaming()
    rows = streaming.LocalDataset(local=str(folder / "streaming"))
    for batch in batches:
        yield of_groups([rows[group] for group in batch])


def _from_litdata(folder: Path, rank: int, world_size: int) -> Iterator[Any]:
    """In its own shuffled order: asked for samples one by one in ours, it takes fifty times as long."""
    import litdata
    from litdata.utilities.env import _DistributedEnv

    from benchmarks.load import BUDGET
    from benchmarks.packing import of_groups

    rows = litdata.StreamingDataset(str(folder / "litdata"), shuffle=True)
    rows.distributed_env = _DistributedEnv(world_size, rank, 1)
    held: list[dict[str, Any]] = []
    tokens = 0
    for group in rows:
        if held and tokens + len(group["tokens"]) > BUDGET:
            yield of_groups(held)
            held, tokens = [], 0
        held.append(group)
        tokens += len(group["tokens"])
    if held:
        yield of_groups(held)


READERS: dict[str, Callable[[Path, list[list[int]], tuple[str, ...]], Iterator[Any]]] = {
    "jsonl": _jsonl, "pickle": _pickle, "parquet": _from_parquet, "lance": _from_lance, "hf datasets": _from_datasets,
    "streaming": _from_streaming,
}  # fmt: skip


def _write(file: Any, content: bytes) -> None:
    file.write(content)


def _parquet(path: Path, held: dict[str, pq.ParquetWriter], stack: contextlib.ExitStack, table: pa.Table) -> None:
    if not held:
        held["writer"] = stack.enter_context(pq.ParquetWriter(path, table.schema, compression="zstd"))
    held["writer"].write_table(table)


def _arrow(path: Path, held: dict[str, Any], stack: contextlib.ExitStack, table: pa.Table) -> None:
    """An uncompressed Arrow stream: what `datasets` keeps in its cache, and maps."""
    if not held:
        held["writer"] = stack.enter_context(pa.ipc.new_stream(str(path), table.schema))
    held["writer"].write_table(table, max_chunksize=1_000)


def _lance(path: Path, table: pa.Table) -> None:
    import lance

    lance.write_dataset(table, str(path), mode="append" if path.exists() else "create")


def _groups(table: pa.Table) -> Iterator[dict[str, Any]]:
    rows = list(map(peers.arrays, from_table(table)))
    for first in range(0, len(rows), data.GROUP):
        group = rows[first : first + data.GROUP]
        joined = {
            name: np.concatenate([row[name] for row in group])
            for name in ("tokens", "action_mask", "logprobs", "weight_versions", *HEADS)
            if name in group[0]
        }
        yield joined | {
            "lengths": np.array([len(row["tokens"]) for row in group]),
            "reward": np.array([row["reward"] for row in group]),
            "rollout_id": " ".join(row["rollout_id"] for row in group),
        }


def _streaming(path: Path, stack: contextlib.ExitStack) -> Writer:
    streaming = _import_streaming()
    held: dict[str, Any] = {}

    def write(table: pa.Table) -> None:
        for group in _groups(table):
            if not held:
                kinds = {n: f"ndarray:{v.dtype}" if isinstance(v, np.ndarray) else "str" for n, v in group.items()}
                kinds["action_mask"] = "ndarray:uint8"
                held["writer"] = stack.enter_context(streaming.MDSWriter(out=str(path), columns=kinds, hashes=[]))
            held["writer"].write(group | {"action_mask": group["action_mask"].astype(np.uint8)})

    return write


def _import_streaming() -> Any:
    """MosaicML Streaming imports torchvision for its image data sets, which are not used here: an empty one will do."""
    if "streaming" not in sys.modules and not installed("torchvision"):
        stub = {"torchvision": {}, "torchvision.transforms": {}}
        stub |= {"torchvision.datasets": {"VisionDataset": object, "CIFAR10": object}}
        stub |= {"torchvision.transforms.functional": {"to_tensor": None}}
        for name, held in stub.items():
            module = sys.modules[name] = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__dict__.update(held)
    import streaming

    return streaming


def _litdata(path: Path, stack: contextlib.ExitStack) -> Writer:
    from litdata.streaming.cache import Cache

    cache = Cache(str(path), chunk_bytes="4MB")  # small, so that two ranks have chunks of their own
    count = iter(range(1 << 60))

    def finish() -> None:
        cache.done()
        cache.merge()

    stack.callback(finish)

    def write(table: pa.Table) -> None:
        for group in _groups(table):
            cache[next(count)] = group | {"action_mask": group["action_mask"].astype(np.uint8)}

    return write
