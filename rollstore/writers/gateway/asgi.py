"""What the gateway needs of ASGI: requests and answers as bytes, headers as they stand."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

HOPS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)
"""Headers that are of one connection, not of the call."""


class GoneError(Exception):
    """The client left before its request was whole."""


class Endpoint:
    """A plain ASGI application, to which Starlette hands the connection as it is."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(GoneError):
            await self._answer(scope, receive, send)


async def body_of(receive: Receive) -> bytes:
    """The body of a request. Raises GoneError."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise GoneError
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def left(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def passed(headers: Iterable[tuple[bytes, bytes]], *, without: Iterable[bytes]) -> Headers:
    """The headers of a call that go on to the other side."""
    dropped = HOPS.union(without)
    return [(name.lower(), value) for name, value in headers if name.lower() not in dropped]


async def reply(send: Send, status: int, content: Any) -> None:
    """An answer of the gateway's own, as JSON."""
    body = msgspec.json.encode(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def refuse(send: Send, status: int, why: object) -> None:
    """An error as OpenAI-compatible servers write it."""
    await reply(send, status, {"error": {"message": f"rollstore gateway: {why}", "type": "gateway_error"}})
