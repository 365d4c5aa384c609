"""The example of an engine and a trainer in two processes: every step is trained from the store, once, and in time."""

from __future__ import annotations

from pathlib import Path

import pytest

import rollstore
from examples import asynchronous


def test_engine_and_trainer_share_a_store_and_the_newest_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert asynchronous.main([str(tmp_path / "store"), "--steps", "3"]) == 0, capfd.readouterr().err
    store = rollstore.open(tmp_path / "store")
    uses = store.scan("uses").read_all().to_pylist()
    trained = [use for use in uses if use["disposition"] == "trained"]
    assert sorted({use["train_step"] for use in trained}) == [0, 1, 2]
    assert len({use["rollout_id"] for use in trained}) == len(trained)
    versions = {use["rollout_id"]: use["weight_version"] for use in trained}
    found = {name: store.get(name)[0] for name in versions}
    assert all(0 <= versions[name] - one.weight_version_min <= asynchronous.MOST_LAG for name, one in found.items())
    assert all(one.group_size == asynchronous.GROUP and one.ending == "truncated" for one in found.values())
    assert store.verify() == []
    assert "steps   0 to" in capfd.readouterr().out
