"""The declarations, what is derived from them, and what a released version promised agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rollstore import VersionError
from rollstore.schema import (
    SYSTEM_COLUMNS,
    TABLES,
    Column,
    Rollout,
    from_table,
    problems,
    read_version,
    render,
    to_table,
    upgrade,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "schema-1.0.json"


def columns(given: tuple[Column, ...], prefix: str = "") -> Iterator[tuple[str, Column]]:
    for column in given:
        yield prefix + column.name, column
        yield from columns(column.children, f"{prefix}{column.name}.")


def test_what_is_generated_from_the_declarations_is_fresh() -> None:
    assert render.STRUCTS.read_text(encoding="utf-8") == render.structs_source()
    assert render.SPEC.read_text(encoding="utf-8") == render.spec_source()


@pytest.mark.parametrize("name", TABLES)
def test_permanent_ids_are_unique_within_a_table(name: str) -> None:
    ids = [column.id for _, column in columns((*TABLES[name].columns, *SYSTEM_COLUMNS))]
    assert len(ids) == len(set(ids))


def test_a_released_version_is_never_edited() -> None:
    """Columns may be added in a minor version; those of 1.0 keep their name, id and type in tests/golden."""
    now = {
        f"{name}.{path}": [column.id, str(column.type) if not column.children else "struct"]
        for name, table in TABLES.items()
        for path, column in columns((*table.columns, *SYSTEM_COLUMNS))
    }
    golden: dict[str, list[object]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert {path: now.get(path) for path in golden} == golden
    assert all(column.since != "1.0" for path, column in _all() if path not in golden)


def _all() -> Iterator[tuple[str, Column]]:
    for name, table in TABLES.items():
        for path, column in columns((*table.columns, *SYSTEM_COLUMNS)):
            yield f"{name}.{path}", column


def test_every_field_carries_its_id_struct_children_too() -> None:
    for table in TABLES.values():
        for column in table.columns:
            field = table.arrow_schema.field(column.name)
            assert field.metadata[b"PARQUET:field_id"] == str(column.id).encode()
            inner = field.type.value_type if pa.types.is_list(field.type) else field.type
            for child in column.children:
                assert inner.field(child.name).metadata[b"PARQUET:field_id"] == str(child.id).encode()


ROW = to_table([Rollout(rollout_id="a", tokens=[1, 2], action_mask=[False, True])])


def test_an_older_minor_version_reads_with_nulls_for_what_it_lacks() -> None:
    older = ROW.select(["rollout_id", "segment", "tokens", "action_mask"])
    assert upgrade(older, "1.0").equals(ROW)


def test_a_newer_minor_version_keeps_columns_children_and_values_that_are_not_known_here() -> None:
    span = {"start": 0, "length": 2, "is_action": False, "mood": "new"}
    newer = ROW.select(["rollout_id", "segment", "tokens"]).append_column("action_mask", [[[False, False]]])
    newer = newer.append_column("brand_new", pa.array([5])).append_column("ending", pa.array(["paused"]))
    newer = newer.append_column("spans", pa.array([[span]]))
    newer = newer.replace_schema_metadata({"rollstore.schema": "1.7"})
    read = upgrade(newer, read_version(newer.schema.metadata))
    assert read["brand_new"].to_pylist() == [5]
    assert read["ending"].to_pylist() == ["paused"]
    assert read["spans"].to_pylist()[0][0]["mood"] == "new"
    assert problems(newer) == []
    assert [problem.kind for problem in problems(newer.replace_schema_metadata(None))] == ["unknown_enum"]
    assert from_table(read)[0].ending == "paused"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("2.0", "schema version: wanted 1.x or older, got 2.0: a newer rollstore wrote this"),
        ("0.9", "schema version: wanted 1.x, got 0.9, which nothing upgrades"),
        ("one", "schema version: wanted two numbers as 1.0, got 'one'"),
    ],
)
def test_a_version_that_cannot_be_read_is_refused_in_one_line(version: str, message: str) -> None:
    with pytest.raises(VersionError) as refused:
        upgrade(ROW, version)
    assert str(refused.value) == message


def test_a_schema_without_a_version_is_refused() -> None:
    assert read_version(ROW.schema.metadata) == "1.0"
    with pytest.raises(VersionError, match="got ''"):
        read_version(None)
