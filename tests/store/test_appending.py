"""The writer: what it takes, what it fills in, what it refuses."""

from __future__ import annotations

import fcntl
import threading
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rollstore.errors import DuplicateError, NotFoundError, SchemaError, StoreError
from rollstore.schema import Rollout, to_table
from rollstore.store.columns import publish_types
from rollstore.store.store import Store
from tests.store.conftest import errors, ids, once, rollout


def test_rows_are_seen_after_a_flush_and_still_after_the_seal(store: Store) -> None:
    with store.writer() as writer:
        writer.append(rollout("a"))
        assert ids(store) == {}
        writer.flush()
        assert ids(store) == once("a")
        assert store.parts("rollouts") == []
    assert ids(store) == once("a")
    assert [part.rows for part in store.parts("rollouts")] == [1]
    assert list((Path(store.path) / "journal").iterdir()) == []


def test_a_record_a_list_a_batch_and_a_table_are_taken_alike(store: Store) -> None:
    table = to_table([rollout("c"), rollout("d")])
    with store.writer() as writer:
        writer.append(rollout("a"))
        writer.append([rollout("b")])
        writer.append(table)
        writer.append(to_table([rollout("e")]).combine_chunks().to_batches()[0])
    assert ids(store) == once("a", "b", "c", "d", "e")
    for name in "abcde":
        (found,) = store.get(name)
        assert found.tokens.tolist() == rollout(name).tokens.tolist()
        assert found.action_mask.tolist() == rollout(name).action_mask.tolist()


def test_bad_rows_are_refused_whole_and_the_writer_goes_on(store: Store) -> None:
    bad = to_table([rollout("good"), rollout("bad")])
    column = pa.array([[1, 2, 3, 4, 5, 6], [1, -2, 3, 4, 5, 6]], pa.list_(pa.int32()))
    bad = bad.set_column(bad.schema.get_field_index("tokens"), bad.schema.field("tokens"), column)
    with store.writer() as writer:
        with pytest.raises(SchemaError, match="row 1") as caught:
            writer.append(bad)
        assert [problem.column for problem in caught.value.problems] == ["tokens"]
        writer.append(rollout("after"))
    assert ids(store) == once("after")


def test_the_store_fills_in_when_and_where_a_row_was_written(store: Store) -> None:
    before = datetime.now(UTC)
    given = datetime(2020, 1, 1, tzinfo=UTC)
    with store.writer(source="engine 0") as writer:
        writer.append([rollout("a"), rollout("b", written_at=given)])
        writer.append(rollout("c"))
    rows = store.scan("rollouts", ["rollout_id", "written_at", "written_by", "written_row"]).read_all().to_pylist()
    (part,) = store.parts("rollouts")
    assert [row["written_row"] for row in rows] == [0, 1, 2]
    assert {row["written_by"] for row in rows} == {part.name}
    assert rows[1]["written_at"] == given
    assert before <= rows[0]["written_at"] <= datetime.now(UTC)
    assert part.source == "engine 0"


def test_the_writer_s_run_fills_what_is_null_and_never_replaces_another(store: Store) -> None:
    with store.writer(run="one") as writer:
        writer.append([rollout("a"), rollout("b", run_id="one")])
        with pytest.raises(ValueError, match="row 1 has 'two', wanted 'one'"):
            writer.append([rollout("c"), rollout("d", run_id="two")])
    assert store.scan("rollouts", ["rollout_id", "run_id"]).read_all().to_pydict() == {
        "rollout_id": ["a", "b"],
        "run_id": ["one", "one"],
    }


def test_the_first_value_of_another_column_begins_another_journal(store: Store) -> None:
    with store.writer() as writer:
        writer.append(rollout("a"))
        writer.flush()
        writer.append(rollout("b", reward=1.0, reward_status="scored"))
        writer.append(rollout("c"))
        writer.flush()
        assert ids(store) == once("a", "b", "c")
    assert sorted(part.rows for part in store.parts("rollouts")) == [1, 2]
    assert store.get("b")[0].reward == 1.0
    assert store.get("c")[0].reward is None


def test_a_full_journal_is_sealed_and_the_next_one_begun(store: Store) -> None:
    rng = np.random.default_rng(0)
    with store.writer(seal_bytes=20_000) as writer:
        for number in range(30):
            tokens = rng.integers(0, 2**31 - 1, 400, dtype=np.int32)
            writer.append(rollout(f"r{number}", tokens=400, metadata={"noise": tokens.tobytes().hex()}))
            writer.flush()
    parts = store.parts("rollouts")
    assert len(parts) > 3
    assert len({part.name.split("-")[1] for part in parts}) == 1
    assert ids(store) == once(*(f"r{number}" for number in range(30)))
    assert errors(store) == []


def test_a_closed_writer_refuses_and_closing_twice_is_no_error(store: Store) -> None:
    writer = store.writer()
    writer.close()
    writer.close()
    with pytest.raises(StoreError, match="closed"):
        writer.append(rollout("a"))
    assert list((Path(store.path) / "journal").iterdir()) == []


def test_threads_share_a_writer(store: Store) -> None:
    with store.writer(seal_bytes=30_000) as writer:

        def append(thread: int) -> None:
            for number in range(20):
                writer.append(rollout(f"t{thread}-{number}"))
                writer.flush(sync=number % 7 == 0)

        threads = [threading.Thread(target=append, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ids(store) == once(*(f"t{t}-{n}" for t in range(4) for n in range(20)))
    assert errors(store) == []


def test_an_id_that_is_not_there_is_said_so(store: Store) -> None:
    with pytest.raises(NotFoundError, match="'nobody': no such rollout"):
        store.get("nobody")
    store.append("rollouts", [rollout("a")])
    with pytest.raises(KeyError, match="segment 3"):
        store.get("a", segment=3)
    assert store.get("a", segment=0).rollout_id == "a"


def test_an_id_written_twice_counts_once_where_equal_and_is_an_error_where_not(store: Store) -> None:
    store.append("rollouts", [rollout("same")])
    store.append("rollouts", [rollout("same"), rollout("other")])
    assert len(store.get("same")) == 1
    store.append("rollouts", [rollout("other", tokens=8)])
    with pytest.raises(DuplicateError, match="'other', segment 0"):
        store.get("other")
    with pytest.raises(DuplicateError):
        store.get("other", segment=0)
    assert len(store.get("same")) == 1


def test_segments_come_in_order(store: Store) -> None:
    store.append("rollouts", [rollout("a", segment=1)])
    store.append("rollouts", [rollout("a", segment=0, ending="continued")])
    assert [found.segment for found in store.get("a")] == [0, 1]


def test_other_tables_take_tables(store: Store) -> None:
    scores = pa.table({"rollout_id": ["a"], "scorer": ["judge"], "value": [float("nan")], "repeat": [0]})
    with pytest.raises(TypeError, match="scores: wanted"):
        store.append("scores", [rollout("a")])
    store.append("scores", scores.set_column(2, "value", pa.array([0.5])))
    assert store.scan("scores", ["rollout_id", "value"]).read_all().to_pylist() == [{"rollout_id": "a", "value": 0.5}]
    with pytest.raises(ValueError, match="wanted one of"):
        store.scan("rewards")


def test_a_caller_s_column_keeps_the_type_of_its_first_use(store: Store) -> None:
    def with_x(name: str, values: pa.Array) -> pa.Table:
        return to_table([rollout(name)]).append_column("x_mine", values)

    store.append("rollouts", with_x("a", pa.array([7], pa.int16())))
    store.append("rollouts", [rollout("b")])
    with store.writer() as writer:
        with pytest.raises(SchemaError, match="x_mine: wrong_type"):
            writer.append(with_x("c", pa.array(["seven"])))
        writer.append(with_x("d", pa.array([None])))
    rows = store.scan("rollouts", ["rollout_id", "x_mine"]).read_all()
    assert dict(zip(*rows.to_pydict().values(), strict=True)) == {"a": 7, "b": None, "d": None}
    assert rows.schema.field("x_mine").type == pa.int16()
    assert errors(store) == []


def test_a_caller_s_column_that_no_reader_could_open_is_refused(store: Store) -> None:
    table = to_table([rollout("a")])
    with pytest.raises(SchemaError, match="x_ and letters"):
        store.append("rollouts", table.append_column("x_../../etc", pa.array([1])))
    with pytest.raises(SchemaError, match="x_none"):
        store.append("rollouts", table.append_column("x_none", pa.array([[None]], pa.list_(pa.null()))))
    for array in (pa.array(["a"]).dictionary_encode(), pa.array(["a"], pa.string_view()), pa.array([[None]])):
        with pytest.raises(SchemaError, match=r"x_u: wrong_type.*a plain type"):
            publish_types(store.filesystem, pa.table({"x_u": array}), {}, dict)
    assert ids(store) == {}


def test_bytes_that_are_a_pickle_come_back_as_bytes(store: Store, tmp_path: Path) -> None:
    marker = tmp_path / "PWNED"
    payload = b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    table = to_table([rollout("a")]).append_column("x_blob", pa.array([payload]))
    store.append("rollouts", table)
    assert store.scan("rollouts", ["x_blob"]).read_all().to_pylist() == [{"x_blob": payload}]
    assert errors(store) == []
    assert not marker.exists()


def test_an_id_with_a_lone_surrogate_is_found_again(store: Store) -> None:
    store.append("rollouts", Rollout(rollout_id="a\ud800", tokens=[1, 2], action_mask=[0, 1]))
    assert store.get("a\ud800", segment=0).rollout_id == "a\ud800"


@pytest.mark.parametrize("id_", [5, None, b"a"])
def test_get_by_what_is_no_text_is_a_type_error(store: Store, id_: object) -> None:
    with pytest.raises(TypeError, match="get: wanted a rollout_id as text"):
        store.get(id_)  # pyright: ignore  the wrong type is the point


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"table": "foo"}, ValueError, "wanted one of rollouts, scores, evaluations, uses, got 'foo'"),
        ({"run": 5}, TypeError, "writer: run: wanted text, got int"),
        ({"run": ""}, ValueError, "writer: run: wanted a name, or None, got ''"),
        ({"source": 5}, TypeError, "writer: source: wanted text, got int"),
        ({"seal_bytes": 0}, ValueError, "writer: seal_bytes: wanted more than 0, got 0"),
    ],
)
def test_a_writer_with_wrong_arguments_is_refused_when_it_is_made(
    store: Store, wrong: dict[str, object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        store.writer(**wrong)  # pyright: ignore  the wrong type is the point


@pytest.mark.parametrize("swept", ["looked at", "deleted"])
def test_a_new_file_that_a_sweep_meets_before_it_is_locked_is_made_all_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch, swept: str
) -> None:
    place, lock = store.filesystem, fcntl.flock
    turns = iter([True, False, False])

    def flock(fd: int, how: int) -> None:
        if next(turns):
            if swept == "deleted":
                place.delete("staging/new")
            else:
                raise BlockingIOError
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    handle = place.create("staging/new")
    handle.write(0, b"here")
    assert place.list("staging") == ["new"]
    assert place.lock("staging/new") is None  # it is locked, under the name
    handle.close()
