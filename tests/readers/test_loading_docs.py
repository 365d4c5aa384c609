"""docs/loading.md says what is true: its code runs, in order, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "loading.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of datasets, when it is imported
def test_the_code_of_the_page_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) >= 9
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "loading.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "3 batches, 24 rollouts" in shown
    assert "40 tokens, " in shown
