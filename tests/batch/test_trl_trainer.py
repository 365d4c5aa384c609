"""TRL's own trainer, whole, on recorded rollouts: a step of it is a step on our loss."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import rollstore
from rollstore import Rollout, Sampler
from rollstore.batch import TokenBatch, Transform, to_padded, to_trl
from rollstore.losses import group_zscore, ppo_clip, token_mean
from rollstore.readers.torch import RolloutLoader
from rollstore.writers import trl

torch.set_num_threads(1)
TEMPERATURE = 0.5


def recorded_trainer() -> Any:
    """The class as docs/loading.md has it: rollouts come from a store, and are not drawn."""
    text = (Path(__file__).parents[2] / "docs" / "loading.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```py\n(class Recorded.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {"GRPOTrainer": GRPOTrainer, "to_trl": to_trl}
    exec(compile(block, "loading.md", "exec"), names)
    return names["Recorded"]


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, initializer_range=0.5, **sizes))


def tokenizer() -> Any:
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(50)}, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")


def scored(network: Any, batch: TokenBatch) -> torch.Tensor:
    """[A], at the temperature that was drawn at."""
    padded = to_padded(batch)
    logits = network(input_ids=padded.tokens, attention_mask=padded.attention_mask.long()).logits[:, :-1]
    return padded.flat((logits / TEMPERATURE).log_softmax(-1).gather(-1, padded.tokens[:, 1:, None]).squeeze(-1))


def recorded(path: Path) -> TokenBatch:
    """Two groups of two, with prompts and answers of several lengths, and a tool's output in one of them."""
    draw = np.random.default_rng(0)
    store = rollstore.open(path, create=True)
    with store.writer(run="run") as writer:
        for number, (prompt, length) in enumerate([(3, 9), (3, 5), (1, 4), (1, 8)]):
            mask = (np.arange(length) >= prompt) & ((np.arange(length) != 5) | (number > 0))
            writer.append(
                Rollout(
                    rollout_id=f"r{number}", group_id=f"g{number // 2}", group_size=2, ending="terminated",
                    tokens=draw.integers(3, 50, length), action_mask=mask, reward=float(number % 2),
                    logprobs=-draw.random(int(mask.sum()), np.float32), logprob_kind="behavior",
                    samplers=(Sampler(temperature=TEMPERATURE),),
                )
            )  # fmt: skip
    (batch,) = RolloutLoader(store, tokens_per_batch=99, trainer_transform=Transform(temperature=True))
    return group_zscore(batch)[0]


def made(trainer: Any, network: Any, folder: Path, rollout_func: Any = None, **settings: Any) -> Any:
    """A trainer whose reward is of the length of an answer and of its first word."""
    same = {
        "use_cpu": True, "report_to": [], "save_strategy": "no", "bf16": False, "temperature": TEMPERATURE, "top_k": 0,
        "top_p": 1.0, "beta": 0.0, "gradient_checkpointing": False, "disable_tqdm": True, "loss_type": "dapo",
        "max_completion_length": 6,
    }  # fmt: skip
    return trainer(
        model=network, args=GRPOConfig(output_dir=str(folder), **same, **settings), processing_class=tokenizer(),
        reward_funcs=lambda completion_ids, **_: [float(len(ids) + ids[0] % 3) for ids in completion_ids],
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w3", "w4", "w5", "w6"]}), rollout_func=rollout_func,
    )  # fmt: skip


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.filterwarnings("ignore")  # whatever transformers' trainer warns of
def test_a_step_of_trls_trainer_on_recorded_rollouts_is_one_on_our_loss(tmp_path: Path, pieces: int) -> None:
    batch = recorded(tmp_path / "store")
    network = model()
    with torch.no_grad():
        # Some ratios are clipped, some are not.
        batch = replace(batch, anchor_logprobs=scored(network, batch) + torch.linspace(-0.4, 0.4, len(batch.weights)))
    loss, _ = ppo_clip(batch, scored(network, batch), clip=(0.2, 0.2), reduce=token_mean)
    loss.backward()
    wanted = {name: value.detach() - 0.125 * value.grad for name, value in network.named_parameters()}

    trained = model()
    trainer = made(
        recorded_trainer(), trained, tmp_path / "out", max_steps=1, per_device_train_batch_size=4 // pieces,
        gradient_accumulation_steps=pieces, num_generations=2, optim="sgd", learning_rate=0.125,
        lr_scheduler_type="constant", max_grad_norm=0.0,
    )  # fmt: skip
    trainer.batches = iter([batch])
    trainer.train()
    for name, value in trained.named_parameters():
        torch.testing.assert_close(value.detach(), wanted[name], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_what_trl_drew_and_a_store_kept_comes_back_as_trls_own_inputs(tmp_path: Path) -> None:
    class Seen(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            drawn.append(super()._generate_and_score_completions(inputs))
            return dict(drawn[-1])

    drawn: list[dict[str, Any]] = []
    store = rollstore.open(tmp_path / "store", create=True)
    trainer = made(
        Seen, model(), tmp_path / "out", trl.Sampling(), max_steps=2, per_device_train_batch_size=4, num_generations=4
    )
    with store.writer(run="run") as writer, trl.record(trainer, writer):
        trainer.train()
    loader = RolloutLoader(
        store, rollouts_per_batch=1, whole_groups=True, trainer_transform=Transform(temperature=True)
    )  # fmt: skip
    batches = sorted(loader, key=lambda batch: int(batch.tokens[0]))
    drawn.sort(key=lambda inputs: int(inputs["prompt_ids"][0, 0]))
    for batch, wanted in zip(batches, drawn, strict=True):
        found = to_trl(group_zscore(batch)[0], pad_id=0)
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampling_per_token_logps"):
            torch.testing.assert_close(found[name], wanted[name])
        assert found["num_items_in_batch"] == wanted["num_items_in_batch"]
        advantages = wanted["advantages"][:, None] * found["tool_mask"]
        torch.testing.assert_close(found["advantages"], advantages, rtol=1e-3, atol=0.0)  # its deviation has 1e-4 added
        assert advantages.abs().max() > 0.1
