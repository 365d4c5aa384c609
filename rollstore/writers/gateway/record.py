"""What comes of one call, handed to the recording before its client can see the end of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from rollstore.errors import WriteError
from rollstore.writers.gateway.call import Call, End, Expire, Told, widened
from rollstore.writers.gateway.calls import Calls
from rollstore.writers.gateway.conversations import Conversations
from rollstore.writers.queued import PATIENCE_SECONDS, Queued
from rollstore.writers.uuid7 import uuid7

LOG = logging.getLogger("rollstore")


class Recorded:
    """The way from the proxy to the conversations: first into the log, then into a reserved place of the queue.

    For use by one event loop. Without a log, what waits in the queue is in memory alone.
    """

    def __init__(self, recording: Queued, conversations: Conversations) -> None:
        self.recording, self.conversations = recording, conversations
        self._log: Calls | None = conversations.log

    def take(self, event: Call | End | Expire | Told) -> None:
        """Hand over an event, for which a place is reserved. Raises WriteError where the log cannot be written."""
        self.recording.put(event if self._log is None else self._log.put(event))

    async def take_when_written(self, event: Call | End | Expire | Told) -> None:
        """The same, however long the disk takes."""
        while True:
            try:
                self.take(event)
            except WriteError as error:
                await _wait(error)
            else:
                return

    async def part(self, call: Call, parts: Sequence[bytes]) -> None:
        """Parts of a stream are in the log when this returns."""
        while self._log is not None:
            try:
                self._log.part(call, parts)
            except WriteError as error:
                await _wait(error)
            else:
                return


async def _wait(error: WriteError) -> None:
    LOG.warning("a reply waits for the log of calls: %s", error)
    await asyncio.sleep(PATIENCE_SECONDS)


class Record:
    """A reserved place in the recording, filled once. `weights`: what they are said to be when the call begins."""

    def __init__(
        self,
        recorded: Recorded,
        request: bytes,
        rollout_id: str | None,
        fields: Mapping[str, Any],
        weights: tuple[str, ...],
    ) -> None:
        self._recorded: Recorded | None = recorded
        self._weights = weights
        self._call = Call(
            request=request, mark=uuid7(), rollout_id=rollout_id, fields=dict(fields), weights=weights,
            server=recorded.conversations.server, started_at=datetime.now(UTC),
        )  # fmt: skip
        self.parts: list[bytes] = []

    @property
    def ended(self) -> bool:
        """Whether it was handed over."""
        return self._recorded is None

    def told(self, weights: tuple[str, ...]) -> None:
        """The weights may have become others."""
        self._weights = widened(self._weights, weights)

    async def streamed(self, parts: Sequence[bytes]) -> None:
        """Parts of a stream, which the client sees when this returns."""
        if parts and self._recorded is not None:
            self.parts += parts
            await self._recorded.part(self._whole(None, self._recorded, ()), parts)

    async def end(self, cut: str | None = None) -> None:
        """Hand over what was seen. Only the first end counts. The client may see the end when this returns."""
        if self._recorded is not None:
            if self.parts:
                await self._recorded.take_when_written(self._whole(cut, self._recorded, self.parts))
                self._recorded = None
            else:
                self.leave(cut)

    def leave(self, cut: str | None) -> None:
        """The same where nobody waits for an answer: if the log cannot be written, it goes without."""
        if self._recorded is not None:
            recorded, self._recorded = self._recorded, None
            call = self._whole(cut, recorded, self.parts)
            try:
                if self.parts:
                    recorded.take(call)
                else:
                    recorded.recording.put(call)  # nothing came that could be lost
            except WriteError as error:
                LOG.warning("a call that its client left is not in the log of calls: %s", error)
                recorded.recording.put(call)

    def failed(self, why: str) -> None:
        """Nothing can be recorded: the engine refused, or its reply cannot be read."""
        if self._recorded is not None:
            recorded, self._recorded = self._recorded, None
            error = msgspec.json.encode({"error": why})
            recorded.recording.put(self._whole("engine_abort", recorded, [error]))

    def _whole(self, cut: str | None, recorded: Recorded, parts: Sequence[bytes]) -> Call:
        return msgspec.structs.replace(
            self._call, parts=list(parts), cut=cut, weights=self._weights, finished_at=datetime.now(UTC),
            at=recorded.conversations.clock(),
        )  # fmt: skip
