"""Stores that released versions wrote, whole and damaged, are read for ever as they were meant."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from rollstore.errors import CorruptionError, VersionError
from rollstore.readers.duckdb import connect
from rollstore.readers.polars import scan
from rollstore.schema import TABLES, from_table, to_table
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.golden import content, make
from tests.strategies import values_of

ABOUT: dict[str, Any] = json.loads(make.ABOUT.read_text(encoding="ascii"))
DAMAGED = sorted(name for name in ABOUT if name.startswith("damaged/"))
STAMPS = ("written_at", "flags")


def opened(name: str, folder: Path) -> Store:
    """A golden store, copied: reading one leaves a lease and an index in it. Git keeps no empty folders."""
    shutil.copytree(make.STORES / name, folder / "store")
    for empty in (*TABLES, "journal", "commits", "columns", "staging", "cache"):
        (folder / "store" / empty).mkdir(exist_ok=True)
    return open_store(folder / "store")


@pytest.fixture
def released(tmp_path: Path) -> Store:
    return opened("released-1.0", tmp_path)


def test_nothing_that_was_made_is_without_its_description_and_the_script_leaves_it_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = make.ABOUT.read_bytes()
    make.main()
    assert capsys.readouterr().out.count("there already, left as it is") == len(ABOUT) == len(make.MAKE)
    assert make.ABOUT.read_bytes() == before


def test_the_golden_rollout_has_a_value_in_every_column_of_its_version() -> None:
    rows = {table: ABOUT["released-1.0"]["rows"][table] for table in TABLES}
    for table, declared in TABLES.items():
        names = {column.name for column in declared.columns if column.since == "1.0"} - {"written_at"}
        assert names <= set().union(*rows[table]), table
    full = next(row for row in rows["rollouts"] if row["rollout_id"] == "full")
    for name, inside in (("spans", full["spans"][0]), ("samplers", full["samplers"][0]), ("engine", full["engine"])):
        children = TABLES["rollouts"].by_name[name].children
        assert {child.name for child in children if child.since == "1.0"} - {"sampler"} <= set(inside), name


@pytest.mark.parametrize("table", TABLES)
def test_a_released_store_reads_as_it_was_written(table: str, released: Store) -> None:
    wanted = ABOUT["released-1.0"]["rows"][table]
    assert content.rows(released.scan(table).read_all()) == wanted
    released.recover()
    assert content.rows(released.scan(table).read_all()) == wanted
    released.compact()
    released.vacuum(grace=0)
    assert content.rows(open_store(released.path).scan(table).read_all()) == wanted


def test_a_released_store_is_whole_and_its_rollouts_come_back_by_id(released: Store) -> None:
    assert [finding for finding in released.verify() if finding.level == "error"] == []
    for record in (rollout for part in [*content.rollouts(), content.dead()] for rollout in part):
        (written,) = from_table(to_table([record]))
        read = values_of(released.get(record.rollout_id, segment=record.segment))
        assert {k: v for k, v in read.items() if k not in STAMPS} == {
            k: v for k, v in values_of(written).items() if k not in STAMPS
        }


def test_a_released_store_is_the_same_through_every_reader(released: Store) -> None:
    wanted = ABOUT["released-1.0"]["rows"]["rollouts"]
    once = [row for n, row in enumerate(wanted) if row not in wanted[:n]]
    with connect(released) as connection:
        found = connection.sql("SELECT rollout_id, segment, step, replay_key FROM rollouts ORDER BY ALL").fetchall()
    assert found == [(r["rollout_id"], r["segment"], r.get("step"), r.get("replay_key")) for r in once]
    frame = scan(released).sort("rollout_id", "segment").select("rollout_id", "tokens").collect().to_dicts()
    assert frame == [{"rollout_id": row["rollout_id"], "tokens": row["tokens"]} for row in once]


@pytest.mark.parametrize("name", [name for name in DAMAGED if "ids" in ABOUT[name]])
def test_a_damaged_store_gives_what_was_whole_and_says_what_was_not(name: str, tmp_path: Path) -> None:
    about = ABOUT[name]
    store = opened(name, tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert sorted(store.scan("rollouts", ["rollout_id"]).read_all()[0].to_pylist()) == about["ids"]
        for id_ in about["ids"]:
            assert store.get(id_)[0].tokens.tolist() == content.plain(id_).tokens.tolist()
        assert [finding.kind for finding in store.verify()] == about["found"]
        report = store.recover()
    assert any(about["warns"] in str(w.message) for w in caught) if "warns" in about else not caught
    assert sorted(path.partition("-")[2] for path in report.moved) == sorted(about.get("moved", []))
    after = open_store(store.path)
    assert sorted(after.scan("rollouts", ["rollout_id"]).read_all()[0].to_pylist()) == about["ids"]
    assert after.verify() == []


def test_a_flipped_bit_is_named_and_what_lies_elsewhere_is_still_there(tmp_path: Path) -> None:
    about = ABOUT["damaged/flipped_bit"]
    store = opened("damaged/flipped_bit", tmp_path)
    with pytest.raises(CorruptionError, match=about["raises"]):
        store.scan("rollouts").read_all()
    assert [finding.kind for finding in store.verify()] == about["found"]
    for id_ in about["get"]:
        assert store.get(id_)[0].tokens.tolist() == content.plain(id_).tokens.tolist()


def test_a_hole_in_the_log_is_an_error_and_not_an_end(tmp_path: Path) -> None:
    store = opened("damaged/missing_commit", tmp_path)
    for read in (store.snapshot, store.verify, store.info, lambda: store.get("a")):
        with pytest.raises(CorruptionError, match=ABOUT["damaged/missing_commit"]["raises"]):
            read()


def test_a_store_of_an_older_major_version_without_its_upgrade_is_refused_by_part_and_version(tmp_path: Path) -> None:
    store = opened("synthetic-0.9", tmp_path)
    with pytest.raises(VersionError, match=r"\.arrows?: schema: wanted 1\.x, got 0\.9, which nothing upgrades"):
        store.scan("rollouts")
