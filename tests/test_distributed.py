"""The example of a distributed analysis: two Ray workers say what DuckDB says, and a difference is noticed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import rollstore
from examples import distributed
from rollstore.schema import Rollout

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


def test_a_task_keeps_log_probs_beside_their_own_versions_where_either_is_not_known() -> None:
    versions, logprobs = pa.list_(pa.int64()), pa.list_(pa.float32())
    block = pa.table({
        "weight_versions": pa.array([[1, 1], None, [2], [2, None], None], versions),
        "logprobs": pa.array([[-1.0, -6.0], [-2.0], None, [-7.0, -3.0], None], logprobs),
    })  # fmt: skip
    said = {row["weight_version"]: row for row in distributed.by_version(block).to_pylist()}
    assert {version: (row["actions"], row["total"], row["unlikely"]) for version, row in said.items()} == {
        1: (2, -7.0, 1), None: (2, -5.0, 0), 2: (1, -7.0, 1),
    }  # fmt: skip


def test_versions_that_are_not_known_are_told_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = rollstore.open(tmp_path / "store", create=True)
    one = {"tokens": [1, 2], "action_mask": [False, True], "logprobs": [-1.0], "logprob_kind": "behavior"}
    store.append("rollouts", [Rollout(rollout_id="a", **one), Rollout(rollout_id="b", weight_versions=[3], **one)])
    monkeypatch.setattr(distributed, "with_ray", lambda store: (distributed.with_duckdb(store), {1}))
    assert distributed.main([str(tmp_path / "store")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["version 3", "version not known", lines[-1]]
