"""`rollstore gateway` killed with SIGKILL while calls and streams are under way, and started again: nothing it answered
is lost, and its conversations go on."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

import rollstore
from rollstore import Rollout
from rollstore.writers.gateway import Conversations
from rollstore.writers.gateway.call import Call, End, Told
from rollstore.writers.openai import Server
from tests.writers.upstream import END, STREAM, Engine, Got, Step, answer, assistant, chat, event, part, user

SERVER = Server(logprob_kind="behavior", defaults={"temperature": 1.0})


class Running:
    """A gateway as a process."""

    def __init__(self, store: Path, upstream: str, *more: str) -> None:
        command = [
            sys.executable, "-m", "rollstore", "gateway", "--upstream", upstream, "--store", str(store), "--port", "0",
            "--logprob-kind", "behavior", "--default", "temperature=1.0", "--json", *more,
        ]  # fmt: skip
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
        self.said = (self.process.stderr or sys.stdin).readline()
        self.address = self.said.split()[-1]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.address, timeout=60, trust_env=False, verify=False)

    def kill(self) -> None:
        self.process.kill()

    def stop(self) -> Any:
        """What it says at its end."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=60)
        return json.loads(out) if out else None


@contextmanager
def running(store: Path, upstream: str, *more: str) -> Iterator[Running]:
    gateway = Running(store, upstream, *more)
    try:
        yield gateway
    finally:
        gateway.kill()
        gateway.process.communicate()


def prompt_of(messages: Sequence[dict[str, str]]) -> list[int]:
    """Ids of a chat: two for what a user says, and for an assistant those that were drawn."""
    return [token for said in messages for token in ids_of(said["content"])]


def ids_of(text: str) -> list[int]:
    return [1000 + int(text[1:]), 3] if text[0] == "u" else [2000 + int(text[1:]), 2500, 9]


def reply_to(request: dict[str, Any]) -> list[Any]:
    """The parts of the reply, the same whenever it is asked for: a whole one, or one part for each token."""
    prompt = prompt_of(request["messages"])
    text = f"a{sum(prompt) % 400}"
    tokens = ids_of(text)
    if not request.get("stream"):
        return [chat(prompt, tokens, text)]
    parts = [part([token], prompt=prompt if n == 0 else None) for n, token in enumerate(tokens)]
    parts[0]["choices"][0]["delta"]["content"] = text
    parts[-1]["choices"][0]["finish_reason"] = "stop"
    return parts


class Answers:
    """An engine that kills the gateway in the middle of some replies: behind a part of a stream that its client has
    seen, or at the very moment in which it sends the reply."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kill_next: str | None = None
        self.gateway: Running | None = None
        self.seen, self.dead = threading.Event(), threading.Event()
        self.parts = 0

    def __call__(self, got: Got) -> list[Step]:
        parts = reply_to(got.json)
        if self.kill_next is None:
            return [STREAM, *map(event, parts), event(b"[DONE]"), END] if len(parts) > 1 else [answer(parts[0])]
        self.kill_next = None
        if len(parts) == 1:
            return [self._kill, answer(parts[0])]
        self.parts = self.random.randrange(1, len(parts))
        return [STREAM, *map(event, parts[: self.parts]), self.dead]

    def _kill(self, connection: Any) -> None:
        assert self.gateway is not None
        self.gateway.kill()


def shape(rows: Sequence[Rollout]) -> list[Any]:
    """What was recorded, without ids that are drawn and times."""
    by_id: dict[str, list[Any]] = {}
    for row in sorted(rows, key=lambda row: row.segment):
        said = (
            row.segment, row.segment_cause, row.tokens.tolist(), row.action_mask.tolist(), row.logprobs.to_list(),
            row.ending, row.ending_reason, row.reward, row.metadata, row.weight_version_min, row.weight_version_max,
            None if row.weight_versions is None else row.weight_versions.to_list(),
        )  # fmt: skip
        by_id.setdefault(row.rollout_id, []).append(said)
    named = [(name if len(name) < 5 else "", segments) for name, segments in by_id.items()]
    return sorted(named, key=repr)


def without_kills(events: Sequence[Any]) -> list[Any]:
    """What a gateway records of these events when nobody kills it."""
    rows: list[Rollout] = []

    class Sink:
        def append(self, data: list[Rollout]) -> None:
            rows.extend(data)

        def flush(self, *, sync: bool = False) -> None: ...

        def close(self) -> None: ...

    conversations = Conversations(Sink(), server=SERVER)
    for one in events:
        conversations.append(one)
    conversations.close()
    return shape(rows)


class Client:
    """Three conversations in turn, two of them named, by call and by stream; and what should be recorded of it."""

    def __init__(self, path: Path, seed: int, upstream: Engine, answers: Answers) -> None:
        self.path, self.upstream, self.answers = path, upstream, answers
        self.random = random.Random(seed)
        self.messages: dict[str, list[dict[str, str]]] = {"r0": [], "r1": [], "": []}
        self.weights: tuple[str, ...] = ()
        self.count = itertools.count()
        self.events: list[list[Any]] = []
        """For each step: the events that may have been recorded, one of them or none (None)."""

    def run(self, steps: int, kills: set[int]) -> Any:
        gateway = self.start()
        try:
            for step in range(steps):
                name = self.random.choice(list(self.messages))
                stream = self.random.random() < 0.5
                if step in kills:
                    self.killed(gateway, name, stream)
                    gateway = self.start()
                self.answered(gateway, name, stream)
                if self.random.random() < 0.2:
                    version = step
                    with gateway.client() as client:
                        assert client.post("/rollstore/weights", json={"version": version}).status_code == 200
                    self.weights = (str(version),)
                    self.events.append([Told(weights=self.weights)])
                if self.random.random() < 0.3:
                    gateway.kill()
                    gateway.process.communicate()
                    gateway = self.start()
            with gateway.client() as client:
                assert client.post("/rollstore/end", json={"rollout_id": "r0", "reward": 0.5}).status_code == 202
            self.events.append([End(rollout_id="r0", fields={"reward": 0.5})])
            gateway.kill()
            gateway.process.communicate()
            gateway = self.start()
            return gateway.stop()
        finally:
            assert self.answers.gateway is not None  # the last one, also where it did not start
            self.answers.gateway.kill()
            self.answers.gateway.process.communicate()

    def start(self) -> Running:
        self.answers.gateway = gateway = Running(self.path, self.upstream.address)
        assert gateway.said.startswith("listening"), gateway.said
        return gateway

    def request(self, name: str, stream: bool) -> tuple[dict[str, Any], dict[str, str]]:
        if not self.messages[name]:
            self.messages[name] = [user(f"u{next(self.count)}")]
        headers = {"x-rollstore-rollout": name} if name else {}
        return {"messages": self.messages[name], **({"stream": True} if stream else {})}, headers

    def call(self, request: dict[str, Any], name: str, parts: list[Any], cut: str | None = None) -> Call:
        return Call(
            request=json.dumps(request).encode(), parts=[json.dumps(one).encode() for one in parts], cut=cut,
            rollout_id=name or None, weights=self.weights,
        )  # fmt: skip

    def answered(self, gateway: Running, name: str, stream: bool) -> None:
        request, headers = self.request(name, stream)
        with gateway.client() as client:
            reply = client.post("/v1/chat/completions", json=request, headers=headers)
        assert reply.status_code == 200
        parts = reply_to(request)
        self.events.append([self.call(request, name, parts)])
        said = parts[0]["choices"][0].get("message") or parts[0]["choices"][0]["delta"]
        self.messages[name] = [*self.messages[name], assistant(said["content"]), user(f"u{next(self.count)}")]

    def killed(self, gateway: Running, name: str, stream: bool) -> None:
        """A call in the middle of which the gateway dies. Its client asks again later."""
        request, headers = self.request(name, stream)
        self.answers.kill_next = "now"
        self.answers.dead.clear()
        came = b""
        with gateway.client() as client, suppress(httpx.HTTPError):
            streamed = client.stream("POST", "/v1/chat/completions", json=request, headers=headers)
            with streamed as response:
                for data in response.iter_raw():
                    came += data
                    if stream and came.count(b"\n\n") == self.answers.parts:
                        gateway.kill()
        gateway.process.communicate()
        self.answers.dead.set()
        parts = reply_to(request)
        if stream:  # what its client saw is recorded
            self.events.append([self.call(request, name, parts[: self.answers.parts], "cancelled")])
        else:
            whole = self.call(request, name, parts)
            self.events.append([whole] if came else [whole, None])  # answered, or perhaps not even seen


@pytest.mark.parametrize("seed", [4])
def test_a_killed_gateway_goes_on_where_it_was_and_everything_is_recorded_once(tmp_path: Path, seed: int) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    answers = Answers(seed)
    engine = Engine(answers)
    client = Client(tmp_path / "s", seed, engine, answers)
    try:
        found = client.run(6, {1, 3, 4})
    finally:
        answers.dead.set()
        engine.close()
    table = store.scan("rollouts").read_all()
    keys = list(zip(table["rollout_id"].to_pylist(), table["segment"].to_pylist(), strict=True))
    assert len(keys) == len(set(keys))  # nothing was written twice
    rows = [segment for name in dict.fromkeys(name for name, _ in keys) for segment in store.get(name)]
    worlds = itertools.product(*client.events)
    assert shape(rows) in [without_kills([one for one in world if one is not None]) for world in worlds]
    assert (found["damaged"], found["refused"]) == (0, 0)
    assert store.verify() == []


def test_the_second_gateway_on_one_state_is_refused_in_one_line(tmp_path: Path) -> None:
    rollstore.open(tmp_path / "s", create=True)
    with running(tmp_path / "s", "http://127.0.0.1:9") as first:
        assert first.said.startswith("listening")
        with running(tmp_path / "s", "http://127.0.0.1:9") as second:
            second.process.wait(60)
            assert second.process.returncode != 0
            assert "s.gateway: wanted a state that no other gateway uses" in second.said
            assert "--state" in second.said
        with running(tmp_path / "s", "http://127.0.0.1:9", "--state", str(tmp_path / "own")) as third:
            assert third.said.startswith("listening")
