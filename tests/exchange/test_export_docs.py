"""docs/export.md: its code runs as it stands, and what it says of the files is what the code does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pyarrow.compute as pc
import pytest
from typer.testing import CliRunner

from rollstore.cli import app
from rollstore.cli.exchange import To
from rollstore.exchange import files
from rollstore.exchange.folder import STAGED
from rollstore.store.store import open as open_store
from tests.readers.samples import rollout, write

TEXT = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("runs/math", create=True)
    write(store, rollout("a", run_id="math-7b", reward=1.0), rollout("b", run_id="math-7b"), run="math-7b")
    *blocks, (_, ray) = re.findall(r"```(sh|python)\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, object] = {}
    for language, block in blocks:  # in the page's order, as a reader runs them
        if language == "python":
            exec(compile(block, "export.md", "exec"), names)
            continue
        for line in block.splitlines():
            result = CliRunner().invoke(app, shlex.split(line)[1:])
            assert result.exit_code == 0, (line, result.output)
    shown = capsys.readouterr().out
    assert shown.count("2") >= 3
    assert "math-7b" in shown
    assert "{'rollouts': 2}" in shown
    assert Path("for-tinker/datums.jsonl").exists()
    assert Path("exported/rollouts/run=math-7b/part-00000.parquet").exists()
    compile(ray, "export.md", "exec")  # run by the tests of the reader itself
    assert str(pc.field("reward") > 0.5)


def test_the_limits_and_names_on_the_page_are_those_of_the_code() -> None:
    assert f"{files.ROW_GROUP_BYTES >> 20} MiB decoded and 2^{files.ROW_GROUP_ITEMS.bit_length() - 1} items" in TEXT
    assert f"exported.<random>{STAGED}" in TEXT


def test_every_format_has_a_row_of_the_table() -> None:
    for form in To:
        assert f"| `{form.value}` |" in TEXT, form
