"""Replies of a real vLLM server on loopback, through the OpenAI writer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from rollstore import Rollout
from rollstore.replay.score import score_rollouts
from rollstore.schema import to_table
from rollstore.writers import openai
from tests.engines import serving
from tests.engines.settings import PROMPTS

IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
SAMPLING = {"model": "smol", "temperature": 0.8, "top_p": 0.9, "top_k": 50, "max_tokens": 16, "seed": 5}
SERVER = openai.Server(logprob_kind="behavior", context=256)


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[httpx.Client]:
    options = ("--logprobs-mode", "processed_logprobs", "--enable-scale-out")
    with serving.server(folder, *options, environment={"VLLM_SERVER_DEV_MODE": "1"}) as client:
        yield client


def posted(server: httpx.Client, path: str, request: dict[str, Any]) -> bytes:
    response = server.post(path, json=request)
    assert response.status_code == 200, response.text
    return response.content


def agreed(rollouts: list[Rollout], teacher: Any) -> None:
    to_table(rollouts)
    found = [
        np.abs(row.logprobs.values - own).mean()
        for row, (own, _, _) in zip(rollouts, score_rollouts(teacher, rollouts), strict=True)
    ]
    assert max(found) < 1e-4


def test_a_chat_agrees_with_the_checkpoint(server: httpx.Client, teacher: Any) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    request = {**SAMPLING, **IDS, "messages": messages, "logprobs": True, "top_logprobs": 4, "n": 2}
    made = openai.rollouts(posted(server, "/v1/chat/completions", request), request, server=SERVER)
    agreed(made, teacher)
    assert [row.samplers[0].seed for row in made] == [5, 6]
    assert {row.heads.size for row in made} <= {3, 4}
    for row, (_, heads, _) in zip(made, score_rollouts(teacher, made), strict=True):
        assert np.abs(row.heads.logprobs - heads).max() < 1e-3
    assert {(row.engine.name, row.policy) for row in made} == {("vllm", "smol")}


def test_a_chat_of_texts_has_log_probs_and_no_heads(server: httpx.Client, teacher: Any) -> None:
    messages = [{"role": "user", "content": "Three fruits?"}]
    request = {**SAMPLING, "return_token_ids": True, "messages": messages, "logprobs": True, "top_logprobs": 4}
    made = openai.rollouts(posted(server, "/v1/chat/completions", request), request, server=SERVER)
    agreed(made, teacher)
    assert made[0].heads is None


def test_completions_of_several_prompts_agree_with_the_checkpoint(server: httpx.Client, teacher: Any) -> None:
    request = {**SAMPLING, **IDS, "prompt": PROMPTS, "logprobs": 4}
    made = openai.rollouts(posted(server, "/v1/completions", request), request, server=SERVER)
    agreed(made, teacher)
    assert {row.heads.size for row in made} == {4}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_is_the_whole_reply(server: httpx.Client, path: str) -> None:
    asks: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
        if "chat" in path
        else {"prompt": PROMPTS[0], "logprobs": 2}
    )
    request = {**SAMPLING, **IDS, **asks}
    whole = openai.rollouts(posted(server, path, request), request, server=SERVER)[0]
    raw = posted(server, path, {**request, "stream": True, "stream_options": {"include_usage": True}})
    streamed = openai.rollouts(openai.joined(openai.events(raw)), request, server=SERVER)[0]
    to_table([streamed])
    assert streamed.tokens.tolist() == whole.tokens.tolist()
    assert np.allclose(streamed.logprobs.values, whole.logprobs.values, atol=1e-4)
    assert (streamed.ending, streamed.ending_reason) == (whole.ending, whole.ending_reason)


def test_token_ids_in_and_out_have_ranks_and_the_version_of_the_weights(server: httpx.Client, teacher: Any) -> None:
    posted(server, "/update_weight_version", {"new_version": "step-9"})
    request = {
        "token_ids": [1, 504, 3575, 282],
        "sampling_params": {"temperature": 0.8, "top_k": 5, "max_tokens": 6, "logprobs": 3, "seed": 1},
    }
    made = openai.rollouts(posted(server, "/inference/v1/generate", request), request, server=SERVER)
    agreed(made, teacher)
    (row,) = made
    assert set(row.weight_versions.to_list()) == {9}
    assert row.ranks is not None
    assert min(row.ranks.to_list()) >= 1
    assert (row.ending, row.ending_reason) == ("truncated", "max_tokens")


def test_without_ids_the_reply_is_refused(server: httpx.Client) -> None:
    request = {**SAMPLING, "prompt": PROMPTS[0], "logprobs": 1}
    reply = posted(server, "/v1/completions", request)
    with pytest.raises(ValueError, match="token ids"):
        openai.rollouts(reply, request)
