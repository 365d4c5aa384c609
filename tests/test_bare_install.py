"""What `pip install rollstore` alone gives: every command says what it does, and the base loads without any extra."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from rollstore.cli import app

EXTRAS = (
    "torch", "transformers", "vllm", "ray", "trl", "matplotlib", "s3fs", "starlette", "httpx", "uvicorn", "numba",
    "lance", "datasets", "accelerate", "hypothesis", "pandas", "tinker", "atif", "playwright",
)  # fmt: skip
"""What a bare installation does not have."""

ABSENT = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}));"


def commands() -> list[str]:
    return sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_there_are_commands() -> None:
    assert {"init", "ls", "sql", "import", "view", "report", "replay"} <= set(commands())


@pytest.mark.parametrize("piece", range(3))
def test_every_command_says_what_it_does_without_any_extra(piece: int) -> None:
    code = (
        f"{ABSENT} from contextlib import suppress; from rollstore.cli import main\n"
        f"for command in {commands()[piece::3]!r}:\n"
        "    try:\n        main([command, '--help'])\n"
        "    except SystemExit as left:\n        assert not left.code, (command, left.code)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("Usage: rollstore") == len(commands()[piece::3])


def test_the_package_runs_as_a_module_without_any_extra() -> None:
    run = "sys.argv = ['rollstore', '--version']; runpy.run_module('rollstore', run_name='__main__')"
    code = f"{ABSENT} import runpy; {run}"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (shown.returncode, shown.stdout.startswith("rollstore ")) == (0, True), shown.stderr
