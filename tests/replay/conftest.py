"""A tiny deterministic model, and keyed records made with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollstore.replay.samplers.transformers import Turn, generate
from rollstore.schema import Rollout, Sampler, Span
from tests.replay.keyed_records import joined_heads, known

SAMPLER = Sampler(temperature=0.8, top_k=50, top_p=0.95)


# The tiny model's products are too small for threads, which would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,  # wide enough that the distributions are far from flat
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def other_model(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same model after its weights have moved."""
    moved = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    return moved


@pytest.fixture
def record(model: LlamaForCausalLM) -> Callable[..., Rollout]:
    """Makes a keyed rollout of several turns with a tool's answer in between, drawn by the tiny model."""

    def make(
        prompt: Sequence[int] = (1, 2, 3),
        *,
        rollout_id: str = "r",
        key: int = 5,
        sample: int = 2,
        sampler: Sampler = SAMPLER,
        turns: int = 2,
        new: int = 8,
        **fields: Any,
    ) -> Rollout:
        tool = [9, 9, 7]
        tokens, mask, drawn = list(prompt), [False] * len(prompt), list[Turn]()
        spans = [Span(start=0, length=len(prompt), is_action=False, role="user", origin="rendered")]
        for turn in range(turns):
            if turn:
                spans.append(Span(start=len(tokens), length=len(tool), is_action=False, role="tool", origin="rendered"))
                tokens, mask = tokens + tool, mask + [False] * len(tool)
            one = generate(model, [tokens], keys=key, samples=sample, sampler=sampler, max_new_tokens=new, head_size=8)[
                0
            ]
            spans.append(
                Span(
                    start=len(tokens),
                    length=len(one.tokens),
                    is_action=True,
                    role="assistant",
                    origin="sampled",
                    sampler=turn,
                    turn=turn,
                    cache_state="fresh",
                )
            )
            tokens, mask = tokens + one.tokens.tolist(), mask + [True] * len(one.tokens)
            drawn.append(one)
        return Rollout(
            **{
                "rollout_id": rollout_id,
                "tokens": np.array(tokens, dtype=np.int32),
                "action_mask": np.array(mask),
                "logprobs": known(*(one.logprobs for one in drawn)),
                "logprob_kind": "behavior",
                "head_kind": "behavior",
                "heads": joined_heads(drawn),
                "entropies": known(*(one.entropies for one in drawn)),
                "batch_rows": known(*(one.batch_rows for one in drawn)),
                "weight_versions": known(np.zeros(sum(mask), dtype=np.int64)),
                "spans": spans,
                "samplers": [one.sampler for one in drawn],
                "replay_key": key,
                "replay_sample": sample,
                "noise": drawn[0].noise,
            }
            | fields
        )

    return make
