"""docs/gateway.md says what the gateway does: its tables are held against the code."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from rollstore.cli import app
from rollstore.schema.rollouts import SEGMENT_CAUSES
from rollstore.writers.gateway.asking import PATHS
from rollstore.writers.gateway.columns import Columns
from rollstore.writers.gateway.upstream import COLUMNS, NAME

PAGE = (Path(__file__).parent.parent.parent / "docs" / "gateway.md").read_text(encoding="utf-8")


def test_every_option_on_the_page_is_one_of_the_command() -> None:
    command = typer.main.get_command(app).commands["gateway"]  # pyright: ignore  typer's type does not say it is a group
    options = {option for parameter in command.params for option in parameter.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - {"--logprobs-mode"}  # an option of vLLM
    assert named <= options
    assert {"--upstream", "--store", "--heads", "--idle", "--queue", "--when-full", "--default", "--host"} <= named


def test_the_paths_headers_columns_and_causes_on_the_page_are_those_of_the_code() -> None:
    assert all(f"`...{path}`" in PAGE for path in PATHS)
    assert all(f"`{header.decode()}: " in PAGE for header in (NAME, COLUMNS))
    row = next(line for line in PAGE.splitlines() if COLUMNS.decode() in line and line.startswith("|"))
    assert set(re.findall(r"`([a-z_]+)`", row)) <= set(Columns.__struct_fields__)
    causes = re.findall(r"^\| `(\w+)` \|", PAGE.split("| `segment_cause` |")[1].split("\n\n")[0], re.MULTILINE)
    assert set(causes) <= set(SEGMENT_CAUSES)


def test_the_python_on_the_page_compiles() -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        compile(block, "docs/gateway.md", "exec")
