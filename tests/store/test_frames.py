"""Messages and files: what was written comes back bit for bit, and nothing else ever does."""

from __future__ import annotations

import random
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from hypothesis import given, settings

from rollstore.errors import CorruptionError
from rollstore.store import frame
from rollstore.store.batching import filled

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("tokens", pa.list_(pa.int32())),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("mask", pa.list_(pa.bool_())),
        pa.field("version", pa.int64()),
        pa.field("key", pa.uint64()),
        pa.field("raw", pa.binary()),
        pa.field("spans", pa.list_(pa.struct([("start", pa.int32()), ("role", pa.string())]))),
        pa.field("metadata", pa.map_(pa.string(), pa.string())),
    ]
)
FLOATS = st.one_of(st.none(), st.floats(width=32), st.sampled_from([float("nan"), float("-inf"), -0.0]))
INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "id": TEXT,
            "tokens": st.one_of(st.none(), st.lists(INT32, max_size=9)),
            "logprobs": st.one_of(st.none(), st.lists(FLOATS, max_size=9)),
            "mask": st.one_of(st.none(), st.lists(st.booleans(), max_size=20)),
            "version": st.one_of(st.none(), INT64),
            "key": st.one_of(st.none(), st.integers(0, 2**64 - 1)),
            "raw": st.one_of(st.none(), st.binary(max_size=9)),
            "spans": st.one_of(
                st.none(),
                st.lists(st.fixed_dictionaries({"start": INT32, "role": st.one_of(st.none(), TEXT)}), max_size=3),
            ),
            "metadata": st.one_of(st.none(), st.dictionaries(TEXT, TEXT, max_size=2)),
        }
    ),
    max_size=8,
)


def batch_from(rows: list[dict[str, object]]) -> pa.RecordBatch:
    columns = []
    for field in SCHEMA:
        values = [row[field.name] for row in rows]
        if field.name == "metadata":
            values = [None if value is None else list(value.items()) for value in values]
        columns.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def bits(batch: pa.RecordBatch | pa.Table) -> str:
    """Values as text in which NaN equals NaN and -0.0 is not 0.0."""
    return repr(batch.to_pydict())


def open_file(file: bytes) -> list[pa.RecordBatch]:
    """Read a whole file the way the store does: nothing goes to Arrow before its sum holds."""
    length = frame.tail_length(file[-10:])
    if not 0 < length <= len(file):
        raise CorruptionError("no tail")
    tail = frame.read_tail(file[-length:], len(file), "file")
    frame.check_head(file[: tail.batches[0].offset if tail.batches else len(file) - length], "head")
    found = []
    for batch in tail.batches:
        message = file[batch.offset : batch.offset + batch.length]
        frame.check_message(message, batch, "batch")
        found.append(frame.Decoder(tail.schema).decode(message, "batch"))
    return found


SMALL = batch_from(
    [
        {
            "id": f"r{i}", "tokens": [1, 2, i], "logprobs": [-0.5, None, float("nan")], "mask": [True, False],
            "version": i, "key": 2**64 - 1 - i, "raw": b"\x00\xff", "spans": [{"start": 0, "role": "user"}],
            "metadata": {"a": "b"},
        }
        for i in range(4)
    ]
)  # fmt: skip


def own(batch: pa.RecordBatch) -> pa.RecordBatch:
    (found,) = filled([batch], 1 << 30)
    return found


def small_file() -> bytes:
    return bytes(frame.encode_file(SCHEMA, [own(SMALL.slice(0, 2)), own(SMALL.slice(2))], {"note": "x"}))


@settings(max_examples=150, deadline=None)
@given(ROWS, st.data())
def test_a_message_comes_back_bit_for_bit_whatever_its_slice(
    rows: list[dict[str, object]], data: st.DataObject
) -> None:
    whole = batch_from(rows)
    start = data.draw(st.integers(0, len(rows)))
    part = whole.slice(start, data.draw(st.integers(0, len(rows) - start)))
    message = frame.encode_message(own(part) if part.num_rows else part)
    found = frame.next_message(message, 0)
    assert found is not None
    assert (found.length, found.rows) == (len(message), part.num_rows)
    assert bits(frame.Decoder(SCHEMA).decode(message, "")) == bits(part)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, max_size=3))
def test_a_file_comes_back_bit_for_bit_checked_and_through_arrow(
    batches: list[list[dict[str, object]]],
) -> None:
    written = [batch_from(rows) for rows in batches]
    file = bytes(frame.encode_file(SCHEMA, written, {}))
    assert [bits(batch) for batch in open_file(file)] == [bits(batch) for batch in written]
    reader = pa.ipc.open_file(file)
    assert [bits(reader.get_batch(i)) for i in range(reader.num_record_batches)] == [bits(batch) for batch in written]


def test_other_readers_open_a_file_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "part.arrow"
    path.write_bytes(small_file())
    assert ds.dataset(path, format="ipc").to_table().column("key").to_pylist() == SMALL.column("key").to_pylist()
    frames = pl.scan_ipc(path).select("id", "key", "tokens").collect()
    assert frames["key"].to_list() == SMALL.column("key").to_pylist()
    assert frames["tokens"].to_list() == SMALL.column("tokens").to_pylist()


def test_head_and_messages_one_after_the_other_are_an_arrow_stream() -> None:
    stream = frame.encode_head(SCHEMA) + frame.encode_message(SMALL) + frame.encode_message(own(SMALL.slice(1, 1)))
    batches = list(pa.ipc.open_stream(stream))
    assert [bits(batch) for batch in batches] == [bits(SMALL), bits(SMALL.slice(1, 1))]


def test_a_batch_of_one_column_can_be_read_alone() -> None:
    message = frame.encode_message(SMALL)
    assert frame.Decoder(SCHEMA).decode(message, "", [5]).to_pydict() == {"key": SMALL.column("key").to_pylist()}


def test_a_slice_takes_the_room_of_its_own_rows_and_holds_no_other() -> None:
    tokens = np.arange(1_000_000, dtype=np.int32)
    lists = pa.ListArray.from_arrays(pa.array(np.arange(0, 1_000_001, 1000), pa.int32()), pa.array(tokens))
    batch = pa.RecordBatch.from_arrays([lists, pa.array([f"secret-{i}" for i in range(1000)])], names=["tokens", "id"])
    fresh = pa.RecordBatch.from_pydict({"tokens": [tokens[500_000:501_000]], "id": ["secret-500"]}, schema=batch.schema)
    message = frame.encode_message(own(batch.slice(500, 1)))
    assert len(message) == len(frame.encode_message(fresh))
    assert b"secret-499" not in message
    assert bits(frame.Decoder(batch.schema).decode(message, "")) == bits(fresh)


def test_every_flipped_bit_of_a_small_file_is_found() -> None:
    batch = SMALL.select(["id", "tokens"])
    file = bytes(frame.encode_file(batch.schema, [own(batch.slice(0, 2)), own(batch.slice(2))], {}))
    for position in range(len(file)):
        for bit in range(8):
            damaged = bytearray(file)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptionError):
                open_file(bytes(damaged))


def test_sampled_flips_of_a_larger_file_are_found() -> None:
    rng = np.random.default_rng(3)
    tokens = pa.array([rng.integers(0, 50_000, 800, dtype=np.int32) for _ in range(200)], pa.list_(pa.int32()))
    logprobs = pa.array([-rng.random(800, dtype=np.float32) for _ in range(200)], pa.list_(pa.float32()))
    batch = pa.RecordBatch.from_arrays([tokens, logprobs], names=["tokens", "logprobs"])
    file = bytes(frame.encode_file(batch.schema, [own(batch.slice(i, 50)) for i in range(0, 200, 50)], {}))
    draw = random.Random(5)
    for _ in range(2000):
        damaged = bytearray(file)
        damaged[draw.randrange(len(file))] ^= 1 << draw.randrange(8)
        with pytest.raises(CorruptionError):
            open_file(bytes(damaged))


def test_every_flipped_bit_of_a_message_ends_the_journal_there() -> None:
    message = frame.encode_message(SMALL)
    for position in range(len(message)):
        damaged = bytearray(message)
        damaged[position] ^= 1 << (position % 8)
        assert frame.next_message(bytes(damaged), 0) is None


def test_every_flipped_bit_of_a_head_is_found() -> None:
    head = frame.encode_head(SCHEMA)
    for position in range(len(head)):
        for bit in range(8):
            damaged = bytearray(head)
            damaged[position] ^= 1 << bit
            try:
                assert frame.read_head(bytes(damaged), "") is None
            except CorruptionError:
                continue


def test_a_file_cut_at_any_length_is_an_error() -> None:
    file = small_file()
    for length in range(len(file)):
        with pytest.raises(CorruptionError):
            open_file(file[:length])


def test_a_message_cut_at_any_length_is_unfinished_and_a_damaged_one_is_not() -> None:
    message = frame.encode_message(SMALL)
    for length in range(len(message)):
        assert frame.next_message(message[:length], 0) is None
        assert frame.is_unfinished(message[:length])
    assert not frame.is_unfinished(bytes(len(message)))
    assert not frame.is_unfinished(message[:-1] + bytes([message[-1] ^ 1]))


def test_a_whole_message_in_another_one_s_place_is_found() -> None:
    file = bytearray(frame.encode_file(SCHEMA, [own(SMALL.slice(0, 1)), own(SMALL.slice(1, 1))], {}))
    tail = frame.read_tail(file[-frame.tail_length(bytes(file[-10:])) :], len(file), "")
    first, second = tail.batches
    assert first.length == second.length
    file[first.offset : first.offset + first.length] = file[second.offset : second.offset + second.length]
    with pytest.raises(CorruptionError, match="another one"):
        open_file(bytes(file))


def test_text_that_imitates_a_mark_is_only_text() -> None:
    hostile = '{"xxh3-tail":"0000000000000000"}{"xxh3-message":"0000000000000000"}'
    batch = pa.RecordBatch.from_pydict({"id": [hostile]})
    assert open_file(bytes(frame.encode_file(batch.schema, [batch], {})))[0].to_pydict() == {"id": [hostile]}
    message = frame.encode_message(batch)
    assert frame.next_message(message, 0) is not None
