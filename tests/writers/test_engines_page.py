"""docs/engines.md names what there is, and leaves out nothing that is public."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent.parent / "docs" / "engines.md").read_text(encoding="utf-8")
PUBLIC = {
    "vllm": ("record", "rollouts", "replies", "configuration"),
    "openai": ("rollouts", "Server", "joined", "events"),
    "sglang": ("rollouts", "Server"),
    "llamacpp": ("rollouts", "drawn"),
    "transformers": ("rollouts", "settings_of"),
    "trl": ("record", "Sampling"),
    "queued": ("Queued",),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_on_the_page_exists_and_the_ways_in_are_on_it(name: str) -> None:
    module = importlib.import_module(f"rollstore.writers.{name}")
    named = set(re.findall(rf"\b{name}\.(\w+)\(", PAGE))
    assert {found for found in named if not hasattr(module, found)} <= {"generate"}
    for public in PUBLIC[name]:
        assert hasattr(module, public)
        assert re.search(rf"\b{public}\b", PAGE), public


def test_the_python_on_the_page_compiles() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 6
    for block in blocks:
        compile(block, "docs/engines.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
