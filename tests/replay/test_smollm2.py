"""The keyed sampler and replay on the real model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from examples import smollm2
from rollstore.replay import replay
from rollstore.replay.generate import generate as forking
from rollstore.replay.samplers.transformers import generate
from rollstore.schema import Rollout, Sampler, Span
from tests.replay.keyed_records import Memory, joined_heads, known

pytestmark = pytest.mark.model
QUESTIONS = ["What is 12 + 30?", "What is 7 times 6, and why do you think so?"]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return smollm2.load()


def test_tokens_drawn_in_one_batch_are_drawn_again_alone(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in QUESTIONS
    ]
    turns = generate(
        model,
        prompts,
        keys=42,
        samples=[0, 1],
        sampler=Sampler(temperature=0.8, top_k=50, top_p=0.95),
        max_new_tokens=6,
        head_size=8,
        stop_token_ids=[tokenizer.eos_token_id],
    )
    for prompt, turn in zip(prompts, turns, strict=True):
        rollout = Rollout(
            rollout_id="r",
            tokens=np.array([*prompt, *turn.tokens], dtype=np.int32),
            action_mask=np.arange(len(prompt) + len(turn.tokens)) >= len(prompt),
            logprobs=known(turn.logprobs),
            logprob_kind="behavior",
            head_kind="behavior",
            heads=joined_heads([turn]),
            spans=[
                Span(start=0, length=len(prompt), is_action=False, role="user"),
                Span(start=len(prompt), length=len(turn.tokens), is_action=True, sampler=0),
            ],
            samplers=[turn.sampler],
            replay_key=turn.key,
            replay_sample=turn.sample,
            noise=turn.noise,
        )
        found = replay(Memory(rollout), "r", model)
        assert found.identical
        assert found.segments[0].max_logprob_difference < 1e-3  # type: ignore[operator]


def test_a_hundred_of_a_hundred_are_drawn_again_to_the_bit_at_a_fixed_batch_shape(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    prompts = [tokenizer.encode(f"{number} plus {number + 3} is") for number in range(10)]
    options: dict[str, Any] = {
        "sampler": Sampler(temperature=1.0, top_k=50), "max_new_tokens": 2, "rows": 2,
    }  # fmt: skip
    drawn = forking(model, prompts, 7, samples=10, **options)
    again = [
        (turn, forking(model, [prompt], 7, samples=[[turn.sample]], **options).groups[0].turns[0])
        for prompt, group in zip(prompts, drawn.groups, strict=True)
        for turn in group.turns
    ]
    identical = sum(turn.tokens.tolist() == alone.tokens.tolist() for turn, alone in again)
    assert (identical, len(again)) == (100, 100)
    assert all(turn.logprobs.tobytes() == alone.logprobs.tobytes() for turn, alone in again)
    assert any(fork.position > len(prompts[0]) for fork in drawn.groups[0].forks)
    assert drawn.savings.forward_saved is not None
    assert drawn.savings.forward_saved > 0.3  # the prompts ran once for ten samples
