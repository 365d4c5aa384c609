"""Completion in bash, zsh and fish: a script for each shell, and answers in the words that it asks for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollstore.cli import app

ASKED = {
    "bash": lambda words: {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))},
    "zsh": lambda words: {"_TYPER_COMPLETE_ARGS": words},
    "fish": lambda words: {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}


def answered(instruction: str, **environment: str) -> str:
    result = CliRunner().invoke(app, [], prog_name="rollstore", env={"_ROLLSTORE_COMPLETE": instruction, **environment})
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("shell", ASKED)
@pytest.mark.parametrize(
    ("words", "found", "left_out"),
    [
        ("rollstore ch", "check-tokens", "sql"),
        ("rollstore sql --no", "--no-sandbox", "--format"),
        ("rollstore sql runs/math --format ma", "markdown", "csv"),
    ],
)
def test_commands_options_and_words_are_completed(shell: str, words: str, found: str, left_out: str) -> None:
    shown = answered(f"complete_{shell}", **ASKED[shell](words))
    assert found in shown
    assert left_out not in shown


@pytest.mark.parametrize("shell", ASKED)
def test_each_shell_has_a_script_that_asks_in_its_way(shell: str) -> None:
    script = answered(f"source_{shell}")
    assert f"_ROLLSTORE_COMPLETE=complete_{shell}" in script
    assert {"bash": "complete ", "zsh": "compdef ", "fish": "complete "}[shell] in script


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    (tmp_path / "script").write_text(answered("source_bash"), encoding="utf-8")
    program = (
        'source "$0"; COMP_WORDS=(rollstore verif); COMP_CWORD=1; _rollstore_completion "$1"; echo "${COMPREPLY[@]}"'
    )
    command = [bash, "--norc", "-c", program, tmp_path / "script", Path(sys.executable).with_name("rollstore")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "verify\n"
