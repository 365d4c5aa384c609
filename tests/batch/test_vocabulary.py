"""A rollout with an id that the trainer lacks is left out whole, and counted."""

from __future__ import annotations

import numpy as np
import pytest

from rollstore.batch import TokenBatch, collate, within_vocabulary
from rollstore.schema import Rollout, to_table


def batch() -> TokenBatch:
    """The second turn of `a` has an id of the first inside its prompt; `b` is ordinary."""
    rows = [
        ("a", 0, [1, 5, 117, 7], [0, 1, 1, 1]),
        ("a", 1, [1, 117, 7, 9, 5], [0, 0, 0, 0, 1]),
        ("b", 0, [1, 99], [0, 1]),
        ("c", 0, [100, 3], [0, 1]),
    ]
    made = [
        Rollout(
            rollout_id=name, segment=segment, tokens=np.array(tokens), action_mask=np.array(mask, bool), vocab_size=128,
            tokenizer_size=100, ending="continued" if (name, segment) == ("a", 0) else "terminated",
        )
        for name, segment, tokens, mask in rows
    ]  # fmt: skip
    return collate(to_table(made))


def test_every_segment_of_it_goes_and_prompts_count_too() -> None:
    kept, left_out = within_vocabulary(batch(), 100)
    assert (kept.rollout_ids, kept.tokens.tolist(), left_out) == (["b"], [1, 99], 2)


def test_nothing_is_clamped_or_cut_where_all_ids_are_known() -> None:
    whole = batch()
    kept, left_out = within_vocabulary(whole, 128)
    assert kept is whole
    assert left_out == 0


def test_all_can_go() -> None:
    kept, left_out = within_vocabulary(batch(), 1)
    assert (kept.rows, kept.actions, left_out) == (0, 0, 3)


def test_a_size_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted at least 1, got 0"):
        within_vocabulary(batch(), 0)
