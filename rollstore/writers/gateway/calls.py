"""The log of calls: what a gateway took and has not yet written as whole segments, read back after it was killed.

Its records are events in the order in which they happened, and the parts of streams under way. The head is the state of
all conversations at its number: which calls the segment under way of each is made of. Requests and replies stand in it
as the engine got and sent them; headers never do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from rollstore.errors import CorruptionError, StoreError
from rollstore.store.filesystem import Filesystem
from rollstore.writers.gateway.call import Call, End, Expire, Logged, Told, widened
from rollstore.writers.gateway.log import REWRITE_BYTES, Log

FORMAT = 1
"""Version of what stands in the log."""


class Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A conversation that may go on. calls: (number of the call, which of its replies) of the segment under way.

    own: its id if its client had not named it. apart: whether it is written under that one.
    """

    rollout_id: str
    number: int
    cause: str | None
    fields: dict[str, Any]
    used: float
    calls: list[tuple[int, int]]
    own: str = ""
    apart: bool = False


class State(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """All conversations, the one used longest ago first; the rollouts that have ended; what the weights are said to be.

    store: of which store they are. ends: a fingerprint of what ended each of `ended`, 0 where its client did not.
    """

    store: str
    format: int = FORMAT
    open: list[Kept] = []
    ended: list[str] = []
    ends: list[int] = []
    weights: tuple[str, ...] = ()


class Began(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A stream: its call without parts, which follow."""

    call: Call


class Parts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """More of the stream with that mark."""

    mark: str
    parts: list[bytes]
    at: datetime


class Found(NamedTuple):
    """What stands in a log. streams: calls that nobody ended, as they were left."""

    number: int
    """Of the last event that the state knows of."""
    state: State
    calls: dict[int, Call]
    """Those that the state names, by their numbers."""
    events: list[Logged]
    """What happened since."""
    streams: list[Call]


_Written = State | Began | Parts | Call | End | Expire | Told
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Written).decode


class Calls:
    """The log of one gateway on one store. Raises StoreError where another gateway has it."""

    def __init__(self, filesystem: Filesystem, store_id: str, *, rewrite_bytes: int = REWRITE_BYTES) -> None:
        self._log = Log(filesystem, rewrite_bytes=rewrite_bytes)
        self._store_id = store_id
        self._streams: dict[str, list[int]] = {}
        self.damaged = 0
        """Places of the log that held no sum when it was read."""

    def read(self) -> Found:
        """What a gateway before this one left; nothing where there was none.

        Raises CorruptionError where the state itself cannot be read, StoreError where it is another store's.
        """
        try:
            return self._read()
        except BaseException:
            self._log.close()
            raise

    def _read(self) -> Found:
        where, records = self._log.where, self._log.read()
        self.damaged = len(self._log.damages)
        if not records:
            return Found(0, State(store=self._store_id), {}, [], [])
        try:
            read = [(record.number, _decode(record.payload)) for record in records]
        except msgspec.MsgspecError as error:
            raise CorruptionError(f"{where}: wanted records of format {FORMAT}, got others: {error}") from error
        (number, state), *following = read
        if not isinstance(state, State) or state.format != FORMAT:
            raise CorruptionError(f"{where}: wanted a state of format {FORMAT} first, got {state!r:.80}")
        if state.store != self._store_id:
            raise StoreError(f"{where}: wanted the state of store {self._store_id}, got that of {state.store}")
        kept = {n: found for n, found in following if n <= number and isinstance(found, Call)}
        events = [Logged(n, e) for n, e in following if n > number and isinstance(e, Call | End | Expire | Told)]
        over = {event.mark for _, event in following if isinstance(event, Call)}
        streams = [call for call in _left(read) if call.mark not in over]
        for call in streams:
            self._streams[call.mark] = [n for n, found in following if _stream(found) == call.mark]
        return Found(number, state, kept, events, streams)

    def put(self, event: Call | End | Expire | Told) -> Logged:
        """Write an event: from now on it survives the death of this process. Raises WriteError, with nothing taken."""
        number = self._log.append(_encode(event))
        if isinstance(event, Call):
            self._streams.pop(event.mark, None)
        return Logged(number, event)

    def part(self, call: Call, parts: Sequence[bytes]) -> None:
        """Write what came of a stream; `call` is what is known of it beside. Raises WriteError, with nothing taken."""
        numbers = self._streams.get(call.mark)
        if numbers is None:
            numbers = self._streams[call.mark] = [self._log.append(_encode(Began(call=call)))]
        more = Parts(mark=call.mark, parts=list(parts), at=datetime.now(UTC))
        numbers.append(self._log.append(_encode(more)))

    @property
    def due(self) -> bool:
        """Whether the log has grown so far that what is over should go."""
        return self._log.due

    def rewrite(
        self, number: int, conversations: Sequence[Kept], ended: Mapping[str, int], weights: tuple[str, ...]
    ) -> None:
        """Drop every call up to `number` that none of these conversations has. Raises WriteError, and dropped none.

        ended: rollouts that are over, and a fingerprint of what ended them.
        """
        keep = {n for conversation in conversations for n, _ in conversation.calls}
        for numbers in list(self._streams.values()):
            keep.update(numbers)
        state = State(
            store=self._store_id, open=list(conversations), ended=list(ended), ends=list(ended.values()),
            weights=weights,
        )  # fmt: skip
        self._log.rewrite(_encode(state), number, keep)

    def close(self) -> None:
        """Let the files go."""
        self._log.close()


def _stream(found: Any) -> str | None:
    """The mark of the stream that a record is of."""
    return found.call.mark if isinstance(found, Began) else found.mark if isinstance(found, Parts) else None


def _left(read: Sequence[tuple[int, Any]]) -> Iterator[Call]:
    """Streams as far as their parts came: the gateway died, and with it the connection to the engine."""
    begun: dict[str, tuple[int, Call]] = {}
    parts: dict[str, Parts] = {}
    told: list[tuple[int, tuple[str, ...]]] = []
    for number, found in read:
        if isinstance(found, Began):
            begun[found.call.mark] = number, found.call
        elif isinstance(found, Parts):
            before = parts[found.mark].parts if found.mark in parts else []
            parts[found.mark] = Parts(mark=found.mark, parts=[*before, *found.parts], at=found.at)
        elif isinstance(found, Told | State):
            told.append((number, found.weights))
    for mark, (number, call) in begun.items():
        if mark in parts:
            weights = call.weights
            for later in (labels for at, labels in told if at > number):
                weights = widened(weights, later)
            came = parts[mark]
            yield msgspec.structs.replace(call, parts=came.parts, cut="cancelled", finished_at=came.at, weights=weights)
