"""Many writers: processes, threads, tasks and forks; compactions that race; readers that see one moment.

`python -m tests.store.test_many_writers NAME FOLDER ...` runs one of the process trees below and prints what is wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rollstore.store import commits
from rollstore.store.names import part_name
from rollstore.store.snapshot import Snapshot
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.store.conftest import errors, ids, once, rollout, rounds
from tests.store.test_kills import forked


def held(snapshot: Snapshot) -> list[str]:
    return snapshot.scan("rollouts", ["rollout_id"]).read_all().column(0).to_pylist()


def crowd(folder: Path, writers: int, turns: int) -> list[str]:
    """Writers that flush every append, a compactor with its vacuum, and a reader, all at once; what is wrong."""
    store = open_store(folder, create=True)
    names = [f"{w}-{t}-{n}" for w in range(writers) for t in range(turns) for n in range(8)]
    go, start = os.pipe()

    def write(number: int) -> None:
        os.read(go, 1)
        for turn in range(turns):
            with store.writer(seal_bytes=8_000) as writer:
                for row in range(8):
                    writer.append(rollout(f"{number}-{turn}-{row}", tokens=60, group_id=f"g{row % 2}"))
                    writer.flush(sync=row == 5)

    def tend(busy: Callable[[], bool]) -> None:
        while busy():
            store.compact(codec="lz4")
            store.vacuum(grace=0)

    def read(busy: Callable[[], bool]) -> None:
        seen: set[str] = set()
        while busy():
            with store.snapshot() as snapshot:
                first = held(snapshot)
                store.get(random.choice(first)) if first else None
                again = held(snapshot)
                if first != again or len(set(first)) < len(first) or not seen <= set(first):
                    raise SystemExit(f"{len(first)} rows, then {len(again)}; {len(set(first))} of them once; {seen}")
                seen = set(first)

    stop, parent = folder / "cache" / "stop", os.getpid()

    def busy() -> bool:
        return os.getppid() == parent and not stop.exists()

    others = [forked(lambda _, work=work: work(busy))[0] for work in (tend, read)]
    children = [forked(lambda _, number=number: write(number))[0] for number in range(writers)]
    os.write(start, b"x" * writers)
    wrong = [f"a writer ended with {status}" for pid in children if (status := os.waitpid(pid, 0)[1])]
    stop.touch()
    wrong += [f"a reader or compactor ended with {status}" for pid in others if (status := os.waitpid(pid, 0)[1])]
    if ids(open_store(folder)) != once(*names):
        wrong.append(f"{ids(open_store(folder))} rows")
    store = open_store(folder)
    store.compact()
    store.vacuum(grace=0)
    if ids(store) != once(*names) or store.get("3-0-4")[0].tokens.tolist() != rollout("3-0-4", 60).tokens.tolist():
        wrong.append("other rows after the last compaction")
    if not store.filesystem.list("commits"):
        wrong.append("nothing was ever compacted")
    return wrong + errors(store)


def pairs(folder: Path, count: int) -> list[str]:
    """Two processes that append 3 and 5 rows to ten, from one starting shot; both say they did."""
    wrong: list[str] = []
    for turn in range(count):
        store = open_store(folder / str(turn), create=True)
        store.append("rollouts", [rollout(f"old{n}") for n in range(10)])
        before = store.snapshot()
        go, start = os.pipe()

        def write(name: str, rows: int, store: Store = store, go: int = go) -> None:
            with store.writer(source="the same") as writer:
                writer.append([rollout(f"{name}{n}") for n in range(rows)])
                os.read(go, 1)

        children = [forked(lambda _, own=own: write(*own))[0] for own in (("three", 3), ("five", 5))]
        os.write(start, b"xx")
        status = [os.waitpid(pid, 0)[1] for pid in children]
        rows = ids(store)
        if any(status) or len(rows) != 18 or set(rows.values()) != {1}:
            wrong.append(f"turn {turn}: {status}, {len(rows)} rows")
        if len(held(before)) != 10:
            wrong.append(f"turn {turn}: the older snapshot has {len(held(before))} rows")
        before.close()
        os.close(go)
        os.close(start)
    return wrong


def entries(folder: Path, processes: int, each: int) -> list[str]:
    """Processes that add entries to one log at once: every one is there once, in some order."""
    store = open_store(folder, create=True)
    go, start = os.pipe()

    def commit(number: int) -> None:
        os.read(go, 1)
        log = commits.read_log(store.filesystem)
        for n in range(each):
            name = part_name(f"{number:032x}", n, compacted=True)
            after = commits.append(store.filesystem, log, commits.Commit(add={"scores": [name]}, replace={}))
            if after is None:
                raise SystemExit("an entry without inputs was refused")
            log = after

    children = [forked(lambda _, number=number: commit(number))[0] for number in range(processes)]
    os.write(start, b"x" * processes)
    wrong = [f"status {status}" for pid in children if (status := os.waitpid(pid, 0)[1])]
    whole = commits.read_log(store.filesystem, whole=True)
    if (whole.number, len(whole.added)) != (processes * each, processes * each):
        wrong.append(f"{whole.number} entries, {len(whole.added)} names")
    if whole != commits.read_log(store.filesystem):
        wrong.append("the checkpoints say something else")
    return wrong


def compactors(folder: Path, count: int) -> list[str]:
    """Two processes that compact the same parts at once."""
    wrong: list[str] = []
    for turn in range(count):
        store = open_store(folder / str(turn), create=True)
        for name in "abcd":
            store.append("rollouts", [rollout(name)])
        go, start = os.pipe()

        def compact(store: Store = store, go: int = go) -> None:
            store.parts("rollouts")
            os.read(go, 1)
            store.compact()
            store.vacuum(grace=0)

        children = [forked(lambda _: compact())[0] for _ in range(2)]
        os.write(start, b"xx")
        status = [os.waitpid(pid, 0)[1] for pid in children]
        fresh = open_store(store.path)
        if any(status) or ids(fresh) != once(*"abcd") or len(fresh.parts("rollouts")) != 1 or errors(fresh):
            wrong.append(f"turn {turn}: {status}, {ids(fresh)}, {errors(fresh)}")
        os.close(go)
        os.close(start)
    return wrong


def forks(folder: Path, count: int) -> list[str]:
    """Forks while threads append and flush: the child writes on under its own name, and no lock is held for ever."""
    store = open_store(folder, create=True)
    writer = store.writer(seal_bytes=5_000)
    stop = threading.Event()
    taken: list[list[str]] = [[], []]

    def append(thread: int) -> None:
        while not stop.is_set():
            name = f"t{thread}-{len(taken[thread])}"
            writer.append(rollout(name))
            taken[thread].append(name)
            writer.flush()

    threads = [threading.Thread(target=append, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    wrong: list[str] = []
    for turn in range(count):

        def child(_: int, turn: int = turn) -> None:
            writer.append(rollout(f"c{turn}"))
            writer.flush()
            store.get(f"c{turn}")
            writer.close()

        status = os.waitpid(forked(child)[0], 0)[1]
        if status:
            wrong.append(f"child {turn} ended with {status}")
    stop.set()
    for thread in threads:
        thread.join()
    writer.close()
    if ids(store) != once(*taken[0], *taken[1], *(f"c{turn}" for turn in range(count))):
        wrong.append(f"{len(ids(store))} rows of {len(taken[0]) + len(taken[1]) + count}")
    return wrong + errors(store)


def wrong_in(name: str, folder: Path, *numbers: int) -> list[str]:
    command = [sys.executable, "-m", "tests.store.test_many_writers", name, str(folder), *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [*json.loads(done.stdout), *filter(None, done.stderr.splitlines())]


def test_sixteen_processes_write_while_one_compacts_and_one_reads(tmp_path: Path) -> None:
    assert wrong_in("crowd", tmp_path / "store", 16, rounds(2, 8)) == []


def test_two_processes_that_append_at_once_both_have_their_rows_and_older_readers_theirs(tmp_path: Path) -> None:
    assert wrong_in("pairs", tmp_path, rounds(15, 200)) == []


def test_two_compactions_of_the_same_parts_leave_every_row_once(tmp_path: Path) -> None:
    assert wrong_in("compactors", tmp_path, rounds(10, 200)) == []


def test_entries_added_to_the_log_at_once_are_all_there_and_its_checkpoints_agree(tmp_path: Path) -> None:
    assert wrong_in("entries", tmp_path, 4, rounds(20, 100)) == []


def test_a_fork_amid_appends_and_flushes_leaves_parent_and_child_able_to_go_on(tmp_path: Path) -> None:
    assert wrong_in("forks", tmp_path, rounds(15, 100)) == []


def test_tasks_share_a_writer_and_none_waits_for_another_s_disk(store: Store) -> None:
    with store.writer(seal_bytes=20_000) as writer:

        async def one(task: int) -> None:
            for number in range(10):
                writer.append(rollout(f"{task}-{number}"))  # in the loop's own thread
                await asyncio.to_thread(writer.flush, sync=number % 5 == 0)
                await asyncio.sleep(0)

        async def every() -> None:
            await asyncio.gather(*(one(task) for task in range(6)))

        asyncio.run(every())
        assert ids(store) == once(*(f"{t}-{n}" for t in range(6) for n in range(10)))
    assert errors(store) == []


def test_writers_of_one_source_never_share_a_name(store: Store) -> None:
    writers = [store.writer(source="rank", run="r") for _ in range(4)]
    for number, writer in enumerate(writers):
        writer.append(rollout(f"r{number}"))
        writer.close()
    assert len({part.name for part in store.parts("rollouts")}) == 4
    assert ids(store) == once(*(f"r{n}" for n in range(4)))


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:]))))
