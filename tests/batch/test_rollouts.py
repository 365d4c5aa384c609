"""Which rows are one rollout, which rollouts are one group; and a caller's table that is not as it should be."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rollstore import Sampler
from rollstore.batch import (
    Transform,
    as_behavior,
    collate,
    refuse_unusable,
    select,
    settings,
    to_padded,
    to_responses,
    to_tinker,
    to_trl,
    to_verl,
    within_vocabulary,
)
from rollstore.batch.packer import ACTION_COLUMNS, FIELDS
from rollstore.batch.token_batch import TokenBatch
from rollstore.errors import DuplicateError, UnsupportedRecordError
from rollstore.losses import group_mean, with_counts
from rollstore.readers.prefix import share_prefixes
from rollstore.usable import Draw, draw

nan, inf = float("nan"), float("inf")
Call = Callable[[], Any]


def table(count: int = 3, **columns: Any) -> pa.Table:
    return pa.table(
        {
            "rollout_id": [f"r{number}" for number in range(count)],
            "tokens": [[1, 2, 3 + number] for number in range(count)],
            "action_mask": [[False, True, True]] * count,
            "logprobs": [[-0.5, -0.6]] * count,
            "logprob_kind": ["behavior"] * count,
        }
        | columns
    )


SEGMENTS: dict[str, Any] = {"rollout_id": ["a", "a", "b"], "segment": [0, 1, 0], "reward": [None, 1.0, 0.0]}
PLACES: dict[str, dict[str, Any]] = {
    "the later segment in a later step": {"step": [3, 4, 3], "group_id": ["g"] * 3},
    "the later segment without a step": {"step": [3, None, 3], "group_id": ["g"] * 3},
    "the first segment without a step": {"step": [None, 3, 3], "group_id": ["g"] * 3},
    "the later segment without a group": {"group_id": ["g", None, "g"]},
    "the first segment without a group": {"group_id": [None, "g", "g"]},
    "the later segment in another group": {"group_id": ["g", "h", "g"]},
    "the later segment without a run": {"group_id": ["g"] * 3, "run_id": ["r", None, "r"]},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("order", [[0, 1, 2], [1, 2, 0]])
def test_all_segments_of_a_rollout_are_trained_in_the_group_of_the_first_that_has_one(
    place: dict[str, Any], order: list[int]
) -> None:
    batch, found = group_mean(collate(table(**SEGMENTS, **place).take(order)))
    assert batch.advantages is not None
    wanted = {"a": 0.5, "b": -0.5}
    assert batch.advantages.tolist() == [wanted[batch.rollout_ids[row]] for row in batch.sequence.tolist()]
    assert found.present.tolist() == [2]


def test_two_rollouts_without_a_group_are_apart_however_many_segments_they_have() -> None:
    batch = collate(table(**SEGMENTS, step=[3, 4, 3]))
    assert batch.group[0] == batch.group[1] != batch.group[2]


def test_a_rollout_whose_rows_are_of_two_runs_is_refused_and_lends_no_reward() -> None:
    both = pa.concat_tables(
        [table(2, run_id=["A"] * 2, reward=[1.0, 0.0]), table(2, run_id=["B"] * 2, reward=[0.0, 1.0])]
    )
    with pytest.raises(DuplicateError, match=r"^rollout 'r0': wanted rows of one run, got some of 'A' and of 'B': "):
        collate(both)
    with pytest.raises(DuplicateError, match=r"^rollout 'a': wanted rows of one run"):
        collate(table(**SEGMENTS, run_id=["A", "B", "A"]))


@pytest.mark.parametrize("reward", [[1.0, None, 0.5], [None, 0.5, 1.0]])
def test_a_segment_that_stands_twice_is_refused(reward: list[float | None]) -> None:
    twice = table(rollout_id=["a", "a", "b"], segment=[1, 1, 0], reward=reward)
    with pytest.raises(DuplicateError, match=r"^'a', segment 1: wanted once in the table, got it twice"):
        collate(twice)


def test_a_step_of_batches_of_two_runs_with_the_same_ids_is_refused_and_never_counted_as_one() -> None:
    one, other = (collate(table(2, run_id=[run] * 2)) for run in "AB")
    with pytest.raises(DuplicateError, match=r"^rollout 'r[01]': wanted one group in the step, got two"):
        with_counts([one, other])
    assert with_counts([one, one])[0].counts is not None


def test_rewards_or_groups_that_differ_between_the_segments_of_a_rollout_are_refused_by_id() -> None:
    batch = collate(table(**SEGMENTS))
    batch.rewards[0] = 0.25
    with pytest.raises(UnsupportedRecordError, match=r"^rollout 'a': wanted one reward on all its segments"):
        group_mean(batch)
    batch = collate(table(**SEGMENTS))
    batch.group[1] += 1
    with pytest.raises(UnsupportedRecordError, match=r"^rollout 'a': wanted one group on all its segments"):
        group_mean(batch)


# ---- columns that the caller names


def test_a_column_that_the_caller_names_must_be_there_and_one_that_nobody_names_need_not() -> None:
    for field in ("weights", "action_rewards", "anchor_logprobs", "final_values"):
        with pytest.raises(ValueError, match=rf"^columns: {field}: the table has no column 'x_wieght'$"):
            collate(table(), columns={field: "x_wieght"})
    assert collate(table()).weights.tolist() == [1] * 6


def test_a_weight_that_is_null_is_1_and_one_that_is_no_number_is_refused_by_id() -> None:
    weights = pa.array([[0.5, None], None, [0.0, 2.0]], pa.list_(pa.float32()))
    assert collate(table(x_w=weights), columns={"weights": "x_w"}).weights.tolist() == [0.5, 1, 1, 1, 0, 2]
    for wrong in (nan, inf, -1.0):
        with pytest.raises(UnsupportedRecordError, match=r"^rollout 'r1': x_w: wanted numbers of at least 0, got "):
            collate(table(2, x_w=[[1.0, 1.0], [1.0, wrong]]), columns={"weights": "x_w"})


WRONG: dict[str, tuple[type[Exception], Call]] = {
    r"columns: wanted a mapping of fields to names, .*, got \['advantages'\]": (
        TypeError,
        lambda: collate(table(), columns=["advantages"]),  # pyright: ignore[reportArgumentType]
    ),
    "reward: wanted a list of numbers a row, got double": (
        UnsupportedRecordError,
        lambda: collate(table(2, reward=[1.0, 0.0]), columns={"advantages": "reward"}),
    ),
    "logprobs: wanted a list of numbers a row, got list<item: string>": (
        UnsupportedRecordError,
        lambda: collate(table(1, logprobs=[["a", "b"]])),
    ),
    "spans: wanted a list of structs a row, got list<item: int64>": (
        UnsupportedRecordError,
        lambda: collate(table(1, spans=[[1]])),
    ),
    "spans.start: wanted a number, got string": (
        UnsupportedRecordError,
        lambda: collate(table(1, spans=[[{"start": "0", "length": 3}]])),
    ),
    "spans.start: wanted a number in every span, got null": (
        UnsupportedRecordError,
        lambda: collate(table(1, spans=[[{"start": None, "length": 3}, {"start": 1, "length": 2}]])),
    ),
    "spans.length: wanted a number in every span, got null": (
        UnsupportedRecordError,
        lambda: collate(table(1, spans=[[{"start": 0, "media": [{"kind": "image"}], "length": n} for n in (1, None)]])),
    ),
    "spans.media.kind: wanted a text, got int64": (
        UnsupportedRecordError,
        lambda: collate(table(1, spans=[[{"start": 0, "length": 3, "media": [{"kind": 5}]}]])),
    ),
    "samplers.temperature: wanted a number, got string": (
        UnsupportedRecordError,
        lambda: collate(table(1, samplers=[[{"temperature": "1"}]])),
    ),
    "samplers.top_k: wanted int64, got others: Float value 1.5.* was truncated converting to int64": (
        UnsupportedRecordError,
        lambda: collate(table(1, samplers=[[{"temperature": 1.0, "top_k": 1.5}]])),
    ),
    "rollout 'r0': tokens: wanted ids, got null": (
        UnsupportedRecordError,
        lambda: collate(table(1, tokens=[[1, None, 3]])),
    ),
    "rollout 'r1': tokens: wanted whole numbers of 64 bits, signed, got 2.5": (
        UnsupportedRecordError,
        lambda: collate(table(2, tokens=[[1.0, 2.0, 3.0], [1.0, 2.5, 3.0]])),
    ),
    "rollout 'r1': step: wanted whole numbers of 64 bits, signed, got nan": (
        UnsupportedRecordError,
        lambda: collate(table(2, step=[1.0, nan])),
    ),
    "rollout_id: wanted text, got int64": (UnsupportedRecordError, lambda: collate(table(2, rollout_id=[1, 2]))),
    "group_id: wanted text, got int64": (UnsupportedRecordError, lambda: collate(table(2, group_id=[1, 2]))),
    "step: wanted a number a row, got string": (UnsupportedRecordError, lambda: collate(table(1, step=["3"]))),
    r"sampler: wanted a Sampler, as Sampler\(temperature=1.0\), got \{'temperature': 1.0\}": (
        TypeError,
        lambda: collate(table(), sampler={"temperature": 1.0}),
    ),
    "table: wanted a pyarrow Table or RecordBatch, got list": (TypeError, lambda: collate([{"rollout_id": "a"}])),  # pyright: ignore[reportArgumentType]
    "Transform: temperature: wanted True or False, got 0.7": (TypeError, lambda: Transform(temperature=0.7)),  # pyright: ignore[reportArgumentType]
    "Transform: filters: wanted True or False, got 'no'": (TypeError, lambda: Transform(filters="no")),  # pyright: ignore[reportArgumentType]
    "Transform: support: wanted True or False, got 1": (TypeError, lambda: Transform(support=1)),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize(("message", "case"), WRONG.items(), ids=WRONG)
def test_what_is_none_of_what_was_wanted_is_refused_in_one_line(
    message: str, case: tuple[type[Exception], Call]
) -> None:
    kind, call = case
    with pytest.raises(kind, match=f"^{message}$"):
        call()


def same(one: TokenBatch, other: TokenBatch) -> None:
    for name in ("tokens", "action_index", "behavior_logprobs", "group", "rollout", "sequence"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), msg=name)
    assert one.rollout_ids == other.rollout_ids


def test_lists_of_a_fixed_size_list_views_and_dictionaries_of_text_are_read_as_what_they_hold() -> None:
    plain = table(2, group_id=["g", "g"])
    wanted = collate(plain)
    for kind in (pa.list_(pa.int64(), 3), pa.list_view(pa.int64()), pa.large_list_view(pa.int64())):
        tokens = pa.array([None, [1, 2, 3], [1, 2, 4], [9, 9, 9]], kind).slice(1, 2)
        same(collate(plain.set_column(1, "tokens", tokens)), wanted)
    missing = pa.array([None, [-0.5, -0.6]], pa.list_view(pa.float32()))
    assert collate(plain.set_column(3, "logprobs", missing)).valid.tolist() == [False, False, True, True]
    # a dictionary may hold a text twice, and texts that no row has
    codes = pa.DictionaryArray.from_arrays(pa.array([1, 2], pa.int32()), pa.array(["x", "r0", "r1"]))
    same(collate(plain.set_column(0, "rollout_id", codes)), wanted)
    again = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array(["r0", "r0"]))
    with pytest.raises(DuplicateError):
        collate(plain.set_column(0, "rollout_id", again))


def test_rewards_weights_and_columns_of_a_caller_may_be_integers_truth_values_or_decimals_with_gaps() -> None:
    wanted = [1.0, nan, 0.0]
    for reward in ([1, None, 0], [True, None, False], pa.array([Decimal("1.0"), None, Decimal("0.0")])):
        np.testing.assert_array_equal(collate(table(reward=reward)).rewards.numpy(), wanted)
    lists = [[1, None], [0, 1], None]
    assert collate(table(weights=lists)).weights.tolist() == [1, 1, 0, 1, 1, 1]
    bools = [[True, None], [False, True], None]
    assert collate(table(weights=bools)).weights.tolist() == [1, 1, 0, 1, 1, 1]
    for given in (lists, bools, pa.array([[Decimal(1), None], [Decimal(0), Decimal(1)], None])):
        advantages = collate(table(x_a=given), columns={"advantages": "x_a"}).advantages
        assert advantages is not None
        np.testing.assert_array_equal(advantages.numpy(), [1, nan, 0, 1, nan, nan])


STRANGE: dict[str, Any] = {
    "text": ["a", "b"],
    "lists of text": [["a", "b"]] * 2,
    "lists of lists": [[[1], [2]]] * 2,
    "structs": [{"a": 1}] * 2,
    "lists of structs": [[{"start": 0, "length": 3}]] * 2,
    "bytes": [b"a", b"b"],
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_column_of_any_other_type_is_refused_by_its_name_whatever_field_it_is_asked_for(field: str) -> None:
    whole = table(2, spans=[[{"start": 0, "length": 3}]] * 2, samplers=[[{"temperature": 1.0}]] * 2, reward=[1.0, 0.0])
    what = "a number a row" if field == "final_values" else "a list of numbers a row"
    for given in STRANGE.values():
        with pytest.raises(UnsupportedRecordError, match=f"^x_q: wanted {what}, got "):
            collate(whole.append_column("x_q", pa.array(given)), columns={field: "x_q"})
    strange = {"rollout_id", "logprob_kind", "spans", "samplers"}
    for name in strange | ({"tokens", "logprobs"} if field == "final_values" else {"reward"}):
        with pytest.raises(UnsupportedRecordError, match=f"^{name}: wanted {what}, got "):
            collate(whole, columns={field: name})


@pytest.mark.parametrize("field", FIELDS)
def test_a_number_that_a_batch_cannot_hold_is_refused_by_its_column_and_rollout(field: str) -> None:
    for number, kind in ((2**53 + 1, pa.int64()), (2**64 - 1, pa.uint64()), (-(2**62), pa.int64())):
        if field == "final_values":
            column = pa.array([1, None, number], kind)
        else:
            column = pa.array([[1, 2], None, [3, number]], pa.list_(kind))
        said = rf"^rollout 'r2': x_q: wanted numbers that float64 holds, integers of at most 2\*\*53, got {number}$"
        whole = table(x_q=column)
        with pytest.raises(UnsupportedRecordError, match=said):
            collate(whole, columns={field: "x_q"})
        assert collate(whole.slice(0, 2), columns={field: "x_q"}).rows == 2
    for number in (1e300, -1e300):
        column = pa.array([1.0, number] if field == "final_values" else [[1.0, 2.0], [0.5, number]])
        with pytest.raises(
            UnsupportedRecordError, match=r"^rollout 'r1': x_q: wanted numbers that float32 holds, got "
        ):
            collate(table(2, x_q=column), columns={field: "x_q"})
    if field in ACTION_COLUMNS:
        kept = getattr(collate(table(1, x_q=[[inf, -inf]]), columns={field: "x_q"}), field)
        assert kept.tolist() == [inf, -inf]


def test_whole_numbers_may_come_as_floats_and_truth_values_as_numbers() -> None:
    given = table(
        2, tokens=[[1.0, 2.0, 3.0], [1.0, 2.0, 4.0]], action_mask=[[0, 1, 1], [0, 1, 1]], segment=[0.0, None],
        trainable=[[1, 0], [5, None]], bootstrap=[1, None], step=[True, False], samplers=[[{"temperature": 1}]] * 2,
        spans=pa.array([[], []]),
    )  # fmt: skip
    batch = collate(given)
    same(batch, collate(table(2, step=[1, 0])))
    assert batch.weights.tolist() == [1, 0, 1, 1]
    assert batch.bootstrap.tolist() == [1, -1]
    assert batch.temperature.tolist() == [1.0] * 4
    flags = pa.array([[True, None], [None, False]])
    assert collate(table(2, trainable=flags)).weights.tolist() == [1, 1, 1, 0]


def test_a_draw_that_is_given_as_a_sampler_keeps_what_it_says() -> None:
    given = Draw(temperature=0.5, removed=("grammar",), honoured=False)
    assert draw(given) is given
    batch = collate(table(1, logprob_kind=["behavior"]), sampler=given)
    assert batch.transformed.all()
    assert draw(Sampler(temperature=0.5)) == Draw(temperature=0.5)


SHARED: dict[str, Callable[[TokenBatch], Any]] = {
    "to_padded": to_padded,
    "to_responses": to_responses,
    "to_tinker": to_tinker,
    "within_vocabulary": lambda batch: within_vocabulary(batch, 10),
    "select": lambda batch: select(batch, [0]),
    "share_prefixes": share_prefixes,
}


@pytest.mark.parametrize("name", SHARED)
def test_a_pack_of_shared_prefixes_is_refused_by_what_needs_rows_of_their_own(name: str) -> None:
    shared = share_prefixes(collate(table())).batch
    with pytest.raises(UnsupportedRecordError, match=rf"^{name}: wanted a batch whose rows stand by themselves"):
        SHARED[name](shared)


TAKE_A_BATCH: dict[str, Callable[[Any], Any]] = {
    **SHARED,
    "to_verl": to_verl,
    "to_trl": to_trl,
    "as_behavior": as_behavior,
    "settings": settings,
    "refuse_unusable": refuse_unusable,
}


@pytest.mark.parametrize("name", TAKE_A_BATCH)
def test_what_is_no_batch_is_refused_by_everything_that_takes_one(name: str) -> None:
    for got, said in ((None, "NoneType"), (table(), "Table"), ([1], "list")):
        with pytest.raises(TypeError, match=f"^batch: wanted a TokenBatch, got {said}$"):
            TAKE_A_BATCH[name](got)
