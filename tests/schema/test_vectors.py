"""The vectors of spec/: what is valid has no problem and comes back, what is not has exactly the problems it names."""

from __future__ import annotations

import base64
import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollstore.errors import SchemaError
from rollstore.schema import FLAG_KINDS, KINDS, TABLES, from_table, prepare, problems, to_table

SPEC = Path(__file__).parents[2] / "spec"
VALID = sorted((SPEC / "vectors" / "valid").glob("*.json"))
INVALID = sorted((SPEC / "vectors" / "invalid").glob("*.json"))

TYPES = {
    "int64": pa.int64(), "string": pa.string(), "timestamp[us]": pa.timestamp("us"), "list<int8>": pa.list_(pa.int8()),
}  # fmt: skip


def value(given: Any, type_: pa.DataType) -> Any:
    """One JSON value in the encoding of spec/README.md as what pyarrow takes."""
    if given is None:
        return None
    if pa.types.is_list(type_):
        return [value(item, type_.value_type) for item in given]
    if pa.types.is_struct(type_):
        return {name: value(item, type_.field(name).type) for name, item in given.items()}
    if pa.types.is_map(type_):
        return list(given.items())
    if pa.types.is_floating(type_):
        return math.nan if given == "nan" else float(given)
    if pa.types.is_binary(type_):
        return bytes.fromhex(given)
    return datetime.fromisoformat(given) if pa.types.is_timestamp(type_) else given


def table_of(vector: dict[str, Any]) -> pa.Table:
    if "arrow" in vector:
        return pa.ipc.open_stream(base64.b64decode(vector["arrow"])).read_all()
    names = list(dict.fromkeys(name for row in vector["rows"] for name in row))
    declared = {c.name: c.type for c in TABLES[vector["table"]].columns}
    declared |= {name: TYPES[type_] for name, type_ in vector.get("types", {}).items()}
    return pa.table(
        {n: pa.array([value(row.get(n), declared[n]) for row in vector["rows"]], declared[n]) for n in names}
    )


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def named(problem: Any) -> tuple[str, str, str]:
    return problem["column"], problem["kind"], str(problem["row"])


@pytest.mark.parametrize("path", VALID, ids=lambda p: p.stem)
def test_a_valid_vector_has_no_problems_and_comes_back(path: Path) -> None:
    vector = read(path)
    table = table_of(vector)
    assert problems(table, vector["table"]) == []
    prepared = prepare(table, vector["table"])
    for name in table.column_names:
        assert prepared[name].equals(table[name].cast(prepared[name].type)), name
    if vector["table"] == "rollouts":
        assert to_table(from_table(prepared)).equals(prepared)


@pytest.mark.parametrize("path", INVALID, ids=lambda p: p.stem)
def test_an_invalid_vector_has_exactly_the_problems_it_names(path: Path) -> None:
    vector = read(path)
    table = table_of(vector)
    found = problems(table, vector["table"])
    unknown = [p for p in vector["problems"] if p["kind"] == "unknown_column"]  # a reader keeps it, an append refuses
    told = [p for p in vector["problems"] if p not in unknown]
    assert sorted(named(vars(p)) for p in found) == sorted(named(p) for p in told)
    derived = {"nan": {"logprobs"}, "not_scored": {"reward"}, "ending_mismatch": {"bootstrap"}}
    with pytest.raises(SchemaError) as refused:
        prepare(table, vector["table"])
    kept = {named(vars(p)) for p in refused.value.problems}
    asked = {named(p) for p in vector["problems"]}
    assert kept <= asked
    assert all(column in derived.get(kind, ()) for column, kind, _ in asked - kept)


def test_every_kind_of_problem_has_an_invalid_vector() -> None:
    assert {p["kind"] for path in INVALID for p in read(path)["problems"]} == set(KINDS)


def test_the_specification_explains_every_kind_and_every_flag() -> None:
    text = (SPEC / "README.md").read_text(encoding="utf-8")
    assert [kind for kind in (*KINDS, *FLAG_KINDS) if f"| `{kind}` |" not in text] == []
