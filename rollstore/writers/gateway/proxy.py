"""The proxy itself: an ASGI application that passes calls on, and hands what it saw to the recording."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.routing import Route

from rollstore.errors import RollstoreError, WriteError
from rollstore.writers.gateway.asgi import Endpoint, Receive, Scope, Send, body_of, left, refuse, reply
from rollstore.writers.gateway.asking import PATHS, UNRECORDED, Asked, asked
from rollstore.writers.gateway.busy import Busy
from rollstore.writers.gateway.call import End, Expire, Told, widened
from rollstore.writers.gateway.columns import columns, ended, weights
from rollstore.writers.gateway.conversations import Conversations
from rollstore.writers.gateway.passing import READABLE, encoding, is_stream, pass_raw, pass_stream, pass_whole
from rollstore.writers.gateway.record import Record, Recorded
from rollstore.writers.gateway.upstream import COLUMNS, NAME, Upstream
from rollstore.writers.queued import PATIENCE_SECONDS, Queued
from rollstore.writers.settings import samples

LOG = logging.getLogger("rollstore")

EXPIRE_SECONDS = 5.0

REMEMBERED = 10_000
"""Rollouts of which it is known what their client said last, so that the same is not looked at again."""


class Gateway:
    """Passes every request on to `upstream`; calls of a model are recorded.

    `recording` takes what was seen; a call waits for one of its places, or is answered with 503 where it is full under
    `fail`. heads: likeliest tokens to ask for with each call.
    """

    def __init__(self, upstream: str, recording: Queued, conversations: Conversations, *, heads: int = 0) -> None:
        self._upstream = Upstream(upstream)
        if heads < 0:
            raise ValueError(f"gateway: heads: wanted 0 or more, got {heads}")
        self._recording, self._conversations, self._heads = recording, conversations, heads
        self._recorded = Recorded(recording, conversations)
        self._weights = conversations.weights
        self._under_way: set[Record] = set()
        self._busy = Busy(conversations.clock)
        self._ends: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # one end of a rollout at a time
        self._columns: OrderedDict[str, bytes] = OrderedDict()  # what was last said of each rollout
        self.application = Starlette(
            routes=[
                Route("/rollstore/end", Endpoint(self._end), methods=["POST"]),
                Route("/rollstore/weights", Endpoint(self._told), methods=["POST"]),
                Route("/rollstore/status", Endpoint(self._status)),
                Route("/{path:path}", Endpoint(self._any)),
            ],
            lifespan=self._lifespan,
        )

    def status(self) -> dict[str, Any]:
        """What happened so far, by name."""
        counts = self._conversations.counts
        names = ("calls", "cut", "segments", "refused", "left out", "names taken", "not recorded", "ends of nothing")
        return {
            **{name.replace(" ", "_"): counts[name] for name in names},
            "last_not_recorded": self._conversations.last_not_recorded,
            "recovered": counts["recovered"],
            "damaged": counts["damaged"],
            "weights": list(self._weights),
            "open": self._conversations.open,
            "waiting": self._recording.waiting,
            "failing": None if self._recording.error is None else str(self._recording.error),
        }

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        timer = asyncio.create_task(self._expire())
        try:
            yield
        finally:
            timer.cancel()
            await self._upstream.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_SECONDS)
            await self.expire()

    async def expire(self) -> None:
        """End the conversations that are idle, if there is room."""
        expiry = self._busy.expiry(self._conversations.idle_seconds)
        if self._conversations.any_unused(expiry) and self._recording.waiting < self._recording.limit:
            with contextlib.suppress(RollstoreError):  # in a moment again
                await self._take(expiry)

    async def _take(self, event: End | Expire | Told) -> None:
        """Hand an event over when there is room. Raises WriteError where there is none under `fail`."""
        await self._recording.reserve_async()
        try:
            await self._recorded.take_when_written(event)
        except BaseException:
            self._recording.release()
            raise

    async def _status(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, 200, self.status())

    async def _end(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`{"rollout_id": ..., "reward": ..., ...}`: the rollout is over."""
        try:
            name, fields = ended(await body_of(receive))
            lock = self._ends.setdefault(name, asyncio.Lock())
            async with lock:
                with self._busy.using(name, is_call=False):
                    refused = await self._end_open(name, fields)
        except RollstoreError as error:
            await refuse(send, 503, error)
        except ValueError as error:
            await refuse(send, 400, error)
        else:
            await (reply(send, 202, {"rollout_id": name}) if refused is None else refuse(send, *refused))

    async def _end_open(self, name: str, fields: Mapping[str, Any]) -> tuple[int, str] | None:
        """End a rollout that is open. Otherwise (status, why not), and None where it has ended in just this way."""
        await self._check(name, fields, end=True)
        await asyncio.to_thread(self._conversations.look)
        standing = self._conversations.standing(name, fields)
        if standing == "open":
            await self._take(End(rollout_id=name, fields=dict(fields)))
            return None
        if standing == "ended so":  # a client that was not answered says it again
            return None
        self._conversations.ends_nothing(name)
        if self._busy.calls(name):
            return 409, f"rollout {name}: wanted a call of it that is over, got its first one under way: end it then"
        if standing == "unknown":
            return 404, f"rollout {name}: wanted one of which a call was recorded, got none of that name"
        by = "by itself, as nobody went on with it," if standing == "idle" else "with other columns,"
        return 409, f"rollout {name}: wanted one that is open, got one that has ended {by} and does not take this end"

    async def _check(self, name: str, fields: Mapping[str, Any], *, end: bool) -> None:
        """Hold what a client says against its rollout, once all that came before is part of that.

        Raises ValueError where they do not fit, WriteError where the disk has no room under `fail`.
        """
        while True:
            try:
                await self._recording.flush_async()
                break
            except WriteError as error:
                if self._recording.when_full == "fail" or self._conversations.gone:
                    raise
                LOG.warning("what is said of rollout %s waits for the disk: %s", name, error)
                await asyncio.sleep(PATIENCE_SECONDS)
        await asyncio.to_thread(self._conversations.check, name, fields, end=end)

    async def _check_columns(self, name: str, text: bytes, fields: Mapping[str, Any]) -> None:
        """The same for the columns of a call, as far as they are new."""
        before = self._columns.get(name)
        if text and text != before and (before is not None or self._conversations.has(name)):
            await self._check(name, fields, end=False)
        self._columns[name] = text or before or b""
        self._columns.move_to_end(name)
        while len(self._columns) > REMEMBERED:
            self._columns.popitem(last=False)

    async def _told(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`{"version": N}`: the engine has these weights; with `"changing": true` it is about to get them."""
        try:
            label, changing = weights(await body_of(receive))
            # At once: calls that end while this one waits for the disk may have been drawn by either.
            self._weights = widened(self._weights, (label,)) if changing else (label,)
            for record in self._under_way:
                record.told((label,))
            await self._take(Told(weights=self._weights))
        except WriteError as error:
            await refuse(send, 503, error)
        except ValueError as error:
            await refuse(send, 400, error)
        else:
            await reply(send, 200, {"weights": list(self._weights)})

    async def _any(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["method"] != "POST" or not path.endswith(PATHS):
            if scope["method"] == "POST" and path.endswith(UNRECORDED):
                self._pass_by(path, "only chats, completions and /inference/v1/generate are")
            await self._pass(scope, receive, send)
            return
        body = await body_of(receive)
        named = {name: value for name, value in scope["headers"] if name in (NAME, COLUMNS)}
        try:
            rollout_id = named[NAME].decode() if NAME in named else None
            if rollout_id == "":
                raise ValueError(f"{NAME.decode()}: wanted the id of a rollout, got an empty one")
            fields = columns(named[COLUMNS]) if COLUMNS in named else {}
            ask = asked(path, body, self._heads)
            if ask is not None and rollout_id is not None and samples(msgspec.json.decode(body)) > 1:
                raise ValueError("one rollout has one sample: wanted n of 1")
        except RecursionError:
            await refuse(send, 400, "wanted a request that can be read, got one nested too deeply")
            return
        except ValueError as error:
            await refuse(send, 400, error)
            return
        if ask is None:
            self._pass_by(path, "it is no JSON object, nested too deeply, echoes or uses beams")
            await self._forward(scope, body, None, None, send)
            return
        with self._busy.using(rollout_id):
            try:
                if rollout_id is not None:
                    await self._check_columns(rollout_id, named.get(COLUMNS, b""), fields)
                await self._recording.reserve_async()
            except ValueError as error:
                await refuse(send, 400, error)
            except RollstoreError as error:
                await refuse(send, 503, error)
            else:
                await self._call(scope, receive, send, ask, rollout_id, fields)

    async def _call(
        self, scope: Scope, receive: Receive, send: Send, ask: Asked, rollout_id: str | None, fields: Mapping[str, Any]
    ) -> None:
        """Pass a call on for which a place is reserved, and record it."""
        record = Record(self._recorded, ask.body, rollout_id, fields, self._weights)
        self._under_way.add(record)
        passing = asyncio.create_task(self._forward(scope, ask.body, ask, record, send))
        leaving = asyncio.create_task(left(receive))
        try:
            await asyncio.wait((passing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not record.ended:  # the client is gone
                record.leave("cancelled")
                passing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await passing
        finally:
            leaving.cancel()
            passing.cancel()
            record.leave("cancelled")  # nothing, where it has ended
            self._under_way.discard(record)

    def _pass_by(self, path: str, why: str) -> None:
        self._conversations.not_recorded(f"a call of {path} was passed on and not recorded: {why}")

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Anything that is no call of a model."""
        await self._forward(scope, await body_of(receive), None, None, send)

    async def _forward(self, scope: Scope, body: bytes, ask: Asked | None, record: Record | None, send: Send) -> None:
        """Send the request to the engine and its answer to the client, as it comes."""
        try:
            response, ask = await self._upstream.send(scope, body, ask)
        except httpx.HTTPError as error:
            if record is not None:
                record.leave("engine_abort")
            await refuse(send, 502, f"upstream {self._upstream}: {str(error) or type(error).__name__}")
            return
        try:
            if ask is None or record is None:
                await pass_raw(response, send)
            elif not 200 <= response.status_code < 300:
                record.failed(f"status {response.status_code}")
                await pass_raw(response, send)
            elif encoding(response) not in READABLE:
                record.failed(f"content-encoding {encoding(response)[:40]}, asked for identity")
                await pass_raw(response, send)
            elif is_stream(response):
                await pass_stream(response, ask, record, send)
            else:
                await pass_whole(response, ask, record, send)
        finally:
            await response.aclose()
