"""docs/cookbook.md: each query finds what was planted for it, and nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstore.cli.answers import rows
from rollstore.cli.query import ask, connected
from rollstore.readers.duckdb import connect
from rollstore.store.store import open as open_store
from tests.docs import outcomes  # fills PLANTED, too
from tests.docs.planted import PLANTED

TEXT = (Path(__file__).parents[2] / "docs" / "cookbook.md").read_text(encoding="utf-8")
RECIPES = {
    title: (query, after.strip())
    for title, query, after in re.findall(
        r"^### ([^\n]+)\n(?:(?!^#|```).)*?```sql\n(.*?)```\n(.*?)(?=^#|\Z)", TEXT, re.DOTALL | re.MULTILINE
    )
}


def test_every_query_of_the_cookbook_has_a_store_and_is_explained() -> None:
    assert list(RECIPES) == re.findall(r"^### (.+)$", TEXT, re.MULTILINE)
    assert len(RECIPES) == TEXT.count("```sql") == 25
    assert set(RECIPES) == set(PLANTED)
    assert all(read for _, read in RECIPES.values())


@pytest.mark.parametrize("title", RECIPES)
def test_the_answer_is_what_was_planted(title: str, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", create=True)
    wanted = PLANTED[title](store)
    with connect(store) as connection:
        found = list(rows(ask(connection, RECIPES[title][0])))
    assert len(found) == len(wanted), found
    for row, planted in zip(found, wanted, strict=True):
        assert list(row) == [pytest.approx(v, rel=1e-6, abs=1e-7) if isinstance(v, float) else v for v in planted], row


@pytest.mark.parametrize("title", RECIPES)
def test_an_empty_store_has_no_answer_and_no_error_on_the_command_line(title: str, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    open_store(path, create=True)
    with connected(path) as connection:
        assert list(rows(ask(connection, RECIPES[title][0]))) == []


@pytest.fixture(scope="module")
def odd_values(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = open_store(tmp_path_factory.mktemp("odd") / "store", create=True)
    outcomes.put_odd_values(store)
    with connect(store) as connection:
        yield connection


@pytest.mark.parametrize("title", RECIPES)
def test_what_no_mean_can_be_taken_of_makes_no_answer_nan_or_infinite(title: str, odd_values: Any) -> None:
    for row in rows(ask(odd_values, RECIPES[title][0])):
        assert all(math.isfinite(value) for value in row if isinstance(value, float)), row
