"""Rows of other schema versions: older ones upgraded or filled up, newer minor ones kept, newer major ones refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from typer.testing import CliRunner

from rollstore.cli import app
from rollstore.errors import VersionError
from rollstore.readers.duckdb import connect
from rollstore.readers.polars import scan
from rollstore.readers.torch import RolloutLoader
from rollstore.schema import Rollout, Span, to_table
from rollstore.schema.upgrade import UPGRADES
from rollstore.store.commits import Commit, append, entry, read_log
from rollstore.store.filesystem import Filesystem, read_file
from rollstore.store.migrate import migrate
from rollstore.store.names import new_id, part_name
from rollstore.store.part import write_part
from rollstore.store.store import Store, open_on
from rollstore.store.store import open as open_store
from rollstore.testing import Fault, MachineCrash, MemoryFilesystem
from tests.golden import content, older
from tests.store.conftest import errors, ids, once, rollout
from tests.store.test_golden_stores import ABOUT, opened


@pytest.fixture
def reads_09(monkeypatch: pytest.MonkeyPatch) -> None:
    """This library as it would be, had there been a 0.9."""
    monkeypatch.setitem(UPGRADES, 0, older.upgrade)


def put(filesystem: Filesystem, table: pa.Table, version: str, name: str | None = None) -> str:
    """A part as another version of this library would have left it; its name."""
    name = name or part_name(new_id(), 1)
    for column, values in (("written_by", [name] * table.num_rows), ("written_row", range(table.num_rows))):
        place = table.schema.get_field_index(column)
        table = table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))
    table = table.replace_schema_metadata({"rollstore.schema": version, "rollstore.table": "rollouts"})
    write_part(filesystem, "rollouts", name, table)
    return name


def acting(name: str, **fields: Any) -> Rollout:
    spans = (Span(start=0, length=1, is_action=False, role="user"), Span(start=1, length=1, is_action=True))
    return Rollout(rollout_id=name, tokens=[1, 2], action_mask=[False, True], spans=spans, **fields)


def newer(name: str) -> pa.Table:
    """A row of schema 1.7: a column, a child of a struct and a word that 1.0 does not have."""
    table = to_table([acting(name)])
    spans = table["spans"].combine_chunks()
    fields = [*spans.type.value_type, pa.field("mood", pa.string())]
    inside = pa.StructArray.from_arrays([*spans.values.flatten(), pa.array(["calm", "keen"])], fields=fields)
    columns = {"spans": pa.ListArray.from_arrays(spans.offsets, inside), "ending": pa.array(["paused"])}
    for column, values in columns.items():
        table = table.set_column(table.schema.get_field_index(column), column, values)
    return table.append_column("brand_new", pa.array([2**53 + 1]))


def versions(store: Store) -> list[str]:
    return sorted(part.schema_version for part in store.parts("rollouts"))


# An older minor version: fewer columns, fewer children.


def test_what_an_older_minor_version_lacks_is_null_and_not_a_default(store: Store) -> None:
    table = to_table([acting("old", step=3)])
    spans = table["spans"].combine_chunks()
    kept = [
        n for n, field in enumerate(spans.type.value_type) if field.name in ("start", "length", "is_action", "role")
    ]
    inside = pa.StructArray.from_arrays(
        [spans.values.field(n) for n in kept], fields=[spans.type.value_type[n] for n in kept]
    )
    few = ["rollout_id", "segment", "tokens", "action_mask", "step", "written_by", "written_row"]
    lacking = table.select(few).append_column("spans", pa.ListArray.from_arrays(spans.offsets, inside))
    put(store.filesystem, lacking, "1.0")
    store.append("rollouts", [acting("new", step=4, weight_versions=[7], head_kind="raw")])
    for read in (store, compacted(store)):
        rows = {row["rollout_id"]: row for row in read.scan("rollouts").read_all().to_pylist()}
        assert rows["old"]["weight_versions"] is None
        assert rows["old"]["weight_version_max"] is None
        assert rows["new"]["weight_versions"] == [7]
        assert [span["role"] for span in rows["old"]["spans"]] == ["user", None]
        assert rows["old"]["spans"][0]["replay_key"] is None
        with connect(read) as connection:
            found = connection.sql("SELECT rollout_id, weight_version_max, list_transform(spans, lambda s: s.turn) "
                                   "FROM rollouts ORDER BY rollout_id").fetchall()  # fmt: skip
        assert found == [("new", 7, [None, None]), ("old", None, [None, None])]
        assert read.verify() == []


def compacted(store: Store) -> Store:
    store.compact()
    return open_store(store.path)


# A newer minor version.


def test_columns_children_and_words_of_a_newer_minor_version_are_kept_through_every_reader(store: Store) -> None:
    store.append("rollouts", [acting("known", ending="terminated")])
    put(store.filesystem, newer("new"), "1.7")
    assert versions(store) == ["1.0", "1.7"]
    wanted = {"known": (None, "terminated", [None, None]), "new": (2**53 + 1, "paused", ["calm", "keen"])}
    for read in (store, compacted(store)):
        table = read.scan("rollouts").read_all()
        rows = {row["rollout_id"]: row for row in table.to_pylist()}
        assert {k: (r["brand_new"], r["ending"], [s["mood"] for s in r["spans"]]) for k, r in rows.items()} == wanted
        assert table.schema.metadata[b"rollstore.schema"] == b"1.7"
        assert read.get("new")[0].ending == "paused"
        with connect(read) as connection:
            query = "SELECT rollout_id, brand_new, ending, list_transform(spans, lambda s: s.mood) FROM rollouts"
            assert {row[0]: row[1:] for row in connection.sql(query).fetchall()} == wanted
            moods = connection.sql("SELECT mood FROM spans WHERE rollout_id = 'new' ORDER BY span").fetchall()
            assert moods == [("calm",), ("keen",)]
        frame = scan(read).select("rollout_id", "brand_new").collect()
        assert dict(frame.iter_rows()) == {"known": None, "new": 2**53 + 1}
        loaded = [batch.rollout_ids for batch in RolloutLoader(read, rollouts_per_batch=1)]
        assert sorted(loaded) == [["known"], ["new"]]
        assert read.verify() == []


def test_rewriting_rows_of_a_newer_minor_version_does_not_call_them_older(store: Store) -> None:
    put(store.filesystem, newer("new"), "1.7")
    put(store.filesystem, newer("newest"), "1.10")
    assert versions(compacted(store)) == ["1.10"]
    assert store.migrate().added == {}


# A newer major version.


def test_a_part_of_a_newer_major_version_is_refused_by_name_and_version(store: Store) -> None:
    store.append("rollouts", [acting("known")])
    name = put(store.filesystem, newer("new"), "2.0")
    wanted = rf"rollouts/{name}\.arrow: schema: wanted at most 1\.x, got 2\.0; a newer rollstore reads it"
    for read in (
        lambda: store.scan("rollouts"),
        lambda: connect(store),
        lambda: scan(store),
        store.compact,
        store.migrate,
    ):
        with pytest.raises(VersionError, match=wanted):
            read()
    shown = CliRunner().invoke(app, ["ls", store.path])
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert "got 2.0; a newer rollstore reads it" in shown.stderr
    assert store.scan("scores").read_all().num_rows == 0


# An older major version.


@pytest.mark.usefixtures("reads_09")
def test_an_older_major_version_is_upgraded_as_it_is_read_by_every_reader(tmp_path: Path) -> None:
    store = opened("synthetic-0.9", tmp_path)
    wanted = ABOUT["synthetic-0.9"]["rows"]["rollouts"]
    assert content.rows(store.scan("rollouts").read_all()) == wanted
    assert versions(store) == ["0.9", "0.9", "1.0"]
    assert store.verify() == []
    by_id = {row["rollout_id"]: row for row in wanted}
    for id_, row in by_id.items():
        (read,) = store.get(id_)
        assert (read.tokens.tolist(), read.weight_version_max) == (row["tokens"], row.get("weight_version_max"))
        assert [s.seed for s in read.samplers or ()] == [s["seed"] for s in row.get("samplers", [])]
    with connect(store) as connection:
        found = connection.sql("SELECT rollout_id, tokens, x_mood, weight_version_max FROM rollouts").fetchall()
        assert {r[0]: (r[1], r[2], r[3]) for r in found} == {
            k: (r["tokens"], r.get("x_mood"), r.get("weight_version_max")) for k, r in by_id.items()
        }
        newest = connection.sql(f"SELECT rollout_id FROM rollouts WHERE weight_version_max > {2**53 + 2}").fetchall()
        assert newest == [("c",)]
    frame = scan(store).select("rollout_id", "tokens").collect()
    assert dict(frame.iter_rows()) == {k: r["tokens"] for k, r in by_id.items()}
    found = {
        name: batch.tokens.tolist()
        for batch in RolloutLoader(store, rollouts_per_batch=1)
        for name in batch.rollout_ids
    }
    assert found == {k: r["tokens"] for k, r in by_id.items()}
    kept = store.scan("rollouts", ["rollout_id"], where=pc.field("ending") == "truncated").read_all()
    assert sorted(kept["rollout_id"].to_pylist()) == ["b", "e"]


def test_statistics_of_an_older_major_version_prune_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that kept its name and changed its unit: what a part says of old values is not about the new ones."""

    def in_thousands(table: pa.Table, name: str) -> pa.Table:
        steps = pc.multiply(table["step"], pa.scalar(1000, pa.int64()))
        return table.set_column(table.schema.get_field_index("step"), "step", steps)

    monkeypatch.setitem(UPGRADES, 0, in_thousands)
    put(store.filesystem, to_table([acting("old", step=3)]), "0.9")
    store.append("rollouts", [acting("new", step=3000), acting("other", step=3)])
    for step, wanted in ((3000, ["new", "old"]), (3, ["other"])):
        where = pc.field("step") == step
        assert sorted(store.scan("rollouts", ["rollout_id"], where).read_all()["rollout_id"].to_pylist()) == wanted
        with connect(store) as connection:
            query = f"SELECT rollout_id FROM rollouts WHERE step = {step} ORDER BY 1"
            assert connection.sql(query).fetchall() == [(name,) for name in wanted]
        frame = scan(store).filter(pl.col("step") == step).collect()
        assert sorted(frame["rollout_id"]) == wanted


@pytest.mark.usefixtures("reads_09")
def test_the_version_of_rows_is_told_by_their_part_and_by_info(tmp_path: Path) -> None:
    store = opened("synthetic-0.9", tmp_path)
    counts: Counter[str] = Counter()
    for part in store.parts("rollouts"):
        counts[part.schema_version] += part.rows
    assert counts == {"0.9": 5, "1.0": 1}
    shown = CliRunner().invoke(app, ["info", store.path, "--json"])
    assert json.loads(shown.stdout)["schemas"] == ["0.9", "1.0"]
    assert "0.9, 1.0" in CliRunner().invoke(app, ["info", store.path]).stdout


@pytest.mark.usefixtures("reads_09")
def test_a_journal_of_an_older_major_version_is_sealed_in_the_newest(tmp_path: Path) -> None:
    store = opened("synthetic-0.9", tmp_path)
    assert len(store.migrate(dry_run=True).journals) == 1
    assert len(store.recover().sealed) == 1
    assert versions(store) == ["0.9", "0.9", "1.0", "1.0"]
    assert content.rows(store.scan("rollouts").read_all()) == ABOUT["synthetic-0.9"]["rows"]["rollouts"]
    assert store.verify() == []


# migrate.


@pytest.mark.usefixtures("reads_09")
def test_migrate_rewrites_the_older_parts_in_one_commit_each_and_changes_no_row(tmp_path: Path) -> None:
    store = opened("synthetic-0.9", tmp_path)
    before = store.scan("rollouts").read_all().sort_by("rollout_id")
    old = {part.name for part in store.parts("rollouts") if part.is_older}
    planned = store.migrate(dry_run=True)
    assert (planned.rows, planned.added, read_log(store.filesystem).number) == ({"rollouts": {"0.9": 5}}, {}, 0)
    report = store.migrate()
    assert (report.rows, set(report.replaced["rollouts"])) == ({"rollouts": {"0.9": 5}}, old)
    assert len(report.added["rollouts"]) == 2
    bodies = [json.loads(read_file(store.filesystem, entry(number))) for number in (1, 2)]
    assert [body["reason"] for body in bodies] == ["migrate", "migrate"]
    assert [len(body["replace"]["rollouts"]) for body in bodies] == [1, 1]
    after = open_store(store.path)
    assert versions(after) == ["1.0", "1.0", "1.0"]
    assert after.scan("rollouts").read_all().sort_by("rollout_id").equals(before)
    assert after.verify() == []
    again = after.migrate()
    assert (again.rows, again.added, read_log(store.filesystem).number) == ({}, {}, 2)


def test_after_migrate_and_vacuum_nobody_needs_the_upgrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(UPGRADES, 0, older.upgrade)
        store = opened("synthetic-0.9", tmp_path)
        store.recover()
        store.migrate()
        store.vacuum(grace=0)
    assert (
        content.rows(open_store(store.path).scan("rollouts").read_all()) == ABOUT["synthetic-0.9"]["rows"]["rollouts"]
    )


def test_migrating_and_compacting_at_once_leaves_every_row_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, reads_09: None
) -> None:
    for names in (["a", "b"], ["c"]):
        name = part_name(new_id(), 1)
        write_part(store.filesystem, "rollouts", name, older.rows(name, names).drop_columns(["x_mood"]))
    with store.snapshot() as snapshot:
        open_store(store.path).compact()  # after this snapshot was taken
        assert migrate(snapshot).added == {}
    assert ids(open_store(store.path)) == once("a", "b", "c")
    assert versions(open_store(store.path)) == ["1.0"]


def half_migrated(at: int) -> Iterator[tuple[MemoryFilesystem, bool]]:
    """A disk whose machine, and one whose process, died at the n-th verb of a migration; whether it died."""
    disk = MemoryFilesystem(at)
    open_on(disk, create=True)
    name = part_name(new_id(), 1)
    write_part(disk, "rollouts", name, older.rows(name, ["a", "b", "c"]).drop_columns(["x_mood"]))
    disk.sync_folder("")
    fault = disk.fault = Fault(at=at, crash=True)
    with suppress(MachineCrash):
        open_on(disk).migrate()
    yield disk.crash(), bool(fault.fired)
    disk.kill()
    yield disk, bool(fault.fired)


@pytest.mark.usefixtures("reads_09")
def test_a_migration_that_dies_anywhere_loses_and_doubles_nothing_and_can_be_run_again() -> None:
    at, died = 0, True
    while died:
        at += 1
        for disk, died in half_migrated(at):  # noqa: B007 # the loop ends with it
            disk.fault = None
            store = open_on(disk)
            assert ids(store) == once("a", "b", "c")
            store.migrate()
            disk.age(1_000_000)
            store.vacuum(grace=10)
            store.recover()
            assert ids(store) == once("a", "b", "c")
            assert versions(store) == ["1.0"]
            assert errors(store) == []
            assert len(disk.list("rollouts")) == 1
    assert at > 10


@pytest.mark.usefixtures("reads_09")
def test_the_command_says_what_it_would_do_does_it_and_then_has_nothing_to_do(tmp_path: Path) -> None:
    path = opened("synthetic-0.9", tmp_path).path

    def run(*options: str) -> str:
        result = CliRunner().invoke(app, ["migrate", path, *options])
        assert result.exit_code == 0, result.stderr
        return result.stdout

    waiting = next(iter((Path(path) / "journal").iterdir())).stem
    line = f"waiting: {waiting}: a journal of an older version is rewritten when it is sealed\n"
    assert run("--dry-run") == f"{path}: rollouts: 5 rows would be rewritten from 0.9 to 1.0\n{line}"
    assert run() == f"{path}: rollouts: 5 rows rewritten from 0.9 to 1.0\n{line}"
    open_store(path).recover()
    assert run() == f"{path}: every part is of schema 1.0 or newer\n"
    read = json.loads(run("--json"))
    assert (read["schema"], read["report"]["rows"], read["report"]["journals"]) == ("1.0", {}, [])


def test_a_log_that_another_library_wrote_in_a_newer_layout_is_refused(store: Store) -> None:
    store.append("rollouts", [rollout("a")])
    log = append(store.filesystem, read_log(store.filesystem), Commit(add={}, replace={}))
    assert log is not None
    path = Path(store.path) / entry(1)
    path.write_bytes(path.read_bytes().replace(b'"format":"1.0"', b'"format":"2.0"'))
    with pytest.raises(VersionError, match=r"format: wanted at most 1\.x, got 2\.0"):
        open_store(store.path).snapshot()
