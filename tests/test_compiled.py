"""What is compiled where numba is installed: with and without a folder to keep the machine code in."""

from __future__ import annotations

from typing import Any

import numba
import pytest

from rollstore.compiled import compiled


def test_compiled_loops_need_no_folder_to_keep_machine_code_in(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = numba.njit

    def nowhere(function: Any, *, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(function, **options)

    monkeypatch.setattr(numba, "njit", nowhere)
    assert compiled(lambda x: x + 1)(2) == 3
