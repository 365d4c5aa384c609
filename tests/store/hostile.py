"""Files whose sums hold and whose content does not: what somebody who means harm, or a broken program, would leave.

`python -m tests.store.hostile FOLDER FIRST LAST` reads a store made from each seed the way every reader does. It
prints the seed before, so that the one which killed the process is known, and exits with 1 where a reader fails with
anything but an error of ours.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from rollstore.errors import RollstoreError
from rollstore.schema import to_table
from rollstore.store import document, frame
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.store.conftest import rollout

NASTY = (0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def patched(data: bytearray, start: int, stop: int, mark: bytes) -> None:
    """Put the sum of data[start:stop] where the one of its kind stands."""
    place = data.index(mark, start, stop) + len(mark)
    data[place : place + 16] = b"0" * 16
    data[place : place + 16] = xxhash.xxh3_64_hexdigest(bytes(data[start:stop])).encode()


def spoiled(data: bytearray, start: int, stop: int, draw: random.Random) -> None:
    """Change some bytes of a range: bits, numbers at their usual places, runs of zeros or ones."""
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        place = draw.randrange(start, stop)
        way = draw.randrange(4)
        if way == 0:
            data[place] ^= 1 << draw.randrange(8)
        elif way == 1:
            size = draw.choice((1, 2, 4, 8))
            place = min(place - place % size, stop - size)
            data[place : place + size] = (draw.choice(NASTY) % (1 << 8 * size)).to_bytes(size, "little")
        elif way == 2:
            size = min(draw.randrange(1, 40), stop - place)
            data[place : place + size] = bytes([draw.choice((0, 255))]) * size
        else:
            size = min(8, stop - place)
            value = int.from_bytes(data[place : place + size], "little") + draw.choice((-1, 1, 8, -8, 1 << 20))
            data[place : place + size] = (value % (1 << 8 * size)).to_bytes(size, "little")


def part(path: Path, draw: random.Random) -> None:
    """A part with changes in a message's metadata or body, or in the tail; every sum made to hold again."""
    data = bytearray(path.read_bytes())
    tail_start = len(data) - frame.tail_length(bytes(data[-10:]))
    tail = frame.read_tail(bytes(data[tail_start:]), len(data), "")
    target = draw.choice(("metadata", "body", "tail", "directory"))
    batch = draw.choice(tail.batches)
    begin, end = batch.offset, batch.offset + batch.length
    body = begin + 8 + int.from_bytes(data[begin + 4 : begin + 8], "little")
    if target == "metadata":
        spoiled(data, begin, body, draw)
    elif target == "body":
        spoiled(data, body, end, draw)
    elif target == "tail":
        spoiled(data, tail_start, len(data) - 10, draw)
    else:
        line = data.index(f"{batch.offset:016x} {batch.length:016x}".encode(), tail_start)
        place = line + 17 * draw.randrange(4)
        data[place : place + 16] = f"{draw.choice(NASTY):016x}".encode()
    with suppress(ValueError):  # the change hit what would be made to hold: as good a file as any
        place = data.index(b'{"xxh3-message":"', begin, body) + 17
        data[place : place + 16] = b"0" * 16
        data[place : place + 16] = digits = xxhash.xxh3_64_hexdigest(bytes(data[begin:end])).encode()
        line = data.index(f"{batch.offset:016x} {batch.length:016x} {batch.rows:016x} ".encode(), tail_start)
        data[line + 51 : line + 67] = digits
    with suppress(ValueError):
        patched(data, tail_start, len(data), b'{"xxh3-tail":"')
    path.write_bytes(data)


def journal(path: Path, draw: random.Random) -> None:
    """A journal with changes in its head, or in a message."""
    data = bytearray(path.read_bytes())
    head = 8 + int.from_bytes(data[4:8], "little")
    starts = [head]
    while (message := frame.next_message(bytes(data), starts[-1])) is not None:
        starts.append(starts[-1] + message.length)
    try:
        if draw.random() < 0.4:
            spoiled(data, 0, head, draw)
            patched(data, 0, head, b'{"xxh3-head":"')
        else:
            number = draw.randrange(len(starts) - 1)
            spoiled(data, starts[number], starts[number + 1], draw)
            patched(data, starts[number], starts[number + 1], b'{"xxh3-message":"')
    except ValueError:
        pass
    path.write_bytes(data)


def json_file(path: Path, draw: random.Random) -> None:
    """A document with members of other types and values, its sum made to hold."""
    body = json.loads(path.read_bytes())
    body.pop("xxh3", None)
    values = (
        None, -1, 0, 2**70, 1.5, "", "../../x", "1.0", [], [[]], [["rollouts"]], {}, {"rollouts": "x"}, True, "\ud800",
        {"rollouts": ["../../../etc/passwd"]}, {"nowhere": ["x"]}, {"rollouts": [None]},
    )  # fmt: skip
    for _ in range(draw.choice((1, 1, 2))):
        name = draw.choice(list(body))
        if draw.random() < 0.15:
            del body[name]
            if not body:
                break
        else:
            body[name] = draw.choice(values)
    path.write_bytes(document.encode(body) if draw.random() < 0.9 else json.dumps(draw.choice(values)).encode())


def other_columns(path: Path, draw: random.Random) -> None:
    """A part that is whole in every respect, of rows that no table of ours has."""
    batch = to_table([rollout(f"r{n}") for n in range(3)]).combine_chunks().to_batches()[0]
    batch = batch.select([f.name for f in batch.schema if batch.column(f.name).null_count < 3])
    arrays, fields = list(batch.columns), list(batch.schema)
    strange: list[Callable[[], pa.Array]] = [
        lambda: pa.array([1, 2, 3]),
        lambda: pa.array(["a", None, "c"]),
        lambda: pa.array([None, None, None], pa.null()),
        lambda: pa.array(["a", "b", "a"]).dictionary_encode(),
        lambda: pa.array([[1], None, [2, 3]], pa.large_list(pa.int64())),
        lambda: pa.array([[["x"]], [], None]),
        lambda: pa.array([{"start": 1}, None, {"start": -5}]),
        lambda: pa.array([[{"start": 2**62, "length": 2**62}], [], None]),
        lambda: pa.array([b"\xff\xfe", b"", None]),
        lambda: pa.array([[1, 2], [3, 4], None], pa.list_(pa.int32(), 2)),
        lambda: pa.array([2**62, -(2**62), 0], pa.timestamp("us", "UTC")),
        lambda: pa.array([float("nan"), float("inf"), None]),
        lambda: pa.array([None, 5, -1], pa.int32()),
    ]
    for _ in range(draw.choice((1, 2, 4))):
        place = draw.randrange(len(arrays))
        way = draw.randrange(4)
        if way == 0 and len(arrays) > 1:
            del arrays[place], fields[place]
        elif way == 1:
            arrays.append(arrays[place])
            fields.append(fields[place])
        else:
            arrays[place] = draw.choice(strange)()
            fields[place] = pa.field(fields[place].name, arrays[place].type)
    name = path.name.removesuffix(".arrow")
    ranges = {"rollout_id": {"min": draw.choice(("a", None, 3)), "max": "z", "nulls": draw.choice((0, -1, "x"))}}
    if draw.random() < 0.7:
        ranges = {}
    about = {
        "rollstore.format": "1.0",
        "rollstore.table": "rollouts",
        "rollstore.part": name,
        "rollstore.statistics": json.dumps({"rows": draw.choice((3, 3, 3, 2, -1, "3")), "columns": ranges}),
    }
    schema = pa.schema(fields, batch.schema.metadata)
    rows = pa.RecordBatch.from_arrays(arrays, schema=schema)
    path.write_bytes(frame.encode_file(schema, [rows], about))


def make(folder: Path, seed: int) -> Store:
    """A store of two parts, a column of the caller's, an entry of the log and a journal; one file of it is hostile."""
    draw = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(folder.parent / "whole", folder)
    kinds: list[tuple[Callable[[Path, random.Random], None], str]] = [
        (part, "rollouts/*.arrow"), (part, "rollouts/*.arrow"), (part, "scores/*.arrow"), (journal, "journal/*.arrows"),
        (journal, "journal/*.arrows"), (json_file, "commits/*.json"), (json_file, "columns/*.json"),
        (json_file, "rollstore.json"), (other_columns, "rollouts/*.arrow"), (other_columns, "rollouts/*.arrow"),
        (part, "cache/*.index"),
    ]  # fmt: skip
    spoil, pattern = draw.choice(kinds)
    paths = sorted(folder.glob(pattern))
    if paths:
        spoil(draw.choice(paths), draw)
    return open_store(folder)


def whole(folder: Path) -> None:
    """The store that all are made from."""
    store = open_store(folder / "whole", create=True)
    for number in range(4):
        rows = [rollout(f"r{number}-{n}", tokens=30, group_id=f"g{n % 2}", step=number, reward=1.0,
                        reward_status="scored", extra={"x_mine": [n]}) for n in range(4)]  # fmt: skip
        store.append("rollouts", rows)
        if number == 1:
            store.compact()
    store.append("scores", pa.table({"rollout_id": ["r0-0"], "scorer": ["judge"], "value": [0.5]}))
    writers = [store.writer() for _ in range(2)]
    for number, writer in enumerate(writers):
        for row in range(2):
            writer.append(rollout(f"j{number}-{row}", tokens=30))
            writer.flush()
    store.get("r0-0")
    kept = {path: path.read_bytes() for path in (folder / "whole" / "journal").iterdir()}
    for writer in writers:
        writer.close()
    for path, data in kept.items():  # as if they had died
        path.write_bytes(data)
        (folder / "whole" / "rollouts" / f"{path.stem}.arrow").unlink()


def readers(folder: Path, seed: int) -> list[Callable[[], object]]:
    """Everything that reads a store, and what looks after it."""
    store: list[Store] = []

    def opened() -> Store:
        return store[0]

    def load() -> None:
        from rollstore.readers.torch import RolloutLoader

        for _ in RolloutLoader(opened(), tokens_per_batch=10_000):
            pass

    return [
        lambda: store.append(make(folder, seed)),
        lambda: opened().scan("rollouts").read_all().to_pydict(),
        lambda: [opened().get(name) for name in ("r0-0", "r2-1", "r3-3", "j0-1")],
        lambda: opened().verify(),
        lambda: opened().info(),
        load,
        lambda: opened().compact(),
        lambda: opened().recover(),
        lambda: opened().vacuum(grace=0),
        lambda: open_store(folder).scan("rollouts").read_all(),
    ]


def main(folder: Path, first: int, last: int) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (24 << 30, resource.RLIM_INFINITY))
    warnings.simplefilter("ignore", UserWarning)  # orphans
    np.seterr(all="ignore")
    failed = 0
    for seed in range(first, last):
        print(seed, flush=True)
        for read in readers(folder, seed):
            try:
                read()
            except (RollstoreError, OSError):
                continue
            except IndexError:  # the store could not be opened
                break
            except Exception:
                traceback.print_exc()
                failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
