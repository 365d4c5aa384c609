"""The command line in process, and a store to run it on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollstore.cli import app
from rollstore.store.store import open as open_store
from tests.cli import story


@pytest.fixture(autouse=True)
def a_pipe_of_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs the tests may have said how wide its own terminal is, and what its own defaults are."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("ROLLSTORE_CONFIG", os.devnull)


@pytest.fixture(scope="session")
def shown_store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with the story in it, one part. For reading."""
    path = str(tmp_path_factory.mktemp("cli") / "store")
    with open_store(path, create=True).writer(source="story") as writer:
        writer.append(story.others())
        writer.flush()
        writer.append(story.conversation())
    return path


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store of one's own, to break."""
    path = str(tmp_path / "store")
    with open_store(path, create=True).writer() as writer:
        writer.append(story.others())
    return path


@pytest.fixture
def run() -> story.Run:
    """Run a command line in this process; nothing it raises passes through but its exit status."""

    def invoke(*arguments: str, **options: object) -> Result:
        return CliRunner().invoke(app, list(arguments), **options)

    return invoke
