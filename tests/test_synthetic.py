"""The rollouts that are made from a seed: valid, the same every time, and of the shape that they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rollstore
from rollstore.errors import RollstoreError
from rollstore.testing import synthetic

TEXT = np.random.default_rng(0).integers(0, 4_000, 30_000).astype(np.int32)


@pytest.mark.parametrize("size", [0, 4])
def test_a_store_takes_them_with_heads_and_without_and_finds_nothing_wrong(size: int, tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "store", create=True)
    store.append("rollouts", synthetic.table(TEXT, 64, heads=synthetic.head_pool(TEXT, size) if size else None))
    assert store.verify() == []
    heads = store.get(synthetic.ids(np.array([63]))[0].as_py(), segment=0).heads
    assert (None if heads is None else heads.size) == (size or None)


def test_equal_arguments_give_equal_rows_and_another_seed_others_under_other_ids() -> None:
    one = synthetic.table(TEXT, 32, first=16)
    assert one.equals(synthetic.table(TEXT, 32, first=16))
    other = synthetic.table(TEXT, 32, first=16, seed=1)
    assert not set(one["rollout_id"].to_pylist()) & set(other["rollout_id"].to_pylist())
    assert not one["tokens"].equals(other["tokens"])


def test_blocks_have_the_ids_of_the_whole_each_once() -> None:
    blocks = list(synthetic.tables(TEXT, 40, block=16))
    assert [table.num_rows for table in blocks] == [16, 16, 8]
    found = [one for table in blocks for one in table["rollout_id"].to_pylist()]
    assert found == synthetic.ids(np.arange(40)).to_pylist()
    assert len(set(found)) == 40


def test_a_group_of_eight_shares_its_prompt_and_every_fourth_has_a_tool() -> None:
    rows = synthetic.rows(TEXT, 16)
    for row in rows:
        first = rows[int(row.group_id or 0) * synthetic.GROUP]
        prompt = int(np.argmax(row.action_mask))
        assert row.tokens[:prompt].tolist() == first.tokens[:prompt].tolist()
    tools = ["tool" in [span.role for span in row.spans or ()] for row in rows]
    assert tools == [True, False, False, False] * 4


def test_the_mean_lengths_are_what_counts_of_rollouts_are_made_of() -> None:
    table = synthetic.table(TEXT, 4_000)
    tokens = len(table["tokens"].combine_chunks().flatten()) / 4_000
    actions = len(table["logprobs"].combine_chunks().flatten()) / 4_000
    assert tokens == pytest.approx(synthetic.MEAN_TOKENS, rel=0.05)
    assert actions == pytest.approx(synthetic.MEAN_ACTIONS, rel=0.05)
    assert synthetic.count(1_000_000) == 3024
    assert synthetic.of_actions(1_000_000) == 4832


def test_words_are_ranked_by_how_often_they_come_and_too_few_are_refused() -> None:
    ids = synthetic.words(["a b " * 20_000 + "c"])
    assert ids[:4].tolist() == [ids[0], ids[1], ids[2], ids[1]]
    assert ids[1] == 0
    assert ids[-1] == ids.max() == 3
    with pytest.raises(RollstoreError, match=r"wanted over 16,384 words of the standard library, got 1"):
        synthetic.words(["alone"])
    assert sum(map(len, synthetic.texts(50_000))) > 50_000
