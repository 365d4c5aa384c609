"""The gateway in front of a real vLLM server: the client sees what it would see without, and the record is exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

import rollstore
from rollstore import Rollout
from rollstore.replay.score import score_rollouts
from rollstore.writers.queued import Queued
from tests.engines import serving
from tests.writers.upstream import assistant, between, user

SAMPLING = {"model": "smol", "temperature": 0.8, "top_p": 0.9, "top_k": 50, "max_tokens": 16, "seed": 5}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Both(NamedTuple):
    """A client of the engine, one of the gateway before it, and what the gateway records."""

    direct: httpx.Client
    through: httpx.Client
    recording: Queued
    store: rollstore.Store

    def rows(self) -> list[Rollout]:
        """All that was recorded, each conversation ended; nothing can be recorded afterwards."""
        self.recording.close()
        ids = self.store.scan("rollouts").read_all()["rollout_id"].to_pylist()
        return [segment for name in dict.fromkeys(ids) for segment in self.store.get(name)]


@pytest.fixture(scope="module")
def direct(folder: str) -> Iterator[httpx.Client]:
    with serving.server(folder, "--logprobs-mode", "processed_logprobs") as client:
        yield client


@pytest.fixture
def both(direct: httpx.Client, tmp_path: Path) -> Iterator[Both]:
    store = rollstore.open(tmp_path / "s", create=True)
    with between(str(direct.base_url), store.writer(), heads=4) as (through, _, recording, _):
        yield Both(direct, through, recording, store)


def same_for_all(reply: Any) -> Any:
    """A reply without what differs from call to call."""
    return {name: value for name, value in reply.items() if name not in ("id", "created")}


def events(client: httpx.Client, path: str, request: dict[str, Any]) -> list[Any]:
    with client.stream("POST", path, json={**request, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [same_for_all(json.loads(line)) for line in lines]


def agreed(rows: list[Rollout], teacher: Any) -> None:
    for row, (own, heads, _) in zip(rows, score_rollouts(teacher, rows), strict=True):
        assert np.abs(row.logprobs.values - own).mean() < 1e-4
        assert np.abs(row.heads.logprobs - heads).max() < 1e-3


ASKS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [user("What is the capital of France?")]}),
    (CHAT, {"messages": [user("Three fruits?")], "logprobs": True, "top_logprobs": 2}),
    (COMPLETIONS, {"prompt": "The capital of France is"}),
    (COMPLETIONS, {"prompt": [1, 504, 3575, 282], "logprobs": 2, "return_token_ids": True}),
]


@pytest.mark.parametrize(("path", "ask"), ASKS)
def test_the_client_sees_what_it_would_see_without_the_gateway(both: Both, path: str, ask: dict[str, Any]) -> None:
    request = {**SAMPLING, **ask}
    direct, through = both.direct.post(path, json=request), both.through.post(path, json=request)
    assert same_for_all(through.json()) == same_for_all(direct.json())
    one, other = events(both.direct, path, request), events(both.through, path, request)
    assert [event for event in other if event["choices"][0]["finish_reason"]] == one[-1:]
    field = "delta" if path == CHAT else "text"
    shown, seen = ([event["choices"][0][field] for event in stream] for stream in (one, other))
    # Asked for ids, the engine also sends the parts that show no text.
    assert [part for part in seen if part] == [part for part in shown if part]
    assert {frozenset(event) for event in other} == {frozenset(event) for event in one}
    rows = both.rows()
    assert len(rows) == 2
    assert rows[0].tokens.tolist() == rows[1].tokens.tolist()


def test_turns_of_a_chat_are_recorded_as_they_were_drawn(both: Both, teacher: Any) -> None:
    messages = [user("Name one colour.")]
    drawn: list[list[int]] = []
    for question in ("And one more?", "Thanks."):
        reply = both.through.post(CHAT, json={**SAMPLING, "messages": messages, "return_token_ids": True}).json()
        (choice,) = reply["choices"]
        drawn.append(choice["token_ids"])
        messages = [*messages, assistant(choice["message"]["content"]), user(question)]
    rows = both.rows()
    assert len({row.rollout_id for row in rows}) == 1
    assert np.concatenate([row.tokens[row.action_mask] for row in rows]).tolist() == drawn[0] + drawn[1]
    agreed(rows, teacher)
    assert [row.segment_cause for row in rows] in ([None], [None, "retokenised"], [None, "template_drop"])


def test_a_stream_that_the_client_leaves_is_cancelled_and_its_part_agrees_with_the_checkpoint(
    both: Both, teacher: Any
) -> None:
    request = {**SAMPLING, "max_tokens": 200, "ignore_eos": True, "prompt": "Once upon a time", "stream": True}
    with both.through.stream("POST", COMPLETIONS, json=request) as response:
        lines = response.iter_lines()
        for _ in range(8):
            next(lines)
    assert both.through.post(COMPLETIONS, json={**SAMPLING, "prompt": "a"}).status_code == 200
    left, _ = sorted(both.rows(), key=lambda row: row.ending)
    assert (left.ending, left.ending_reason) == ("aborted", "cancelled")
    assert 4 <= int(left.action_mask.sum()) < 200
    agreed([left], teacher)
