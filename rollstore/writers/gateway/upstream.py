"""The engine behind the gateway: its address, and what is sent to it."""

from __future__ import annotations

import logging

import httpx

from rollstore.writers.gateway.asgi import Headers, Scope, passed
from rollstore.writers.gateway.asking import PATHS, Asked, asked_beside

LOG = logging.getLogger("rollstore")

NAME, COLUMNS = b"x-rollstore-rollout", b"x-rollstore-columns"
"""Headers by which a client names its rollout, and says what no engine knows. They are not passed on."""

CONNECT_SECONDS = 10.0


class Upstream:
    """Sends requests to an engine, for one event loop. Raises ValueError for an address that would not reach one."""

    def __init__(self, address: str) -> None:
        self._base = _address(address)
        self._path = self._base.raw_path.rstrip(b"/")
        self._lists_at_end = False
        """Whether it refused `return_token_ids` in a streamed chat, as it will again."""
        # The transport alone: redirects, cookies and credentials are the client's business, and cost time.
        self._transport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
            verify=self._base.scheme == "https",  # certificates take a while to load
        )

    def __str__(self) -> str:
        return _without_secret(self._base)

    async def close(self) -> None:
        """Close what is open to it."""
        await self._transport.aclose()

    async def send(self, scope: Scope, body: bytes, ask: Asked | None) -> tuple[httpx.Response, Asked | None]:
        """(the engine's answer, what it was asked in the end) to a client's request. Raises httpx.HTTPError.

        A streamed chat that is refused for the ids that the gateway asked for is asked again in another way: nothing
        was drawn, and its client asked for nothing wrong.
        """
        if ask is None or not scope["path"].endswith(PATHS[0]):
            return await self._send(scope, body, ask), ask
        if self._lists_at_end and (again := asked_beside(ask)) is not None:
            return await self._send(scope, again.body, again), again
        response = await self._send(scope, body, ask)
        if response.status_code != 400 or (again := asked_beside(ask)) is None:
            return response, ask
        try:
            why = b"".join([data async for data in response.aiter_raw()])
        finally:
            await response.aclose()
        if b"return_token_ids" not in why:
            return httpx.Response(400, headers=response.headers.raw, stream=httpx.ByteStream(why)), ask
        self._lists_at_end = True
        LOG.info("the engine lists the ids of streamed chats at their end alone: of a stream that breaks it has none")
        return await self._send(scope, again.body, again), again

    async def _send(self, scope: Scope, body: bytes, ask: Asked | None) -> httpx.Response:
        raw = scope.get("raw_path") or scope["path"].encode()
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        headers = passed(scope["headers"], without=(b"host", b"content-length", NAME, COLUMNS))
        if ask is not None:  # the reply is read here, so it has to be readable
            own: Headers = [(b"accept-encoding", b"identity"), *ask.headers]
            names = {name for name, _ in own}
            headers = [*((name, value) for name, value in headers if name not in names), *own]
        request = httpx.Request(
            scope["method"],
            self._base.copy_with(raw_path=self._path + raw + query),
            headers=headers,
            content=body,
            extensions={"timeout": {"connect": CONNECT_SECONDS}},
        )
        return await self._transport.handle_async_request(request)


def _address(upstream: str) -> httpx.URL:
    """The address of an engine. Raises ValueError on anything that would not reach it; what is secret is not shown."""
    try:
        url = httpx.URL(upstream)
    except httpx.InvalidURL as error:
        raise ValueError(f"gateway: upstream: wanted an http or https address, got none: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"gateway: upstream: wanted an http or https address, got {_without_secret(url)}")
    if url.userinfo:
        raise ValueError(
            f"gateway: upstream: wanted {_without_secret(url)} without a user and password before it: clients send an "
            "authorization header, which is passed on"
        )
    if "?" in upstream or "#" in upstream:
        raise ValueError(
            f"gateway: upstream: wanted {_without_secret(url)} without what follows ? or #: clients send their own "
            "query, which is passed on"
        )
    return url


def _without_secret(url: httpx.URL) -> str:
    return str(url.copy_with(userinfo=b"", query=None, fragment=None))
