"""Stores at URLs: where rows wait, what is promised where, what is refused, and that every reader works over them."""

from __future__ import annotations

import pickle
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from fsspec.registry import _registry

import rollstore
from rollstore import Rollout
from rollstore.errors import CorruptionError, StoreError
from rollstore.readers.arrow import dataset
from rollstore.readers.duckdb import connect
from rollstore.readers.polars import scan
from rollstore.readers.torch import RolloutLoader
from rollstore.store import document
from rollstore.store.objects import Objects, Patience
from rollstore.store.part import Part
from rollstore.store.remote import open_remote
from rollstore.store.store import Store
from rollstore.testing import Fault
from tests.store.conftest import errors, ids, once, rollout
from tests.store.flaky import Flaky

Open = Callable[..., Store]
NUMBERS = count()


@pytest.fixture
def place(tmp_path: Path) -> Open:
    """Opens a store at memory://, from one machine or another."""
    url = f"memory://test_remote/{next(NUMBERS)}"

    def opened(machine: str = "here", **options: object) -> Store:
        return rollstore.open(url, spool=tmp_path / machine, **options)

    opened(create=True)
    return opened


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts the place that fails on demand under a protocol."""
    yield lambda protocol: monkeypatch.setitem(_registry, protocol, Flaky)
    Flaky.forget()


def test_a_store_without_put_if_absent_does_all_but_compact_unless_told_that_nobody_else_does(place: Open) -> None:
    store = place()
    with store.writer(seal_bytes=3_000) as writer:
        for number in range(3):
            writer.append(rollout(f"r{number}", tokens=60))
            writer.flush(sync=number == 1)
    store.append("rollouts", [rollout("r3")])
    with pytest.raises(StoreError, match=r"wanted put-if-absent, which memory does not have here") as caught:
        store.compact()
    assert "\n" not in str(caught.value)
    assert not [file for file in store.filesystem.list("rollouts") if file.startswith("c-")]
    alone = place(single_compactor=True)
    assert alone.compact().added
    assert alone.vacuum(grace=0)
    for each in (store, alone):
        assert ids(each) == once("r0", "r1", "r2", "r3")
        assert each.get("r1")[0].tokens.tolist() == rollout("r1", tokens=60).tokens.tolist()
        assert errors(each) == []
    assert store.path == repr(store)[7:-2]


def test_flushed_rows_wait_on_their_own_machine_and_all_see_them_when_they_are_sealed(place: Open) -> None:
    here, there = place("here"), place("there")
    writer = here.writer()
    writer.append(rollout("a"))
    writer.flush()
    assert ids(here) == once("a")
    assert here.get("a")[0].rollout_id == "a"
    assert ids(there) == {}
    assert there.recover().sealed == []
    writer.close()
    assert ids(here) == ids(there) == once("a")


def test_recovery_uploads_what_the_dead_left_and_moves_aside_what_is_no_part(place: Open) -> None:
    store = place()
    writer = store.writer()
    writer.append(rollout("a"))
    writer.flush()
    assert list(store.recover().kept.values()) == ["its writer holds it"]
    writer.after_fork()  # its process is gone
    filesystem = Flaky.__base__()
    filesystem.pipe_file(f"{store.path}/rollouts/notes.txt", b"mine")
    assert store.info().orphans == ("rollouts/notes.txt",)
    report = store.recover()
    assert (len(report.sealed), len(report.moved)) == (1, 1)
    assert filesystem.cat_file(f"{store.path}/{report.moved[0]}") == b"mine"
    assert store.recover() == type(report)()
    assert ids(place("there")) == once("a")


def test_the_spool_is_where_it_is_asked_for_and_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    url = f"memory://test_remote/{next(NUMBERS)}"
    places = {"state/rollstore": {}, "named": {}, "given": {"spool": tmp_path / "given"}}
    for place, options in places.items():
        if place == "named":
            monkeypatch.setenv("ROLLSTORE_SPOOL", str(tmp_path / "named"))
        store = rollstore.open(url, create=True, **options)
        writer = store.writer()
        writer.append(rollout("a"))
        writer.flush()
        (spool,) = (tmp_path / place).glob(f"{store.store_id}-*")
        assert len([*spool.glob("journal/*.arrows")]) == 1
        assert stat.S_IMODE(spool.stat().st_mode) == 0o700
        writer.close()
        assert [path for path in spool.rglob("*") if path.is_file()] == []


def test_a_store_id_that_would_lead_out_of_the_spool_is_refused(tmp_path: Path) -> None:
    url = f"memory://test_remote/{next(NUMBERS)}"
    about = {"format": "1.0", "store_id": "../../elsewhere", "created_at": "2026-01-01T00:00:00+00:00"}
    Flaky.__base__().pipe_file(f"{url}/rollstore.json", document.encode(about))
    with pytest.raises(CorruptionError, match="store_id: wanted 32 hexadecimal digits"):
        rollstore.open(url, spool=tmp_path)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://host/run", "^http://host/run: wanted a place that can be written and listed, got http$"),
        (
            "nowhere://x/run",
            "^nowhere://x/run: wanted an address that fsspec opens, got ValueError: Protocol not known",
        ),
        ("simplecache::memory://x/run", "^simplecache::memory://x/run: wanted one protocol, got a chain of them$"),
        ("gs://bucket/run", "^gs://bucket/run: wanted what gs needs, got ImportError"),
        ("memory://", "^memory://: wanted a folder in it for the store, got none$"),
    ],
)
def test_an_address_that_can_hold_no_store_is_refused_in_one_line(
    url: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(StoreError, match=said) as caught:
        rollstore.open(url)
    assert "\n" not in str(caught.value)


def test_a_missing_package_for_s3_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    with pytest.raises(StoreError, match=r"^s3://bucket/run: wanted what s3 needs.*pip install 'rollstore\[s3\]'$"):
        rollstore.open("s3://bucket/run")


def test_options_of_urls_are_refused_for_a_local_path(tmp_path: Path) -> None:
    for options in ({"storage_options": {}}, {"spool": tmp_path}, {"single_compactor": True}):
        with pytest.raises(ValueError, match="wanted a URL, got a local path"):
            rollstore.open(tmp_path / "store", create=True, **options)


def test_a_password_in_the_address_is_shown_nowhere(flaky: Callable[..., None], tmp_path: Path) -> None:
    flaky("ftp")
    store = rollstore.open("ftp://me:secret@host/run", create=True, spool=tmp_path, storage_options={"key": "hidden"})
    store.append("rollouts", [rollout("a")])
    Flaky.fault = Fault(at=1, lasting=True)
    with pytest.raises(StoreError) as caught:
        Objects("ftp://me:secret@host/run", patience=Patience(tries=1)).list("rollouts")
    Flaky.fault = None
    shown = [str(caught.value), store.path, repr(store), str(store.info()), str(store.verify()), str(vars(store))]
    assert store.path == "ftp://me@host/run"
    assert not [text for text in shown if "secret" in text or "hidden" in text]
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [data for data in [*written, *(f.getvalue() for f in Flaky.store.values())] if b"hidden" in data]


def test_a_place_whose_files_appear_while_they_are_written_never_shows_half_of_one(
    flaky: Callable[..., None], tmp_path: Path
) -> None:
    flaky("ftp")
    store = open_remote("ftp://host/run", create=True, spool=tmp_path, patience=Patience(sleep=lambda _: None))
    shown: list[str] = []

    class Slow(Flaky):
        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
            for stop in (len(value) // 2, len(value)):
                super().pipe_file(path, value[:stop], **kwargs)
                shown.extend(store.filesystem.list("rollouts"))
            if len(shown) == 0 and not failed:
                failed.append(path)
                raise OSError("the connection broke")

    failed: list[str] = []
    _registry["ftp"] = Slow
    slow = open_remote("ftp://host/run", spool=tmp_path, patience=Patience(sleep=lambda _: None))
    slow.append("rollouts", [rollout("a")])
    assert (shown, len(failed)) == ([], 1)
    assert ids(store) == once("a")
    assert errors(store) == []


def test_a_place_that_is_one_conversation_is_spoken_to_by_one_thread(
    flaky: Callable[..., None], tmp_path: Path
) -> None:
    """Two requests at a time over one FTP connection would each get the reply to the other."""
    flaky("ftp")
    speakers: set[int] = set()

    class Noting(Flaky):
        def ls(self, path: str, detail: bool = True, **kwargs: object) -> list[object]:
            speakers.add(threading.get_ident())
            return super().ls(path, detail, **kwargs)

    store = rollstore.open("ftp://host/run", create=True, spool=tmp_path)
    store.append("rollouts", [rollout("a", extra={"x_mark": 1})])
    _registry["ftp"] = Noting
    assert ids(rollstore.open("ftp://host/run", spool=tmp_path)) == once("a")
    assert speakers == {threading.get_ident()}


def test_listings_may_come_in_any_order_with_folders_and_names_of_folders_in_them(
    flaky: Callable[..., None], tmp_path: Path
) -> None:
    flaky("s3")

    class Odd(Flaky):
        def ls(self, path: str, detail: bool = True, **kwargs: object) -> list[object]:
            marker = {"name": f"{path}/", "size": 0, "type": "file"}
            inner = {"name": f"{path}/deeper/x.arrow", "size": 3, "type": "file"}
            folder = {"name": f"{path}/deeper", "size": 0, "type": "directory"}
            return [marker, inner, folder, *reversed(super().ls(path, detail, **kwargs))]

    store = rollstore.open("s3://bucket/run", create=True, spool=tmp_path)
    for number in range(5):
        store.append("rollouts", [rollout(f"r{number}")])
    names = store.filesystem.list("rollouts")
    _registry["s3"] = Odd
    again = rollstore.open("s3://bucket/run", spool=tmp_path)
    assert again.filesystem.list("rollouts") == names
    assert again.compact().added
    assert ids(again) == once(*(f"r{number}" for number in range(5)))
    assert again.info().orphans == ()


def test_a_listing_older_than_the_log_is_an_error_and_never_fewer_rows(
    flaky: Callable[..., None], tmp_path: Path
) -> None:
    flaky("s3")
    store = rollstore.open("s3://bucket/run", create=True, spool=tmp_path)
    for name in ("a", "b"):
        store.append("rollouts", [rollout(name)])
    old = Flaky().ls("bucket/run/rollouts", detail=True)
    stale = [True]

    class Stale(Flaky):
        def ls(self, path: str, detail: bool = True, **kwargs: object) -> list[object]:
            return old if path.endswith("rollouts") and stale[0] else super().ls(path, detail, **kwargs)

    store.compact()
    _registry["s3"] = Stale
    reader = rollstore.open("s3://bucket/run", spool=tmp_path)
    with pytest.raises(StoreError, match="the log names parts that are not there"):
        ids(reader)
    stale[0] = False
    assert ids(reader) == once("a", "b")


def test_a_part_that_is_gone_under_a_reader_is_a_typed_error_and_a_new_look_finds_the_rows(place: Open) -> None:
    store = place(single_compactor=True)
    for name in ("a", "b"):
        store.append("rollouts", [rollout(name)])
    with store.snapshot() as snapshot:
        snapshot.parts("rollouts")
        elsewhere = place("there", single_compactor=True)
        elsewhere.compact()
        elsewhere.vacuum(grace=0)  # of the leases here it knows nothing: the grace period would have kept the parts
        with pytest.raises(StoreError, match="wanted a file that was listed, got none"):
            snapshot.scan("rollouts").read_all()
    assert ids(store) == once("a", "b")
    assert store.get("a")[0].rollout_id == "a"


def test_rows_read_before_a_part_was_gone_are_found_by_the_next_look(
    place: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that knows of a part without having its rows would say that they do not exist."""
    store = place()
    for name in ("a", "b", "c"):
        store.append("rollouts", [rollout(name)])
    read, gone = Part.batches, [store.parts("rollouts")[1].name]

    def batches(part: Part, *columns: object) -> object:
        if part.name in gone:
            gone.clear()
            raise StoreError("gone")
        return read(part, *columns)

    monkeypatch.setattr(Part, "batches", batches)
    reader = place()
    for name in ("a", "b", "c"):
        assert reader.get(name)[0].rollout_id == name
    assert gone == []


def test_rows_are_fetched_ahead_only_of_parts_that_are_read_and_where_reading_goes_through_them(
    flaky: Callable[..., None], tmp_path: Path
) -> None:
    flaky("s3")
    store = rollstore.open("s3://bucket/run", create=True, spool=tmp_path)
    drawn = np.random.default_rng(0)
    for step in range(6):
        noise = drawn.integers(0, 1 << 30, (2, 300_000), dtype=np.int32)
        mask = np.zeros(300_000, bool)
        rows = [Rollout(rollout_id=f"{step}-{i}", step=step % 2, tokens=noise[i], action_mask=mask) for i in (0, 1)]
        store.append("rollouts", rows)
    fetched: list[int] = []
    objects = store.filesystem._objects
    several, one = objects.read_each, objects.read
    objects.read_each = lambda wanted: fetched.extend(stop - start for _, start, stop in wanted) or several(wanted)
    objects.read = lambda path, start, stop: fetched.append(stop - start) or one(path, start, stop)

    def read() -> int:
        size = sum(fetched)
        fetched.clear()
        return size

    with store.snapshot() as snapshot:
        parts = snapshot.parts("rollouts")
        assert all(part.batch_count == 2 for part in parts)
        size = parts[0].size
        read()
        for part in parts:  # one batch of each, as of rows drawn at random
            part.batch(0)
        assert read() < 6 * 0.6 * size
        assert snapshot.scan("rollouts", ["rollout_id"], pc.field("step") == 1).read_all().num_rows == 6
        assert read() < 3.1 * size
        for part in parts:
            assert len([*part.batches(["rollout_id"])]) == 2
        assert read() < 6.1 * size


def test_damage_at_the_remote_place_is_found_and_never_returned(place: Open) -> None:
    store = place()
    store.append("rollouts", [rollout(f"r{number}") for number in range(4)])
    (part,) = store.parts("rollouts")
    filesystem = Flaky.__base__()
    whole = filesystem.cat_file(part.path)
    offset = part.tail.batches[0].offset + part.tail.batches[0].length - 20
    filesystem.pipe_file(part.path, whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
    for machine in ("here", "there"):
        (found,) = errors(place(machine))
        assert part.file in found
        with pytest.raises(CorruptionError):
            place(machine).get("r1")
    with store.snapshot() as snapshot, pytest.raises(CorruptionError, match="wanted the sum"):
        dataset(snapshot, "rollouts").to_table(columns=["tokens"])
    filesystem.pipe_file(part.path, whole)
    assert errors(store) == []


def test_every_reader_works_over_a_remote_store(place: Open) -> None:
    store = place()
    for step in range(3):
        rows = [rollout(f"{step}-{i}", step=step, run_id="run", reward=float(i)) for i in range(4)]
        store.append("rollouts", rows)
    writer = store.writer()
    writer.append([rollout("live", step=3, run_id="run")])
    writer.flush()
    with connect(store) as connection:
        assert connection.sql("SELECT count(*) FROM rollouts").fetchall() == [(13,)]
        rewards = connection.sql("SELECT step, sum(reward) FROM rollouts WHERE step > 0 GROUP BY 1 ORDER BY 1")
        assert rewards.fetchall() == [(1, 6.0), (2, 6.0), (3, None)]
        assert connection.sql("SELECT count(*), count(DISTINCT rollout_id) FROM actions").fetchall() == [(39, 13)]
    assert sorted(scan(store).select("rollout_id").collect()["rollout_id"].to_list()) == sorted(ids(store))
    loaded = [name for batch in RolloutLoader(store, tokens_per_batch=24, seed=0) for name in batch.rollout_ids]
    assert sorted(loaded) == sorted(ids(store))
    writer.close()


def test_a_part_goes_to_another_process_without_what_is_known_of_all_others(
    flaky: Callable[..., None], tmp_path: Path
) -> None:
    flaky("s3")
    store = rollstore.open("s3://bucket/run", create=True, spool=tmp_path)
    for name in ("a", "b"):
        store.append("rollouts", [rollout(name)])
    part, other = store.parts("rollouts")
    sent = pickle.dumps(part)
    assert part.name.encode() in sent
    assert other.name.encode() not in sent
    assert next(pickle.loads(sent).batches(["rollout_id"]))["rollout_id"].to_pylist() in (["a"], ["b"])


def test_a_query_fetches_only_the_parts_that_can_match(flaky: Callable[..., None], tmp_path: Path) -> None:
    flaky("s3")
    store = rollstore.open("s3://bucket/run", create=True, spool=tmp_path)
    for step in range(4):
        store.append("rollouts", [rollout(f"{step}-{i}", step=step, tokens=40_000) for i in range(3)])
    parts = {part.name: part.statistics.ranges["step"].min for part in store.parts("rollouts")}

    def fetched() -> set[int]:
        files = [path for verb, path in Flaky.seen if verb == "cat_file" and path.endswith(".arrow")]
        steps = {parts[path.rpartition("/")[2].removesuffix(".arrow")] for path in files}
        Flaky.seen.clear()
        return steps

    with store.snapshot() as snapshot:
        snapshot.parts("rollouts")
        rows = dataset(snapshot, "rollouts")
        fetched()
        found = rows.scanner(columns=["rollout_id"], filter=pc.field("step") == 2).to_table()
        assert sorted(found["rollout_id"].to_pylist()) == ["2-0", "2-1", "2-2"]
        assert fetched() == {2}
        assert snapshot.scan("rollouts", ["rollout_id"], pc.field("step") > 2).read_all().num_rows == 3
        assert fetched() == {3}
        doubled = rows.scanner(columns={"twice": pc.multiply(pc.field("step"), pa.scalar(2))}).to_table()
        assert sorted(set(doubled["twice"].to_pylist())) == [0, 2, 4, 6]


def test_a_lost_reply_is_settled_by_the_end_of_the_file_and_not_by_all_of_it(
    flaky: Callable[..., None], tmp_path: Path
) -> None:
    read: list[int] = []

    class Counting(Flaky):
        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: object) -> bytes:
            data = super().cat_file(path, start, end, **kwargs)
            read.append(len(data))
            return data

    flaky("s3")
    _registry["s3"] = Counting
    store = open_remote("s3://bucket/run", create=True, spool=tmp_path, patience=Patience(sleep=lambda _: None))
    noise = np.random.default_rng(0).integers(0, 1 << 31, 500_000, dtype=np.int32)
    writer = store.writer()
    writer.append(Rollout(rollout_id="big", tokens=noise, action_mask=np.zeros(len(noise), bool)))
    Flaky.when, Flaky.fault = "after", Fault(at=1, verbs=frozenset({"pipe_file"}))
    read.clear()
    writer.close()
    assert Flaky.fault.fired == 1
    (part,) = store.parts("rollouts")
    assert part.size > 1_500_000
    assert 0 < sum(read) < 200_000


def test_an_answer_that_is_cut_short_is_asked_for_again(flaky: Callable[..., None], tmp_path: Path) -> None:
    flaky("s3")
    store = open_remote("s3://bucket/run", create=True, spool=tmp_path, patience=Patience(sleep=lambda _: None))
    for number in range(4):
        store.append("rollouts", [rollout(f"r{number}")])
    cut: set[object] = set()

    class Short(Flaky):
        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: object) -> bytes:
            data = super().cat_file(path, start, end, **kwargs)
            first = path.endswith(".arrow") and (path, start, end) not in cut
            cut.add((path, start, end))
            return data[: len(data) // 2] if first else data

    _registry["s3"] = Short
    again = open_remote("s3://bucket/run", spool=tmp_path, patience=Patience(sleep=lambda _: None))
    assert ids(again) == once(*(f"r{number}" for number in range(4)))
    assert len(cut) > 4


def test_the_code_of_the_page_about_remote_stores_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSTORE_SPOOL", str(tmp_path))
    page = (Path(__file__).parents[2] / "docs" / "remote.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code.replace("s3://bucket", f"memory://test_remote/{next(NUMBERS)}"), "remote.md", "exec"), {})


def test_patience_doubles_its_waits_up_to_a_limit() -> None:
    waits: list[float] = []
    assert [*Patience(tries=6, first=1.0, longest=5.0, sleep=waits.append).turns()] == [1, 2, 3, 4, 5, 6]
    assert [0.5 * full <= wait <= full for wait, full in zip(waits, (1, 2, 4, 5, 5), strict=True)] == [True] * 5


def test_a_local_store_loads_no_fsspec(tmp_path: Path) -> None:
    use = f"store = rollstore.open({str(tmp_path / 's')!r}, create=True); store.writer().close(); store.verify()"
    code = f"import sys, rollstore; {use}; print(sorted({{'fsspec', 's3fs'}} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
