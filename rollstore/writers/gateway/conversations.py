"""Calls to segments: which conversation a call belongs to, and whether its prompt extends what is recorded of it."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from itertools import takewhile, zip_longest
from typing import Any, Literal

import msgspec
import xxhash

from rollstore.errors import WriteError
from rollstore.schema import Rollout
from rollstore.writers.conversation import extends
from rollstore.writers.gateway.call import Asking, Call, End, Expire, Logged, Told, asking
from rollstore.writers.gateway.calls import Calls, Kept
from rollstore.writers.gateway.columns import together
from rollstore.writers.gateway.places import Conversation, Places, cause_of
from rollstore.writers.gateway.reading import Drawn, read
from rollstore.writers.gateway.segments import GROUP
from rollstore.writers.gateway.writing import Writing
from rollstore.writers.openai import Server
from rollstore.writers.queued import Sink
from rollstore.writers.reply import Reply
from rollstore.writers.uuid7 import derived, uuid7
from rollstore.writers.weights import Number, version_number

LOG = logging.getLogger("rollstore")

REMEMBERED = 100_000
"""Ids of ended rollouts that are kept in mind, so that a late call is not taken for their first."""

Standing = Literal["open", "unknown", "idle", "ended so", "ended"]
"""Of a rollout: may go on; no call of it was recorded; nobody went on with it; its client ended it so; or otherwise."""


class Conversations:
    """Takes calls in the order of their ends, holds the segment under way of each conversation, appends what is over.

    A call belongs to the conversation whose id its client named. Without a name it belongs to one whose tokens its
    prompt extends (the longest; at least one of them drawn), else to one whose messages it repeats and goes on from,
    the reply included (at least its end). Otherwise it begins a conversation. Within one, a prompt that extends the
    tokens goes on in the segment; any other ends it as `continued` and begins the next. For use by one thread.

    taken: whether somebody else has written a rollout under a name. One that is called so here gets an id of its own.
    missing: why the store is no longer there, None where it is: what is written to files without a name is lost.
    """

    def __init__(
        self,
        writer: Sink,
        *,
        server: Server | None = None,
        number: Number = version_number,
        idle_seconds: float = 600.0,
        clock: Callable[[], float] = time.time,
        log: Calls | None = None,
        taken: Callable[[str], bool] | None = None,
        missing: Callable[[], str | None] | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.last_not_recorded: str | None = None
        self.server, self.clock, self.idle_seconds, self.log = server or Server(), clock, idle_seconds, log
        self.weights: tuple[str, ...] = ()
        """What the weights were last said to be."""
        self._writer, self._number, self._missing = writer, number, missing
        self.gone = False
        """Whether the store was no longer there when it was last written to."""
        self._writing = Writing(writer, self.counts, taken)
        self._taken = 0
        self._open: OrderedDict[str, Conversation] = OrderedDict()  # the one used longest ago comes first
        self._places = Places()
        self._ended: OrderedDict[str, int] = OrderedDict()  # -> fingerprint of the end; 0: its client did not end it

    @property
    def open(self) -> int:
        """Conversations that may still go on."""
        return len(self._open)

    def any_unused(self, expire: Expire) -> bool:
        """Whether that would end one."""
        return expire.before is not None and bool(self._unused(expire.before, expire.busy))

    def has(self, rollout_id: str) -> bool:
        """Whether that rollout may still go on."""
        return rollout_id in self._open

    @property
    def unused_since(self) -> float:
        """When the conversation that was used longest ago was used; infinity where none is open."""
        return next((conversation.used for conversation in list(self._open.values())[:1]), math.inf)

    def append(self, data: Call | End | Expire | Told | Logged) -> None:
        """Take an event. What is over by it is appended by the next `flush`."""
        number, event = data if isinstance(data, Logged) else (0, data)
        if isinstance(event, End):
            self._end_named(event)
        elif isinstance(event, Expire):
            self._expire(self.clock() - self.idle_seconds if event.before is None else event.before, event.busy)
        elif isinstance(event, Told):
            self.weights = event.weights
        else:
            self._take(event, number)
        self._taken = max(self._taken, number)

    def flush(self, *, sync: bool = False) -> None:
        """Append what is over. Raises WriteError, and goes on from there when called again."""
        self.look()
        self._writing.flush(sync=sync)
        if self.log is not None and self.log.due:
            try:
                self._writer.flush(sync=True)  # what leaves the log shall not be lost with the power either
                self._rewrite(self.log)
            except WriteError as error:
                LOG.warning("the log of calls grows on: %s", error)

    def look(self) -> None:
        """Raises WriteError where the store is gone; any thread may ask."""
        why = None if self._missing is None else self._missing()
        self.gone = why is not None
        if why is not None:
            raise WriteError(why)

    def restore(self, known: Callable[[Rollout], bool]) -> None:
        """Go on where the gateway that wrote the log was killed. `known`: whether a segment is already in the store.

        Raises CorruptionError and StoreError where the log cannot be used, WriteError where what is over cannot be
        written; the log then stays as it is.
        """
        log = self.log
        if log is None:
            raise ValueError("restore: wanted conversations with a log, got some without")
        found = log.read()
        self._taken, self.weights = found.number, found.state.weights
        self._ended = OrderedDict(zip_longest(found.state.ended, found.state.ends, fillvalue=0))
        for kept in found.state.open:
            self._restore(kept, found.calls)
        for event in found.events:
            self.append(event)
        self.counts.clear()  # they are of this process
        self.last_not_recorded = None
        self._writing.forget(known)
        if self._writing:
            self._writing.flush(sync=True)
        self._rewrite(log)
        for call in found.streams:
            self.append(log.put(call))
        self.counts["recovered"] = len(found.calls) + len(found.events) + len(found.streams)
        self.counts["damaged"] = log.damaged

    def _restore(self, kept: Kept, calls: Mapping[int, Call]) -> None:
        """Open a conversation as it was. A call that was damaged, or that this version cannot read, is missing from it:
        its metadata says so."""
        own = kept.own or kept.rollout_id
        if kept.apart:
            self._writing.keep_apart(kept.rollout_id, own)
        conversation = Conversation(rollout_id=kept.rollout_id, own=own, number=kept.number, cause=kept.cause)
        conversation.fields, conversation.used = dict(kept.fields), kept.used
        self._open[kept.rollout_id] = conversation
        said, asked = None, Asking()
        for number, place in kept.calls:
            try:
                asked = asking(calls[number])
                reply, said, left_out = read(calls[number], self.server, self._number).drawn[place]
            except Exception as error:
                LOG.error("rollout %s: call %d is lost: %r", kept.rollout_id, number, error)
                continue
            conversation.replies.append(reply)
            conversation.left_out |= frozenset(left_out)
            conversation.calls.append((number, place))
        lost = len(kept.calls) - len(conversation.calls)
        if lost:
            conversation.fields["metadata"] = {**(kept.fields.get("metadata") or {}), "calls_lost": str(lost)}
        if conversation.replies:
            self._places.put(conversation, said, asked)

    def _rewrite(self, log: Calls) -> None:
        """Everything up to the last event taken is either in the store by now or in an open conversation."""
        kept = [
            Kept(
                rollout_id=one.rollout_id, number=one.number, cause=one.cause, fields=one.fields, used=one.used,
                calls=one.calls, own=one.own, apart=self._writing.apart(one.rollout_id),
            )
            for one in self._open.values()
        ]  # fmt: skip
        log.rewrite(self._taken, kept, self._ended, self.weights)

    def close(self) -> None:
        """End every conversation, append, and close the writer. The log then knows what has ended, and nothing else."""
        self.look()
        if self._open:
            every = Expire(before=math.inf)
            self.append(every if self.log is None else self.log.put(every))
        self._writing.flush()
        self._writer.close()
        if self.log is not None:
            try:
                self._rewrite(self.log)
            except WriteError as error:  # all rows are in the store, and the next gateway will find them there
                LOG.warning("the log of calls is left as it is: %s", error)
            self.log.close()

    def check(self, rollout_id: str, fields: Mapping[str, Any], *, end: bool) -> None:
        """Whether a client may say this of a rollout, beside what was drawn and said so far; any thread may ask.

        end: that it is over now. Before, a fork may lie in what is still to come. Raises ValueError where the row would
        be refused, and the rollout stays as it is; what the engine sent is not held against the client.
        """
        conversation = self._open.get(rollout_id)
        if conversation is None:
            return
        now = conversation.segment(last=True)
        if not now.replies:
            return
        more = dict(fields)
        if not end and "fork_position" in more:
            more["fork_position"] = min(more["fork_position"], len(now.replies[-1].prompt))
        if not end and "ending" not in {**now.said, **more}:
            more.pop("bootstrap", None)  # how the reply to come ends is not known
        together(said_more(now.said, more))
        if now.saying(said_more(now.said, more)).problem() is None:
            return
        try:
            fitting = now.fitting()
        except Exception:  # nothing of it can be kept, whatever its client says
            return
        problem = fitting.saying(said_more(fitting.said, more)).problem()
        if problem is not None:
            raise ValueError(str(problem))

    def standing(self, rollout_id: str, fields: Mapping[str, Any]) -> Standing:
        """Where a rollout stands that its client wants to end so; any thread may ask."""
        if rollout_id in self._open:
            return "open"
        ended = self._ended.get(rollout_id)
        if not ended:
            return "unknown" if ended is None else "idle"
        return "ended so" if ended == fingerprint(fields) else "ended"

    def ends_nothing(self, rollout_id: str) -> None:
        """Count an end of a rollout that is not open, and say so."""
        self.counts["ends of nothing"] += 1
        LOG.warning("rollout %s: wanted an open one to end, got none", rollout_id)

    def not_recorded(self, why: str) -> None:
        """Count a reply that is not recorded, and say so."""
        self.counts["not recorded"] += 1
        self.last_not_recorded = why
        LOG.warning("%s", why)

    def _take(self, call: Call, number: int) -> None:
        try:
            asked = asking(call)
            found = read(call, self.server, self._number)
        except Exception as error:  # a reply may be anything, and the next one may be fine
            self.not_recorded(f"a call was not recorded: {error}")
            return
        self.counts["calls"] += 1
        self.counts["cut"] += found.cut
        for why in found.lost:
            self.not_recorded(f"one reply of a call was not recorded: {why}")
        for place, drawn in enumerate(found.drawn):
            named = call.rollout_id
            late = named in self._ended
            if late:
                LOG.warning("rollout %s has ended: a later call is recorded as a rollout of its own", named)
            conversation = self._of(None if late else named, asked, drawn.reply)
            if conversation is None:
                own = derived(call.mark, f"rollout {place}") if call.mark else uuid7()
                conversation = self._begin(own if late or named is None else named, own)
            self._add(conversation, drawn, call, asked)
            conversation.calls.append((number, place))
            if late:
                conversation.fields["metadata"] = {**(conversation.fields.get("metadata") or {}), "after": named or ""}

    def _of(self, named: str | None, asked: Asking, reply: Reply) -> Conversation | None:
        if named is not None:
            return self._open.get(named)
        return self._places.extended(reply.prompt) or self._places.repeated(asked)

    def _begin(self, name: str, own: str) -> Conversation:
        conversation = Conversation(rollout_id=name, own=own)
        self._open[conversation.rollout_id] = conversation
        return conversation

    def _add(self, conversation: Conversation, drawn: Drawn, call: Call, asked: Asking) -> None:
        self._places.drop(conversation)
        reply = drawn.reply
        if conversation.replies and not extends(reply.prompt, conversation.tokens):
            self._writing.add(conversation.segment(last=False))
            conversation.cause = cause_of(conversation.tokens, reply.prompt, conversation.replies[-1])
            conversation.number += 1
            conversation.replies, conversation.calls, conversation.left_out = [], [], frozenset()
        conversation.replies.append(reply)
        conversation.left_out |= frozenset(drawn.left_out)
        own = {name: reply.row[name] for name in GROUP if name in reply.row}
        conversation.fields = {**own, **conversation.fields, **call.fields}
        conversation.used = self.clock() if call.at is None else call.at
        self._places.put(conversation, drawn.said, asked)
        self._open.move_to_end(conversation.rollout_id)

    def _end(self, conversation: Conversation, fingerprint: int = 0) -> None:
        self._places.drop(conversation)
        del self._open[conversation.rollout_id]
        if conversation.replies:
            self._writing.add(conversation.segment(last=True))
        else:  # all its calls were damaged in the log
            self.counts["refused"] += 1
            LOG.error("rollout %s: segment %d is lost", conversation.rollout_id, conversation.number)
        self._ended[conversation.rollout_id] = fingerprint
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _end_named(self, end: End) -> None:
        conversation = self._open.get(end.rollout_id)
        if conversation is None:
            if self.standing(end.rollout_id, end.fields) != "ended so":
                self.ends_nothing(end.rollout_id)
            return
        conversation.fields = said_more(conversation.fields, end.fields)
        self._end(conversation, fingerprint(end.fields))

    def _expire(self, before: float, busy: Collection[str]) -> None:
        """End what nobody has used since, nor uses now."""
        for conversation in self._unused(before, busy):
            self._end(conversation)

    def _unused(self, before: float, busy: Collection[str]) -> list[Conversation]:
        since = takewhile(lambda conversation: conversation.used <= before, list(self._open.values()))
        return [conversation for conversation in since if conversation.rollout_id not in busy]


def fingerprint(fields: Mapping[str, Any]) -> int:
    """A number other than 0 that stands for what a client said at an end."""
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(fields, order="deterministic")) or 1


def said_more(said: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """What a client says in all. A reason said before was that of another ending."""
    before = {name: value for name, value in said.items() if name != "ending_reason" or "ending" not in more}
    return {**before, **more}
