"""A real GRPOTrainer, two steps of a tiny model: what it generates is in the store, token for token."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import rollstore
from rollstore import Rollout
from rollstore.replay.score import score_rollouts
from rollstore.schema import to_table
from rollstore.usable import Transform, usable_as_behavior

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own: experimental features, generation settings, torch

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

WORDS = ["<pad>", "<end>", "<unk>", *"abcdefghijklm"]
STEPS, EACH, GROUP = 2, 4, 2


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def scored(ids: list[int]) -> float | None:
    """A reward that differs within a group, and is missing where the first token is `e`."""
    return None if ids[0] == WORDS.index("e") else sum(ids) / 100


@contextmanager
def trainer(folder: Path, **options: Any) -> Iterator[Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    seen: list[list[int]] = []

    def length(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        seen.extend(completion_ids)
        return [scored(ids) for ids in completion_ids]

    config = GRPOConfig(
        output_dir=str(folder), use_cpu=True, report_to=[], max_steps=STEPS, per_device_train_batch_size=EACH,
        num_generations=GROUP, max_completion_length=8, learning_rate=0.1, temperature=0.7, top_k=8, logging_steps=100,
        save_strategy="no", disable_tqdm=True, seed=1, beta=0.0, dataloader_pin_memory=False, bf16=False,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": ["a b", "c d e", "f", "g h"]})
    made = GRPOTrainer(
        model=model(), reward_funcs=length, args=config, train_dataset=prompts, processing_class=tokenizer(), **options
    )
    made.seen = seen
    yield made


def trained(tmp_path: Path, *, fields: Any = None, **options: Any) -> tuple[list[Rollout], Any]:
    """(the rows in the order they were drawn, the trainer)."""
    from rollstore.writers import trl

    store = rollstore.open(tmp_path / "s", create=True)
    with (
        trainer(tmp_path / "t", **options) as made,
        store.writer(run="grpo") as writer,
        trl.record(made, writer, fields=fields),
    ):
        made.train()
    ids = store.scan("rollouts").read_all()["rollout_id"].to_pylist()
    return [store.get(name)[0] for name in ids], made


def test_with_our_rollout_func_every_token_has_the_log_prob_it_was_drawn_with(tmp_path: Path) -> None:
    from rollstore.writers import trl

    first = model().eval()  # the trainer's weights before its first step
    rows, made = trained(tmp_path, rollout_func=trl.Sampling(head_size=3), fields={"environment": "toy"})
    assert len(rows) == STEPS * EACH
    assert [row.tokens[row.action_mask].tolist() for row in rows] == made.seen
    assert {row.logprob_kind for row in rows} == {"behavior"}
    for row, (own, heads, _) in zip(rows[:EACH], score_rollouts(first, rows[:EACH]), strict=True):
        assert np.allclose(row.logprobs.values, own, atol=1e-5)
        assert np.allclose(row.heads.logprobs, heads, atol=1e-5)
    for row, (own, _, _) in zip(rows[EACH:], score_rollouts(first, rows[EACH:]), strict=True):  # by other weights
        assert not np.allclose(row.logprobs.values, own, atol=1e-3)
    settings = rows[0].samplers[0]
    assert (settings.temperature, settings.top_k, settings.max_tokens) == (pytest.approx(0.7), 8, 8)
    assert usable_as_behavior("behavior", settings, Transform(temperature=True, filters=True)).usable
    assert {row.environment for row in rows} == {"toy"}


def test_version_group_reward_and_end_are_told(tmp_path: Path) -> None:
    from rollstore.writers import trl

    rows, _ = trained(tmp_path, rollout_func=trl.Sampling())
    assert [row.step for row in rows] == [0] * EACH + [1] * EACH
    for row in rows:
        assert set(row.weight_versions.to_list()) == {row.step}
        assert (row.weight_version_min, row.weight_version_max, row.weight_version_source) == (
            row.step, row.step, "per_span",
        )  # fmt: skip
        drawn = row.tokens[row.action_mask].tolist()
        assert row.ending == ("terminated" if drawn[-1] == 1 else "truncated")
        assert row.ending_reason == ("stop_token" if drawn[-1] == 1 else "max_tokens")
        wanted = scored(drawn)
        assert row.reward == (None if wanted is None else pytest.approx(wanted))
        assert row.reward_status == ("unscored" if wanted is None else "scored")
        assert row.metadata == {"mode": "train"}
    groups = [list(members) for _, members in itertools.groupby(rows, key=lambda row: row.group_id)]
    assert [[row.sample_index for row in members] for members in groups] == [[0, 1]] * (STEPS * EACH // GROUP)
    for members in groups:
        assert len({tuple(row.tokens[~row.action_mask].tolist()) for row in members}) == 1
    assert {row.group_size for row in rows} == {GROUP}


def test_without_our_rollout_func_there_are_tokens_and_no_log_probs(tmp_path: Path) -> None:
    rows, made = trained(tmp_path)
    assert [row.tokens[row.action_mask].tolist() for row in rows] == made.seen
    assert {(row.logprobs, row.logprob_kind) for row in rows} == {(None, None)}
    assert {row.ending for row in rows} <= {"terminated", "truncated"}
    assert rows[0].samplers[0].temperature == pytest.approx(0.7)


def test_training_is_the_same_with_the_recording_and_without(tmp_path: Path) -> None:
    _, recorded = trained(tmp_path)
    with trainer(tmp_path / "other") as alone:
        alone.train()
    assert recorded.seen == alone.seen
    for one, other in zip(recorded.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_trainer_is_left_as_it_was_and_what_was_not_scored_is_kept(tmp_path: Path) -> None:
    from rollstore.writers import trl

    kept: list[Rollout] = []

    class Kept:
        def append(self, data: list[Rollout]) -> None:
            kept.extend(data)

    with trainer(tmp_path) as made:
        with trl.record(made, Kept()):
            made._generate(["a b"] * 2)
            assert not kept
        assert not {"_generate", "_calculate_rewards"} & set(vars(made))
        made._generate(["a b"] * 2)
    assert [row.reward for row in kept] == [None, None]


def test_what_is_no_trainer_is_refused() -> None:
    from rollstore.writers import trl

    with pytest.raises(TypeError, match="wanted a GRPOTrainer"):
        trl.record(SimpleNamespace(), None)  # type: ignore[arg-type]


def turns(completion: list[int], mask: list[int] | None, logprobs: list[float | None] | None = None) -> list[Rollout]:
    """The rows of one completion that a trainer with tools made on vLLM."""
    from rollstore.writers import trl

    made = SimpleNamespace(
        _generate=lambda prompts: ([[3, 4]], [completion], None if mask is None else [mask], None,
                                   None if logprobs is None else [logprobs], {}, None, []),
        _calculate_rewards=lambda: None, rollout_func=None, use_vllm=True, temperature=1.0, top_p=1.0, top_k=0,
        min_p=None, repetition_penalty=1.0, max_completion_length=8, eos_token_ids=[1], num_generations=2,
        state=SimpleNamespace(global_step=5), accelerator=SimpleNamespace(process_index=1),
        model=SimpleNamespace(training=True, config=SimpleNamespace()),
    )  # fmt: skip
    kept: list[Rollout] = []
    with trl.record(made, SimpleNamespace(append=kept.extend), logprob_kind="behavior"):
        made._generate(["p"])
    to_table(kept)
    return kept


def test_what_a_tool_wrote_is_no_action_and_its_dummy_log_probs_are_none() -> None:
    (row,) = turns([5, 6, 9, 9, 7, 1], [1, 1, 0, 0, 1, 1], [-0.5, None, 0.0, 0.0, math.nan, -0.25])
    assert row.tokens.tolist() == [3, 4, 5, 6, 9, 9, 7, 1]
    assert row.action_mask.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert row.logprobs.to_list() == [-0.5, None, None, -0.25]
    assert [(span.role, span.length) for span in row.spans] == [
        ("prompt", 2), ("assistant", 2), ("tool", 2), ("assistant", 2),
    ]  # fmt: skip
    assert (row.ending, row.logprob_kind, row.group_id, row.sample_index) == ("terminated", "behavior", "5.1.0", 1)


def test_a_tool_that_had_the_last_word_ends_no_episode() -> None:
    (row,) = turns([5, 1, 9], [1, 1, 0])
    assert row.action_mask.astype(int).tolist() == [0, 0, 1, 1, 0]
    assert (row.ending, row.ending_reason) == ("unknown", "unknown")


def test_a_padding_id_that_was_drawn_last_ends_nothing() -> None:
    (short,), (full,) = turns([5, 0], None), turns([5, 0] * 4, None)
    assert (short.ending, short.ending_reason) == ("unknown", "unknown")
    assert (full.ending, full.ending_reason) == ("truncated", "max_tokens")
