"""The command line in process."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner, Result

from rollstore.cli import app
from tests.cli.story import Run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line in this process, in a pipe of no width."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def invoke(*arguments: str, **options: object) -> Result:
        return CliRunner().invoke(app, list(arguments), **options)

    return invoke
