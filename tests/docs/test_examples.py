"""docs/examples.md names every example that runs, and its command lines are those of the examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples import agent, distributed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
NOT_RUN = {"__init__.py", "arithmetic.py", "smollm2.py"}
"""What other examples are made of."""


def test_the_table_has_every_example_once() -> None:
    named = re.findall(r"^\| `examples/([\w.]+)` \|", PAGE, re.MULTILINE)
    there = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")}
    assert sorted(named) == sorted(there - NOT_RUN)


@pytest.mark.parametrize("main", [agent.main, distributed.main])
def test_an_example_says_what_it_takes(main: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert "store" in capsys.readouterr().out
    name = main.__module__.rpartition(".")[2]
    assert f"python -m examples.{name} " in PAGE
