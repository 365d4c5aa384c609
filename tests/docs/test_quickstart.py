"""docs/quickstart.md and docs/concepts.md: their code and commands run as they stand, and show what they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollstore import Rollout
from rollstore.cli import app
from rollstore.schema import to_table

DOCS = Path(__file__).parents[2] / "docs"


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
        elif not text.startswith("pip install"):
            program, *arguments = shlex.split(text)
            assert program == "rollstore"
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, result.stderr
            shown, commands = result.stdout, commands + 1
    assert commands == 3
    printed = capsys.readouterr().out
    assert "2-1" in printed
    assert float(printed.split()[-1]) == pytest.approx(0.0, abs=1e-6)  # one step from the policy that drew


def test_the_picture_of_a_rollout_is_the_record_below_it() -> None:
    (picture,) = (text for language, text in blocks("concepts.md") if language == "text")
    (code,) = (text for language, text in blocks("concepts.md") if language == "python")
    names: dict[str, Rollout] = {}
    exec(compile(code, "concepts.md", "exec"), names)
    record = names["rollout"]
    to_table([record])  # else it raises

    def row(name: str) -> list[str]:
        (line,) = re.findall(rf"^{name} +[TAH] +(.*)$", picture, re.MULTILINE)
        return line.replace("|", " ").split()

    assert [int(word) for word in row("tokens")] == record.tokens.tolist()
    assert [word == "x" for word in row("action_mask")] == record.action_mask.tolist()
    assert [
        None if word == "?" else pytest.approx(float(word)) for word in row("logprobs")
    ] == record.logprobs.to_list()
    assert [int(word) for word in row("weight_versions")] == record.weight_versions.to_list()
    assert [word == "x" for word in row("trainable")] == record.trainable.tolist()
    assert [int(word) for word in row("head_counts")] == record.heads.counts.tolist()
    assert [int(word) for word in row("head_tokens")] == record.heads.tokens.tolist()
    assert [pytest.approx(float(word)) for word in row("head_logprobs")] == record.heads.logprobs.tolist()
    bars = [n for n, sign in enumerate(re.search(r"^spans.*$", picture, re.MULTILINE)[0]) if sign == "|"]
    starts = [*(span.start for span in record.spans), len(record.tokens)]
    assert bars == [bars[0] + 5 * start for start in starts]
    # Each value of an action stands under its place in the mask.
    mask = re.search(r"^action_mask.*$", picture, re.MULTILINE)[0]
    places = [n for n, sign in enumerate(mask) if sign == "x"]
    for name in ("action", "weight_versions", "trainable", "head_counts"):
        line = re.search(rf"^{name} .*$", picture, re.MULTILINE)[0]
        assert all(line[place] != " " for place in places), name


@pytest.mark.parametrize(("page", "count"), [("recipes.md", 5), ("recipes-limits.md", 4)])
def test_the_numbers_beside_the_code_are_those_it_prints(
    page: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = (text for language, text in blocks(page) if language == "python")
    exec(compile(code, page, "exec"), {})
    said = [re.split("  +", comment)[0] for comment in re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)]
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == count
