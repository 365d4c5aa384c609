"""A batch packed from some rows of a table is the batch of those rows; keys, ranges, and how a batch travels."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstore.batch import Counts, TokenBatch, collate
from rollstore.batch.keys import text_keys
from rollstore.batch.packer import MOST, Packer
from rollstore.batch.ranges import Marks, Ranges
from rollstore.schema import Heads, Rollout, Sampler, Span, to_table
from tests.readers.samples import rollout
from tests.strategies import FEW, rollout_lists


def equal(first: TokenBatch, second: TokenBatch) -> bool:
    """Bit for bit."""

    def bits(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return (value.dtype, tuple(value.shape), value.contiguous().numpy().tobytes())
        return tuple(map(bits, value)) if isinstance(value, tuple) else value

    names = [field.name for field in dataclasses.fields(first)]
    return all(bits(getattr(first, name)) == bits(getattr(second, name)) for name in names)


def mixed() -> pa.Table:
    """Rows with heads and without, of one span and of several, with one sampler, two, and none."""
    two = (
        Span(start=0, length=2, is_action=False),
        Span(start=2, length=2, is_action=True, sampler=1, logprob_kind="raw"),
        Span(start=4, length=0, is_action=True, sampler=0),
        Span(start=4, length=1, is_action=False),
        Span(start=5, length=3, is_action=True, sampler=0),
    )
    three = (
        Span(start=0, length=1, is_action=False),
        Span(start=1, length=1, is_action=False),
        Span(start=2, length=4, is_action=True, sampler=0),
    )
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1], bool)
    heads = Heads(size=2, tokens=np.tile([1, 2], 4), logprobs=np.tile(np.log([0.5, 0.25]), 4).astype(np.float32))
    uneven = Heads(size=2, counts=np.array([1, 0, 2, 1]), tokens=np.array([3, 1, 2, 4]),
                   logprobs=np.log(np.array([0.5, 0.5, 0.25, 0.125], np.float32)))  # fmt: skip
    return to_table(
        [
            rollout("a", heads=heads, head_kind="behavior", logprobs=None, logprob_kind=None, spans=three),
            rollout("b", tokens=8, action_mask=mask, logprobs=-np.arange(5, dtype=np.float32), spans=two,
                    weight_versions=np.arange(5), samplers=(Sampler(temperature=0.5), Sampler(top_k=5))),
            rollout("c", segment=0, ending="continued", reward_status="on_final_segment", samplers=None, spans=None),
            rollout("c", segment=1, reward=0.5, trainable=np.array([1, 0, 1, 1], bool)),
            rollout("d", weight_versions=None, group_id="g", heads=uneven, head_kind="raw", logprobs=None,
                    logprob_kind=None),
            rollout("e", tokens=3, prompt=3, group_id="g", spans=None),
        ]
    )  # fmt: skip


@pytest.mark.parametrize("rows", [[0], [5, 1, 4], [3, 2], [4, 0], [], [2, 3, 0, 1, 5, 4]])
def test_rows_packed_from_a_table_are_the_batch_of_those_rows(rows: list[int]) -> None:
    table = mixed()
    packed = Packer(table).batch(np.array(rows, np.int64))
    alone = collate(table.take(pa.array(rows, pa.int64())))
    if packed.heads is not None and alone.heads is None:  # a table of rows without heads has no column of them
        packed = dataclasses.replace(packed, heads=None)
    assert equal(packed, alone)


@settings(FEW, max_examples=20)
@given(records=rollout_lists(), seed=st.integers(0, 9))
def test_any_rows_of_any_table_pack_as_they_do_alone(records: list[Rollout], seed: int) -> None:
    columns = ["tokens", "action_mask", "logprobs", "weight_versions", "spans", "samplers", "rollout_id", "segment",
               "group_id", "run_id", "step", "ending", "bootstrap", "logprob_kind", "trainable"]  # fmt: skip
    table = to_table(records).select(columns)
    rows = np.random.default_rng(seed).permutation(table.num_rows)
    assert equal(Packer(table).batch(rows), collate(table.take(pa.array(rows))))


@given(st.lists(st.none() | st.text(max_size=40), max_size=12))
def test_equal_texts_have_one_key_and_others_have_others(texts: list[str | None]) -> None:
    column = pa.array(["x", *texts, "y"], pa.string()).slice(1, len(texts))
    keys = text_keys(column).tolist()
    found: dict[str | None, int] = {}
    assert all(found.setdefault(text, key) == key for text, key in zip(texts, keys, strict=True))
    assert len(set(found.values())) == len(found)


def test_a_key_is_the_same_for_ever() -> None:
    keys = text_keys(pa.array(["", "g1", "more than eight bytes", None]))
    assert keys.tolist() == [0, 5157618499021366272, 6854838048191066402, 11400714819323198485]


def test_keys_of_similar_texts_spread_over_all_bits() -> None:
    keys = text_keys(pa.array([f"group-{n}" for n in range(4096)]))
    ones = np.unpackbits(keys.view(np.uint8).reshape(-1, 8), axis=1).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 0.05


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.data())
def test_ranges_are_the_items_of_the_lists_in_the_order_asked(lengths: list[int], data: st.DataObject) -> None:
    flat = np.arange(sum(lengths))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    asked = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6))
    part = Ranges(offsets).of(np.array(asked, np.int64))
    wanted = [flat[offsets[n] : offsets[n + 1]].tolist() for n in asked]
    assert part.places.tolist() == part.take(flat).tolist() == [item for items in wanted for item in items]
    assert [flat[part.places][a:b].tolist() for a, b in zip(part.offsets, part.offsets[1:], strict=False)] == wanted
    assert part.positions.tolist() == [place for items in wanted for place in range(len(items))]


@given(st.lists(st.booleans(), max_size=70), st.lists(st.integers(-3, 80), max_size=9))
def test_marks_before_a_place_are_those_that_a_loop_counts(marks: list[bool], places: list[int]) -> None:
    counted = Marks(np.array(marks, bool))
    assert counted.before(np.array(places, np.int64)).tolist() == [sum(marks[: max(0, place)]) for place in places]
    assert counted.count == sum(marks)


def test_a_batch_of_more_tokens_than_its_offsets_count_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packer, wanted = Packer(mixed()), collate(mixed())
    most, rows = len(wanted.tokens) - 1, wanted.rows
    monkeypatch.setattr("rollstore.batch.packer.MOST", most)
    with pytest.raises(ValueError, match=f"^rows: wanted at most {most} tokens in a batch, got {most + 1} in {rows} "):
        packer.batch()
    assert packer.batch(np.arange(rows - 1)).rows == rows - 1
    assert np.iinfo(wanted.cu_seqlens.numpy().dtype).max == MOST


def test_a_batch_travels_in_one_piece_and_arrives_bit_for_bit() -> None:
    batch = collate(mixed())
    counts = Counts(*(torch.tensor(2.5),) * 7, *(torch.rand(batch.rows),) * 3, torch.tensor(1.0))
    batch = dataclasses.replace(batch, signal=torch.ones(batch.rows, dtype=torch.bool), counts=counts)
    for arrived in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert equal(arrived, batch)
        assert len({getattr(arrived, name).untyped_storage().data_ptr() for name in ("tokens", "weights")}) == 1
    assert equal(collate(mixed().slice(0, 0)), pickle.loads(pickle.dumps(collate(mixed().slice(0, 0)))))
