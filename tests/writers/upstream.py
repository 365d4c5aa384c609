"""A scripted engine behind real HTTP on loopback, and a gateway in front of it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

import rollstore
from rollstore import Rollout
from rollstore.store.spool import Spool
from rollstore.writers.gateway import Conversations, Gateway
from rollstore.writers.gateway.calls import Calls
from rollstore.writers.openai import Server
from rollstore.writers.queued import Queued

CUT = object()
"""A step of a script: the connection breaks here."""

Step = Any
"""Bytes to send, an Event to wait for, a function to call, or CUT."""


@dataclass
class Got:
    """One request as the engine got it."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Engine:
    """Answers each request with the steps of `script(request)`."""

    def __init__(self, script: Callable[[Got], Sequence[Step]]) -> None:
        self.got: list[Got] = []
        self._script = script
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines, suppress(OSError):
            while line := lines.readline():
                headers: dict[str, str] = {}
                while (header := lines.readline().strip()) and b":" in header:
                    name, _, value = header.partition(b":")
                    headers[name.decode().lower()] = value.strip().decode()
                got = Got(line.decode().strip(), headers, lines.read(int(headers.get("content-length", 0))))
                self.got.append(got)
                for step in self._script(got):
                    if step is CUT:
                        return
                    if isinstance(step, threading.Event):
                        assert step.wait(30)
                    elif callable(step):
                        step(connection)
                    else:
                        connection.sendall(step)

    def close(self) -> None:
        """Closing twice is no error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a connection
        self._socket.close()
        for thread in list(self._threads):
            thread.join()


def answer(body: Any, status: str = "200 OK", *headers: str, kind: str = "application/json") -> bytes:
    """A whole answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(data)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def event(data: Any) -> bytes:
    """One event as a chunk of a stream."""
    text = b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(text), text)


def chat(prompt: list[int], tokens: list[int], text: str = "hi", finish: str | None = "stop", **more: Any) -> Any:
    """A chat's reply with everything asked for."""
    content = [{"token": f"token_id:{token}", "logprob": -0.25, "top_logprobs": []} for token in tokens]
    choice = {
        "index": 0, "message": {"role": "assistant", "content": text}, "logprobs": {"content": content},
        "finish_reason": finish, "stop_reason": None, "token_ids": tokens,
    }  # fmt: skip
    return {"id": "c", "model": "m", "prompt_token_ids": prompt, "choices": [{**choice, **more}]}


def part(tokens: list[int] | None, text: str = "", prompt: list[int] | None = None, finish: str | None = None) -> Any:
    """One part of a streamed chat."""
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": finish, "logprobs": None}
    if tokens is not None:
        choice["token_ids"] = tokens
        choice["logprobs"] = {"content": [{"token": f"token_id:{t}", "logprob": -0.5} for t in tokens]}
    return {"id": "s", "choices": [choice], **({"prompt_token_ids": prompt} if prompt else {})}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@dataclass
class World:
    """A client, the gateway it talks to, the engine behind, and the store."""

    client: httpx.Client
    engine: Engine
    gateway: Gateway
    recording: Queued
    path: Path
    now: list[float] = field(default_factory=lambda: [0.0])

    def post(self, request: dict[str, Any], path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(path, json=request, headers=named)

    def rows(self) -> list[Rollout]:
        """Everything recorded, in the order it was drawn; all conversations end."""
        self.recording.close()
        store = rollstore.open(self.path)
        ids = store.scan("rollouts").read_all()["rollout_id"].to_pylist()
        made = [segment for name in dict.fromkeys(ids) for segment in store.get(name)]
        began = {row.rollout_id: row.requested_at for row in made if row.segment == 0}
        return sorted(made, key=lambda row: (str(began[row.rollout_id]), row.sample_index or 0, row.segment))


@contextmanager
def world(
    path: Path,
    script: Callable[[Got], Sequence[Step]],
    *,
    sink: Any = None,
    heads: int = 0,
    log: Any = None,
    **queue: Any,
) -> Iterator[World]:
    """A gateway in a thread, between a client and a scripted engine. `sink` stands in for the store's writer.

    Its log of calls is beside the store, or on the file system `log`.
    """
    engine = Engine(script)
    writer = rollstore.open(path, create=True).writer() if sink is None else sink
    calls = Calls(Spool(f"{path}.gateway") if log is None else log, "store")
    try:
        with between(engine.address, writer, heads=heads, log=calls, **queue) as (client, gateway, recording, now):
            yield World(client, engine, gateway, recording, path, now)
    finally:
        engine.close()


@contextmanager
def between(
    upstream: str, writer: Any, *, heads: int = 0, log: Calls | None = None, **queue: Any
) -> Iterator[tuple[httpx.Client, Gateway, Queued, list[float]]]:
    """(client, gateway, recording, the time that is now for it): a gateway in a thread, before an engine."""
    now = [0.0]
    server = Server(logprob_kind="behavior", defaults={"temperature": 1.0})
    conversations = Conversations(writer, server=server, idle_seconds=60, clock=lambda: now[0], log=log)
    if log is not None:
        conversations.restore(lambda row: False)
    recording = Queued(conversations, **queue)
    gateway = Gateway(upstream, recording, conversations, heads=heads)
    serving = uvicorn.Server(
        uvicorn.Config(gateway.application, lifespan="on", ws="none", log_level="critical", access_log=False)
    )
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]})
    thread.start()
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        with httpx.Client(base_url=address, timeout=300, trust_env=False, verify=False) as client:
            yield client, gateway, recording, now
    finally:
        serving.should_exit = True
        thread.join()
        listening.close()
        recording.close()
