"""Ctrl-C comes between any two steps of a writer; leaving its block afterwards neither loses nor doubles a row."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from rollstore.errors import WriteError
from rollstore.store import journal, seal
from rollstore.store.store import Store, open_on
from rollstore.testing import Fault, MemoryFilesystem
from rollstore.writers import writer as writing
from tests.store.conftest import errors, ids, once, rollout, rounds

FILES = {module.__file__ for module in (journal, seal, writing)}
OUTSIDE = {
    "__init__", "_start", "_checked", "_held_types", "_copied", "_with_run", "_filled", "table_of", "_journal_schema",
    "<genexpr>", "<listcomp>", "<dictcomp>", "<lambda>",
}  # fmt: skip
"""Functions before a row is taken, or that only read."""


@contextmanager
def interrupted(at: int) -> Iterator[list[int]]:
    """KeyboardInterrupt before line number `at`, counted over what the writer, its journals and its sealing do."""
    seen = [0]

    def each(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name in OUTSIDE:
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] == at:
                raise KeyboardInterrupt
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
        at += rounds(3, 1)
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
