"""A writer behind a queue: nothing is dropped, nobody waits without a word, and everything is written in order."""

from __future__ import annotations

import asyncio
import errno
import logging
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import rollstore
from rollstore import Rollout
from rollstore.errors import SchemaError, StoreError, WriteError
from rollstore.store.store import open_on
from rollstore.testing import Fault, MemoryFilesystem
from rollstore.writers import queued
from rollstore.writers.queued import Queued


class Disk:
    """A writer whose disk can be full, and that says when it was tried."""

    def __init__(self, *, full: bool = False) -> None:
        self.taken: list[Any] = []
        self.safe: list[Any] = []
        self.full, self.closed = full, False
        self.tried = threading.Event()

    def append(self, data: Any) -> None:
        if data == "bad":
            raise SchemaError([])
        self.taken.append(data)

    def flush(self, *, sync: bool = False) -> None:
        self.tried.set()
        if self.full:
            raise WriteError("no space left on device")
        self.safe = list(self.taken)

    def close(self) -> None:
        self.closed = True


def rollout(name: str) -> Rollout:
    return Rollout(rollout_id=name, tokens=[1, 2], action_mask=[False, True])


def test_what_was_flushed_is_in_the_store_in_the_order_it_came(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    with Queued(store.writer()) as writer:
        for n in range(100):
            writer.append(rollout(str(n)))
        writer.flush()
        assert store.scan("rollouts").read_all()["rollout_id"].to_pylist() == [str(n) for n in range(100)]
        assert writer.waiting == 0


def test_a_full_queue_raises_with_the_reason_and_takes_nothing() -> None:
    disk = Disk(full=True)
    writer = Queued(disk, limit=2, when_full="fail")
    writer.append(1)
    assert disk.tried.wait(30)
    writer.append(2)
    with pytest.raises(WriteError, match=r"2 of 2 places taken: no space left"):
        writer.append(3)
    disk.full = False
    writer.close()
    assert disk.safe == [1, 2]


def test_a_full_queue_makes_the_caller_wait_says_so_and_goes_on_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(queued, "PATIENCE_SECONDS", 0.01)
    disk = Disk(full=True)
    writer = Queued(disk, limit=1)
    said = threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "append waits" in record.getMessage():
                said.set()

    handler = Told()
    logging.getLogger("rollstore").addHandler(handler)
    try:
        writer.append(1)
        waiting = threading.Thread(target=writer.append, args=(2,))
        waiting.start()
        assert said.wait(30)
        assert waiting.is_alive()
        disk.full = False
        waiting.join(30)
        writer.close()
    finally:
        logging.getLogger("rollstore").removeHandler(handler)
    assert disk.safe == [1, 2]


def test_coroutines_wait_for_room_in_their_order_while_the_loop_goes_on() -> None:
    async def play() -> list[Any]:
        disk = Disk(full=True)
        writer = Queued(disk, limit=1)
        await writer.append_async(0)
        others = [asyncio.create_task(writer.append_async(n)) for n in (1, 2, 3)]
        await asyncio.sleep(0)  # the loop runs, and each task reaches the queue
        assert not any(task.done() for task in others)
        others.pop(1).cancel()
        disk.full = False
        await writer.flush_async()
        await asyncio.gather(*others)
        await asyncio.to_thread(writer.close)
        return disk.safe

    assert asyncio.run(play()) == [0, 1, 3]


def test_a_place_that_was_given_back_is_free() -> None:
    writer = Queued(Disk(), limit=1, when_full="fail")
    writer.reserve()
    with pytest.raises(WriteError):
        writer.append(1)
    writer.release()
    writer.append(1)
    writer.close()


def test_flush_raises_what_the_disk_says_and_nothing_is_lost() -> None:
    disk = Disk(full=True)
    writer = Queued(disk)
    writer.append(1)
    for action in (writer.flush, writer.close):
        with pytest.raises(WriteError, match="no space left"):
            action()
    writer.append(2)
    disk.full = False
    writer.close()
    assert (disk.safe, disk.closed) == ([1, 2], True)


def test_a_real_writer_on_a_disk_that_fills_up_loses_nothing() -> None:
    filesystem = MemoryFilesystem(seed=1)
    store = open_on(filesystem, create=True)
    writer = Queued(store.writer())
    writer.append(rollout("0"))
    writer.flush()
    filesystem.fault = Fault(at=1, code=errno.ENOSPC, lasting=True)
    writer.append(rollout("1"))
    with pytest.raises(WriteError, match="nothing acknowledged is lost"):
        writer.flush()
    filesystem.fault = None
    writer.flush()
    writer.close()
    assert sorted(store.scan("rollouts").read_all()["rollout_id"].to_pylist()) == ["0", "1"]


def test_rows_that_are_refused_are_logged_and_raised_by_the_next_flush_and_the_others_are_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = Disk()
    writer = Queued(disk)
    for data in (1, "bad", 2):
        writer.append(data)
    with pytest.raises(SchemaError):
        writer.flush()
    assert disk.safe == [1, 2]
    assert "append refused" in caplog.text
    writer.flush()
    writer.close()


def test_of_rows_that_are_refused_together_the_others_are_written(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    bad = Rollout(rollout_id="bad", tokens=[-1, 2], action_mask=[False, True])
    writer = Queued(store.writer())
    writer.append([rollout("a"), bad, rollout("b")])
    with pytest.raises(SchemaError, match="tokens: negative"):
        writer.flush()
    assert store.scan("rollouts").read_all()["rollout_id"].to_pylist() == ["a", "b"]
    other = Rollout(rollout_id="c", tokens=[1, 3], action_mask=[False, True])
    writer.append([rollout("c"), other])
    with pytest.raises(SchemaError, match="duplicate_id"):  # which of the two is right nobody can know
        writer.close()
    assert store.scan("rollouts").read_all()["rollout_id"].to_pylist() == ["a", "b"]


def test_rows_of_a_refused_list_are_written_once_where_the_disk_fills_up_between_them() -> None:
    class Filling(Disk):
        """Takes rows alone, and refuses the second of them once for want of room."""

        def append(self, data: Any) -> None:
            if len(data) > 1 or data == ["bad"]:
                raise SchemaError([])
            if data == ["c"] and not self.tried.is_set():
                self.tried.set()
                raise WriteError("no space left on device")
            self.taken += data

    disk = Filling()
    writer = Queued(disk)
    writer.append(["a", "bad", "b", "c", "d"])
    assert disk.tried.wait(30)
    with pytest.raises(SchemaError):
        writer.close()
    writer.close()
    assert disk.safe == ["a", "b", "c", "d"]


def test_after_close_nothing_is_taken() -> None:
    writer = Queued(Disk())
    writer.close()
    writer.close()
    with pytest.raises(StoreError, match="closed"):
        writer.append(1)


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"when_full": "drop"}])
def test_a_queue_that_holds_nothing_or_drops_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="wanted"):
        Queued(Disk(), **wrong)


def test_a_program_that_ends_without_close_has_written(tmp_path: Path) -> None:
    code = (
        "import sys, rollstore; from rollstore.writers.queued import Queued\n"
        "writer = Queued(rollstore.open(sys.argv[1], create=True).writer())\n"
        "writer.append(rollstore.Rollout(rollout_id='1', tokens=[1, 2], action_mask=[0, 1]))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=True)
    assert rollstore.open(tmp_path / "s").get("1")


def _child(writer: Queued, out: Any) -> None:
    writer.append(rollout("child"))
    writer.close()
    out.send("done")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_writes_its_own_rows_and_not_the_parents(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    writer = Queued(store.writer())
    writer.append(rollout("parent"))
    writer.flush()
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(writer, theirs))
    process.start()
    assert mine.poll(60)
    process.join()
    writer.close()
    assert sorted(store.scan("rollouts").read_all()["rollout_id"].to_pylist()) == ["child", "parent"]
