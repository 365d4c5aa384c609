"""From what an engine sent, through a store, to what a trainer may use: cases that went wrong elsewhere, end to end."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import rollstore
from rollstore import Rollout, SchemaError
from rollstore.batch import Transform, as_behavior, collate, refuse_unusable
from rollstore.errors import UnsupportedRecordError
from rollstore.writers import vllm
from rollstore.writers.conversation import conversation
from tests.writers.vllm_objects import completion, dicts, engine, output, params

RAW = vllm.configuration(engine("raw_logprobs"))
PROCESSED = vllm.configuration(engine("processed_logprobs"))

Through = Callable[[list[Rollout]], pa.Table]


@pytest.fixture
def through(tmp_path: Path) -> Through:
    """Rollouts written to a store and read back."""

    def written(rollouts: list[Rollout]) -> pa.Table:
        store = rollstore.open(tmp_path / "s", create=True)
        with store.writer() as writer:
            writer.append(rollouts)
        return pa.Table.from_batches(list(store.scan("rollouts")))

    return written


def raw_output(*listed: tuple[int, float, int]) -> Any:
    return output([2], completion([1], logprobs=dicts([listed])))


def test_a_raw_log_prob_with_a_complete_head_is_tempered_again_and_the_ratio_is_one(through: Through) -> None:
    everything = raw_output((1, -1.40761, 2), (0, -0.40761, 1), (2, -2.40761, 3))
    made = vllm.rollouts(everything, params(temperature=0.5, logprobs=3), configuration=RAW)
    batch = collate(through(made), trainer_transform=Transform(temperature=True))
    with pytest.raises(UnsupportedRecordError, match=r"temperature=0\.5"):
        refuse_unusable(batch)
    usable = as_behavior(batch, vocab_size=3)
    refuse_unusable(usable)
    assert usable.behavior_logprobs.tolist() == pytest.approx([-2.14293], rel=1e-4)
    assert math.exp(-2.14293 - usable.behavior_logprobs.item()) == pytest.approx(1.0, rel=1e-4)


def test_a_raw_log_prob_with_a_part_of_the_head_stays_unusable(through: Through) -> None:
    made = vllm.rollouts(raw_output((1, -1.40761, 2)), params(temperature=0.5, logprobs=1), configuration=RAW)
    batch = as_behavior(collate(through(made), trainer_transform=Transform(temperature=True)), vocab_size=3)
    with pytest.raises(UnsupportedRecordError, match="raw log-prob"):
        refuse_unusable(batch)


def test_a_processed_log_prob_under_a_filter_needs_a_trainer_that_declares_it(through: Through) -> None:
    filtered = output([2], completion([1], logprobs=dicts([[(1, -1.31326, 2)]])))
    table = through(vllm.rollouts(filtered, params(top_k=2, logprobs=0), configuration=PROCESSED))
    with pytest.raises(UnsupportedRecordError, match="top_k=2"):
        refuse_unusable(collate(table))
    refuse_unusable(collate(table, trainer_transform=Transform(filters=True)))


def test_log_probs_come_back_bit_for_bit_and_one_above_zero_is_flagged(through: Through) -> None:
    values = np.array([-12.345678, -70000.0, -1e-8, 0.03125], np.float32)
    listed = dicts([[(5, float(value), 1)] for value in values])
    made = vllm.rollouts(output([1], completion([5] * 4, logprobs=listed)), params(logprobs=0), configuration=RAW)
    table = through(made)
    assert np.array(table["logprobs"][0].as_py(), np.float32).tobytes() == values.tobytes()
    assert {(f["kind"], f["index"]) for f in table["flags"][0].as_py()} >= {("logprob_above_zero", 3)}
    assert collate(table).behavior_logprobs.numpy().tobytes() == values.tobytes()


def test_an_unknown_log_prob_enters_no_ratio(through: Through) -> None:
    listed = dicts([[(4, -0.1, 1)], [(5, math.nan, 1)], [(6, -0.7, 1)]])
    made = vllm.rollouts(
        output([1], completion([4, 5, 6], logprobs=listed)), params(logprobs=0), configuration=PROCESSED
    )
    assert collate(through(made)).valid.tolist() == [True, False, True]


def test_a_log_prob_is_of_its_own_token_given_all_before(through: Through) -> None:
    tokens, mask = [7, 8, 9, 4, 3], [False, False, True, True, False]
    made = Rollout(rollout_id="a", tokens=tokens, action_mask=mask, logprobs=[-0.2, -0.3], logprob_kind="behavior")
    batch = collate(through([made]))
    trainer = torch.tensor([-0.1, -0.2, -0.3, -0.4])  # of tokens 8, 9, 4, 3
    assert trainer[batch.logit_index].mean().item() == pytest.approx(-0.25)


@pytest.mark.parametrize("column", ["logprobs", "weight_versions", "ranks", "entropies", "trainable"])
def test_a_column_of_another_length_is_refused_with_both_lengths(through: Through, column: str) -> None:
    values = [True] * 4 if column == "trainable" else [1, 1, 1, 1]
    made = Rollout(rollout_id="a", tokens=[1, 11, 12, 13], action_mask=[False, True, True, True], **{column: values})
    with pytest.raises(SchemaError, match=f"{column}: wrong_length: row 0 has 4 values, action_mask has 3 actions"):
        through([made])


def test_the_end_token_keeps_the_log_prob_it_was_drawn_with(through: Through) -> None:
    listed = dicts([[(5, -0.5, 1)], [(6, -0.7, 1)], [(2, -2.99573, 4)]])
    made = vllm.rollouts(
        output([1], completion([5, 6, 2], logprobs=listed)), params(logprobs=0), configuration=PROCESSED
    )
    batch = collate(through(made))
    trainer = torch.tensor([-0.5, -0.7, -2.99573])
    assert (trainer - batch.behavior_logprobs).sum().exp().item() == pytest.approx(1.0, rel=1e-5)


def test_an_end_token_that_the_caller_put_back_is_no_action(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    with store.writer() as writer, writer.rollout(rollout_id="a") as recorder:
        recorder.observe([1], role="user")
        recorder.act([5, 6], logprobs=[-0.5, -0.7], logprob_kind="behavior")
        recorder.observe([2], role="assistant", origin="synthetic")
        recorder.end("terminated", reward=1.0)
    (row,) = store.get("a")
    assert row.action_mask.tolist() == [False, True, True, False]
    batch = collate(pa.Table.from_batches(list(store.scan("rollouts"))))
    assert batch.action_index.tolist() == [1, 2]
    assert (row.spans or ())[-1].origin == "synthetic"


def test_an_id_that_the_tokenizer_does_not_know_is_kept_and_flagged_in_prompts_too(through: Through) -> None:
    known = vllm.Configuration(logprobs_mode="processed_logprobs", tokenizer_size=100, vocab_size=128)
    listed = dicts([[(5, -0.4, 1)], [(117, -9.8, 90)], [(7, -0.2, 1)]])
    asked = params(logprobs=0)
    (first,) = vllm.replies(output([1], completion([5, 117, 7], logprobs=listed)), asked, configuration=known)
    (second,) = vllm.replies(output([1, 117, 7, 9], completion([5], logprobs=listed[:1])), asked, configuration=known)
    table = through(conversation([first, second]))
    assert table["tokens"].to_pylist() == [[1, 5, 117, 7], [1, 117, 7, 9, 5]]
    flagged = [[(f["kind"], f["index"]) for f in flags] for flags in table["flags"].to_pylist()]
    assert flagged == [[("id_outside_tokenizer", 2)], [("id_outside_tokenizer", 1)]]


def test_an_id_past_the_output_layer_cannot_have_been_drawn(through: Through) -> None:
    known = vllm.Configuration(vocab_size=100)
    made = vllm.rollouts(output([1], completion([117])), params(), configuration=known)
    with pytest.raises(SchemaError, match="outside_vocabulary"):
        through(made)


def test_a_batch_of_aborted_requests_is_a_valid_batch_without_actions(through: Through) -> None:
    aborted = [output([1, 2], completion([], finish_reason="abort")) for _ in range(4)]
    table = through(vllm.rollouts(aborted, params(logprobs=1), configuration=PROCESSED))
    batch = collate(table)
    assert (len(batch.behavior_logprobs), len(batch.rollout_ids)) == (0, 4)
    assert table["logprobs"].to_pylist() == [[]] * 4
    assert set(table["ending"].to_pylist()) == {"aborted"}


def test_ids_that_would_be_others_if_the_text_were_read_again_stay_as_they_were_drawn(through: Through) -> None:
    listed = dicts([[(31, -0.5, 1)], [(32, -0.6, 1)]])
    made = vllm.rollouts(
        output([1], completion([31, 32], text="ab", logprobs=listed)), params(logprobs=0), configuration=PROCESSED
    )
    table = through(made)
    assert table["tokens"][0].as_py() == [1, 31, 32]
    assert table["logprobs"][0].as_py() == pytest.approx([-0.5, -0.6])
