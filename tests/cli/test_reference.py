"""docs/cli.md is made from the commands, and every command explains itself."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from rollstore.cli import app, reference
from tests.cli.story import Run

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands


def test_the_reference_is_fresh() -> None:
    assert reference.main(["--check"]) == 0, "run python -m rollstore.cli.reference"


def test_a_stale_reference_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reference, "DOCS", tmp_path / "docs" / "cli.md")
    assert reference.main(["--check"]) == 1
    assert not reference.DOCS.exists()
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_examples_and_json(name: str, run: Run) -> None:
    command = COMMANDS[name]
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"rollstore {name} " in result.stdout
    assert command.epilog.startswith("Example")
    assert "--json" in [option for parameter in command.params for option in parameter.opts]
    assert all(parameter.help for parameter in command.params)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_is_a_command_line_that_parses(name: str) -> None:
    command = COMMANDS[name]
    _, *examples = command.epilog.split("\n\n")
    for example in examples:
        program, called, *arguments = shlex.split(example.split(" > ")[0])
        assert (program, called) == ("rollstore", name)
        with command.make_context(name, arguments) as context:
            assert context.params
