"""The demo's whole loop on a tiny random transformer: record, query, train, record again, replay by id."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import rollstore
from examples.arithmetic import TASKS, Task, calculate, verify
from examples.loop import collect, train
from rollstore.readers.duckdb import connect
from rollstore.replay.replay import replay

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, and the chat markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_model(vocabulary: int, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def parity(text: str, answer: int) -> float:
    """A verdict that random text meets half of the time, so that groups carry signal."""
    return float(len(text.encode("utf-8", "replace")) % 2)


@dataclass(frozen=True)
class Loop:
    """A store with two steps, the model before and after the update between them, and what the loss reported."""

    store: rollstore.Store
    before: LlamaForCausalLM
    after: LlamaForCausalLM
    metrics: dict[str, float]
    tokenizer: PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    tokenizer = tiny_tokenizer()
    before, after = (tiny_model(len(tokenizer)) for _ in range(2))
    store = rollstore.open(tmp_path_factory.mktemp("loop") / "store", create=True)
    tasks = [TASKS[0], Task(prompt_id="count", question="Count.", answer=3)]
    collect(store, after, tokenizer, tasks, step=0, max_new_tokens=12, verifier=parity)
    metrics = train(store, after, step=0, learning_rate=0.02, tokens_per_batch=600)
    collect(store, after, tokenizer, tasks, step=1, max_new_tokens=12, verifier=parity)
    return Loop(store, before, after, metrics, tokenizer)


def test_every_rollout_of_both_steps_is_recorded_and_sound(loop: Loop) -> None:
    with connect(loop.store) as connection:
        rows = connection.sql(
            "SELECT step, count(*), count(DISTINCT rollout_id), min(weight_version_min), max(weight_version_max) "
            "FROM rollouts GROUP BY 1 ORDER BY 1"
        ).fetchall()
    assert rows == [(0, 8, 8, 0, 0), (1, 8, 8, 1, 1)]
    assert [f for f in loop.store.verify() if f.level == "error"] == []


def test_the_recorded_log_probs_are_those_of_the_distribution_before_the_noise(loop: Loop) -> None:
    row = loop.store.get("arithmetic/0/7+5/1", segment=0)
    logits = (
        loop.before(torch.tensor([row.tokens.tolist()])).logits[0, np.flatnonzero(row.action_mask) - 1].detach() / 0.8
    )
    kept = torch.topk(logits, 50).indices
    filtered = torch.full_like(logits, -torch.inf).scatter(1, kept, logits.gather(1, kept)).log_softmax(-1)
    probabilities, order = filtered.exp().sort(descending=True, stable=True)
    beyond = probabilities.cumsum(-1) - probabilities >= 0.95
    nucleus = filtered.masked_fill(beyond.gather(1, order.argsort(-1)), -torch.inf).log_softmax(-1)
    drawn = nucleus.gather(1, torch.tensor(row.tokens[row.action_mask].astype(np.int64))[:, None]).squeeze(1)
    np.testing.assert_allclose(row.logprobs.values, drawn.numpy(), atol=2e-5)


def test_on_policy_the_trainer_agrees_with_the_sampler_and_the_step_moves_the_weights(loop: Loop) -> None:
    assert loop.metrics["furthest_log_ratio"] < 1e-4
    assert loop.metrics["gradient_norm"] > 0


def test_replay_by_id_is_the_same_under_the_old_weights_and_parts_under_the_new(loop: Loop) -> None:
    same = [replay(loop.store, f"arithmetic/0/7+5/{n}", loop.before).identical for n in range(4)]
    assert same == [True] * 4
    parted = [replay(loop.store, f"arithmetic/0/7+5/{n}", loop.after, reference=loop.before) for n in range(4)]
    assert not all(report.identical for report in parted)


def test_the_calculator_answers_what_it_is_asked_and_nothing_else() -> None:
    assert calculate("so <<17 * 23>>") == "391"
    assert calculate("<<1 + 1>> and <<2 - 5>>") == "-3"
    assert calculate("17 * 23") is None
    assert calculate("<<__import__('os')>>") is None
    assert (verify("7 + 5 is 12.", 12), verify("12, no: 13", 12), verify("", 12)) == (1.0, 0.0, 0.0)
