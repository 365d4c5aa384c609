"""Ctrl-C comes between any two steps; what is done afterwards neither loses nor doubles a row, nor forgets one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rollstore.errors import RollstoreError, WriteError
from rollstore.store import filesystem, index, journal, seal
from rollstore.store.filesystem import LocalFilesystem
from rollstore.store.store import Store, open_on
from rollstore.testing import Fault, MemoryFilesystem
from rollstore.writers import writer as writing
from rollstore.writers.writer import Writer
from tests.store.conftest import errors, ids, once, rollout, rounds

WRITING = {module.__file__ for module in (journal, seal, writing)}
OUTSIDE = {
    "_start", "_checked", "_held_types", "_copied", "_with_run", "_filled", "table_of", "_journal_schema",
    "<genexpr>", "<listcomp>", "<dictcomp>", "<lambda>",
}  # fmt: skip
"""Functions before a row is taken, or that only read."""


@contextmanager
def interrupted(
    at: int, files: set[str] = WRITING, error: type[BaseException] = KeyboardInterrupt
) -> Iterator[list[int]]:
    """An error before line number `at`, counted over what the writer, its journals and its sealing do, or `files`.

    A handler of signals may raise TimeoutError, which is an OSError, and nothing that the file system has refused.
    """
    seen = [0]

    def each(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files or frame.f_code.co_name in OUTSIDE:
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] == at:
                raise error
        return each

    sys.settrace(each)
    try:
        yield seen
    finally:
        sys.settrace(None)


def work(store: Store, acknowledged: set[str], taken: set[str]) -> None:
    """Flushes, a sync, a journal of other columns, a seal; leaves the block as anybody does."""
    with store.writer() as writer:
        for number in range(6):
            fields = {"group_id": "g"} if number == 3 else {}
            taken.add(str(number))
            writer.append(rollout(str(number), **fields))
            if number == 4:
                writer.seal()
            else:
                writer.flush(sync=number == 1)
            acknowledged |= taken


def test_an_interrupt_at_any_line_neither_loses_nor_doubles_a_row() -> None:
    at = 0
    while True:
        at += rounds(8, 1)
        disk = MemoryFilesystem(seed=at)
        store = open_on(disk, create=True)
        acknowledged: set[str] = set()
        taken: set[str] = set()
        with suppress(KeyboardInterrupt), interrupted(at) as seen:
            work(store, acknowledged, taken)
        disk.kill()
        store.recover()
        found = ids(open_on(disk))
        assert set(found.values()) <= {1}, f"line {at}: {found}"
        assert acknowledged <= found.keys() <= taken, f"line {at}: {acknowledged} acknowledged, got {set(found)}"
        assert not errors(open_on(disk)), f"line {at}"
        if seen[0] < at:
            break
    assert at > 150


@pytest.mark.parametrize("at", range(1, 60))
def test_an_interrupted_flush_can_be_made_again(at: int, disk: MemoryFilesystem) -> None:
    store = open_on(disk)
    with store.writer() as writer:
        writer.append(rollout("a", metadata={"long": "x" * 4000}))
        with suppress(KeyboardInterrupt), interrupted(at):
            writer.flush()
        writer.append(rollout("b"))
        writer.flush()
        assert ids(store) == once("a", "b")
    assert ids(store) == once("a", "b")


@pytest.mark.parametrize("at", range(1, 60))
def test_a_failed_sync_after_an_interrupt_carries_each_row_over_once(at: int, disk: MemoryFilesystem) -> None:
    store = open_on(disk)
    writer = store.writer()
    writer.append(rollout("a"))
    with suppress(KeyboardInterrupt), interrupted(at):
        writer.flush()
    writer.append(rollout("b"))
    writer.flush()
    disk.fault = Fault(at=1, verbs=frozenset({"sync"}))
    with pytest.raises(WriteError):
        writer.flush(sync=True)
    writer.flush(sync=True)
    writer.close()
    assert ids(store) == once("a", "b")


def flush(writer: Writer) -> None:
    writer.flush()


def sync(writer: Writer) -> None:
    writer.flush(sync=True)


def seal_all(writer: Writer) -> None:
    writer.seal()


ACTS = {"other column": flush, "full": flush, "seal": seal_all, "refused sync": sync, "carried over": sync}


def ready(how: str, disk: MemoryFilesystem) -> Writer:
    """A writer that has taken "a" and "b", just before what is interrupted."""
    writer = open_on(disk, create=True).writer(seal_bytes=1 if how == "full" else 1 << 20)
    writer.append(rollout("a"))
    if how != "full":
        writer.flush(sync=how == "carried over")
    writer.append(rollout("b", **({"group_id": "g"} if how == "other column" else {})))
    if how == "carried over":
        writer.flush()
    if how in ("refused sync", "carried over"):
        disk.fault = Fault(at=1, verbs=frozenset({"sync"}))
    if how == "carried over":
        with pytest.raises(WriteError):
            writer.flush(sync=True)
    return writer


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("how", ACTS)
def test_what_is_synced_after_an_interrupt_is_there_once_after_power_loss(how: str, error: type[BaseException]) -> None:
    at = 0 if error is KeyboardInterrupt else -1  # other lines
    while True:
        at += rounds(3, 1)
        disk = MemoryFilesystem(seed=at)
        writer = ready(how, disk)
        with suppress(error, RollstoreError), interrupted(at, error=error) as seen:
            ACTS[how](writer)
        if how == "refused sync" and disk.fault is not None and disk.fault.fired:
            journal = writer._written.journal
            assert journal is not None
            assert journal.broken, f"line {at}: the next sync would say what is not so"
        disk.fault = None
        found = ids(open_on(disk))
        assert once(*found) == found, f"line {at}"
        assert found.keys() <= {"a", "b"}, f"line {at}"
        writer.append(rollout("c"))
        for sync in (False, True):
            writer.flush(sync=sync)
            assert ids(open_on(disk)) == once("a", "b", "c"), f"line {at}"
        assert ids(open_on(disk.crash())) == once("a", "b", "c"), f"line {at}"
        writer.close()
        assert not disk.list("journal"), f"line {at}"
        assert ids(open_on(disk.crash())) == once("a", "b", "c"), f"line {at}"
        assert not errors(open_on(disk)), f"line {at}"
        if seen[0] < at:
            break
    assert at > 30


def test_a_sealing_thread_that_begins_only_after_its_start_was_interrupted_does_no_harm(
    disk: MemoryFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[threading.Thread] = []
    start, seal_one = threading.Thread.start, seal.seal

    def interrupted_start(thread: threading.Thread) -> None:
        late.append(thread)
        raise KeyboardInterrupt

    def while_it_works(*args: Any, **options: Any) -> None:
        if late and threading.current_thread() is threading.main_thread():
            start(late[0])
            late.pop(0).join(0.2)  # were it free to, it would do the same work meanwhile
        seal_one(*args, **options)

    writer = open_on(disk).writer(seal_bytes=1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted_start)
        for name in "ab":
            writer.append(rollout(name))
            with pytest.raises(KeyboardInterrupt):
                writer.flush()
    monkeypatch.setattr(seal, "seal", while_it_works)
    writer.flush(sync=True)
    assert not late[1:]
    assert ids(open_on(disk.crash())) == once("a", "b")
    writer.close()
    assert not disk.list("journal")


def test_a_journal_whose_part_was_retired_since_its_sealing_was_interrupted_is_done_with(
    disk: MemoryFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_on(disk).writer()
    writer.append([rollout("a"), rollout("b")])
    discard = seal.discard

    def at_the_end(*args: Any, **options: Any) -> None:
        discard(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(seal, "discard", at_the_end)
        with pytest.raises(KeyboardInterrupt):
            writer.close()
    other = open_on(disk)
    other.append("rollouts", [rollout("c")])
    other.compact()
    disk.age(10)
    other.vacuum(grace=0)
    assert len(other.parts("rollouts")) == 1
    writer.close()
    assert ids(open_on(disk)) == once("a", "b", "c")


def test_a_file_of_which_the_opening_was_interrupted_is_left_without_a_noise(tmp_path: Path) -> None:
    place = LocalFilesystem(tmp_path)
    noise: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, noise.append
    try:
        at = 0
        while True:
            at += 1
            with suppress(KeyboardInterrupt), interrupted(at, {filesystem.__file__}) as seen:
                place.create(f"{at}").close()
                place.open(f"{at}").close()
            if seen[0] < at:
                break
    finally:
        sys.unraisablehook = hook
    assert at > 10
    assert not [said for said in noise if said.exc_type is not KeyboardInterrupt]  # none that would not come anyway


def look(store: Store) -> None:
    """Builds the index, meets a part and a message that are new, merges, and looks for repeats."""
    store.get("a")
    with store.writer() as writer:
        writer.append([rollout("f"), rollout("a")])
        writer.flush()
        store.get("f")
        writer.append([rollout("g")])
        writer.flush()
        store.get("g")
    with store.snapshot() as snapshot:
        snapshot.repeated()


def test_an_interrupt_at_any_line_of_the_index_hides_no_rollout_and_makes_no_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index, "_WORTH_KEEPING", 1)
    at = 0
    while True:
        at += rounds(5, 1)
        disk = MemoryFilesystem(seed=at)
        for names in (["a", "b"], ["c"], ["d", "e"]):
            open_on(disk, create=True).append("rollouts", [rollout(name) for name in names])
        store = open_on(disk)
        with suppress(KeyboardInterrupt), interrupted(at, {index.__file__}) as seen:
            look(store)
        there = ids(store)
        for own in (store, open_on(disk)):
            assert [name for name in sorted(there) if own.get(name)[0].rollout_id != name] == []
            with own.snapshot() as snapshot:
                repeated = [
                    source.batch(batch).column("rollout_id")[row].as_py() for source, batch, row in snapshot.repeated()
                ]
            assert repeated == ["a"] * there["a"] * (there["a"] > 1), f"line {at}"
        if seen[0] < at:
            break
    assert at > 150
