"""A writing process killed by SIGKILL at a random moment: what it had flushed is there, once, and nothing else is.

`python -m tests.store.test_kills FOLDER ROUNDS SEED` is the process that starts the writers and kills them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rollstore.errors import RollstoreError
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.store.conftest import errors, ids, rollout, rounds

ROWS = 60


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Run in a child; its pid, and the end of the pipe that it may write to."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    faulthandler.dump_traceback_later(120, exit=True)  # a child that waits for ever says where
    try:
        os.close(reading)
        work(writing)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
    os._exit(1)


def writing(store: Store, acknowledge: Callable[[str], None], draw: random.Random) -> None:
    """A writer's life: frames of some rows, seals in between, now and then a compaction of its own."""
    seal_bytes = draw.choice((15_000, 60_000, 1 << 20))
    number = 0
    while number < ROWS:
        with store.writer(seal_bytes=seal_bytes) as writer:
            for _ in range(draw.randrange(3, 20)):
                names = [f"r{number + n}" for n in range(draw.choice((1, 1, 3)))]
                number += len(names)
                writer.append([rollout(name, tokens=150) for name in names])
                if draw.random() < 0.8:
                    writer.flush(sync=draw.random() < 0.3)
                    acknowledge(f"r{number - 1}")
        acknowledge(f"r{number - 1}")
        if draw.random() < 0.5:
            store.compact(codec="lz4")
            store.vacuum(grace=0)


def one(folder: Path, draw: random.Random) -> str | None:
    """Start a writer, kill it, look at what it left; what is wrong, or None."""
    store = open_store(folder, create=True)
    seed = draw.random()
    child = random.Random(seed)
    pid, pipe = forked(lambda to: writing(store, lambda name: os.write(to, f"{name}\n".encode()) and None, child))
    acknowledged = b""
    wanted = draw.randrange(1, 40)
    while acknowledged.count(b"\n") < wanted and (data := os.read(pipe, 4096)):
        acknowledged += data
    for _ in range(draw.randrange(30_000)):  # somewhere in what comes after that flush
        pass
    os.kill(pid, signal.SIGKILL)
    while data := os.read(pipe, 4096):
        acknowledged += data
    os.close(pipe)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        return "the writer failed by itself"
    lines = acknowledged.decode().split("\n")[:-1]  # a line cut short acknowledges nothing
    promised = {f"r{n}" for n in range(int(lines[-1][1:]) + 1)} if lines else set()
    for name, found in (("before", ids(open_store(folder))), ("after", recovered(folder))):
        if wrong := {row: n for row, n in found.items() if n > 1} | dict.fromkeys(promised - set(found), 0):
            return f"{name} recovery: {wrong} of {len(promised)} promised"
        if sorted(int(row[1:]) for row in found) != list(range(len(found))):
            return f"{name} recovery: rows with a gap: {sorted(found)}"
    if found := errors(open_store(folder)):
        return f"verify: {found}"
    read = open_store(folder)
    for row in draw.sample(sorted(promised), min(3, len(promised))):
        if read.get(row)[0].tokens.tolist() != rollout(row, tokens=150).tokens.tolist():
            return f"{row}: other tokens"
    left = [path.name for name in ("journal", "staging") for path in (folder / name).iterdir()]
    return f"left behind: {left}" if left else None


def recovered(folder: Path) -> Counter[str]:
    store = open_store(folder)
    store.recover()
    return ids(store)


def main(folder: Path, count: int, seed: int) -> None:
    draw = random.Random(seed)
    wrong: dict[int, str] = {}
    for turn in range(count):
        try:
            said = one(folder / str(turn), draw)
        except RollstoreError as error:
            said = repr(error)
        if said is not None:
            wrong[turn] = said
    print(json.dumps({"kills": count, "wrong": wrong}))


def test_a_writer_killed_at_a_random_moment_leaves_what_it_flushed_once_and_whole(tmp_path: Path) -> None:
    count = rounds(40, 200)
    command = [sys.executable, "-m", "tests.store.test_kills", str(tmp_path), str(count), "11"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"kills": count, "wrong": {}}, done.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
