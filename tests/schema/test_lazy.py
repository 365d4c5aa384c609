"""Attributes that are computed once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rollstore
from rollstore.schema.lazy import lazy


class Counted:
    made = 0

    @lazy
    def value(self) -> int:
        """A number."""
        self.made += 1
        return self.made


def test_a_lazy_attribute_is_computed_once_for_each_object_and_stands_in_its_dict() -> None:
    one, other = Counted(), Counted()
    assert "value" not in vars(one)
    assert (one.value, one.value, one.made) == (1, 1, 1)
    assert vars(one)["value"] == 1
    assert "value" not in vars(other)
    assert Counted.value.__doc__ == "A number."


def test_a_value_that_another_thread_put_there_first_stays() -> None:
    class Raced:
        @lazy
        def value(self) -> str:
            vars(self)["value"] = "first"
            return "second"

    raced = Raced()
    assert (raced.value, raced.value) == ("first", "first")


MODULES = sorted(Path(rollstore.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_module_uses_the_attribute_that_locks(path: Path) -> None:
    """functools.cached_property of Python 3.11: a forked child may wait for its lock for ever."""
    names = {
        node.name if isinstance(node, ast.alias) else node.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.alias | ast.Attribute)
    }
    assert "cached_property" not in names
