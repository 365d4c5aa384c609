"""The example of a migration: what is sound is in the store, what is not stands apart with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rollstore
from examples import migration


def test_a_dump_becomes_a_store_and_a_file_of_what_was_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert migration.main([str(tmp_path)]) == 0
    store = rollstore.open(tmp_path / "store")
    assert store.verify() == []
    assert store.info().tables["rollouts"].rows == 172
    first = store.get("r0")[0]
    assert (first.run_id, first.group_id, first.step, first.ending) == ("migrated", "p0", 0, None)
    assert first.metadata is not None
    assert first.metadata["split"] in ("train", "held out")
    assert int(first.action_mask.sum()) == len(first.logprobs.to_list())
    bad = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sorted(one["row"] for one in bad) == [number for number in range(1, 201) if number % 21 in (0, 8, 15)]
    assert "200 rows: 172 taken, 28 refused" in capsys.readouterr().out
