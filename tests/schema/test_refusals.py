"""What is refused: everything wrong with a call at once, by column and row, from records and from Arrow alike."""

from __future__ import annotations

import copy
from contextlib import suppress
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstore.errors import SchemaError
from rollstore.schema import TABLES, Heads, Known, Problem, Rollout, Sampler, Span, prepare, problems, to_table
from tests.strategies import FEW, conforming_tables, items_of, maybe

GOOD: dict[str, Any] = {"tokens": [5, 6, 7], "action_mask": [False, True, True]}


def refusal(call: Any) -> list[Problem]:
    with pytest.raises(SchemaError) as refused:
        call()
    assert "\n" not in str(refused.value)
    return refused.value.problems


def of_records(*changes: dict[str, Any]) -> list[Problem]:
    made = [Rollout(rollout_id=f"r{n}", **{**GOOD, **change}) for n, change in enumerate(changes)]
    return refusal(lambda: to_table(made))


def of_arrow(changes: list[dict[str, Any]], **types: pa.DataType) -> list[Problem]:
    rows = [{"rollout_id": f"r{n}", "segment": 0, **GOOD, **change} for n, change in enumerate(changes)]
    declared = {c.name: c.type for c in TABLES["rollouts"].columns} | types
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: pa.array([row.get(name) for row in rows], declared[name]) for name in names})
    return refusal(lambda: prepare(table))


NAIVE = datetime(2026, 3, 29, 1, 30)
HEAD = {"head_size": 2, "head_tokens": [9, 9, 6, 7], "head_logprobs": [-1.0, -1.0, -1.0, -2.0]}
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, pa.DataType], str]] = {
    "a wrong length": (
        {"action_mask": [False, True]}, {"action_mask": [False, True]}, {},
        "action_mask: wrong_length: row 1 has 2 values, tokens has 3 values",
    ),
    "an A-column of the wrong length": (
        {"logprobs": [-0.1] * 3}, {"logprobs": [-0.1] * 3}, {},
        "logprobs: wrong_length: row 1 has 3 values, action_mask has 2 actions",
    ),
    "a negative token id": (
        {"tokens": [5, -6, 7]}, {"tokens": [5, -6, 7]}, {}, "tokens: negative: row 1 has -6, wanted at least 0",
    ),
    "a head with one id twice": (
        {"heads": Heads(size=2, tokens=HEAD["head_tokens"], logprobs=HEAD["head_logprobs"])}, HEAD, {},
        "head_tokens: duplicate_head: row 1 has id 9 twice in one head, wanted distinct ids",
    ),
    "a mask value of 2": (
        {"action_mask": [0, 1, 2]}, {"action_mask": [0, 1, 2]}, {"action_mask": pa.list_(pa.int8())},
        "action_mask: not_boolean: row 1 has 2, wanted 0 or 1, false or true",
    ),
    "an unknown enum": (
        {"ending": "finished"}, {"ending": "finished"}, {},
        "ending: unknown_enum: row 1 has 'finished', wanted one of terminated, truncated, continued, aborted, unknown",
    ),
    "a naive timestamp": (
        {"started_at": NAIVE}, {"started_at": NAIVE}, {"started_at": pa.timestamp("us")},
        "started_at: naive_timestamp: row 1 has a time without a zone, wanted a zone, as +00:00",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_by_column_and_row_in_records_and_in_arrow(case: str) -> None:
    record, row, types, message = BAD[case]
    good = {"action_mask": [0, 1, 1]} if "action_mask" in types else {}
    assert message in [str(p) for p in of_arrow([good, row], **types)]
    told = [str(p) for p in of_records({}, record)]
    shown = "a time without a zone" if "naive" in case else ""  # Arrow has the type wrong, a record one value
    assert message in [text.replace(repr(NAIVE), shown) for text in told]


def test_all_problems_of_a_call_are_reported_at_once() -> None:
    found = of_records(*(record for record, _, _, _ in BAD.values()))
    assert sorted({p.row for p in found if p.row is not None}) == list(range(len(BAD)))
    assert {p.kind for p in found} == {
        "wrong_length", "negative", "duplicate_head", "not_boolean", "unknown_enum", "naive_timestamp",
    }  # fmt: skip


def test_a_refused_call_leaves_the_callers_data_as_it_was() -> None:
    logprobs = Known(np.array([-0.1, np.nan, -0.3]), np.array([True, True, False]))
    before = copy.deepcopy(logprobs)
    of_records({"logprobs": logprobs, "metadata": {"a": object()}})
    np.testing.assert_array_equal(logprobs.values, before.values)
    np.testing.assert_array_equal(logprobs.known, before.known)
    table = pa.table({"rollout_id": ["a"], "segment": [0], "tokens": [[1, -2]], "action_mask": [[False, True]]})
    copied = pa.table(table.to_pydict(), schema=table.schema)
    refusal(lambda: prepare(table))
    assert table.equals(copied)


GUESSED = Span(start=0, length=3, is_action=False, origin="guessed")
RECORD_REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "floats as token ids": ({"tokens": [5.0, 6.0, 7.0]}, "tokens", "wrong_type"),
    "a token id past int32": ({"tokens": [5, 2**31, 7]}, "tokens", "out_of_range"),
    "a token id past int64": ({"tokens": [5, 2**64, 7]}, "tokens", "wrong_type"),
    "more than 63 bits": ({"weight_versions": np.array([2**64 - 1, 1], np.uint64)}, "weight_versions", "out_of_range"),
    "a table of tokens": ({"tokens": [[5, 6, 7]]}, "tokens", "wrong_type"),
    "marks that do not fit": ({"logprobs": Known(np.zeros(2), np.ones(3, bool))}, "logprobs", "wrong_length"),
    "a log-prob past float32": ({"logprobs": [-1e300, -0.5]}, "logprobs", "out_of_range"),
    "a temperature past float32": ({"samplers": [Sampler(temperature=1e300)]}, "samplers.temperature", "out_of_range"),
    "a key past uint64": ({"replay_key": 2**64, "replay_sample": 0, "noise": "n"}, "replay_key", "out_of_range"),
    "a negative key": ({"replay_key": -1, "replay_sample": 0, "noise": "n"}, "replay_key", "out_of_range"),
    "a bool as a number": ({"step": True}, "step", "wrong_type"),
    "bytes as a text": ({"policy": b"x"}, "policy", "wrong_type"),
    "a number as a time": ({"started_at": 5}, "started_at", "wrong_type"),
    "a dict as a span": ({"spans": [{"start": 0}]}, "spans", "wrong_type"),
    "a NaN in metadata": ({"metadata": {"a": [float("nan")]}}, "metadata", "wrong_type"),
    "an object in metadata": ({"metadata": {"a": object()}}, "metadata", "wrong_type"),
    "a key that is no text": ({"metadata": {1: "a"}}, "metadata", "wrong_type"),
    "no mapping": ({"metadata": 5}, "metadata", "wrong_type"),
    "a NaN reward": ({"reward": float("nan")}, "reward", "nan"),
    "an x_ column without a type": ({"extra": {"x_a": []}}, "x_a", "wrong_type"),
    "an x_ column of two types": ({"extra": {"x_a": [1, "b"]}}, "x_a", "wrong_type"),
    "an extra column without x_": ({"extra": {"seed": 1}}, "seed", "unknown_column"),
    "a declared column among the extras": ({"extra": {"tokens": [1]}}, "tokens", "unknown_column"),
    "an origin that is none": ({"spans": [GUESSED]}, "spans.origin", "unknown_enum"),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORD_REFUSALS)
def test_a_record_that_does_not_fit_is_refused_by_its_row(case: str) -> None:
    change, column, kind = RECORD_REFUSALS[case]
    found = of_records({}, change)
    assert (column, kind) in {(p.column, p.kind) for p in found}
    assert {p.row for p in found if p.column == column} <= {1, None}


def test_mixed_integer_widths_never_pass_through_floats() -> None:
    big = 2**63 - 1
    made = [
        Rollout(rollout_id="a", weight_versions=np.array([big, 1], np.uint64), **GOOD),
        Rollout(rollout_id="b", weight_versions=np.array([-1, big], np.int64), **GOOD),
        Rollout(rollout_id="c", weight_versions=[None, big], **GOOD),
    ]
    assert to_table(made)["weight_versions"].to_pylist() == [[big, 1], [-1, big], [None, big]]


def test_what_is_no_rollout_and_no_arrow_data_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="item 0 is a dict, wanted a Rollout"):
        to_table([{}])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="wanted a pyarrow Table or RecordBatch, got list"):
        prepare([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wanted one of rollouts, scores, evaluations, uses, got 'rollout'"):
        prepare(pa.table({}), "rollout")


def test_many_rows_with_one_problem_are_counted_after_the_first_hundred() -> None:
    table = pa.table(
        {"rollout_id": ["a"] * 250, "segment": [0] * 250, "tokens": [[-1]] * 250, "action_mask": [[False]] * 250}
    )
    found = [p for p in problems(table) if p.kind == "negative"]
    assert len(found) == 101
    assert str(found[-1]) == "tokens: negative: 150 more rows, wanted the same"


def test_a_map_of_numbers_is_refused_rather_than_read_as_text() -> None:
    numbers = pa.array([[("a", 3)]], pa.map_(pa.string(), pa.int64()))
    found = of_arrow([{"metadata": numbers[0].as_py()}], metadata=numbers.type)
    assert [(p.column, p.kind) for p in found] == [("metadata", "wrong_type")]


@FEW
@given(st.sampled_from(list(TABLES)).flatmap(lambda name: st.tuples(st.just(name), conforming_tables(name))))
def test_problems_of_anything_that_conforms_are_reported_not_raised(case: tuple[str, pa.Table]) -> None:
    name, table = case
    for problem in problems(table, name):
        assert "\n" not in str(problem)
        assert problem.row is None or 0 <= problem.row < table.num_rows


@st.composite
def odd_tables(draw: st.DrawFn, name: str) -> pa.Table:
    """A conforming table with some columns of other types, lengths and encodings."""
    table = draw(conforming_tables(name))
    odd = [
        pa.int8(), pa.float64(), pa.large_string(), pa.list_(pa.int64()), pa.large_list(pa.float32()), pa.null(),
        pa.timestamp("ns"), pa.timestamp("s", "Europe/Berlin"), pa.map_(pa.string(), pa.int32()), pa.binary(),
        pa.list_(pa.struct({"start": pa.int64(), "z": pa.string()})), pa.struct({"name": pa.bool_()}),
    ]  # fmt: skip
    for column in draw(st.lists(st.sampled_from(TABLES[name].columns), max_size=3, unique_by=lambda c: c.name)):
        type_ = draw(st.sampled_from(odd))
        values = (
            st.none()
            if pa.types.is_null(type_)
            else maybe(items_of(type_) if type_ != pa.timestamp("ns") else st.just(5))
        )
        array = pa.array(draw(st.lists(values, min_size=table.num_rows, max_size=table.num_rows)), type_)
        place = table.schema.get_field_index(column.name)
        table = table.append_column(column.name, array) if place < 0 else table.set_column(place, column.name, array)
    return table


@FEW
@given(st.sampled_from(list(TABLES)).flatmap(lambda name: st.tuples(st.just(name), odd_tables(name))))
def test_any_table_is_prepared_or_refused_never_anything_else(case: tuple[str, pa.Table]) -> None:
    name, table = case
    with suppress(SchemaError):
        prepare(table, name).validate(full=True)
