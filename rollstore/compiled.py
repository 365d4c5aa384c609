"""Loops as machine code where numba is installed (extra `numba`); without it numpy does the same, more slowly."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


@cache
def is_possible() -> bool:
    """Whether numba is there. It is imported with the first function that is compiled, when that is needed."""
    return find_spec("numba") is not None


def compiled(function: _F) -> _F:
    """The function as machine code, kept on disk for the next process where there is a folder to keep it in.

    The interpreter's lock is released while it runs. Raises ImportError without numba.
    """
    import numba  # pyright: ignore[reportMissingTypeStubs]  # numba ships no types

    options = {"error_model": "numpy", "nogil": True}
    try:
        return numba.njit(function, cache=True, **options)  # pyright: ignore
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return numba.njit(function, **options)  # pyright: ignore
