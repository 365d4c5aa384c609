"""The notebook of queries: it has no outputs in it, and each of its cells runs and shows what it says."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import rollstore

NOTEBOOK = Path(__file__).parent.parent / "examples" / "queries.ipynb"
DOCUMENT: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
HEADED = {
    "What is there", "Which weights drew", "Groups without a signal", "The least likely draws", "Tools", "One rollout",
}  # fmt: skip


def cells() -> Iterator[tuple[str, str]]:
    """(the heading it stands under, its code) of each code cell."""
    heading = ""
    for cell in DOCUMENT["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = next((line[3:] for line in text.splitlines() if line.startswith("## ")), heading)
        else:
            yield heading, text


def shown(code: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does: its last expression is what it shows."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NOTEBOOK.name, "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)


def test_no_output_and_no_count_is_kept_in_it_and_every_cell_has_a_name_of_its_own() -> None:
    assert (DOCUMENT["nbformat"], DOCUMENT["nbformat_minor"]) == (4, 5)
    code = [cell for cell in DOCUMENT["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)
    names = [cell["id"] for cell in DOCUMENT["cells"]]
    assert len(set(names)) == len(names)


def test_every_cell_runs_and_its_answer_is_that_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for heading, code in cells():
        answer = shown(code, names)
        if answer is not None:
            found[heading] = answer
    assert set(found) == HEADED | {""}
    store = rollstore.open(tmp_path / names["STORE"])
    rows = store.scan("rollouts").read_all()
    assert found[""].rows == rows.num_rows == 1_536
    there = found["What is there"]
    assert there["rollouts"].to_list() == [512, 512, 512]
    assert there["tokens"].sum() == sum(map(len, rows["tokens"].to_pylist()))
    assert found["Which weights drew"].filter(pl.col("step") == 0)["newer"].to_list() == [0, 1]
    assert found["Groups without a signal"]["groups"].to_list() == [64, 64, 64]
    unlikely = found["The least likely draws"]
    assert unlikely["logprob"].is_sorted()
    for name, position, _, _, before in unlikely.iter_rows():
        assert before == store.get(name)[0].tokens[max(position - 3, 0) : position].tolist()
    assert ("tool", 384) in list(zip(found["Tools"]["role"], found["Tools"]["spans"], strict=True))
    assert [role for role, _, _ in found["One rollout"]][:2] == ["user", "assistant"]
    assert os.listdir(tmp_path) == ["runs"]
