"""The example of a distributed analysis: two Ray workers say what DuckDB says, and a difference is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import distributed

pytestmark = [
    pytest.mark.ray,
    # Ray's own files, sockets and deprecations: it closes them when the interpreter ends.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
]


def test_ray_and_duckdb_say_the_same_and_a_row_that_one_lacks_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "store")
    store = distributed.make(path, 1_040)
    assert len(store.parts("rollouts")) == 8
    assert distributed.main([path]) == 0
    out = capsys.readouterr().out
    assert out.endswith("workers) and DuckDB say the same\n")
    assert "version 2: " in out
    answer = distributed.with_duckdb(store)
    assert sum(actions for actions, _, _ in answer.values()) > 100_000
    monkeypatch.setattr(distributed, "with_ray", lambda store: (answer, {1, 2}))
    assert distributed.main([path]) == 0
    actions, total, unlikely = answer[1]
    for wrong in ((actions + 1, total, unlikely), (actions, total * 1.001, unlikely), (actions, total, unlikely + 1)):
        monkeypatch.setattr(distributed, "with_ray", lambda store, wrong=wrong: ({**answer, 1: wrong}, {1, 2}))
        assert distributed.main([path]) == 1
