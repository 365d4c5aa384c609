"""The log of calls: what was taken survives a kill at any moment, and damage is told apart from a torn end."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollstore import Rollout, Store
from rollstore.errors import CorruptionError, StoreError, WriteError
from rollstore.store.spool import Spool
from rollstore.store.store import open_on
from rollstore.testing.filesystem import Fault, MachineCrash, MemoryFilesystem
from rollstore.writers.gateway import Conversations
from rollstore.writers.gateway.call import Call, End, Expire, Told
from rollstore.writers.gateway.calls import Calls
from rollstore.writers.gateway.log import Log
from rollstore.writers.gateway.serve import is_stored
from rollstore.writers.openai import Server
from rollstore.writers.uuid7 import uuid7
from tests.writers.upstream import assistant, chat, part, user

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

# the file


def written(folder: Path, payloads: Sequence[bytes]) -> Path:
    """The file of a log with a head and these records."""
    log = Log(Spool(folder))
    log.read()
    log.rewrite(b"head", 0, ())
    assert [log.append(payload) for payload in payloads] == list(range(1, len(payloads) + 1))
    log.close()
    (file,) = folder.glob("*.log")
    return file


def payloads_of(folder: Path) -> tuple[list[bytes], int]:
    """(what a log reads, how many places it says are damaged)."""
    log = Log(Spool(folder))
    try:
        return [record.payload for record in log.read()], len(log.damages)
    finally:
        log.close()


def test_a_file_that_ends_anywhere_has_the_records_that_are_whole(tmp_path: Path) -> None:
    file = written(tmp_path / "log", [b"one", b"", b"three" * 9])
    data = file.read_bytes()
    for size in range(32, len(data)):
        for torn in (data[:size], data[:size] + bytes(len(data) - size)):
            file.write_bytes(torn)
            found, damaged = payloads_of(tmp_path / "log")
            assert found == [b"head", b"one", b"", b"three" * 9][: len(found)]
            assert len(found) < 4
            assert not damaged or len(torn) == len(data)  # room that was filled with zeros: a hole in a record


def test_a_bit_that_flipped_is_told_and_never_believed(tmp_path: Path) -> None:
    whole = [b"head", b"one", b"", b"three" * 9]
    file = written(tmp_path / "log", whole[1:])
    data = file.read_bytes()
    for at in range(len(data)):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        if at < 32:
            with pytest.raises(CorruptionError, match="wanted a head"):
                payloads_of(tmp_path / "log")
            continue
        found, damaged = payloads_of(tmp_path / "log")
        assert damaged == 1
        assert len(found) == 3
        assert [payload for payload in whole if payload in found] == found


def test_a_damaged_file_is_kept_aside_and_the_others_go(tmp_path: Path) -> None:
    file = written(tmp_path / "log", [b"one", b"two"])
    data = bytearray(file.read_bytes())
    data[61] ^= 1
    file.write_bytes(data)
    log = Log(Spool(tmp_path / "log"))
    assert [record.payload for record in log.read()] == [b"head", b"two"]
    log.rewrite(b"new", 0, ())
    log.rewrite(b"newer", 2, ())
    log.close()
    assert [path.read_bytes() for path in (tmp_path / "log" / "damaged").iterdir()] == [bytes(data)]
    assert payloads_of(tmp_path / "log") == ([b"newer"], 0)


def test_a_full_disk_takes_nothing_and_the_next_record_stands_where_it_should(tmp_path: Path) -> None:
    disk = MemoryFilesystem()
    log = Log(disk)
    log.rewrite(b"head", 0, ())
    log.append(b"one")
    disk.fault = Fault(at=1, verbs=frozenset({"write"}))
    with pytest.raises(WriteError):
        log.append(b"two" * 99)
    with suppress(WriteError):
        log.rewrite(b"head", 1, ())
    log.append(b"three")
    log.close()
    again = Log(disk)
    assert [record.payload for record in again.read()][-1] == b"three"
    assert not again.damages


def test_after_power_loss_what_is_left_is_read_and_nothing_else() -> None:
    told = 0
    for seed in range(60):
        disk = MemoryFilesystem(seed)
        log = Log(disk)
        log.rewrite(b"head", 0, ())
        payloads = [bytes([65 + n]) * (400 * n + 1) for n in range(8)]
        for number, payload in enumerate(payloads[:5], 1):
            log.append(payload)
            if number == 3:
                log.rewrite(b"later", 3, (2,))
        after = Log(disk.crash())
        found = [record.payload for record in after.read()]
        assert found[0] in (b"head", b"later")
        assert [payload for payload in payloads if payload in found] == found[1:]
        assert found[0] == b"head" or payloads[1] in found  # what a new file keeps is synced before it counts
        told += len(after.damages)
    assert told > 5  # pages are lost in the middle too


def test_what_comes_while_the_file_is_replaced_is_kept(tmp_path: Path) -> None:
    log = Log(Spool(tmp_path))
    log.rewrite(b"head", 0, ())
    for number in range(5):
        log.append(b"%d" % number)
    log.rewrite(b"later", 3, (2,))
    log.append(b"more")
    log.close()
    assert payloads_of(tmp_path) == ([b"later", b"1", b"3", b"4", b"more"], 0)


def test_a_log_in_use_and_that_of_another_store_are_refused(tmp_path: Path) -> None:
    one = Calls(Spool(tmp_path), "a" * 32)
    one.read()
    one.rewrite(0, (), {}, ())
    with pytest.raises(StoreError, match="got one in use"):
        Calls(Spool(tmp_path), "a" * 32)
    one.close()
    with pytest.raises(StoreError, match=r"wanted the state of store b+, got that of a+"):
        Calls(Spool(tmp_path), "b" * 32).read()
    Calls(Spool(tmp_path), "a" * 32).read()  # the refusal let go of it


# what happens to conversations


def call(messages: list[Any], prompt: list[int], tokens: list[int], text: str, at: float, **more: Any) -> Call:
    reply = chat(prompt, tokens, text)
    extra = more.pop("second", None)
    if extra is not None:
        reply["choices"].append({**chat(prompt, extra)["choices"][0], "index": 1})
    request = {"messages": messages, "temperature": 1.0, "n": 1 if extra is None else 2}
    return Call(
        request=msgspec.json.encode(request), parts=[msgspec.json.encode(reply)], mark=uuid7(), at=at,
        started_at=NOW, finished_at=NOW, server=Server(logprob_kind="behavior"), **more,
    )  # fmt: skip


def story() -> list[Any]:
    """Conversations with and without names, that go on, break, end, and are forgotten."""
    one = [user("one")]
    again = [*one, assistant("b"), user("more")]
    cut = Call(
        request=b'{"messages": [], "temperature": 1.0}', parts=[msgspec.json.encode(part([70], "h", prompt=[4]))],
        mark=uuid7(), at=4.0, cut="engine_abort", rollout_id="cut", started_at=NOW, finished_at=NOW,
    )  # fmt: skip
    return [
        call(one, [1, 2], [50, 51, 9], "<think>a</think> b", 0.0),
        call([user("two")], [3], [60, 9], "two", 1.0, rollout_id="two", fields={"metadata": {"a": "b"}, "step": 1}),
        call(again, [1, 2, 51, 9, 3], [61, 9], "c", 2.0),
        Told(weights=("7",)),
        call([user("n")], [8, 8], [30, 9], "n", 3.0, second=[31, 9], weights=("7",)),
        call([user("x")], [3, 60, 9, 4], [62, 9], "d", 3.5, rollout_id="two", weights=("7", "8")),
        cut,
        End(rollout_id="two", fields={"reward": 0.5, "ending": "terminated"}),
        call([user("y")], [3], [60, 9], "two", 5.0, rollout_id="two"),
        call([user("z")], [1, 2, 51, 9, 3, 61, 9, 5], [63, 9], "e", 6.0),
        Expire(before=3.0),
        call([user("n"), assistant("n"), user("o")], [8, 8, 30, 9, 6], [33, 9], "p", 7.0),
        call([user("z")], [1, 2, 51, 9, 3, 61, 9, 5, 63, 9, 7], [64, 9], "e", 8.0),
    ]


def started(disk: MemoryFilesystem, store: Store, rewrite_bytes: int) -> Conversations:
    log = Calls(disk, "s", rewrite_bytes=rewrite_bytes)
    conversations = Conversations(store.writer(), log=log)
    conversations.restore(lambda row: is_stored(store, row))
    return conversations


def took(disk: MemoryFilesystem, event: Any) -> bool:
    """Whether a call that was not answered was taken all the same."""
    log = Log(disk)
    mark = getattr(event, "mark", "").encode()
    found = any(mark in record.payload for record in log.read()) if mark else False
    log.close()
    return found


def told(
    events: Sequence[Any], disk: MemoryFilesystem, store_disk: MemoryFilesystem, rewrite_bytes: int, again: str = "log"
) -> int:
    """Hand the events over, each again when the process died before it was taken; how often it died.

    Where it dies once, it dies twice more: soon after it was started again, in what it does to the log or the store.
    """
    deaths, waiting = 0, list(events)
    while True:
        try:
            conversations = started(disk, open_on(store_disk, create=True), rewrite_bytes)
            while waiting:
                logged = conversations.log.put(waiting[0])
                waiting.pop(0)
                conversations.append(logged)
                conversations.flush()
            conversations.close()
        except MachineCrash:
            deaths += 1
            disk.kill()
            store_disk.kill()
            if deaths < 3:
                (disk if again == "log" else store_disk).fault = Fault(at=7 * deaths, crash=True)
            if waiting and took(disk, waiting[0]):
                waiting.pop(0)
        else:
            return deaths


def rows_of(store: Store) -> list[Any]:
    """What was recorded, each rollout once, and all of it but the store's own columns."""
    table = store.scan("rollouts").read_all()
    found = table.drop_columns(["written_by", "written_row", "written_at"]).to_pylist()
    return sorted(({k: v for k, v in row.items() if v is not None} for row in found), key=repr)


@pytest.fixture(scope="module")
def unkilled() -> tuple[list[Any], list[Any]]:
    """(the events, the rows of a gateway that was never killed)."""
    events = story()
    store_disk = MemoryFilesystem()
    assert told(events, MemoryFilesystem(), store_disk, 1 << 20) == 0
    rows = rows_of(open_on(store_disk))
    assert len({(row["rollout_id"], row["segment"]) for row in rows}) == len(rows) == 8
    return events, rows


def moments() -> Iterator[tuple[str, int]]:
    yield from (("log", at) for at in range(1, 60, 3))
    yield from (("store", at) for at in range(1, 90, 8))


@pytest.mark.parametrize("rewrite_bytes", [1, 1 << 20])
def test_a_gateway_killed_at_any_moment_goes_on_as_if_it_had_not_been(
    unkilled: tuple[list[Any], list[Any]], rewrite_bytes: int
) -> None:
    events, rows = unkilled
    deaths = 0
    for where, at in moments():
        disk, store_disk = MemoryFilesystem(at), MemoryFilesystem(at)
        open_on(store_disk, create=True)
        (disk if where == "log" else store_disk).fault = Fault(at=at, crash=True)
        deaths += told(events, disk, store_disk, rewrite_bytes, "store" if at % 3 else "log")
        store_disk.kill()
        assert rows_of(open_on(store_disk)) == rows, (where, at)
    assert deaths > 20


def test_a_rollout_that_ended_is_still_known_after_the_gateway_was_stopped(tmp_path: Path) -> None:
    rows: list[Rollout] = []

    class Sink:
        def append(self, data: list[Rollout]) -> None:
            rows.extend(data)

        def flush(self, *, sync: bool = False) -> None: ...

        def close(self) -> None: ...

    for _ in range(2):
        conversations = Conversations(Sink(), log=Calls(Spool(tmp_path), "s"))
        conversations.restore(lambda row: False)
        conversations.append(conversations.log.put(call([user("q")], [1], [5], "a", 0.0, rollout_id="r")))
        conversations.close()
    assert [row.rollout_id == "r" for row in rows] == [True, False]
    assert rows[1].metadata == {"after": "r"}


def test_the_log_does_not_grow_with_what_is_over(tmp_path: Path) -> None:
    disk = MemoryFilesystem()
    conversations = started(disk, open_on(MemoryFilesystem(), create=True), 20_000)
    sizes: list[int] = []
    for number in range(60):
        name = f"r{number}"
        conversations.append(conversations.log.put(call([user("q" * 900)], [1], [5], "a", 0.0, rollout_id=name)))
        conversations.append(conversations.log.put(End(rollout_id=name)))
        conversations.flush()
        sizes += [disk.open(file).size() for file in disk.list("") if file.endswith(".log")]
    assert 10_000 < max(sizes) < 25_000


def test_a_call_that_was_damaged_in_the_log_is_told_and_its_conversation_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk, store_disk = MemoryFilesystem(), MemoryFilesystem()
    conversations = started(disk, open_on(store_disk, create=True), 1)
    first = call([user("q")], [1], [5], "a", 0.0, rollout_id="r")
    second = call([user("q")], [1, 5, 2], [6], "b", 1.0, rollout_id="r")
    for event in (first, second):
        conversations.append(conversations.log.put(event))
        conversations.flush()
    disk.kill()
    (name,) = (name for name in disk.list("") if name.endswith(".log"))
    data = bytearray(disk.open(name).read(0, 1 << 20))
    data[data.index(first.request) + 3] ^= 1
    disk.lock(name).write(0, bytes(data))
    disk.kill()
    with caplog.at_level(logging.ERROR, "rollstore"):
        store = open_on(store_disk)
        again = started(disk, store, 1)
        again.close()
    assert "hold no sum" in caplog.text
    (row,) = store.get("r")
    assert row.tokens.tolist() == [1, 5, 2, 6]
    assert row.action_mask.tolist() == [False, False, False, True]
    assert row.metadata == {"calls_lost": "1"}
