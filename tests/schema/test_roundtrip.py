"""What goes into a table comes out of it, bit for bit, whatever the shape it went in with."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstore.schema import TABLES, Rollout, conform, from_arrow, from_table, prepare, problems, to_table
from tests.strategies import FEW, rollout_lists, valid_tables, values_of


@FEW
@given(rollout_lists())
def test_records_come_back_bit_for_bit_and_preparing_twice_changes_nothing(rollouts: list[Rollout]) -> None:
    table = to_table(rollouts)
    table.validate(full=True)
    assert [values_of(r) for r in from_table(table)] == [values_of(r) for r in rollouts]
    again = prepare(table)
    assert again.equals(table)
    assert again.schema.equals(table.schema, check_metadata=True)
    assert problems(table) == []


@settings(max_examples=10, deadline=None)
@given(rollout_lists(min_size=from_arrow.FEW + 1, max_size=from_arrow.FEW + 2))
def test_a_row_alone_is_the_record_that_it_is_among_many(rollouts: list[Rollout]) -> None:
    table = to_table(rollouts)
    alone = [from_table(table.slice(number, 1))[0] for number in range(table.num_rows)]
    assert [values_of(r) for r in alone] == [values_of(r) for r in from_table(table)]


@FEW
@given(st.sampled_from(["scores", "evaluations", "uses"]).flatmap(lambda n: st.tuples(st.just(n), valid_tables(n))))
def test_valid_tables_of_the_other_kinds_prepare_unchanged(case: tuple[str, pa.Table]) -> None:
    name, table = case
    prepared = prepare(table, name)
    assert prepared.select(table.column_names).equals(table.cast(pa.schema(list(prepared.schema)[: table.num_columns])))
    assert prepare(prepared, name).equals(prepared)
    assert problems(prepared, name) == []


@FEW
@given(rollout_lists(min_size=1), st.data())
def test_slices_chunks_and_other_encodings_prepare_like_fresh_tables(
    rollouts: list[Rollout], data: st.DataObject
) -> None:
    table = to_table(rollouts)
    first = data.draw(st.integers(0, len(rollouts) - 1))
    count = data.draw(st.integers(0, len(rollouts) - first))
    fresh = to_table(rollouts[first : first + count])
    present = [name for name in fresh.column_names if name in table.column_names]
    view = table.slice(first, count).select(present)
    shape = data.draw(st.sampled_from(["slice", "filter", "take", "chunks", "large", "dictionary", "batch"]))
    keep = [first <= n < first + count for n in range(len(rollouts))]
    if shape == "filter":
        view = table.filter(pa.array(keep)).select(present)
    elif shape == "take":
        view = table.take(pa.array(np.flatnonzero(keep))).select(present)
    elif shape == "chunks":
        view = pa.concat_tables([view.slice(n, 1) for n in range(count)]) if count else view
    elif shape == "large":
        view = _with_types(view, lambda t: pa.large_list(t.value_type) if pa.types.is_list(t) else t)
    elif shape == "dictionary":
        view = _with_types(view, lambda t: pa.dictionary(pa.int32(), t) if pa.types.is_string(t) else t)
    elif shape == "batch" and count:
        view = view.combine_chunks().to_batches()[0]
    prepared = prepare(view)
    assert [n for n in prepared.column_names if not prepared[n].equals(fresh[n])] == []
    prepared.validate(full=True)


def _with_types(table: pa.Table, change: Callable[[pa.DataType], pa.DataType]) -> pa.Table:
    """Declared columns only: a caller's own keeps its type."""
    pairs = zip(table.column_names, table.columns, strict=True)
    return pa.table({n: c if n.startswith("x_") else c.cast(change(c.type)) for n, c in pairs})


ARROW = pa.table(
    {
        "rollout_id": ["a", "b", "c"],
        "segment": [0, 0, 0],
        "tokens": [[1, 2]] * 3,
        "action_mask": [[False, True]] * 3,
    }
)

LAYOUTS = [pa.list_(pa.int64()), pa.list_(pa.int32(), 2), pa.list_view(pa.int32()), pa.large_list_view(pa.uint16())]


@pytest.mark.parametrize("type_", LAYOUTS)
def test_every_list_layout_is_read_with_its_own_offsets(type_: pa.DataType) -> None:
    tokens = pa.array([[1, 2], [3, 4], [5, 6]], type_).slice(1)
    mask = pa.array([[False, True], [False, False]])
    table = pa.table({"rollout_id": ["a", "b"], "segment": [0, 0], "tokens": tokens, "action_mask": mask})
    assert prepare(table)["tokens"].to_pylist() == [[3, 4], [5, 6]]


def test_a_null_list_with_stale_items_keeps_its_row_and_shifts_no_other() -> None:
    offsets, values = pa.array([0, 1, 3, 4], pa.int32()), pa.array([-0.1, -9.0, -9.0, -0.3], pa.float32())
    stale = pa.ListArray.from_arrays(offsets, values, mask=pa.array([False, True, False]))
    table = ARROW.append_column("logprobs", stale)
    logprobs = prepare(table)["logprobs"]
    assert logprobs.to_pylist() == [[np.float32(-0.1)], None, [np.float32(-0.3)]]
    assert [r.logprobs if r.logprobs is None else r.logprobs.to_list() for r in from_table(prepare(table))][1] is None


def test_a_record_keeps_nothing_of_the_callers_arrays() -> None:
    tokens = np.array([1, 2, 3], np.int32)
    table = to_table([Rollout(rollout_id="a", tokens=tokens, action_mask=[0, 1, 1])])
    tokens[:] = 9
    assert table["tokens"].to_pylist() == [[1, 2, 3]]


def test_three_values_make_a_rollout_and_the_rest_is_null() -> None:
    table = to_table([Rollout(rollout_id="a", tokens=[1, 2], action_mask=[False, True])])
    given = {name for name in table.column_names if table[name].null_count == 0}
    assert given == {"rollout_id", "segment", "tokens", "action_mask"}
    assert table.schema.equals(TABLES["rollouts"].arrow_schema, check_metadata=True)


def test_replacing_a_field_of_a_record_settles_it_again() -> None:
    rollout = Rollout(rollout_id="a", tokens=[1, 2], action_mask=[False, True])
    changed = msgspec.structs.replace(rollout, logprobs=[None])
    assert changed.logprobs is not None
    assert changed.logprobs.to_list() == [None]


def test_an_empty_call_is_an_empty_table_of_the_whole_schema() -> None:
    assert to_table([]).schema.equals(TABLES["rollouts"].arrow_schema, check_metadata=True)
    assert from_table(to_table([])) == []
    for name, table in TABLES.items():
        assert prepare(table.arrow_schema.empty_table(), name).num_rows == 0


def test_conform_hands_back_what_already_conforms() -> None:
    table = to_table([Rollout(rollout_id="a", tokens=[1], action_mask=[False])])
    assert conform(table) is table


def test_a_record_of_one_row_keeps_nothing_of_the_rows_beside_it() -> None:
    rows = [Rollout(rollout_id=f"r{n}", tokens=[n] * 50_000, action_mask=[False] * 50_000) for n in range(8)]
    table = to_table(rows)
    before = pa.total_allocated_bytes()
    copied = table.take(pa.array(range(8)))
    record = from_table(copied.slice(3, 1))[0]
    del copied
    assert pa.total_allocated_bytes() - before < 50_000
    assert record.tokens is not None
    assert record.tokens.tolist() == [3] * 50_000
