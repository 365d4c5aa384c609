"""docs/quickstart.md and docs/concepts.md: their code and commands run as they stand, and show what they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from rollstore.cli import app
from rollstore.schema import to_table
from tests.docs import picture

DOCS = Path(__file__).parents[2] / "docs"
FILES = {"json": "dump.jsonl", "toml": "fields.toml"}
"""The files that the quickstart shows."""
NS = "{http://www.w3.org/2000/svg}"


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of every block of code, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_quickstart_runs_in_an_empty_folder_and_shows_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLSTORE_CONFIG", str(tmp_path / "none.toml"))
    (tmp_path / "none.toml").touch()
    monkeypatch.delenv("COLUMNS", raising=False)
    names: dict[str, object] = {}
    shown, commands = "", 0
    for language, text in blocks("quickstart.md"):
        if language == "python":
            exec(compile(text, "quickstart.md", "exec"), names)
        elif language == "text":
            assert shown == text
        elif language in FILES:
            (tmp_path / FILES[language]).write_text(text, encoding="utf-8")
        elif not text.startswith("pip install"):
            program, *arguments = shlex.split(text)
            assert program == "rollstore"
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, result.stderr
            shown, commands = result.stdout, commands + 1
    assert commands == 5
    printed = capsys.readouterr().out
    assert "2-1" in printed
    assert float(printed.split()[-1]) == pytest.approx(0.0, abs=1e-6)  # one step from the policy that drew


def test_the_picture_of_a_rollout_is_the_record_below_it() -> None:
    """`python -m tests.docs.picture` draws it again. Each value of an action stands under its token."""
    record = picture.record()
    to_table([record])  # else it raises
    drawn = picture.SVG.read_text(encoding="utf-8")
    assert drawn == picture.drawing(record)
    texts = [
        (float(one.get("x")), float(one.get("y")), one.text) for one in ElementTree.fromstring(drawn).iter(f"{NS}text")
    ]
    below: dict[str, list[str]] = {}
    for x, _, text in sorted(texts, key=lambda one: one[1]):
        below.setdefault(f"{x:g}", []).append(text or "")
    columns = [below[f"{picture.LEFT + picture.CELL * (position + 0.5):g}"] for position in range(10)]
    assert columns[0] == ["0", "12", "0"]
    assert columns[4] == ["4", "50", "1", "0", "−0.40", "7", "1", "2", "50", "9", "−0.40", "−1.50"]
    assert columns[5] == ["5", "51", "1", "1", "?", "8", "1", "2", "51", "4", "−0.20", "−2.00"]
    assert columns[8] == ["8", "52", "1", "2", "−1.25", "8", "1", "0"]
    assert columns[9] == ["9", "2", "1", "3", "−0.01", "8", "0", "1", "2", "−0.01"]


@pytest.mark.parametrize(("page", "count"), [("recipes.md", 5), ("recipes-limits.md", 4)])
def test_the_numbers_beside_the_code_are_those_it_prints(
    page: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = (text for language, text in blocks(page) if language == "python")
    exec(compile(code, page, "exec"), {})
    said = [re.split("  +", comment)[0] for comment in re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)]
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == count
