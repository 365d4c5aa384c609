"""Keyed noise in a real vLLM, in process: the same tokens in any order and company, and again in transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollstore import Sampler
from rollstore.replay.samplers.transformers import generate
from tests.engines.settings import PROMPTS

SAMPLER = Sampler(temperature=0.8, top_k=50, top_p=0.9)
FOUR = [*PROMPTS, "Once upon a time there was"]
NEW = 24


@pytest.fixture(scope="module")
def llm(folder: str) -> Any:
    from rollstore.replay.samplers.vllm import KeyedNoise
    from tests.engines.conftest import load

    return load(folder, "processed_logprobs", logits_processors=[KeyedNoise])


def drawn(llm: Any, order: list[int], company: int = 0) -> dict[int, tuple[list[int], Any]]:
    """The keyed prompts in an order, with ordinary requests between them: number -> (prompt ids, turn)."""
    from vllm import SamplingParams

    from rollstore.replay.samplers.vllm import keyed, recorded

    prompts, asked = [], []
    for place, number in enumerate(order):
        if place < company:
            prompts.append("Ordinary request number " + "and " * place)
            asked.append(SamplingParams(temperature=1.0, seed=place, max_tokens=NEW))
        prompts.append(FOUR[number])
        asked.append(keyed(SAMPLER, key=42, sample=number, head_size=8, max_tokens=NEW))
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    mine = [output for output, one in zip(outputs, asked, strict=True) if one.extra_args]
    turns = [
        recorded(output, SAMPLER, key=42, sample=number, head_size=8)
        for output, number in zip(mine, order, strict=True)
    ]
    return {
        number: (list(output.prompt_token_ids), turn) for number, output, turn in zip(order, mine, turns, strict=True)
    }


def test_four_prompts_draw_the_same_in_any_order_and_company_and_again_in_transformers(llm: Any, teacher: Any) -> None:
    together = drawn(llm, [0, 1, 2, 3])
    for order, company in (([3, 1, 0, 2], 0), ([2, 0, 3, 1], 4), ([1], 0), ([1], 1)):
        for number, (_, turn) in drawn(llm, order, company).items():
            assert turn.tokens.tolist() == together[number][1].tokens.tolist()
    stop = llm.get_tokenizer().eos_token_id
    prompts = [together[number][0] for number in range(4)]
    offline = generate(
        teacher, prompts, keys=42, samples=range(4), sampler=SAMPLER, max_new_tokens=NEW, head_size=8,
        stop_token_ids=[stop],
    )  # fmt: skip
    count = 0
    for number, turn in enumerate(offline):
        mine = together[number][1]
        assert mine.tokens.tolist() == turn.tokens.tolist()
        # Recorded before the noise: the distribution that a teacher gives.
        assert np.abs(mine.logprobs - turn.logprobs).max() < 1e-3
        assert np.abs(mine.heads.logprobs - turn.heads.logprobs).max() < 1e-3
        assert mine.sampler.temperature == pytest.approx(0.8)
        count += len(turn.tokens)
    least = min(float(turn.margins.min()) for turn in offline)
    print(f"vLLM keyed: {count} of {count} tokens drawn again by transformers; smallest margin {least:.2g}")


def test_ordinary_requests_in_the_same_batch_are_what_they_are_alone(llm: Any) -> None:
    from vllm import SamplingParams

    from rollstore.replay.samplers.vllm import keyed, recorded

    plain = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=NEW, logprobs=0)
    (alone,) = llm.generate(FOUR[:1], plain, use_tqdm=False)
    mixed = llm.generate([FOUR[1], FOUR[0]], [keyed(SAMPLER, key=1, sample=0, max_tokens=NEW), plain], use_tqdm=False)
    assert mixed[1].outputs[0].token_ids == alone.outputs[0].token_ids
    found = [next(iter(one.values())).logprob for one in mixed[1].outputs[0].logprobs]
    wanted = [next(iter(one.values())).logprob for one in alone.outputs[0].logprobs]
    assert np.abs(np.array(found) - np.array(wanted)).max() < 1e-3
    recorded(mixed[0], SAMPLER, key=1, sample=0)


def test_what_cannot_be_honoured_is_refused_by_the_engine(llm: Any) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from rollstore.replay.samplers.vllm import request

    told = request(SAMPLER, key=1, sample=0)
    for name, options in {
        "presence_penalty": {"temperature": 0.0, "presence_penalty": 0.5},
        "repetition_penalty": {"temperature": 0.0, "repetition_penalty": 1.1},
        "temperature": {"temperature": 0.7},
        "logit_bias": {"temperature": 0.0, "logit_bias": {1: 2.0}},
        "min_tokens": {"temperature": 0.0, "min_tokens": 2},
    }.items():
        with pytest.raises(VLLMValidationError, match=f"{name}: a keyed request wants"):
            llm.generate(FOUR[:1], SamplingParams(extra_args=told, max_tokens=4, **options), use_tqdm=False)
