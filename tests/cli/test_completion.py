"""Completion in bash, zsh and fish: a script for each shell, and answers in the words that it asks for."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("shell", ASKED)
@pytest.mark.parametrize("form", ["--show-completion {}", "--show-completion={}"])
def test_a_shell_that_is_named_gets_its_own_script(form: str, shell: str) -> None:
    result = CliRunner().invoke(app, form.format(shell).split(), prog_name="rollstore")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(answered(f"source_{shell}").strip())


@pytest.mark.parametrize("name", ["zsh", "fish", "bash"])
def test_completion_is_installed_for_the_shell_that_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["--install-completion", name], prog_name="rollstore")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{name} completion installed in {tmp_path}/")
    scripts = [path for path in tmp_path.rglob("*rollstore*") if path.is_file()]
    assert [f"complete_{name}" in path.read_text(encoding="utf-8") for path in scripts] == [True]


@pytest.mark.parametrize("named", ["xonsh", "nu", "zsh fish", "zsh sql"])
@pytest.mark.parametrize("option", ["--install-completion", "--show-completion"])
def test_a_shell_without_a_script_is_refused_and_nothing_installed(
    option: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    result = CliRunner().invoke(app, [option, *named.split()], prog_name="rollstore")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"{option}: wanted one of bash, zsh, fish" in result.stderr
    assert f"got {named!r}" in result.stderr
    assert [*tmp_path.iterdir()] == []


TYPED = {
    "rollstore check-t": "rollstore check-tokens",
    "rollstore sql --no": "rollstore sql --no-sandbox",
    "rollstore gateway --logprob-kind beh": "rollstore gateway --logprob-kind behavior",
    "rollstore ls only-on": "rollstore ls only-one-here",
}
"""What is typed before the key, and what stands there afterwards: a command, an option, its word, a folder."""


def shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here")
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with one file in it, and the shells' scripts."""
    (tmp_path / "here" / "only-one-here").mkdir(parents=True)
    for name in ASKED:
        (tmp_path / f"script.{name}").write_text(answered(f"source_{name}"), encoding="utf-8")
    return tmp_path / "here"


def environment(**more: str) -> dict[str, str]:
    """With `rollstore` found by its name, as shells find it."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **more}


def test_bash_completes_with_the_script(folder: Path) -> None:
    program = """source ../script.bash
        while read -r line; do
            COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
            $(complete -p rollstore | sed 's/.*-F \\([^ ]*\\).*/\\1/') rollstore
            echo "${COMPREPLY[@]}"
        done"""
    command = [shell("bash"), "--norc", "-c", program]
    run = subprocess.run(
        command, input="".join(f"{line}\n" for line in TYPED), capture_output=True, text=True, check=True, cwd=folder,
        env=environment(),
    )  # fmt: skip
    wanted = [line.split()[-1] for line in TYPED.values()]
    wanted[-1] = ""  # a path: `-o default` leaves it to bash
    assert (run.stdout.splitlines(), run.stderr) == (wanted, "")


def test_fish_completes_with_the_script(folder: Path) -> None:
    asked = "; ".join(f"complete -C '{line}'" for line in TYPED)
    command = [shell("fish"), "--no-config", "-c", f"source ../script.fish; {asked}"]
    home = {"HOME": str(folder.parent), "XDG_DATA_HOME": str(folder.parent), "XDG_CONFIG_HOME": str(folder.parent)}
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environment(**home))
    found = [line.split("\t")[0].rstrip("/") for line in run.stdout.splitlines()]
    assert (found, run.stderr) == ([line.split()[-1] for line in TYPED.values()], "")


@pytest.mark.parametrize("installed", [False, True])
def test_zsh_completes_where_one_types_from_the_first_key_on(installed: bool, folder: Path) -> None:
    """In a terminal of its own: a key completes what stands in the line, and writes the line down.

    The script is read by each session, or lies where `--install-completion` puts it and zsh loads it when asked.
    """
    zsh, home = shell("zsh"), folder.parent
    if installed:
        (home / "script.zsh").unlink()
        command = [zsh, "-c", "rollstore --install-completion; true"]
        subprocess.run(command, check=True, cwd=folder, env=environment(HOME=str(home)), capture_output=True)
        assert (home / ".zfunc" / "_rollstore").is_file()
    (home / ".zshrc").write_text(
        f"""fpath+={home}/.zfunc
        autoload -Uz compinit; compinit -u -D
        [[ -e ../script.zsh ]] && source ../script.zsh
        note() {{ zle complete-word; print -r -- "$BUFFER" >> ../lines; BUFFER="" }}
        zle -N note
        bindkey "^G" note
        """,
        encoding="utf-8",
    )
    terminal = "import pty, sys; pty.spawn(sys.argv[1:])"
    keys = "".join(f"{line}\a" for line in TYPED) + "exit\n"
    run = subprocess.run(
        [sys.executable, "-c", terminal, zsh, "-i"], input=keys, capture_output=True, text=True, cwd=folder,
        env=environment(ZDOTDIR=str(home), TERM="dumb"), timeout=300,
    )  # fmt: skip
    lines = (home / "lines").read_text(encoding="utf-8").splitlines()
    assert [line.rstrip(" /") for line in lines] == list(TYPED.values()), run.stdout
