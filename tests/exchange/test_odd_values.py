"""Values that no column holds as they are: nested very deep, rounded by a float, of one type first and then another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollstore.errors import SchemaError
from rollstore.exchange import import_atropos, import_chat, import_jsonl
from rollstore.exchange.intake import BATCH_RECORDS, SAMPLE_RECORDS
from rollstore.schema import Rollout
from rollstore.schema.nesting import LEVELS
from rollstore.schema.text import DEEPEST, to_json
from rollstore.store.store import Store
from tests.exchange.dumps import bytes_tokenizer, read_lines, write_lines

GOOD = {"tokens": [5, 6], "action_mask": [False, True]}


def nested(depth: int, pair: str) -> str:
    """JSON of so many lists, or objects, in one another."""
    begin, end = ("[", "]") if pair == "[]" else ('{"a":', "}")
    return f"{begin * depth}1{end * depth}"


def value(depth: int, pair: str) -> Any:
    made: Any = 1
    for _ in range(depth):
        made = [made] if pair == "[]" else {"a": made}
    return made


def record(name: str, **columns: Any) -> Rollout:
    return Rollout(rollout_id=name, tokens=[5, 6], action_mask=[False, True], **columns)


def own(store: Store, name: str) -> list[Any]:
    return store.scan("rollouts").read_all()[name].to_pylist()


DEPTHS = (LEVELS, LEVELS + 1, 64, 70, 340, 500, 900, 980, 995, 1100, 20_000)


@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_a_row_that_is_nested_too_deep_is_refused_and_the_others_are_taken(
    pair: str, store: Store, tmp_path: Path
) -> None:
    lines = [json.dumps({**GOOD, "rollout_id": "first"})]
    for depth in DEPTHS:
        lines.append(json.dumps({**GOOD, "rollout_id": f"{depth}"})[:-1] + f', "x_d": {nested(depth, pair)}}}')
    lines.append(json.dumps({**GOOD, "rollout_id": "last"}))
    report = import_jsonl(store, [write_lines(tmp_path / "a.jsonl", lines)], rejects=tmp_path / "bad")
    assert own(store, "rollout_id") == ["first", str(LEVELS), "last"]
    assert report.total.refused == len(DEPTHS) - 1
    reasons = {entry["row"]: entry["reason"] for entry in read_lines(tmp_path / "bad")}
    assert reasons[3].startswith(f"x_d: wrong_type: wanted at most {LEVELS} lists, structs or maps in one another")
    resumed = import_jsonl(store, [tmp_path / "a.jsonl"], resume=True)
    assert (resumed.total.present, resumed.total.refused) == (3, len(DEPTHS) - 1)


@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_fields_that_go_into_metadata_or_a_mapped_column_may_be_nested_as_deep_as_they_like(
    pair: str, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "m.toml").write_text(
        '[columns]\nprompt_tokens = "p"\nresponse_tokens = "r"\n"metadata.d" = "d"\nx_d = "x"\n', encoding="utf-8"
    )
    good = '{"p": [1], "r": [2]'
    mapped = [good + "}"]
    mapped += [f'{good}, "{name}": {nested(depth, pair)}}}' for depth in DEPTHS for name in ("d", "x")]
    report = import_jsonl(store, [write_lines(tmp_path / "a.jsonl", mapped)], mapping=tmp_path / "m.toml")
    assert report.total.taken == 1 + 1 + sum(depth <= DEEPEST for depth in DEPTHS)
    assert report.total.taken + report.total.refused == len(mapped)
    group = '{"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0], "overrides": '
    chat = '{"messages": [{"role": "user", "content": "hi"}], "deep": '
    groups = write_lines(tmp_path / "g.jsonl", [f"{group}{nested(depth, pair)}}}" for depth in DEPTHS])
    chats = write_lines(tmp_path / "c.jsonl", [f"{chat}{nested(depth, pair)}}}" for depth in DEPTHS])
    for report in (import_atropos(store, [groups]), import_chat(store, [chats], tokenizer=bytes_tokenizer())):
        assert report.total.taken >= sum(depth <= 500 for depth in DEPTHS)
        assert report.total.taken + report.total.refused == len(DEPTHS)


@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_a_writer_names_row_and_column_of_what_is_nested_too_deep(pair: str, store: Store) -> None:
    with store.writer() as writer:
        for depth in DEPTHS[1:]:
            with pytest.raises(SchemaError) as error:
                writer.append([record("a"), record("b", extra={"x_d": value(depth, pair)})])
            assert [(p.column, p.row) for p in error.value.problems] == [("x_d", 1)]
        for depth in (DEEPEST + 1, 1100, 20_000):
            with pytest.raises(SchemaError) as error:
                writer.append([record("a"), record("b", metadata={"d": value(depth, pair)})])
            assert [(p.column, p.row) for p in error.value.problems] == [("metadata", 1)]
        with pytest.raises(SchemaError) as error:
            writer.append([record("a"), record("b", messages=value(20_000, pair), reward=value(20_000, pair))])
        assert {(p.column, p.row) for p in error.value.problems} == {("messages", 1), ("reward", 1)}
        writer.append([record("c", metadata={"d": value(DEEPEST, pair)})])
    assert store.get("c", segment=0).metadata == {"d": value(DEEPEST, pair)}


def test_a_table_with_a_type_that_is_nested_too_deep_is_refused_by_column(store: Store) -> None:
    rows = {
        "rollout_id": ["a"],
        "segment": pa.array([0], pa.int32()),
        "tokens": [[5, 6]],
        "action_mask": [[False, True]],
    }
    for depth in (LEVELS + 1, 70, 340):
        lists, structs = pa.int64(), pa.int64()
        for _ in range(depth):
            lists, structs = pa.list_(lists), pa.struct({"a": structs})
        for type_ in (lists, structs):
            with pytest.raises(SchemaError, match=f"x_d: wrong_type: values nested more than {LEVELS} deep"):
                store.append("rollouts", pa.table({**rows, "x_d": pa.nulls(1, type_)}))
    assert store.info().tables["rollouts"].rows == 0


def test_json_that_a_deep_stack_could_not_write_is_a_value_error() -> None:
    def below(frames: int) -> str:
        return below(frames - 1) if frames else to_json(value(DEEPEST, "[]"))

    with pytest.raises(ValueError, match="nested deeper than this program's stack is long"):
        below(600)


LARGE = 2**53 + 1


def test_a_whole_number_that_a_float_would_round_is_refused_and_never_rounded(store: Store, tmp_path: Path) -> None:
    ids = [0.5, LARGE, 2**53, -LARGE, 3]
    records = [{**GOOD, "rollout_id": str(n), "x_id": id_} for n, id_ in enumerate(ids)]
    records.append({**GOOD, "rollout_id": "reward", "reward": LARGE})
    records.append({**GOOD, "rollout_id": "list", "x_ids": [0.5, LARGE]})
    report = import_jsonl(store, [write_lines(tmp_path / "a.jsonl", records)], rejects=tmp_path / "bad")
    assert (own(store, "rollout_id"), own(store, "x_id")) == (["0", "2", "4"], [0.5, 2.0**53, 3.0])
    assert report.total.refused == 4
    reasons = [entry["reason"] for entry in read_lines(tmp_path / "bad")]
    assert (
        f"x_id: wrong_type: wanted what JSON has for double, got {LARGE}, a whole number that double would round"
        in (reasons)
    )


def test_a_writer_refuses_whole_numbers_beside_fractions_where_one_would_be_rounded(store: Store) -> None:
    with store.writer() as writer:
        for values in ([0.5, LARGE], [LARGE, 0.5], [[0.5], [LARGE]]):
            with pytest.raises(SchemaError, match="x_id: wrong_type"):
                writer.append([record(str(n), extra={"x_id": one}) for n, one in enumerate(values)])
        writer.append([record("a", extra={"x_id": 0.5})])
        with pytest.raises(SchemaError, match="x_id"):
            writer.append([record("b", extra={"x_id": LARGE})])
    assert own(store, "x_id") == [0.5]


# The type of a column of the caller's.


def test_whole_numbers_before_fractions_are_floats_where_both_are_among_the_first_rows(
    store: Store, tmp_path: Path
) -> None:
    count = 3 * BATCH_RECORDS
    assert count < SAMPLE_RECORDS
    records = [{**GOOD, "rollout_id": str(n), "x_share": 0.5 if n > count - 10 else 0} for n in range(count)]
    report = import_jsonl(store, [write_lines(tmp_path / "a.jsonl", records)])
    assert report.causes == {}
    assert str(store.scan("rollouts").schema.field("x_share").type) == "double"
    (tmp_path / "m.toml").write_text('[columns]\nresponse_tokens = "r"\nx_mapped = "s"\n', encoding="utf-8")
    mapped = [{"r": [1], "s": 0.5 if n > count - 10 else 0} for n in range(count)]
    report = import_jsonl(store, [write_lines(tmp_path / "b.jsonl", mapped)], mapping=tmp_path / "m.toml")
    assert report.total.refused == count  # an action at the first place, and no row is left
    mapped = [{**one, "p": [7]} for one in mapped]
    (tmp_path / "m.toml").write_text(
        '[columns]\nprompt_tokens = "p"\nresponse_tokens = "r"\nx_mapped = "s"\n', encoding="utf-8"
    )
    assert import_jsonl(store, [write_lines(tmp_path / "c.jsonl", mapped)], mapping=tmp_path / "m.toml").causes == {}
    assert (
        import_jsonl(
            store, [write_lines(tmp_path / "d.jsonl", [{**mapped[0], "s": 7}])], mapping=tmp_path / "m.toml"
        ).causes
        == {}
    )  # a whole number is one of a column of floats


def test_the_type_of_a_column_can_be_said_in_the_call_and_in_the_mapping(store: Store, tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "a.jsonl",
        [{**GOOD, "x_share": 0, "x_at": "2026-01-02T03:04:05Z", "x_parts": [1]}, {**GOOD, "x_share": "none"}],
    )
    types = {"x_share": "float64", "x_at": "timestamp", "x_parts": "float64[]"}
    report = import_jsonl(store, [file], types=types)
    assert (report.total.taken, list(report.causes)) == (1, ["x_share: wrong_type: wanted what JSON has for double"])
    schema = store.scan("rollouts").schema
    assert [str(schema.field(name).type) for name in types] == ["double", "timestamp[us, tz=UTC]", "list<item: double>"]
    (tmp_path / "m.toml").write_text(
        '[columns]\nprompt_tokens = "p"\nresponse_tokens = "r"\nx_mapped = "s"\n[types]\nx_mapped = "float32"\n',
        encoding="utf-8",
    )
    import_jsonl(
        store, [write_lines(tmp_path / "b.jsonl", [{"p": [1], "r": [2], "s": 3}])], mapping=tmp_path / "m.toml"
    )
    assert own(store, "x_mapped") in ([None, 3.0], [3.0, None])
    assert str(store.scan("rollouts").schema.field("x_mapped").type) == "float"
    with pytest.raises(ValueError, match=r"x_share: wanted double, its type in the store, got int64"):
        import_jsonl(store, [file], types={"x_share": "int64"})


@pytest.mark.parametrize(
    ("types", "said"),
    [
        ({"reward": "float64"}, "types: reward: wanted a column of your own, x_<name>"),
        ({"x_a": "double"}, "types: x_a: wanted one of bool, int64, float64, .* got 'double'"),
        ({"x_a": 3}, "types: x_a: wanted one of .* got 3"),
    ],
)
def test_a_type_that_is_none_is_refused_at_once(types: Any, said: str, store: Store, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        import_jsonl(store, [write_lines(tmp_path / "a.jsonl", [GOOD])], types=types)
