"""Files in cache/ that hold their sums and say what is not so: the data counts, and they are thrown away."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rollstore.errors import NotFoundError
from rollstore.readers.duckdb import connect
from rollstore.store import index, snapshot
from rollstore.store.derived import derived_files, save_derived
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.store.conftest import errors, ids, once, rollout

NAMES = [f"r{number}" for number in range(6)]


@pytest.fixture(autouse=True)
def _small_files_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "WORTH_KEEPING", 2)
    monkeypatch.setattr(index, "_WORTH_KEEPING", 1)


@pytest.fixture
def full(store: Store) -> Store:
    """A store of three parts with two rollouts each, and nothing in cache/."""
    for first, second in zip(NAMES[::2], NAMES[1::2], strict=True):
        store.append("rollouts", [rollout(first), rollout(second)])
    return store


def emptied(store: Store) -> None:
    for kind in ("index", "footers"):
        for file in derived_files(store.filesystem, kind):
            Path(store.path, file).unlink()


def spoiled(store: Store, kind: str, change: Callable[[dict[str, Any], dict[str, str]], None]) -> str:
    """The store's own file of a kind, its columns and metadata changed and summed again, as the only one."""
    fresh = open_store(store.path)
    fresh.get(NAMES[0])
    fresh.parts("rollouts")
    ((_, rows, metadata),) = list(index.load_derived(fresh.filesystem, kind))
    columns = {name: rows.column(name).to_pylist() for name in rows.schema.names}
    kept = {key: value for key, value in metadata.items() if key.startswith(f"rollstore.{kind}.")}
    change(columns, kept)
    emptied(store)
    schema = pa.schema([pa.field(name, rows.schema.field(name).type) for name in columns if name in rows.schema.names])
    made = [pa.array(columns[name], schema.field(name).type) for name in schema.names]
    return save_derived(store.filesystem, kind, pa.RecordBatch.from_arrays(made, schema=schema), kept)


def chosen(columns: dict[str, Any], keep: Callable[[int], bool]) -> None:
    for name, values in columns.items():
        columns[name] = [value for number, value in enumerate(values) if keep(number)]


def of_column(name: str, value: int) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda columns, _: columns.update({name: [value] * len(columns[name])})


LIES: dict[str, Callable[[dict[str, Any], dict[str, str]], None]] = {
    "no rows": lambda columns, _: chosen(columns, lambda _: False),
    "one row too few": lambda columns, _: chosen(columns, lambda number: columns["row"][number] == 0),
    "a part too high": of_column("part", 7),
    "a negative part": of_column("part", -1),
    "a batch too high": of_column("batch", 7),
    "a negative batch": of_column("batch", -2),
    "a row too high": of_column("row", 1 << 30),
    "a negative row": of_column("row", -1),
    "falling hashes": lambda columns, _: columns["hash"].reverse(),
    "no hashes": lambda columns, _: columns.update(hash=[None] * len(columns["hash"])),
    "a column too few": lambda columns, _: columns.__delitem__("key"),
    "no list of parts": lambda _, metadata: metadata.update({"rollstore.index.parts": "7"}),
    "no parts at all": lambda _, metadata: metadata.clear(),
    "one part twice": lambda _, metadata: metadata.update(
        {"rollstore.index.parts": json.dumps(json.loads(metadata["rollstore.index.parts"])[:1] * 3)}
    ),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_an_index_that_is_wrong_hides_no_row(full: Store, lie: Callable[..., None]) -> None:
    wrong = spoiled(full, "index", lie)
    for name in NAMES:
        assert [found.rollout_id for found in open_store(full.path).get(name)] == [name]
    fresh = open_store(full.path)
    with pytest.raises(NotFoundError):
        fresh.get("nobody")
    assert wrong not in derived_files(full.filesystem, "index")
    assert all(fresh.get(name) for name in NAMES)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_an_index_that_is_wrong_hides_no_repeated_row(full: Store, lie: Callable[..., None]) -> None:
    full.append("rollouts", [rollout(NAMES[0])])
    wrong = spoiled(full, "index", lie)
    with open_store(full.path).snapshot() as fixed:
        assert len(fixed.repeated()) == 2
    assert wrong not in derived_files(full.filesystem, "index")


def test_two_indexes_of_the_same_parts_make_no_row_a_repeated_one(full: Store) -> None:
    first = open_store(full.path)
    first.get(NAMES[0])
    (file,) = derived_files(full.filesystem, "index")
    kept = Path(full.path, file).read_bytes()
    Path(full.path, file).unlink()
    full.append("rollouts", [rollout("late")])
    open_store(full.path).get(NAMES[0])
    Path(full.path, "cache", f"index-{'0' * 32}.index").write_bytes(kept)  # by another process, at the same time
    with open_store(full.path).snapshot() as fixed:
        assert fixed.repeated() == []
    connection = connect(open_store(full.path))
    assert connection.execute("select count(*) from rollouts").fetchone() == (len(NAMES) + 1,)
    connection.close()
    assert all(open_store(full.path).get(name) for name in (*NAMES, "late"))


def test_an_absence_is_believed_after_the_parts_were_counted_once(full: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(full.path).get(NAMES[0])
    fresh = open_store(full.path)
    monkeypatch.setattr(index, "_segment", None)  # nothing may be built again
    for _ in range(2):
        with pytest.raises(NotFoundError):
            fresh.get("nobody")
    monkeypatch.setattr(snapshot.Snapshot, "parts", None)  # nor counted
    with pytest.raises(NotFoundError):
        fresh.get("nobody")


NO_ROW = (pc.field("rollout_id") == "nobody") | (pc.field("step") == 7_777)

SUMMARIES = {
    "junk": "junk",
    "nothing": "{}",
    "a list": "[]",
    "rows alone": '{"rows":2}',
    "too many rows": '{"rows":999,"columns":{}}',
    "no number of rows": '{"rows":"2","columns":{}}',
    "fewer than no rows": '{"rows":-2,"columns":{}}',
    "ends of another type": '{"rows":2,"columns":{"rollout_id":{"min":1,"max":"z","nulls":0}}}',
    "an end that no column holds": '{"rows":2,"columns":{"step":{"min":0,"max":99999999999999999999,"nulls":0}}}',
}


@pytest.mark.parametrize("summary", SUMMARIES.values(), ids=SUMMARIES)
@pytest.mark.parametrize(
    "read",
    [
        lambda store: store.info().tables["rollouts"].rows == len(NAMES),
        lambda store: errors(store) == [],
        lambda store: ids(store) == once(*NAMES),
        lambda store: store.scan("rollouts", ["rollout_id"], NO_ROW).read_all().num_rows == 0,
        lambda store: sorted(found.rollout_id for name in NAMES for found in store.get(name)) == NAMES,
        lambda store: store.compact().added != {},
    ],
    ids=["info", "verify", "scan", "filter", "get", "compact"],
)
def test_what_a_part_says_of_itself_goes_before_what_is_said_of_it(
    full: Store, summary: str, read: Callable[[Store], bool]
) -> None:
    spoiled(full, "footers", lambda columns, _: columns.update(summary=[summary] * len(columns["summary"])))
    assert read(open_store(full.path))


@pytest.mark.parametrize(
    "lie",
    [
        lambda columns, _: columns.update(name=[None] * 3),
        lambda columns, _: columns.update(size=[None] * 3),
        lambda columns, _: columns.update(schema=[-1] * 3),
        lambda columns, _: columns.update(schema=[9] * 3),
        lambda columns, _: columns.update(format=["x"] * 3),
        lambda columns, _: columns.update(table=["nowhere"] * 3),
        lambda columns, _: columns.__delitem__("source"),
        lambda _, metadata: metadata.clear(),
        lambda _, metadata: metadata.update({"rollstore.footers.schemas": "7"}),
        lambda _, metadata: metadata.update({"rollstore.footers.schemas": '["AAAA"]'}),
        lambda _, metadata: metadata.update(
            {
                "rollstore.footers.schemas": json.dumps(
                    [base64.b64encode(pa.schema([("rollout_id", pa.int8())]).serialize().to_pybytes()).decode()]
                )
            }
        ),
    ],
)
def test_a_file_that_describes_no_parts_is_thrown_away(full: Store, lie: Callable[..., None]) -> None:
    wrong = spoiled(full, "footers", lie)
    assert ids(open_store(full.path)) == once(*NAMES)
    assert wrong not in derived_files(full.filesystem, "footers")
    assert open_store(full.path).info().tables["rollouts"].rows == len(NAMES)


def test_a_wrong_size_or_a_wrong_author_of_a_part_is_put_right(full: Store) -> None:
    wrong = spoiled(full, "footers", lambda columns, _: columns.update(size=[1] * 3))
    fresh = open_store(full.path)
    true = {part.name: part.size for part in open_store(full.path).parts("rollouts") if part.batch_count}
    assert fresh.info().tables["rollouts"].bytes == sum(true.values()) > 3
    assert wrong not in derived_files(full.filesystem, "footers")
    assert errors(fresh) == []


def test_a_store_whose_cache_is_no_folder_is_read_all_the_same(full: Store) -> None:
    emptied(full)
    for file in Path(full.path, "cache").iterdir():
        file.unlink()
    Path(full.path, "cache").rmdir()
    Path(full.path, "cache").write_bytes(b"")
    fresh = open_store(full.path)
    assert [found.rollout_id for found in fresh.get(NAMES[3])] == [NAMES[3]]
    assert ids(fresh) == once(*NAMES)


def test_indexes_are_read_as_numpy_holds_them(full: Store) -> None:
    """The arrays of a segment stay what searching takes, after a round trip through a file."""
    open_store(full.path).get(NAMES[0])
    (segment,) = index._load(full.filesystem)
    assert [column.dtype for column in (segment.hash, segment.key, segment.part)] == [np.uint64, np.uint64, np.int32]
    assert segment.places == dict.fromkeys(segment.parts, 2)
