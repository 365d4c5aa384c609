"""Every fault point of append, flush, seal, compact, vacuum and recover: what was promised is there, once."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest

from rollstore.errors import RollstoreError, WriteError
from rollstore.store import seal
from rollstore.store.filesystem import Filesystem
from rollstore.store.store import Store, open_on
from rollstore.testing import Fault, MachineCrash, MemoryFilesystem
from tests.store.conftest import errors, ids, rollout

SEEDS = range(3)


class InlineThread:
    """Runs where it is started, so that the n-th verb is always the same one."""

    ident = 1

    def __init__(self, target: Callable[[], None], name: str) -> None:
        self.start = target

    def join(self) -> None: ...
    def is_alive(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def _threads_run_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "threading", SimpleNamespace(Thread=InlineThread))


class Promises:
    """Ids appended, flushed and synced so far, as the writer's caller knows them."""

    def __init__(self) -> None:
        self.appended: set[str] = set()
        self.flushed: set[str] = set()
        self.synced: set[str] = set()


def work(store: Store, promises: Promises, *, goes_on: bool) -> None:
    """Append, flush, sync and close; with `goes_on`, every refused call is tried again until it is taken."""

    def do(action: Callable[[], None]) -> bool:
        for _ in range(8):
            try:
                action()
            except WriteError:
                if not goes_on:
                    raise
            else:
                return True
        return False

    writer = store.writer(seal_bytes=6_000)
    for number in range(6):
        name = f"r{number}"
        if do(lambda name=name: writer.append(rollout(name, tokens=40))):
            promises.appended.add(name)
        sync = number % 2 == 1
        taken = set(promises.appended)
        if do(lambda sync=sync: writer.flush(sync=sync)):
            promises.flushed |= taken
            if sync:
                promises.synced |= taken
    if do(writer.close):
        promises.flushed |= promises.appended
        promises.synced |= promises.appended


def check(disk: Filesystem, promised: set[str], appended: set[str]) -> None:
    """Before and after recovery: everything promised once, nothing twice, nothing that was not appended."""
    store = open_on(disk)
    for found in (ids(store), None):
        if found is None:
            store.recover()
            found = ids(store)
        assert set(found) >= promised
        assert set(found) <= appended
        assert set(found.values()) <= {1}
    assert errors(store) == []
    assert not disk.list("journal")
    assert not disk.list("staging")
    for name in promised:
        assert store.get(name)[0].rollout_id == name


def new_disk(seed: int) -> MemoryFilesystem:
    disk = MemoryFilesystem(seed)
    open_on(disk, create=True)
    disk.sync_folder("")
    return disk


@pytest.mark.parametrize("seed", SEEDS)
def test_power_lost_at_any_verb_keeps_what_was_synced(seed: int) -> None:
    at = 0
    while True:
        at += 1
        disk, promises = new_disk(seed * 1000 + at), Promises()
        fault = disk.fault = Fault(at=at, crash=True)
        with suppress(MachineCrash):
            work(open_on(disk), promises, goes_on=False)
        # The row under way may be there or not: it was handed over, and nothing was said of it.
        after = disk.crash()
        check(after, promises.synced, {f"r{i}" for i in range(6)})
        if not fault.fired:
            break
    assert at > 20


@pytest.mark.parametrize("seed", SEEDS)
def test_a_process_killed_at_any_verb_keeps_what_was_flushed(seed: int) -> None:
    at = 0
    while True:
        at += 1
        disk, promises = new_disk(seed * 1000 + at), Promises()
        fault = disk.fault = Fault(at=at, crash=True)
        with suppress(MachineCrash):
            work(open_on(disk), promises, goes_on=False)
        disk.kill()
        check(disk, promises.flushed, {f"r{i}" for i in range(6)})
        if not fault.fired:
            break


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("power", [True, False])
def test_one_refused_verb_costs_nothing_and_the_writer_goes_on(code: int, power: bool) -> None:
    at = 0
    while True:
        at += 1
        disk, promises = new_disk(at), Promises()
        fault = disk.fault = Fault(at=at, code=code)
        with suppress(OSError):  # the fault may hit the reading of the store itself
            work(open_on(disk), promises, goes_on=True)
        assert promises.appended == {f"r{i}" for i in range(6)}
        disk.fault = None
        after = disk.crash() if power else disk
        disk.kill()
        check(after, promises.synced if power else promises.flushed, promises.appended)
        if not fault.fired:
            break


@pytest.mark.parametrize("verb", ["write", "sync", "sync_folder", "create", "publish", "truncate", "delete"])
def test_a_disk_that_refuses_from_some_verb_on_loses_nothing_it_acknowledged(verb: str) -> None:
    at = 0
    while True:
        at += 1
        disk, promises = new_disk(at), Promises()
        fault = disk.fault = Fault(at=at, code=errno.ENOSPC, lasting=True, verbs=frozenset({verb}))
        store = open_on(disk)
        work(store, promises, goes_on=True)
        acknowledged = set(promises.flushed)
        assert set(ids(store)) >= acknowledged
        disk.kill()
        check(disk, acknowledged, promises.appended | {f"r{i}" for i in range(6)})
        if not fault.fired:
            break


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("power", [True, False])
def test_recovery_that_dies_at_any_verb_is_done_again(seed: int, power: bool) -> None:
    at = 0
    while True:
        at += 1
        disk, promises = new_disk(seed * 1000 + at), Promises()
        with suppress(MachineCrash):
            disk.fault = Fault(at=17 + seed * 5, crash=True)
            work(open_on(disk), promises, goes_on=False)
        if power:
            disk = disk.crash()
        else:
            disk.kill()
        promised = promises.synced if power else promises.flushed
        fault = disk.fault = Fault(at=at, crash=True)
        with suppress(MachineCrash):
            open_on(disk).recover()
        again = disk.crash() if power else disk
        again.kill()
        check(again, promised, {f"r{i}" for i in range(6)})
        if not fault.fired:
            break


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("action", ["compact", "vacuum"])
def test_compaction_and_vacuum_that_die_at_any_verb_change_no_row(seed: int, action: str) -> None:
    names = {f"r{i}" for i in range(4)}
    at = 0
    while True:
        at += 1
        disk = new_disk(seed * 1000 + at)
        store = open_on(disk)
        for name in sorted(names):
            store.append("rollouts", [rollout(name)])
        if action == "vacuum":
            store.compact()
            disk.age(100)
        fault = disk.fault = Fault(at=at, crash=True)
        with suppress(MachineCrash):
            store.compact() if action == "compact" else store.vacuum(grace=10)
        for after in (disk.crash(), disk):
            after.kill()
            again = open_on(after)
            assert ids(again) == dict.fromkeys(names, 1)
            again.compact()
            after.age(1_000_000)
            again.vacuum(grace=10)
            again.recover()
            assert ids(again) == dict.fromkeys(names, 1)
            assert errors(again) == []
            assert len(after.list("rollouts")) == 1
        if not fault.fired:
            break


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("action", ["compact", "vacuum", "recover"])
def test_upkeep_that_a_disk_refuses_at_any_verb_changes_no_row_and_can_be_done_again(
    action: str, lasting: bool
) -> None:
    names = {f"r{i}" for i in range(4)}
    at = 0
    while True:
        at += 1
        disk = new_disk(at)
        store = open_on(disk)
        for name in sorted(names):
            if action == "recover":
                writer = store.writer()
                writer.append(rollout(name))
                writer.flush(sync=True)
            else:
                store.append("rollouts", [rollout(name)])
        disk.kill()
        if action == "vacuum":
            store.compact()
            disk.age(100)
        work = {"compact": store.compact, "vacuum": partial(store.vacuum, grace=10), "recover": store.recover}[action]
        fault = disk.fault = Fault(at=at, code=errno.ENOSPC, lasting=lasting)
        with suppress(WriteError):
            work()
        disk.fault = None
        assert ids(open_on(disk)) == dict.fromkeys(names, 1)
        work()
        # What was refused and then done is as durable as what was done at once.
        for after in (disk.crash(), disk):
            again = open_on(after)
            assert ids(again) == dict.fromkeys(names, 1)
            after.age(1_000_000)
            after.kill()
            again.recover()
            again.compact()
            again.vacuum(grace=0)
            assert ids(open_on(after)) == dict.fromkeys(names, 1)
            assert errors(open_on(after)) == []
            assert len(after.list("rollouts")) == 1
            assert not after.list("staging")
        if not fault.fired:
            break
    assert at > 3


def test_a_failed_sync_is_an_error_and_the_file_is_never_synced_again() -> None:
    disk = new_disk(1)
    store = open_on(disk)
    writer = store.writer()
    writer.append(rollout("before"))
    writer.flush(sync=True)
    writer.append(rollout("after"))
    disk.fault = Fault(at=1, verbs=frozenset({"sync"}))
    with pytest.raises(WriteError):
        writer.flush(sync=True)
    first = disk.list("journal")
    writer.flush(sync=True)
    assert disk.list("journal") != first
    # Power goes: whatever the failed sync left of the first file, the second has the row, and it counts once.
    check(disk.crash(), {"before", "after"}, {"before", "after"})


def test_an_error_after_the_fault_is_still_a_rollstore_error() -> None:
    disk = new_disk(1)
    disk.fault = Fault(at=1, code=errno.EROFS, lasting=True)
    writer = open_on(disk).writer()
    writer.append(rollout("r"))
    with pytest.raises(RollstoreError, match="fault 1 at create"):
        writer.flush()


@pytest.mark.parametrize("seed", range(12))
def test_a_file_whose_first_sync_failed_never_counts_beside_its_successor(seed: int) -> None:
    disk = new_disk(seed)
    store = open_on(disk)
    with store.writer() as writer:
        writer.append(rollout("a"))
        writer.flush()
        disk.fault = Fault(at=1, verbs=frozenset({"sync"}))
        with pytest.raises(WriteError):
            writer.flush(sync=True)
        disk.fault = None
    # The first file was deleted without ever having been a part: should its name come back, so would its rows.
    check(disk.crash(), {"a"}, {"a"})


@pytest.mark.parametrize("seed", range(4))
def test_a_sync_covers_the_rows_in_journals_that_wait_to_be_sealed(seed: int) -> None:
    disk = new_disk(seed)
    writer = open_on(disk).writer()
    writer.append(rollout("a"))
    writer.flush()
    writer.append(rollout("b", reward=1.0, reward_status="scored"))
    writer.flush(sync=True)
    check(disk.crash(), {"a", "b"}, {"a", "b"})


@pytest.mark.parametrize("seed", range(3))
def test_what_recovery_has_done_survives_power_loss(seed: int) -> None:
    at = 0
    while True:
        at += 1
        disk, promises = new_disk(seed * 1000 + at), Promises()
        fault = disk.fault = Fault(at=at, crash=True)
        with suppress(MachineCrash):
            work(open_on(disk), promises, goes_on=False)
        disk.kill()
        open_on(disk).recover()
        check(disk.crash(), promises.flushed, {f"r{i}" for i in range(6)})
        if not fault.fired:
            break


def test_a_refused_write_is_cut_back_to_the_last_whole_batch() -> None:
    disk = new_disk(3)
    store = open_on(disk)
    writer = store.writer()
    writer.append(rollout("a"))
    writer.flush()
    writer.append(rollout("b"))
    disk.fault = Fault(at=1, code=errno.ENOSPC, verbs=frozenset({"write"}))
    with pytest.raises(WriteError, match="nothing acknowledged is lost"):
        writer.flush()
    (view,) = store.snapshot().views("rollouts")
    assert (view.rows, view.rest) == (1, 0)
    writer.close()
    assert ids(store) == {"a": 1, "b": 1}
