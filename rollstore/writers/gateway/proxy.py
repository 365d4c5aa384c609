"""The proxy itself: an ASGI application that passes calls on, and hands what it saw to the recording."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.routing import Route

from rollstore.errors import RollstoreError, WriteError
from rollstore.writers.gateway.asking import PATHS, Asked, Events, asked, payload, shown, shown_event
from rollstore.writers.gateway.call import Call, End, Expire
from rollstore.writers.gateway.columns import columns, ended
from rollstore.writers.gateway.conversations import Conversations
from rollstore.writers.queued import Queued

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

LOG = logging.getLogger("rollstore")

NAME, COLUMNS = b"x-rollstore-rollout", b"x-rollstore-columns"
"""Headers by which a client names its rollout, and says what no engine knows. They are not passed on."""

HOPS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)
"""Headers that are of one connection, not of the call."""

CONNECT_SECONDS = 10.0
EXPIRE_SECONDS = 5.0


class Gateway:
    """Passes every request on to `upstream`; calls of a model are recorded.

    `recording` takes what was seen; a call waits for one of its places, or is answered with 503 where it is full under
    `fail`. heads: likeliest tokens to ask for with each call.
    """

    def __init__(self, upstream: str, recording: Queued, conversations: Conversations, *, heads: int = 0) -> None:
        self._base = httpx.URL(upstream)
        if self._base.scheme not in ("http", "https") or not self._base.host:
            raise ValueError(f"gateway: upstream: wanted an http or https address, got {_without_secret(self._base)}")
        if heads < 0:
            raise ValueError(f"gateway: heads: wanted 0 or more, got {heads}")
        self._path = self._base.raw_path.rstrip(b"/")
        self._recording, self._conversations, self._heads = recording, conversations, heads
        # The transport alone: redirects, cookies and credentials are the client's business, and cost time.
        self._transport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
            verify=self._base.scheme == "https",  # certificates take a while to load
        )
        self.application = Starlette(
            routes=[
                Route("/rollstore/end", _Endpoint(self._end), methods=["POST"]),
                Route("/rollstore/status", _Endpoint(self._status)),
                Route("/{path:path}", _Endpoint(self._any)),
            ],
            lifespan=self._lifespan,
        )

    def status(self) -> dict[str, Any]:
        """What happened so far, by name."""
        counts = self._conversations.counts
        names = ("calls", "cut", "segments", "refused", "not recorded", "ends of nothing")
        return {
            **{name.replace(" ", "_"): counts[name] for name in names},
            "open": self._conversations.open,
            "waiting": self._recording.waiting,
        }

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        timer = asyncio.create_task(self._expire())
        try:
            yield
        finally:
            timer.cancel()
            await self._transport.aclose()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_SECONDS)
            if self._recording.waiting < self._recording.limit:
                await self._recording.append_async(Expire())

    async def _status(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _reply(send, 200, self.status())

    async def _end(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`{"rollout_id": ..., "reward": ..., ...}`: the rollout is over."""
        try:
            name, fields = ended(await _body(receive))
            await self._recording.append_async(End(rollout_id=name, fields=fields))
        except WriteError as error:
            await _refuse(send, 503, error)
        except ValueError as error:
            await _refuse(send, 400, error)
        else:
            await _reply(send, 202, {"rollout_id": name})

    async def _any(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["method"] != "POST" or not path.endswith(PATHS):
            await self._pass(scope, receive, send)
            return
        body = await _body(receive)
        named = {name: value for name, value in scope["headers"] if name in (NAME, COLUMNS)}
        try:
            rollout_id = named[NAME].decode() if NAME in named else None
            fields = columns(named[COLUMNS]) if COLUMNS in named else {}
            ask = asked(path, body, self._heads)
            if ask is not None and rollout_id is not None and _samples(body) > 1:
                raise ValueError("one rollout has one sample: wanted n of 1")
        except ValueError as error:
            await _refuse(send, 400, error)
            return
        if ask is None:
            self._conversations.counts["not recorded"] += 1
            LOG.warning("a call of %s was passed on and not recorded: it is no JSON object, echoes or uses beams", path)
            await self._forward(scope, body, None, None, send)
            return
        try:
            await self._recording.reserve_async()
        except RollstoreError as error:
            await _refuse(send, 503, error)
            return
        record = _Record(self._recording, ask.body, rollout_id, fields)
        passing = asyncio.create_task(self._forward(scope, ask.body, ask, record, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((passing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not record.ended:  # the client is gone
                record.end("cancelled")
                passing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await passing
        finally:
            leaving.cancel()
            passing.cancel()
            record.end("cancelled")  # nothing, where it has ended

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Anything that is no call of a model."""
        await self._forward(scope, await _body(receive), None, None, send)

    async def _forward(self, scope: Scope, body: bytes, ask: Asked | None, record: _Record | None, send: Send) -> None:
        """Send the request to the engine and its answer to the client, as it comes."""
        raw = scope.get("raw_path") or scope["path"].encode()
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        headers = _passed(scope["headers"], without=(b"host", b"content-length", NAME, COLUMNS))
        if ask is not None:  # the reply is read here, so it has to be readable
            headers = [(name, value) for name, value in headers if name != b"accept-encoding"]
            headers.append((b"accept-encoding", b"identity"))
        request = httpx.Request(
            scope["method"],
            self._base.copy_with(raw_path=self._path + raw + query),
            headers=headers,
            content=body,
            extensions={"timeout": {"connect": CONNECT_SECONDS}},
        )
        try:
            response = await self._transport.handle_async_request(request)
        except httpx.HTTPError as error:
            if record is not None:
                record.end("engine_abort")
            await _refuse(send, 502, f"upstream {_without_secret(self._base)}: {str(error) or type(error).__name__}")
            return
        try:
            if ask is None or record is None:
                await _raw(response, send)
            elif response.status_code != 200:
                record.failed(response.status_code)
                await _raw(response, send)
            elif response.headers.get("content-type", "").startswith("text/event-stream"):
                await _stream(response, ask, record, send)
            else:
                await _whole(response, ask, record, send)
        finally:
            await response.aclose()


class _Endpoint:
    """A plain ASGI application, to which Starlette hands the connection as it is."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(_GoneError):
            await self._answer(scope, receive, send)


class _GoneError(Exception):
    """The client left before its request was whole."""


class _Record:
    """A reserved place in the recording, filled once."""

    def __init__(self, recording: Queued, request: bytes, rollout_id: str | None, fields: Mapping[str, Any]) -> None:
        self._recording: Queued | None = recording
        self._call = Call(request=request, parts=(), rollout_id=rollout_id, fields=fields, started_at=datetime.now(UTC))
        self.parts: list[bytes] = []

    @property
    def ended(self) -> bool:
        return self._recording is None

    def end(self, cut: str | None = None) -> None:
        """Hand over what was seen. Only the first end counts."""
        if self._recording is not None:
            recording, self._recording = self._recording, None
            recording.put(replace(self._call, parts=self.parts, cut=cut, finished_at=datetime.now(UTC)))

    def failed(self, status: int) -> None:
        """The engine refused: nothing was drawn."""
        self.parts = [b'{"error": "status %d"}' % status]
        self.end("engine_abort")


async def _stream(response: httpx.Response, ask: Asked, record: _Record, send: Send) -> None:
    """Events as they come. The record is handed over before the client can see the end."""
    events = Events()
    await _start(response, send, without=(b"content-length",))
    try:
        async for data in response.aiter_raw():
            for event in events.cut(data):
                await _event(event, ask, record, send)
    except httpx.HTTPError as error:
        record.end("engine_abort")
        LOG.warning("the engine's reply was cut: %s", str(error) or type(error).__name__)
        return  # without an end, so that the server closes the connection and the client sees the cut too
    rest = events.rest()
    if rest:
        await _event(rest, ask, record, send)
    record.end()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _event(event: bytes, ask: Asked, record: _Record, send: Send) -> None:
    data = payload(event)
    if data == b"[DONE]":
        record.end()
    elif data:
        record.parts.append(data)
        event = shown_event(event, data, ask.hidden)
    await send({"type": "http.response.body", "body": event, "more_body": True})


async def _whole(response: httpx.Response, ask: Asked, record: _Record, send: Send) -> None:
    try:
        body = b"".join([data async for data in response.aiter_raw()])
    except httpx.HTTPError as error:
        record.end("engine_abort")
        LOG.warning("the engine's reply was cut: %s", str(error) or type(error).__name__)
        await _start(response, send)  # and no body: the client sees the cut too
        return
    record.parts.append(body)
    visible = shown(body, ask.hidden)
    await _start(response, send, size=len(visible))
    record.end()
    await send({"type": "http.response.body", "body": visible, "more_body": False})


async def _raw(response: httpx.Response, send: Send) -> None:
    """The answer, byte for byte."""
    await _start(response, send)
    try:
        async for data in response.aiter_raw():
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except httpx.HTTPError as error:
        LOG.warning("the engine's reply was cut: %s", str(error) or type(error).__name__)
        return
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _start(
    response: httpx.Response, send: Send, *, without: Iterable[bytes] = (), size: int | None = None
) -> None:
    dropped = (*without, *(() if size is None else (b"content-length",)))
    headers = _passed(response.headers.raw, without=dropped)
    if size is not None:
        headers.append((b"content-length", b"%d" % size))
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})


def _passed(headers: Iterable[tuple[bytes, bytes]], *, without: Iterable[bytes]) -> Headers:
    dropped = HOPS.union(without)
    return [(name.lower(), value) for name, value in headers if name.lower() not in dropped]


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _GoneError
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _left(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _samples(body: bytes) -> int:
    request = msgspec.json.decode(body)
    return (request.get("sampling_params") or request).get("n") or 1


async def _reply(send: Send, status: int, content: Any) -> None:
    body = msgspec.json.encode(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _refuse(send: Send, status: int, why: object) -> None:
    """An error as OpenAI-compatible servers write it."""
    await _reply(send, status, {"error": {"message": f"rollstore gateway: {why}", "type": "gateway_error"}})


def _without_secret(url: httpx.URL) -> str:
    return str(url.copy_with(userinfo=b"", query=None, fragment=None))
