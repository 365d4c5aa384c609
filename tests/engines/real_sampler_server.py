"""Keyed noise behind a real vLLM server: the same tokens as offline, with what was recorded before the noise."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rollstore import Sampler
from rollstore.replay.samplers.slots import read, request, turn
from rollstore.replay.samplers.transformers import generate
from tests.engines import serving
from tests.engines.settings import PROMPTS

SAMPLER = Sampler(temperature=0.8, top_k=50, top_p=0.9)
FOUR = [*PROMPTS, "Once upon a time there was"]
NEW = 16


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def server(folder: str, records: Path) -> Iterator[httpx.Client]:
    processor = "rollstore.replay.samplers.vllm:KeyedNoise"
    with serving.server(
        folder, "--logits-processors", processor, environment={"ROLLSTORE_VLLM_RECORDS": str(records)}
    ) as client:
        yield client


def asked(server: httpx.Client, number: int, *, ordinary: bool = False) -> Any:
    body: dict[str, Any] = {
        "model": "smol", "prompt": FOUR[number], "max_tokens": NEW, "temperature": 0, "return_token_ids": True,
    }  # fmt: skip
    if ordinary:
        body |= {"temperature": 1.0, "seed": number}
    else:
        body["vllm_xargs"] = request(SAMPLER, key=2**63 + 9, sample=number, head_size=4)
    response = server.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_a_served_keyed_request_draws_what_transformers_draws_in_any_company(
    server: httpx.Client, records: Path, teacher: Any
) -> None:
    with ThreadPoolExecutor(8) as pool:  # keyed and ordinary requests at the same time
        ordinary = [pool.submit(asked, server, number, ordinary=True) for number in range(4)]
        keyed = [pool.submit(asked, server, number) for number in (3, 1, 0, 2)]
        replies = {number: one.result() for number, one in zip((3, 1, 0, 2), keyed, strict=True)}
        assert all(one.result()["token_ids"] for one in ordinary)
    prompts = [replies[number]["prompt_token_ids"] for number in range(4)]
    offline = generate(
        teacher, prompts, keys=2**63 + 9, samples=range(4), sampler=SAMPLER, max_new_tokens=NEW, head_size=4,
        stop_token_ids=[2],
    )  # fmt: skip
    for number, wanted in enumerate(offline):
        tokens = replies[number]["token_ids"]
        assert tokens == wanted.tokens.tolist()
        mine = turn(
            read(records, key=2**63 + 9, sample=number), tokens, start=len(prompts[number]),
            finish=replies[number]["finish_reason"], sampler=SAMPLER, key=2**63 + 9, sample=number, head_size=4,
            limit=NEW,
        )  # fmt: skip
        assert np.abs(mine.logprobs - wanted.logprobs).max() < 1e-3
    assert asked(server, 0)["token_ids"] == replies[0]["token_ids"]  # alone as in company


def test_a_served_request_with_a_penalty_is_refused(server: httpx.Client) -> None:
    body = {
        "model": "smol", "prompt": "a", "max_tokens": 2, "temperature": 0, "presence_penalty": 1.0,
        "vllm_xargs": request(SAMPLER, key=1, sample=1),
    }  # fmt: skip
    response = server.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert "presence_penalty: a keyed request wants 0.0, got 1.0" in response.text
