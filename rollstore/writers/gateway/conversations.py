"""Calls to segments: which conversation a call belongs to, and whether its prompt extends what is recorded of it."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rollstore.errors import SchemaError, WriteError
from rollstore.schema import Rollout
from rollstore.writers.conversation import ON_LAST, extends, segment
from rollstore.writers.gateway.call import Asking, Call, End, Expire, Logged, Said, Told, asking, replies_of
from rollstore.writers.gateway.calls import Calls, Kept
from rollstore.writers.gateway.places import Conversation, Places, cause_of
from rollstore.writers.openai import Server
from rollstore.writers.queued import Sink
from rollstore.writers.reply import Reply
from rollstore.writers.uuid7 import derived, uuid7
from rollstore.writers.weights import Number, unknown_weights, version_number

LOG = logging.getLogger("rollstore")

GROUP = ("group_id", "group_size", "sample_index")
"""Columns of a reply that a conversation keeps from its first call on."""

TOGETHER = 64
"""Segments that are appended in one call, which costs little more than one of them."""

REMEMBERED = 100_000
"""Ids of ended rollouts that are kept in mind, so that a late call is not taken for their first."""


class Conversations:
    """Takes calls in the order of their ends, holds the segment under way of each conversation, appends what is over.

    A call belongs to the conversation whose id its client named. Without a name it belongs to one whose tokens its
    prompt extends (the longest; at least one of them drawn), else to one whose messages it repeats and goes on from,
    the reply included (at least its end). Otherwise it begins a conversation. Within one, a prompt that extends the
    tokens goes on in the segment; any other ends it as `continued` and begins the next. For use by one thread.
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
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.server, self.clock, self.idle_seconds, self.log = server or Server(), clock, idle_seconds, log
        self.weights: tuple[str, ...] = ()
        """What the weights were last said to be."""
        self._writer, self._number = writer, number
        self._taken = 0
        self._open: OrderedDict[str, Conversation] = OrderedDict()  # the one used longest ago comes first
        self._places = Places()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._ready: list[Rollout] = []

    @property
    def open(self) -> int:
        """Conversations that may still go on."""
        return len(self._open)

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
            self._expire(self.clock() - self.idle_seconds if event.before is None else event.before)
        elif isinstance(event, Told):
            self.weights = event.weights
        else:
            self._take(event, number)
        self._taken = max(self._taken, number)

    def flush(self, *, sync: bool = False) -> None:
        """Append what is over. Raises WriteError, and goes on from there when called again."""
        self._write(sync=sync)
        if self.log is not None and self.log.due:
            try:
                self._writer.flush(sync=True)  # what leaves the log shall not be lost with the power either
                self._rewrite(self.log)
            except WriteError as error:
                LOG.warning("the log of calls grows on: %s", error)

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
        self._ended = OrderedDict.fromkeys(found.state.ended)
        for kept in found.state.open:
            self._restore(kept, found.calls)
        for event in found.events:
            self.append(event)
        self.counts.clear()  # they are of this process
        self._ready = [row for row in self._ready if not known(row)]
        if self._ready:
            self._write(sync=True)
        self._rewrite(log)
        for call in found.streams:
            self.append(log.put(call))
        self.counts["recovered"] = len(found.calls) + len(found.events) + len(found.streams)
        self.counts["damaged"] = log.damaged

    def _restore(self, kept: Kept, calls: Mapping[int, Call]) -> None:
        """Open a conversation as it was. A call that was damaged is missing from it, and its metadata says so."""
        there = [(number, place) for number, place in kept.calls if number in calls]
        conversation = Conversation(rollout_id=kept.rollout_id, number=kept.number, cause=kept.cause)
        conversation.fields, conversation.used = dict(kept.fields), kept.used
        if len(there) < len(kept.calls):
            lost = str(len(kept.calls) - len(there))
            conversation.fields["metadata"] = {**(kept.fields.get("metadata") or {}), "calls_lost": lost}
        self._open[kept.rollout_id] = conversation
        said, asked = None, Asking()
        for number, place in there:
            reply, said = replies_of(calls[number], self.server, self._number)[place]
            conversation.replies.append(reply)
            conversation.calls.append((number, place))
            asked = asking(calls[number])
        if conversation.replies:
            self._places.put(conversation, said, asked)

    def _rewrite(self, log: Calls) -> None:
        """Everything up to the last event taken is either in the store by now or in an open conversation."""
        kept = [
            Kept(
                rollout_id=one.rollout_id, number=one.number, cause=one.cause, fields=one.fields, used=one.used,
                calls=one.calls,
            )
            for one in self._open.values()
        ]  # fmt: skip
        log.rewrite(self._taken, kept, list(self._ended), self.weights)

    def _write(self, *, sync: bool = False) -> None:
        while self._ready:
            some = self._ready[:TOGETHER]
            try:
                self._writer.append(some)
                self.counts["segments"] += len(some)
            except SchemaError:
                some = some[:1]
                self._append_alone(some[0])
            del self._ready[: len(some)]
        self._writer.flush(sync=sync)

    def _append_alone(self, row: Rollout) -> None:
        """Of rows that are refused together, the others are not to blame."""
        try:
            self._writer.append(row)
            self.counts["segments"] += 1
        except SchemaError as error:
            self.counts["refused"] += 1
            LOG.error("rollout %s: not recorded: %s", row.rollout_id, error)

    def close(self) -> None:
        """End every conversation, append, and close the writer. The log then knows what has ended, and nothing else."""
        if self._open:
            every = Expire(before=math.inf)
            self.append(every if self.log is None else self.log.put(every))
        self._write()
        self._writer.close()
        if self.log is not None:
            try:
                self._rewrite(self.log)
            except WriteError as error:  # all rows are in the store, and the next gateway will find them there
                LOG.warning("the log of calls is left as it is: %s", error)
            self.log.close()

    def _take(self, call: Call, number: int) -> None:
        try:
            asked = asking(call)
            made = replies_of(call, self.server, self._number)
        except Exception as error:  # a reply may be anything, and the next one may be fine
            self.counts["not recorded"] += 1
            LOG.warning("a call was not recorded: %s", error)
            return
        self.counts["calls"] += 1
        self.counts["cut"] += call.cut is not None
        for place, (reply, said) in enumerate(made):
            named = call.rollout_id
            late = named in self._ended
            if late:
                LOG.warning("rollout %s has ended: a later call is recorded as a rollout of its own", named)
            conversation = self._of(None if late else named, asked, reply)
            if conversation is None:
                own = derived(call.mark, f"rollout {place}") if call.mark else uuid7()
                conversation = self._begin(own if late or named is None else named)
            self._add(conversation, reply, call, said, asked)
            conversation.calls.append((number, place))
            if late:
                conversation.fields["metadata"] = {**(conversation.fields.get("metadata") or {}), "after": named or ""}

    def _of(self, named: str | None, asked: Asking, reply: Reply) -> Conversation | None:
        if named is not None:
            return self._open.get(named)
        return self._places.extended(reply.prompt) or self._places.repeated(asked)

    def _begin(self, name: str) -> Conversation:
        conversation = Conversation(rollout_id=name)
        self._open[conversation.rollout_id] = conversation
        return conversation

    def _add(self, conversation: Conversation, reply: Reply, call: Call, said: Said | None, asked: Asking) -> None:
        self._places.drop(conversation)
        if conversation.replies and not extends(reply.prompt, conversation.tokens):
            self._ready.append(self._segment(conversation, {"ending": "continued", "ending_reason": None}))
            conversation.cause = cause_of(conversation.tokens, reply.prompt, conversation.replies[-1])
            conversation.number += 1
            conversation.replies, conversation.calls = [], []
        conversation.replies.append(reply)
        own = {name: reply.row[name] for name in GROUP if name in reply.row}
        conversation.fields = {**own, **conversation.fields, **call.fields}
        conversation.used = self.clock() if call.at is None else call.at
        self._places.put(conversation, said, asked)
        self._open.move_to_end(conversation.rollout_id)

    def _segment(self, conversation: Conversation, fields: dict[str, Any]) -> Rollout:
        own = {name: value for name, value in conversation.fields.items() if name not in ON_LAST}
        said: dict[str, Any] = {
            "segment": conversation.number,
            "segment_cause": conversation.cause,
            "requested_at": conversation.replies[0].started_at,
            "finished_at": conversation.replies[-1].finished_at,
        }
        replies = conversation.replies
        if any(name.startswith("weight_version_") for name in own):  # the client's word goes before the trainer's
            replies = [
                replace(one, weights=unknown_weights(len(one.tokens)))
                if one.weights is not None and one.weights.source == "start_end" else one
                for one in replies
            ]  # fmt: skip
        return segment(replies, rollout_id=conversation.rollout_id, **(said | own | fields))

    def _end(self, conversation: Conversation) -> None:
        self._places.drop(conversation)
        del self._open[conversation.rollout_id]
        final = {name: value for name, value in conversation.fields.items() if name in ON_LAST}
        if final.get("reward") is not None:
            final.setdefault("reward_status", "scored")
        if conversation.replies:
            self._ready.append(self._segment(conversation, final))
        else:  # all its calls were damaged in the log
            self.counts["refused"] += 1
            LOG.error("rollout %s: segment %d is lost", conversation.rollout_id, conversation.number)
        self._ended[conversation.rollout_id] = None
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _end_named(self, end: End) -> None:
        conversation = self._open.get(end.rollout_id)
        if conversation is None:
            self.counts["ends of nothing"] += 1
            LOG.warning("rollout %s: wanted an open one to end, got none", end.rollout_id)
            return
        if "ending" in end.fields:  # a reason said before was that of another ending
            conversation.fields.pop("ending_reason", None)
        conversation.fields.update(end.fields)
        self._end(conversation)

    def _expire(self, before: float) -> None:
        """End what nobody has used since."""
        while self._open and next(iter(self._open.values())).used <= before:
            self._end(next(iter(self._open.values())))
