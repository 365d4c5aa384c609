"""A store on S3, over real connections to a server on loopback that can be told to fail."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import s3fs
from typer.testing import CliRunner

import rollstore.store.remote
from rollstore.cli import app
from rollstore.errors import StoreError, WriteError
from rollstore.readers.arrow import dataset
from rollstore.readers.duckdb import connect as duckdb_connect
from rollstore.store.objects import Patience
from rollstore.store.remote import RemoteFilesystem, open_remote
from rollstore.store.snapshot import Snapshot
from rollstore.store.store import Store
from tests.store.conftest import errors, ids, once, rollout
from tests.store.s3_server import BUCKET, Deed, Request, S3Server

Open = Callable[..., Store]
NUMBERS = count()

PRELUDE = """
import sys
sys.path.insert(0, sys.argv[2])
import s3fs
s3fs.S3FileSystem.retries = 1
import rollstore
from tests.store.conftest import ids, rollout
store = rollstore.open(sys.argv[1])
"""


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    server = S3Server()
    s3fs.S3FileSystem(**server.options()).mkdir(BUCKET)
    yield server
    server.stop()


@pytest.fixture
def url(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a store of one's own."""
    server.seen.clear()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # so that it is our patience that is seen
    return f"s3://{BUCKET}/runs/{next(NUMBERS)}"


@pytest.fixture
def connect(server: S3Server, url: str, tmp_path: Path) -> Open:
    """Opens the store, from one machine or another."""

    def opened(machine: str = "here", **options: object) -> Store:
        patience = Patience(sleep=lambda _: None)
        spool = tmp_path / machine
        return open_remote(url, options=server.options(), spool=spool, patience=patience, **options)

    return opened


@pytest.fixture
def store(connect: Open) -> Store:
    return connect(create=True)


def start(server: S3Server, url: str, spool: Path, script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), url, str(Path(__file__).parents[2]), *arguments],
        env={**server.environment(), "ROLLSTORE_SPOOL": str(spool)},
        stdout=subprocess.PIPE,
        text=True,
    )


def killed_after_its_first_upload(server: S3Server, started: Callable[[], subprocess.Popen[str]]) -> None:
    """Run a process to the moment when the server has stored a part of its, and has not yet said so."""
    stored, killed = threading.Event(), threading.Event()

    def after(request: Request) -> None:
        if request.method == "PUT" and request.path.endswith(".arrow"):
            stored.set()
            killed.wait(timeout=60)

    with server.doing(after=after):
        process = started()
        assert stored.wait(timeout=60)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed.set()


def journals(store: Store) -> list[str]:
    return store.filesystem.list("journal")


def tale(connect: Open) -> None:
    """All that a store does, from two machines."""
    here, there = connect("here", create=True), connect("there")
    with here.writer(source="here", seal_bytes=3_000) as writer:
        for number in range(3):
            writer.append(rollout(f"r{number}", tokens=60))
            writer.flush(sync=number == 1)
        assert ids(here) == once("r0", "r1", "r2")
    there.append("rollouts", [rollout("r3", reward=1.0, extra={"x_mark": 3})])
    for store in (here, there):
        assert ids(store) == once(*(f"r{number}" for number in range(4)))
    assert there.get("r1")[0].tokens.tolist() == rollout("r1", tokens=60).tokens.tolist()
    assert here.compact().replaced["rollouts"]
    assert there.vacuum(grace=0)
    assert there.recover().moved == []
    for store in (here, there):
        assert ids(store) == once(*(f"r{number}" for number in range(4)))
        assert here.scan("rollouts", ["x_mark"]).read_all()["x_mark"].to_pylist().count(3) == 1
        assert errors(store) == []
        assert journals(store) == []
    assert here.info().tables["rollouts"].parts == 1


def test_a_store_on_s3_does_all_that_a_store_does(connect: Open) -> None:
    tale(connect)


def test_a_server_that_fails_one_request_in_five_is_not_noticed(server: S3Server, connect: Open) -> None:
    deeds: Iterator[Deed] = cycle(["fail", "fail after", "drop", "drop after"])
    turn = count(1)
    with server.doing(lambda _: next(deeds) if next(turn) % 5 == 0 else "serve"):
        tale(connect)
    assert next(turn) > 100


def test_an_upload_whose_reply_is_lost_is_found_done_and_not_done_twice(server: S3Server, store: Store) -> None:
    lost: set[str] = set()

    def deed(request: Request) -> Deed:
        if request.method == "PUT" and request.path not in lost:
            lost.add(request.path)
            return "drop after"
        return "serve"

    with server.doing(deed):
        with store.writer() as writer:
            writer.append(rollout("a", extra={"x_mark": 1}))
        store.append("rollouts", [rollout("b")])
        store.compact()
    assert len([path for path in lost if path.endswith((".arrow", ".json"))]) == 5
    assert ids(store) == once("a", "b")
    assert errors(store) == []


def test_another_file_under_the_name_is_told_from_a_lost_reply(server: S3Server, store: Store) -> None:
    with store.writer() as writer:
        writer.append(rollout("a"))
        writer.flush()
        (name,) = (file.removesuffix(".arrows") for file in journals(store))
        foreign = s3fs.S3FileSystem(**server.options())
        foreign.pipe_file(f"{store.path}/rollouts/{name}.arrow", b"something else")
        with pytest.raises(StoreError, match="wanted a free name"):
            writer.seal()
        foreign.rm_file(f"{store.path}/rollouts/{name}.arrow")
    assert ids(store) == once("a")


def test_writers_in_two_processes_meet_in_one_store(server: S3Server, url: str, store: Store, tmp_path: Path) -> None:
    script = """
    with store.writer(seal_bytes=10_000) as writer:
        for number in range(10):
            writer.append(rollout(f"{sys.argv[3]}-{number}", tokens=100))
            writer.flush()
    """
    writers = [start(server, url, tmp_path / "shared", script, str(number)) for number in range(2)]
    while any(process.poll() is None for process in writers):
        store.compact()
        found = ids(store)
        assert set(found.values()) <= {1}
    for process in writers:
        process.communicate()
        assert process.returncode == 0
    assert ids(store) == once(*(f"{writer}-{number}" for writer in range(2) for number in range(10)))
    assert errors(store) == []


def test_a_writer_killed_between_upload_and_confirmation_is_recovered_without_a_second_upload(
    server: S3Server, url: str, store: Store, connect: Open, tmp_path: Path
) -> None:
    script = """
    writer = store.writer()
    writer.append(rollout("a"))
    writer.flush()
    writer.append(rollout("b", reward=1.0))
    writer.flush()
    writer.close()
    """
    killed_after_its_first_upload(server, lambda: start(server, url, tmp_path / "here", script))
    assert len(journals(store)) == 2
    assert ids(store) == once("a", "b")
    assert ids(connect("elsewhere")) == once("a")  # the second journal has not left its machine
    server.seen.clear()
    report = store.recover()
    assert (len(report.sealed), len(report.deleted)) == (1, 1)
    uploads = [request.path for request in server.seen if request.method == "PUT" and request.path.endswith(".arrow")]
    assert len(uploads) == 1
    assert report.sealed[0] in uploads[0]
    assert journals(store) == []
    assert ids(connect("elsewhere")) == once("a", "b")
    assert errors(store) == []


def test_a_name_that_was_published_compacted_and_vacuumed_meanwhile_is_not_published_again(
    server: S3Server, url: str, store: Store, connect: Open, tmp_path: Path
) -> None:
    script = """
    writer = store.writer()
    writer.append(rollout("a"))
    writer.close()
    """
    killed_after_its_first_upload(server, lambda: start(server, url, tmp_path / "here", script))
    elsewhere = connect("elsewhere")
    elsewhere.append("rollouts", [rollout("b")])
    elsewhere.compact()
    assert len(elsewhere.vacuum(grace=0)) == 2
    assert ids(store) == once("a", "b")
    assert store.recover().deleted
    assert journals(store) == []
    assert ids(store) == ids(elsewhere) == once("a", "b")
    assert len(elsewhere.parts("rollouts")) == 1


def test_of_two_compactions_that_race_exactly_one_wins_a_number(server: S3Server, store: Store, connect: Open) -> None:
    for name in ("a", "b", "c"):
        store.append("rollouts", [rollout(name)])
    both = threading.Barrier(2, timeout=60)
    met = [False, False]

    def deed(request: Request) -> Deed:
        if request.method == "PUT" and request.path.endswith("/commits/0000000001.json") and not all(met):
            met[both.wait()] = True
        return "serve"

    reports: list[object] = []
    stores = [connect("one"), connect("two")]
    rivals = [threading.Thread(target=lambda s=each: reports.append(s.compact())) for each in stores]
    with server.doing(deed):
        for rival in rivals:
            rival.start()
        for rival in rivals:
            rival.join()
    assert all(met)
    assert sorted(len(report.added) for report in reports) == [0, 1]
    assert store.snapshot().log.number == 1
    assert len(store.filesystem.list("rollouts")) == 4  # the loser took its output away
    assert ids(store) == once("a", "b", "c")


def test_a_server_that_cannot_be_reached_at_close_leaves_the_rows_in_the_spool(server: S3Server, connect: Open) -> None:
    first = connect("first", create=True)
    second = connect("second")
    writers = [first.writer(), second.writer()]
    with server.doing(lambda _: "drop"):
        for writer, name in zip(writers, ("a", "b"), strict=True):
            writer.append(rollout(name))
            writer.flush()
            with pytest.raises(WriteError, match=r"^s3://bucket/runs/\d+/.*: upload: .*; tries: 6$") as caught:
                writer.close()
            assert isinstance(caught.value, StoreError)
            assert "\n" not in str(caught.value)
    assert ids(first) == once("a")
    writers[0].close()  # closing again tries again
    assert journals(first) == []
    writers[1].after_fork()  # the second process dies
    assert len(second.recover().sealed) == 1
    assert ids(first) == ids(second) == once("a", "b")


def test_a_server_that_overwrites_what_it_was_told_not_to_gets_no_compaction(
    server: S3Server, connect: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ignores_conditions", True)
    store = connect(create=True)
    for name in ("a", "b"):
        store.append("rollouts", [rollout(name)])
    with pytest.raises(StoreError, match=r"wanted put-if-absent.*single_compactor=True"):
        store.compact()
    assert len(store.filesystem.list("rollouts")) == 2
    assert connect(single_compactor=True).compact().added
    assert ids(store) == once("a", "b")
    monkeypatch.setattr(server, "ignores_conditions", False)
    assert not connect().compact().added  # one part is left: nothing to do, and nobody says it may not be done


def test_ages_are_by_the_servers_clock_whatever_this_machine_thinks(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        store.append("rollouts", [rollout(name)])
    store.compact()
    later = time.time() + 30 * 24 * 3600.0
    with monkeypatch.context() as skewed:
        skewed.setattr(rollstore.store.remote.time, "time", lambda: later)
        skewed.setattr(store.filesystem.spool, "modified", lambda _: later)
        assert store.vacuum() == []
    assert len(store.vacuum(grace=0)) == 2


def test_a_listing_from_before_is_not_believed(store: Store, connect: Open) -> None:
    elsewhere = connect("elsewhere")
    names = ("a", "b", "c")
    for number, name in enumerate(names):
        store.append("rollouts", [rollout(name)])
        assert ids(elsewhere) == once(*names[: number + 1])


def test_a_scan_reads_in_large_ranges_and_a_get_reads_one_batch(server: S3Server, connect: Open, store: Store) -> None:
    with store.writer() as writer:
        for number in range(40):
            writer.append(rollout(f"r{number:02}", tokens=60_000))
    reader = connect()
    (part,) = reader.parts("rollouts")
    assert part.batch_count > 10
    server.seen.clear()
    assert len(ids(reader)) == 40
    assert len([r for r in server.seen if r.path.endswith(".arrow")]) <= 4
    reader.get("r07")
    sizes: list[int] = []
    objects = reader.filesystem._objects
    original = objects.read
    objects.read = lambda path, start, stop, *more: sizes.append(stop - start) or original(path, start, stop, *more)
    assert reader.get("r33")[0].rollout_id == "r33"
    assert sum(sizes) < part.size / 5


@pytest.fixture(scope="module")
def twenty(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Store]:
    """Opens a store of twenty parts that nobody writes to, each time from another machine."""

    def opened(**options: object) -> Store:
        spool = tmp_path_factory.mktemp("spool")
        return open_remote(f"s3://{BUCKET}/runs/twenty", options=server.options(), spool=spool, **options)

    store = opened(create=True)
    for number in range(20):
        rows = [rollout(f"{number}-{i}", tokens=64, step=number, run_id="run") for i in range(4)]
        store.append("rollouts", rows)
    return opened


def together(store: Store) -> list[int]:
    """How many files each of the store's requests for several is about, from now on."""
    turns: list[int] = []
    objects = store.filesystem._objects
    original = objects.read_each
    objects.read_each = lambda wanted: turns.append(len(wanted)) or original(wanted)
    return turns


def test_many_parts_are_opened_in_few_requests(server: S3Server, twenty: Callable[[], Store]) -> None:
    reader = twenty()
    server.seen.clear()
    turns = together(reader)
    parts = reader.parts("rollouts")
    assert (len(parts), turns) == (20, [20])
    assert len([r for r in server.seen if r.path.endswith(".arrow")]) == 20


def test_parts_that_nobody_said_are_read_next_are_fetched_more_at_a_time_with_every_turn(
    twenty: Callable[[], Store],
) -> None:
    reader = twenty()
    parts = reader.parts("rollouts")
    turns = together(reader)
    for part in parts:
        assert next(part.batches(["rollout_id"])).num_rows == 4
    assert turns == [2, 4, 8, 5]
    turns.clear()
    for part in parts:
        assert replace(part).batch_count == 1  # reads the end again
    assert turns == [2, 4, 8, 5]


def test_of_parts_that_cannot_match_nothing_is_fetched_along(server: S3Server, twenty: Callable[[], Store]) -> None:
    with twenty().snapshot() as snapshot:
        wanted = (pc.field("step") > 15) | (pc.field("step") < 3)
        matching = {part.name for part in snapshot.matching("rollouts", wanted)}
        assert len(matching) == 7
        for scan in (lambda: dataset(snapshot, "rollouts").to_table(filter=wanted), lambda: read(snapshot, wanted)):
            server.seen.clear()
            assert scan().num_rows == 28
            fetched = Counter(seen.path.rpartition("/")[2].removesuffix(".arrow") for seen in server.seen)
            assert fetched == dict.fromkeys(matching, 1)


def read(snapshot: Snapshot, where: pc.Expression) -> pa.Table:
    return snapshot.scan("rollouts", ["rollout_id"], where).read_all()


def requests(server: S3Server) -> dict[str, int]:
    """The requests so far, by kind, and forgets them."""
    kinds = {"HEAD": "looks", "PUT": "writes", "DELETE": "deletes", "POST": "posts"}
    found = Counter(
        kinds.get(seen.method) or ("lists" if seen.path.strip("/") == BUCKET else "reads") for seen in server.seen
    )
    server.seen.clear()
    return dict(found)


def test_no_more_is_asked_of_a_server_than_the_page_says(server: S3Server, twenty: Callable[..., Store]) -> None:
    found: dict[str, dict[str, int]] = {}

    def measured(what: str, act: Callable[[], object]) -> None:
        server.seen.clear()
        act()
        found[what] = requests(server)

    def count(store: Store) -> int:
        with store.snapshot() as snapshot:
            return snapshot.count("rollouts")

    def query(store: Store) -> list[tuple[int]]:
        with duckdb_connect(store) as connection:
            return connection.sql("SELECT count(step) FROM rollouts").fetchall()

    parts = twenty().parts("rollouts")
    first, other = (next(parts[place].batches(["rollout_id"]))["rollout_id"][0].as_py() for place in (0, 7))
    stores = [twenty() for _ in range(3)]
    measured("open", twenty)
    measured("count", lambda: count(stores[0]))
    measured("count again", lambda: count(stores[0]))
    measured("the first `get`", lambda: stores[1].get(first))
    measured("a further `get`", lambda: stores[1].get(other))
    measured("SQL over one column", lambda: query(stores[2]))
    page = (Path(__file__).parents[2] / "docs" / "remote.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \| \d+ \|$", page, re.MULTILINE)
    assert found == {
        what: {kind: int(n) for kind, n in (("lists", lists), ("reads", reads)) if int(n)}
        for what, lists, reads in rows
    }


def test_a_writer_looks_once_and_asks_once_whether_names_are_refused(server: S3Server, connect: Open) -> None:
    connect(create=True)
    writes: list[dict[str, int]] = []
    for machine in ("one", "two"):
        store = connect(machine)
        for name in ("a", "b"):
            server.seen.clear()
            store.append("rollouts", [rollout(f"{machine}-{name}")])
            writes.append(requests(server))
    # The file that is refused was written when the store was made.
    assert writes == [{"lists": 1, "writes": 2}, {"lists": 1, "writes": 1}] * 2


def test_what_does_not_need_the_other_is_asked_at_once(server: S3Server, twenty: Callable[[], Store]) -> None:
    """Each request waits until all that should come with it are there."""
    reader = twenty()
    waits = {"first look": threading.Barrier(5, timeout=60), "ends": threading.Barrier(20, timeout=60)}
    second = threading.Barrier(2, timeout=60)

    def deed(request: Request) -> Deed:
        if request.path.endswith(".arrow"):
            waits["ends"].wait()
        elif request.path.strip("/") == BUCKET and looks:
            looks.pop()
            waits["first look"].wait()
        else:
            second.wait()
        return "serve"

    looks = [1] * 5
    with server.doing(deed):
        assert len(reader.parts("rollouts")) == 20
    assert looks == []


def test_the_types_of_columns_are_read_at_once_and_again_only_when_there_are_others(
    server: S3Server, connect: Open, store: Store
) -> None:
    store.append("rollouts", [rollout("a", extra={"x_one": 1, "x_two": 2.0})])
    reader = connect("elsewhere")
    types = threading.Barrier(2, timeout=60)

    def deed(request: Request) -> Deed:
        if "/columns/" in request.path and request.method == "GET":
            types.wait()
        return "serve"

    with server.doing(deed):
        assert reader.scan("rollouts", ["x_two"]).read_all()["x_two"].to_pylist() == [2.0]
    store.append("rollouts", [rollout("b", extra={"x_three": "c"})])
    server.seen.clear()
    for _ in range(2):
        assert set(reader.scan("rollouts", ["x_three"]).read_all()["x_three"].to_pylist()) == {None, "c"}
    read = [seen.path for seen in server.seen if "/columns/" in seen.path]
    assert [path.rpartition("/")[2] for path in read] == ["x_three.json"]


def test_a_long_log_is_read_at_once(server: S3Server, connect: Open, store: Store) -> None:
    for number in range(4):
        store.append("rollouts", [rollout(f"r{number}")])
        store.compact()
    reader = connect("elsewhere")
    entries = threading.Barrier(4, timeout=60)  # three, and the one after them, which is missing

    def deed(request: Request) -> Deed:
        if "/commits/" in request.path:
            entries.wait()
        return "serve"

    with server.doing(deed), reader.snapshot() as snapshot:
        assert snapshot.log.number == 3
    assert ids(reader) == once(*(f"r{number}" for number in range(4)))


def test_a_reader_holds_back_no_more_from_vacuum_than_it_needs(connect: Open, store: Store) -> None:
    for name in ("a", "b"):
        store.append("rollouts", [rollout(name)])
    with connect().snapshot() as before:
        store.compact()
        assert store.vacuum(grace=0) == []
        assert before.scan("rollouts").read_all().num_rows == 2
    with connect().snapshot() as after:  # the first look of its process
        assert len(store.vacuum(grace=0)) == 2
        assert after.scan("rollouts").read_all().num_rows == 2


@pytest.mark.parametrize("name", ["no-such-bucket/run", BUCKET])
def test_a_bucket_that_is_not_there_is_one_line(server: S3Server, tmp_path: Path, name: str) -> None:
    def opened(**options: object) -> Store:
        patience = Patience(sleep=lambda _: None)
        return open_remote(f"s3://{name}", options=server.options(), spool=tmp_path, patience=patience, **options)

    with pytest.raises(StoreError, match=rf"^s3://{name}/: wanted a store, found no rollstore.json there$"):
        opened()
    if "/" in name:
        with pytest.raises(WriteError, match=r"^s3://no-such-bucket/run: wanted a place to write to, got none"):
            opened(create=True)


def test_the_command_line_takes_a_url_and_the_environments_credentials(
    server: S3Server, url: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append("rollouts", [rollout("a", reward=0.5)])

    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ROLLSTORE_SPOOL", str(tmp_path / "cli"))

    def run(*arguments: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, list(arguments))
        return done.exit_code, done.stdout, done.stderr

    status, shown, _ = run("info", url, "--json")
    assert (status, json.loads(shown)["path"]) == (0, url)
    status, shown, _ = run("sql", url, "SELECT rollout_id, reward FROM rollouts", "--json")
    assert status == 0
    assert "0.5" in shown
    assert run("init", f"{url}-new")[0] == 0
    status, shown, error = run("info", f"{url}-none")
    assert (status, shown) == (2, "")
    assert error == f"rollstore: {url}-none/: wanted a store, found no rollstore.json there\n"


def test_a_forked_child_goes_on_with_connections_of_its_own(
    server: S3Server, url: str, store: Store, tmp_path: Path
) -> None:
    script = """
    import os
    store.append("rollouts", [rollout("parent")])
    child = os.fork()
    if child == 0:
        try:
            store.append("rollouts", [rollout("child")])
            os._exit(0 if set(ids(store)) == {"parent", "child"} else 3)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    process = start(server, url, tmp_path / "forked", script)
    said, _ = process.communicate(timeout=120)
    assert (process.returncode, said) == (0, "")
    assert ids(store) == once("parent", "child")


def test_the_spool_of_another_machine_is_none_of_ours(store: Store, connect: Open) -> None:
    writer = store.writer()
    writer.append(rollout("a"))
    writer.flush()
    elsewhere = connect("elsewhere")
    assert ids(elsewhere) == {}
    assert elsewhere.recover().sealed == []
    writer.close()
    assert ids(elsewhere) == once("a")
    assert isinstance(elsewhere.filesystem, RemoteFilesystem)
