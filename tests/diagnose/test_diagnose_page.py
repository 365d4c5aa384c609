"""docs/diagnose.md names every rule, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollstore.diagnose.audit import choose
from rollstore.diagnose.rules import RULES

TEXT = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text(encoding="utf-8")


def test_the_page_has_every_rule_with_its_question() -> None:
    assert re.findall(r"^\| `([a-z-]+)` \| (.*?) \|", TEXT, re.M) == [(rule.id, rule.question) for rule in RULES]


def test_the_config_of_the_page_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "audit.toml").write_text(text)
    assert choose(path=tmp_path / "audit.toml").limits["groups-variance"] == {"most": 0.8, "floor": 0.006}


def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "diagnose.md", "exec"), {"__name__": "page"})
    assert 0.005 < float(capsys.readouterr().out.split()[0]) < 0.007
