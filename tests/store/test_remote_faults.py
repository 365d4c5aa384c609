"""Every request of a remote store that may fail, before or after it was carried out: no row is lost or doubled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.registry import _registry

from rollstore.errors import StoreError, WriteError
from rollstore.store import seal
from rollstore.store.objects import Patience
from rollstore.store.remote import open_remote
from rollstore.store.store import Store
from rollstore.testing import Fault, MachineCrash
from tests.store.conftest import errors, ids, rollout
from tests.store.flaky import Flaky
from tests.store.test_crashes import Promises, check, work

ALL = {f"r{number}" for number in range(6)}
WITH, WITHOUT = "s3", "memory"
"""Protocols under which the place is reached: with put-if-absent and without."""

Open = Callable[..., Store]


class InlineThread:
    """Runs where it is started, and holds nothing afterwards: the dead must let go of their locks."""

    ident = 1

    def __init__(self, target: Callable[[], None], name: str) -> None:
        self._targets = [target]

    def start(self) -> None:
        self._targets.pop()()

    def join(self) -> None: ...
    def is_alive(self) -> bool:
        return False


@pytest.fixture(params=[(WITH, "before"), (WITH, "after"), (WITHOUT, "after")], ids="-".join)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens a store at a place whose faults hit before or after a request is carried out; a number says which store."""
    protocol, Flaky.when = request.param
    monkeypatch.setattr(seal, "threading", SimpleNamespace(Thread=InlineThread))
    monkeypatch.setitem(_registry, protocol, Flaky)
    for sync in ("fsync", "fdatasync"):  # no power is lost here
        monkeypatch.setattr(os, sync, lambda _: None)

    def opened(number: int, *, create: bool = False, spool: str = "spool") -> Store:
        return open_remote(
            f"{protocol}://place/run",
            create=create,
            spool=tmp_path / f"{spool}-{number}",
            single_compactor=protocol == WITHOUT,
            patience=Patience(tries=3, sleep=lambda _: None),
        )

    yield opened
    Flaky.forget()


def fresh(place: Open, number: int) -> Store:
    Flaky.forget()
    return place(number, create=True)


def test_a_request_that_fails_once_is_not_even_noticed(place: Open) -> None:
    at = 0
    while True:
        at += 1
        store, promises = fresh(place, at), Promises()
        fault = Flaky.fault = Fault(at=at)
        work(place(at), promises, goes_on=False)
        assert ids(store) == dict.fromkeys(ALL, 1)
        assert promises.synced == ALL
        Flaky.fault = None
        check(store.filesystem, ALL, ALL)
        if not fault.fired:
            break
    assert at > 10


@pytest.mark.parametrize("verb", ["pipe_file", "ls", ""])
def test_a_place_that_fails_from_some_request_on_costs_nothing_that_was_acknowledged(place: Open, verb: str) -> None:
    at = 0
    while True:
        at += 1
        fresh(place, at)
        promises = Promises()
        store = place(at)
        fault = Flaky.fault = Fault(at=at, lasting=True, verbs=frozenset({verb} if verb else ()))
        with suppress(StoreError):  # a writer cannot begin without knowing the types of the caller's columns
            work(store, promises, goes_on=True)
        Flaky.fault = None
        assert set(ids(store)) >= promises.flushed
        check(store.filesystem, promises.flushed, ALL)
        if not fault.fired:
            break


def test_a_process_that_dies_at_any_request_leaves_what_it_flushed(place: Open) -> None:
    at = 0
    while True:
        at += 1
        fresh(place, at)
        store, promises = place(at), Promises()
        fault = Flaky.fault = Fault(at=at, crash=True)
        with suppress(MachineCrash):
            work(store, promises, goes_on=False)
        Flaky.fault = None
        stored = {path for path in Flaky.store if "/rollouts/" in path}
        check(place(at).filesystem, promises.flushed, ALL)
        assert all(Flaky.seen.count(("pipe_file", path)) == 1 for path in stored)  # and not once more by recovery
        if not fault.fired:
            break


def test_recovery_that_dies_at_any_request_is_done_again(place: Open) -> None:
    at = 0
    while True:
        at += 1
        fresh(place, at)
        promises = Promises()
        Flaky.fault = Fault(at=4, crash=True, verbs=frozenset({"pipe_file"}))
        with suppress(MachineCrash):
            work(place(at), promises, goes_on=False)
        Flaky.fault = None
        assert promises.flushed
        store = place(at)
        fault = Flaky.fault = Fault(at=at, crash=True)
        with suppress(MachineCrash):
            store.recover()
        Flaky.fault = None
        check(place(at).filesystem, promises.flushed, ALL)
        if not fault.fired:
            break


@pytest.mark.parametrize("action", ["compact", "vacuum"])
def test_compaction_and_vacuum_that_die_at_any_request_change_no_row(place: Open, action: str) -> None:
    names = {f"r{number}" for number in range(3)}
    at = 0
    while True:
        at += 1
        store = fresh(place, at)
        for name in sorted(names):
            store.append("rollouts", [rollout(name)])
        if action == "vacuum":
            store.compact()
        fault = Flaky.fault = Fault(at=at, crash=True)
        with suppress(MachineCrash):
            store.compact() if action == "compact" else store.vacuum(grace=0)
        Flaky.fault = None
        again = place(at)
        assert ids(again) == dict.fromkeys(names, 1)
        again.compact()
        again.vacuum(grace=0)
        again.recover()
        assert ids(again) == dict.fromkeys(names, 1)
        assert errors(again) == []
        assert len(again.filesystem.list("rollouts")) == 1
        if not fault.fired:
            break


def test_a_request_of_compaction_or_vacuum_that_fails_once_is_not_even_noticed(place: Open) -> None:
    at = 0
    while True:
        at += 1
        store = fresh(place, at)
        for name in ("a", "b"):
            store.append("rollouts", [rollout(name)])
        fault = Flaky.fault = Fault(at=at)
        assert store.compact().added
        assert len(store.vacuum(grace=0)) == 2
        Flaky.fault = None
        assert ids(store) == {"a": 1, "b": 1}
        assert len(store.filesystem.list("rollouts")) == 1
        if not fault.fired:
            break


def test_a_place_that_fails_for_good_is_an_error_of_reading_and_of_writing_in_one_line(place: Open) -> None:
    store = fresh(place, 0)
    writer = store.writer()
    writer.append(rollout("a"))
    Flaky.fault = Fault(at=1, lasting=True)
    for refused in (writer.close, lambda: store.get("a"), store.verify, store.recover, lambda: place(0)):
        with pytest.raises(StoreError, match=r"^\w+://place/run.*fault.*; tries: 3$") as caught:
            refused()
        assert isinstance(caught.value, WriteError)
    Flaky.fault = None
    writer.close()
    assert ids(store) == {"a": 1}
