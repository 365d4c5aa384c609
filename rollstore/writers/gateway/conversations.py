"""Calls to segments: which conversation a call belongs to, and whether its prompt extends what is recorded of it."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from rollstore.errors import SchemaError
from rollstore.schema import Rollout
from rollstore.writers.conversation import ON_LAST, after, common, extends, segment
from rollstore.writers.gateway.call import Call, End, Expire, Said, read, replies_of
from rollstore.writers.openai import Server
from rollstore.writers.queued import Sink
from rollstore.writers.reply import Ints, Reply
from rollstore.writers.uuid7 import uuid7
from rollstore.writers.weights import Number, version_number

LOG = logging.getLogger("rollstore")

GROUP = ("group_id", "group_size", "sample_index")
"""Columns of a reply that a conversation keeps from its first call on."""

TOGETHER = 64
"""Segments that are appended in one call, which costs little more than one of them."""

REMEMBERED = 100_000
"""Ids of ended rollouts that are kept in mind, so that a late call is not taken for their first."""


@dataclass(kw_only=True)
class Conversation:
    """Calls that follow one another: the segment under way, and what the next call must look like to belong here."""

    rollout_id: str
    number: int = 0
    cause: str | None = None
    replies: list[Reply] = field(default_factory=list[Reply])
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    said: Said | None = None
    used: float = 0.0

    @property
    def tokens(self) -> Ints:
        """int64 [T]: what the next prompt has to extend."""
        return after(self.replies[-1])


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._writer = writer
        self._server, self._number = server or Server(), number
        self._idle_seconds, self._clock = idle_seconds, clock
        self._open: OrderedDict[str, Conversation] = OrderedDict()  # the one used longest ago comes first
        self._by_tokens: dict[int, dict[int, list[str]]] = {}  # length, digest -> ids, the oldest first
        self._by_messages: dict[int, list[str]] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._ready: list[Rollout] = []

    @property
    def open(self) -> int:
        """Conversations that may still go on."""
        return len(self._open)

    def append(self, data: Call | End | Expire) -> None:
        """Take a call, or end what was asked to be ended. What is over is appended by the next `flush`."""
        if isinstance(data, End):
            self._end_named(data)
        elif isinstance(data, Expire):
            self._expire()
        else:
            self._take(data)

    def flush(self, *, sync: bool = False) -> None:
        """Append what is over. Raises WriteError, and goes on from there when called again."""
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
        """End every conversation, append, and close the writer."""
        for conversation in list(self._open.values()):
            self._end(conversation)
        self.flush()
        self._writer.close()

    def _take(self, call: Call) -> None:
        try:
            call = read(call)
            made = replies_of(call, self._server, self._number)
        except (ValueError, TypeError, KeyError) as error:
            self.counts["not recorded"] += 1
            LOG.warning("a call was not recorded: %s", error)
            return
        self.counts["calls"] += 1
        self.counts["cut"] += call.cut is not None
        for reply, said in made:
            named = call.rollout_id
            late = named in self._ended
            if late:
                LOG.warning("rollout %s has ended: a later call is recorded as a rollout of its own", named)
            conversation = self._of(None if late else named, call, reply) or self._begin(None if late else named)
            self._add(conversation, reply, call, said)
            if late:
                conversation.fields["metadata"] = {**(conversation.fields.get("metadata") or {}), "after": named or ""}

    def _of(self, named: str | None, call: Call, reply: Reply) -> Conversation | None:
        if named is not None:
            return self._open.get(named)
        found = self._extended(reply.prompt) or self._repeated(call)
        return None if found is None else self._open[found]

    def _extended(self, prompt: Ints) -> str | None:
        """The conversation whose tokens the prompt extends, the longest; of equals, the oldest."""
        for length in sorted((length for length in self._by_tokens if length <= len(prompt)), reverse=True):
            ids = self._by_tokens[length].get(_digest(prompt[:length]))
            if ids:
                return ids[0]
        return None

    def _repeated(self, call: Call) -> str | None:
        """The one conversation whose messages the call repeats, its reply next."""
        prints = call.prints
        for length in range(len(prints) - 1, 0, -1):
            following = call.messages[length]
            ids = [
                name
                for name in self._by_messages.get(prints[length - 1], ())
                if (said := self._open[name].said) is not None and said.is_in(following)
            ]
            if len(ids) == 1:
                return ids[0]
        return None

    def _begin(self, named: str | None) -> Conversation:
        conversation = Conversation(rollout_id=uuid7() if named is None else named)
        self._open[conversation.rollout_id] = conversation
        return conversation

    def _add(self, conversation: Conversation, reply: Reply, call: Call, said: Said | None) -> None:
        self._forget(conversation)
        if conversation.replies and not extends(reply.prompt, conversation.tokens):
            self._ready.append(self._segment(conversation, {"ending": "continued", "ending_reason": None}))
            conversation.cause = _cause(conversation.tokens, reply.prompt, conversation.replies[-1])
            conversation.number += 1
            conversation.replies = []
        conversation.replies.append(reply)
        own = {name: reply.row[name] for name in GROUP if name in reply.row}
        conversation.fields = {**own, **conversation.fields, **call.fields}
        conversation.said, conversation.used = None, self._clock()
        if any(len(one.tokens) for one in conversation.replies):
            tokens = conversation.tokens
            same = self._by_tokens.setdefault(len(tokens), {}).setdefault(_digest(tokens), [])
            same.append(conversation.rollout_id)
        if said is not None and call.prints:
            conversation.said = said.behind(call.prints[-1])
            self._by_messages.setdefault(call.prints[-1], []).append(conversation.rollout_id)
        self._open.move_to_end(conversation.rollout_id)

    def _forget(self, conversation: Conversation) -> None:
        """Take a conversation out of the places where the next call is looked up."""
        if not conversation.replies:
            return
        tokens = conversation.tokens
        same = self._by_tokens.get(len(tokens), {})
        _drop(same, _digest(tokens), conversation.rollout_id)
        if not same:
            self._by_tokens.pop(len(tokens), None)
        if conversation.said is not None:
            _drop(self._by_messages, conversation.said.behind_print, conversation.rollout_id)

    def _segment(self, conversation: Conversation, fields: dict[str, Any]) -> Rollout:
        own = {name: value for name, value in conversation.fields.items() if name not in ON_LAST}
        said: dict[str, Any] = {
            "segment": conversation.number,
            "segment_cause": conversation.cause,
            "requested_at": conversation.replies[0].started_at,
            "finished_at": conversation.replies[-1].finished_at,
        }
        return segment(conversation.replies, rollout_id=conversation.rollout_id, **(said | own | fields))

    def _end(self, conversation: Conversation) -> None:
        self._forget(conversation)
        del self._open[conversation.rollout_id]
        final = {name: value for name, value in conversation.fields.items() if name in ON_LAST}
        if final.get("reward") is not None:
            final.setdefault("reward_status", "scored")
        self._ready.append(self._segment(conversation, final))
        self._ended[conversation.rollout_id] = None
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _end_named(self, end: End) -> None:
        conversation = self._open.get(end.rollout_id)
        if conversation is None:
            self.counts["ends of nothing"] += 1
            LOG.warning("rollout %s: wanted an open one to end, got none", end.rollout_id)
            return
        conversation.fields.update(end.fields)
        self._end(conversation)

    def _expire(self) -> None:
        """End what nobody has used for a while."""
        before = self._clock() - self._idle_seconds
        while self._open and next(iter(self._open.values())).used <= before:
            self._end(next(iter(self._open.values())))


def _digest(tokens: Ints) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens).data)


def _drop(places: dict[int, list[str]], key: int, name: str) -> None:
    names = places.get(key, [])
    if name in names:
        names.remove(name)
        if not names:
            del places[key]


def _cause(tokens: Ints, prompt: Ints, last: Reply) -> str:
    """Why the prompt does not extend the tokens.

    `template_drop`: it has them with some left out, the last of them still there. `retokenised`: the drawn tokens of
    the last reply came back as others. `context_edit`: anything before them differs.
    """
    first = common(tokens, prompt)
    if _left_out(tokens[first:], prompt[first:]):
        return "template_drop"
    return "retokenised" if len(last.prompt) <= first < len(prompt) else "context_edit"


def _left_out(tokens: Ints, prompt: Ints) -> bool:
    """Whether the prompt begins with some of the tokens, in their order and the last of them included."""
    given, end = prompt.tolist(), int(tokens[-1])
    at, found = 0, False
    for token in tokens.tolist():
        if at < len(given) and given[at] == token:
            found = found or token == end
            at += 1
    return found
