"""JSONL: a store, its lines, and a store again, equal to the last bit."""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstore.errors import CorruptionError, StoreError
from rollstore.exchange.folder import ABOUT
from rollstore.exchange.jsonl import export, import_jsonl
from rollstore.exchange.texts import lines
from rollstore.exchange.values import array
from rollstore.schema import TABLES, Rollout
from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.golden import content
from tests.readers.samples import rollout, rows, settled, write
from tests.strategies import rollout_lists, valid_tables

ORIGIN = ("written_by", "written_row")


def there_and_back(store: Store, folder: Path, compression: str = "zst") -> Store:
    export(store, folder / "out", compression=compression)
    back = open_store(folder / "back", create=True)
    report = import_jsonl(back, [folder / "out"])
    assert report.causes == {}
    return back


def bits(store: Store, table: str) -> list[Any]:
    """Every row with its values as bits, in any order; where it was written is its store's own business."""
    return sorted(rows(store.scan(table).read_all(), ORIGIN), key=repr)


@settings(max_examples=15, deadline=None)
@given(
    made=rollout_lists(min_size=1, max_size=3),
    others=st.fixed_dictionaries({name: valid_tables(name) for name in TABLES if name != "rollouts"}),
)
def test_any_store_comes_back_bit_for_bit(made: list[Rollout], others: Mapping[str, pa.Table]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "store", create=True)
        write(store, *[settled(record) for record in made], run=None)  # pyright: ignore[reportArgumentType]
        for name, table in others.items():
            store.append(name, table)
        back = there_and_back(store, Path(folder))
        for name in TABLES:
            assert bits(back, name) == bits(store, name), name
            held, found = store.scan(name).read_all(), back.scan(name).read_all()
            if held.num_rows:
                assert found.schema.equals(held.schema)


@pytest.mark.parametrize("compression", ["zst", "gz", "none"])
def test_every_column_of_every_table_comes_back_through_each_compression(
    compression: str, store: Store, tmp_path: Path
) -> None:
    for part in content.rollouts()[:1]:
        write(store, *part, run=None)  # pyright: ignore[reportArgumentType]
    for table, data in content.others().items():
        store.append(table, data)
    back = there_and_back(store, tmp_path, compression)
    for table in TABLES:
        assert bits(back, table) == bits(store, table)
        assert bits(back, table)


ODD: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int64": (pa.int64(), [2**53 + 1, -(2**63), 2**63 - 1, None]),
    "uint64": (pa.uint64(), [2**64 - 1, 2**53 + 1, 0]),
    "float32": (pa.float32(), [0.1, -0.0, 1e-45, math.nan, math.inf, -math.inf, None, 3.4028234663852886e38]),
    "float64": (pa.float64(), [0.1, -0.0, 5e-324, math.nan, math.inf, -math.inf, None, 1e22, 2.0**63]),
    "bool": (pa.bool_(), [True, False, None]),
    "text": (pa.string(), ["", "NaN", 'a"b\\\n\x00é\u2028', None, "null"]),
    "large text": (pa.large_string(), ["", None, "x"]),
    "bytes": (pa.binary(), [b"", b"\xff\x00", None]),
    "fixed bytes": (pa.binary(2), [b"\xff\x00", None]),
    "time": (pa.timestamp("us", "UTC"), [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]),
    "seconds": (pa.timestamp("s", "UTC"), [datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC), None]),
    "date": (pa.date32(), [date(1, 1, 1), date(9999, 12, 31), None]),
    "date64": (pa.date64(), [date(1, 1, 1), None]),
    "of day": (pa.time32("ms"), [time(23, 59, 59, 999000), None]),
    "of day, finer": (pa.time64("us"), [time(23, 59, 59, 999999), None]),
    "duration": (pa.duration("us"), [timedelta(days=-9999, microseconds=1), None]),
    "decimal": (pa.decimal128(38, 3), [Decimal("12345678901234567890123456789012345.678"), None]),
    "lists": (pa.list_(pa.list_(pa.float32())), [[[1.5, None, math.nan], None, []], [], None]),
    "large lists": (pa.large_list(pa.int64()), [[1, None], [], None]),
    "structs": (
        pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())}), [{"a": 1, "b": None}, {"a": None, "b": []}, None],
    ),
    "maps": (pa.map_(pa.string(), pa.float32()), [[("a", 1.0), ("b", None)], [], None]),
    "maps with a key twice": (pa.map_(pa.string(), pa.string()), [[("a", "1"), ("a", "2")], [("b", None)]]),
    "maps of numbers": (pa.map_(pa.int64(), pa.string()), [[(1, "a"), (2**62, None)], None]),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_value_of_any_type_that_a_column_may_have_reads_back_as_itself(name: str) -> None:
    type_, values = ODD[name]
    held = pa.array(values, type_)
    made = lines(pa.table({"x": held}))
    read = array([json.loads(line).get("x") for line in made], type_)
    assert repr(read.to_pylist()) == repr(held.to_pylist())  # NaN is no NaN's equal
    assert read.equals(held) or "nan" in repr(held.to_pylist())


def test_floats_of_any_bits_read_back_as_the_same_bits() -> None:
    for dtype, wide in ((np.float32, np.uint32), (np.float64, np.uint64)):
        some = np.random.default_rng(1).integers(0, np.iinfo(wide).max, 200_000, wide, endpoint=True).view(dtype)
        held = pa.array(some[np.isfinite(some)])
        line = lines(pa.table({"x": pa.array([held.to_pylist()], pa.list_(held.type))}))[0]
        read = array([json.loads(line)["x"]], pa.list_(held.type)).values
        assert (read.to_numpy().view(wide) == held.to_numpy().view(wide)).all()


def test_lines_are_what_a_person_expects_and_nulls_are_left_out(store: Store, tmp_path: Path) -> None:
    keyed = {"replay_key": 2**64 - 1, "replay_sample": 0, "noise": "n/1"}
    write(store, rollout("a", tokens=4, reward=0.5, logprobs=[None, -math.inf], **keyed))
    export(store, tmp_path / "out", compression="none", tables=["rollouts"])
    row = json.loads((tmp_path / "out" / "rollouts.jsonl").read_text(encoding="utf-8"))
    assert (row["tokens"], row["action_mask"]) == ([97, 98, 99, 100], [False, False, True, True])
    assert (row["logprobs"], row["reward"], row["replay_key"]) == ([None, "-Infinity"], 0.5, 2**64 - 1)
    assert row["spans"][0] == {
        "start": 0,
        "length": 2,
        "role": "user",
        "is_action": False,
        "origin": "rendered",
        "turn": 0,
    }
    assert "head_tokens" not in row
    about = json.loads((tmp_path / "out" / ABOUT).read_text(encoding="ascii"))
    assert about["tables"]["rollouts"]["rows"] == 1


def test_without_the_note_beside_it_a_columns_type_is_that_of_the_store_or_of_its_values(
    store: Store, tmp_path: Path
) -> None:
    write(store, rollout("a", extra={"x_count": 3, "x_share": 1.0}))
    export(store, tmp_path / "out", compression="none", tables=["rollouts"])
    (tmp_path / "out" / ABOUT).unlink()
    for name, first in (("with", rollout("b", extra={"x_share": 0.5})), ("without", rollout("b"))):
        back = open_store(tmp_path / name, create=True)
        write(back, first)
        report = import_jsonl(back, [tmp_path / "out"])
        assert report.total.taken == 1
        assert str(back.scan("rollouts").schema.field("x_share").type) == ("double" if name == "with" else "int64")
    (tmp_path / "out" / ABOUT).write_text("{", encoding="ascii")
    with pytest.raises(CorruptionError, match=f"{ABOUT}: wanted the types of columns"):
        import_jsonl(back, [tmp_path / "out"])


def test_of_an_id_with_two_contents_both_are_in_the_files_and_one_comes_back(store: Store, tmp_path: Path) -> None:
    for reward in (0.0, 1.0):
        write(store, rollout("a", reward=reward), rollout(f"only {reward}"))
    with pytest.warns(UserWarning, match="different contents"):
        export(store, tmp_path / "out", compression="none", tables=["rollouts"])
    assert len((tmp_path / "out" / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()) == 4
    report = import_jsonl(open_store(tmp_path / "back", create=True), [tmp_path / "out"])
    assert (report.total.taken, report.total.refused) == (3, 1)


def test_nothing_is_overwritten_and_bad_names_are_refused(store: Store, tmp_path: Path) -> None:
    export(store, tmp_path / "out")
    with pytest.raises(StoreError, match="nothing is overwritten"):
        export(store, tmp_path / "out")
    with pytest.raises(ValueError, match="compression: wanted one of zst, gz, none, got 'lz4'"):
        export(store, tmp_path / "other", compression="lz4")
    with pytest.raises(ValueError, match=r"tables: wanted some of rollouts, .* got 'actions'"):
        export(store, tmp_path / "other", tables=["actions"])
    with pytest.raises(ValueError, match=r"table: wanted one of rollouts, .* got 'rollout'"):
        import_jsonl(store, [tmp_path / "out"], table="rollout")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_what_the_files_are_packed_with_is_seen_from_their_bytes(store: Store, tmp_path: Path) -> None:
    line = b'{"tokens":[5,6],"action_mask":[false,true]}\n'
    (tmp_path / "plain").write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\n")
    (tmp_path / "zst").write_bytes(zstandard.compress(line) + zstandard.compress(line))
    (tmp_path / "gz").write_bytes(gzip.compress(line) + gzip.compress(line.strip()))
    report = import_jsonl(store, [tmp_path / name for name in ("plain", "zst", "gz")])
    assert [counts.taken for counts in report.files.values()] == [1, 2, 2]
