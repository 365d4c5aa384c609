"""docs/operations.md: its commands are commands, and a copy made in the order it names has every row once."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer

from rollstore.cli import app
from rollstore.store.store import open as open_store
from rollstore.writers.writer import Writer
from tests.readers.samples import rollout

TEXT = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


def test_every_command_line_of_the_page_parses() -> None:
    commands = typer.main.get_command(app).commands
    lines = re.findall(r"(?:^|`)(rollstore [a-z]+ runs/[^`\n]*)", TEXT, re.MULTILINE)
    for line in lines:
        _, name, *arguments = shlex.split(line)
        with commands[name].make_context(name, arguments) as context:
            assert context.params
    assert len(lines) >= 10


@pytest.mark.parametrize("sealed_after", ["commits", "journal"])
def test_a_copy_in_the_order_of_the_page_has_every_row_once(sealed_after: str, tmp_path: Path) -> None:
    """Between any two of its steps rows are written and parts compacted; after one of them a journal is sealed."""
    order = re.search(r"first\n`(\w+)/`, then `(\w+)/`, then everything else", TEXT).groups()
    source, copy = tmp_path / "store", tmp_path / "copy"
    store = open_store(source, create=True)
    written: list[str] = []

    def write(writer: Writer) -> None:
        written.append(str(len(written)))
        writer.append(rollout(written[-1]))
        writer.flush()

    def work() -> None:
        for _ in range(3):
            with store.writer() as writer:
                write(writer)
        store.compact()

    with store.writer() as live:
        work()
        write(live)
        before = set(written)
        for folder in order:
            shutil.copytree(source / folder, copy / folder)
            work()
            if folder == sealed_after:
                live.seal()
        done = {*order, "cache", "staging"}
        shutil.copytree(source, copy, dirs_exist_ok=True, ignore=lambda _, names: done & set(names))
        copied = open_store(copy)
        rows = copied.scan("rollouts", columns=["rollout_id"]).read_all()["rollout_id"].to_pylist()
        assert len(set(rows)) == len(rows)
        assert before <= set(rows)
        assert not [finding for finding in copied.verify() if finding.level == "error"]
