"""The engine's answer on its way to the client: whole, as a stream of events, or byte for byte."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable

import httpx

from rollstore.writers.gateway.asgi import Send, passed
from rollstore.writers.gateway.asking import Asked, Events, begins_events, payload, shown, shown_event
from rollstore.writers.gateway.record import Record

LOG = logging.getLogger("rollstore")

_BEGINNING = 16
"""Bytes by which a stream is known that its header does not name."""

READABLE = ("", "identity", "gzip", "deflate")
"""Content encodings that are undone here, though the engine was asked for none."""


def encoding(response: httpx.Response) -> str:
    """How the engine encoded its reply."""
    return response.headers.get("content-encoding", "").strip().lower()


def is_stream(response: httpx.Response) -> bool:
    """Whether a reply comes as events."""
    return response.headers.get("content-type", "").strip().lower().startswith("text/event-stream")


async def pass_stream(response: httpx.Response, ask: Asked, record: Record, send: Send) -> None:
    """Events as they come. Each is handed over before the client can see it, and the record before the end."""
    await _pass_events(response, b"", response.aiter_bytes(), ask, record, send)


async def _pass_events(
    response: httpx.Response, begun: bytes, coming: AsyncIterator[bytes], ask: Asked, record: Record, send: Send
) -> None:
    events = Events()
    await _start(response, send, without=(b"content-length", b"content-encoding"))
    try:
        await _events(list(events.cut(begun)), ask, record, send)
        async for data in coming:
            await _events(list(events.cut(data)), ask, record, send)
    except httpx.HTTPError as error:
        await record.end("engine_abort")
        LOG.warning("the engine's reply was cut: %s", str(error) or type(error).__name__)
        return  # without an end, so that the server closes the connection and the client sees the cut too
    rest = events.rest()
    if rest:
        await _events([rest], ask, record, send)
    await record.end()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(events: list[bytes], ask: Asked, record: Record, send: Send) -> None:
    found = [(event, payload(event)) for event in events]
    await record.streamed([data for _, data in found if data and data != b"[DONE]"])
    for event, data in found:
        if data == b"[DONE]":
            await record.end()
        visible = shown_event(event, data, ask.hidden) if data and data != b"[DONE]" else event
        if visible:
            await send({"type": "http.response.body", "body": visible, "more_body": True})


async def pass_whole(response: httpx.Response, ask: Asked, record: Record, send: Send) -> None:
    """A reply in one piece; a stream, if it begins like one."""
    coming, came, begun = response.aiter_bytes(), list[bytes](), b""
    try:
        async for data in coming:
            came.append(data)
            if len(begun) < _BEGINNING:
                begun += data
                if begins_events(begun):
                    await _pass_events(response, begun, coming, ask, record, send)
                    return
    except httpx.HTTPError as error:
        await record.end("engine_abort")
        LOG.warning("the engine's reply was cut: %s", str(error) or type(error).__name__)
        await _start(response, send)  # and no body: the client sees the cut too
        return
    body = b"".join(came)
    record.parts.append(body)
    visible = shown(body, ask.hidden)
    await _start(response, send, without=(b"content-encoding",), size=len(visible))
    await record.end()  # as late as can be: it wakes the recording thread, which competes with this one
    await send({"type": "http.response.body", "body": visible, "more_body": False})


async def pass_raw(response: httpx.Response, send: Send) -> None:
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
    headers = passed(response.headers.raw, without=dropped)
    if size is not None:
        headers.append((b"content-length", b"%d" % size))
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
