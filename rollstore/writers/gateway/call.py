"""One call as the proxy saw it, and the replies that are in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
import xxhash

from rollstore.schema import Flag
from rollstore.writers.openai import Server, joined, replies
from rollstore.writers.openai.body import Body, decode
from rollstore.writers.reply import Reply
from rollstore.writers.uuid7 import derived
from rollstore.writers.weights import Number, Weights, by_labels

LOG = logging.getLogger("rollstore")


class Tool(msgspec.Struct, frozen=True):
    id: str | None = None


class Message(msgspec.Struct, frozen=True):
    """An assistant's message, or a part of one."""

    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: tuple[Tool, ...] | None = None


class Choice(msgspec.Struct, frozen=True):
    index: int = 0
    text: Any = None
    message: Message | None = None
    delta: Message | None = None

    @property
    def speaks(self) -> bool:
        """Whether there is anything that tokens were drawn for."""
        said = self.message or self.delta or Message()
        return any((self.text, said.content, said.reasoning, said.reasoning_content, said.tool_calls))


class Chat(msgspec.Struct, frozen=True):
    """What of a chat's reply the next request repeats."""

    choices: tuple[Choice, ...] = ()


class Failure(msgspec.Struct, frozen=True):
    """Whether the engine failed in the middle of a reply."""

    error: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, kw_only=True)
class Said:
    """What the assistant said in one reply: its text, and the ids of its calls of tools."""

    text: str
    tools: tuple[str, ...] = ()
    behind_print: int = 0
    """Fingerprint of the messages that it answered."""

    def behind(self, fingerprint: int) -> Said:
        """The same, in answer to those messages."""
        return replace(self, behind_print=fingerprint)

    def is_in(self, message: Mapping[str, Any]) -> bool:
        """Whether a message is this reply, or its end: clients leave the reasoning out."""
        if message.get("role") != "assistant":
            return False
        calls = message.get("tool_calls") or ()
        tools = tuple(str(call.get("id")) for call in calls if isinstance(call, dict))
        text = message.get("content") or ""
        if self.tools or tools:
            return self.tools == tools
        return isinstance(text, str) and bool(text.strip()) and self.text.rstrip().endswith(text.strip())


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Something that happened to the conversations. The same events in the same order make the same rollouts."""


class Call(Event, frozen=True, kw_only=True):
    """A request as the engine got it, and what came back: the body, or the data of each event of a stream.

    mark: an id from which those of its rollouts follow; drawn anew where there is none. cut: why it ended early
    (`engine_abort`, `cancelled`), else None. fields: columns that the client named. weights: every label that the
    trainer named for some time of the call, an empty one for a time before the first. server: how its reply is read.
    at: seconds on the clock that ends unused conversations.
    """

    request: bytes
    parts: Sequence[bytes] = ()
    mark: str = ""
    cut: str | None = None
    rollout_id: str | None = None
    fields: dict[str, Any] = {}
    weights: tuple[str, ...] = ()
    server: Server | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    at: float | None = None


class End(Event, frozen=True, kw_only=True):
    """A rollout is over; `fields` are columns of its last segment."""

    rollout_id: str
    fields: dict[str, Any] = {}


class Expire(Event, frozen=True, kw_only=True):
    """Time has passed: conversations that nobody used since `before`, in seconds on their clock, are over."""

    before: float | None = None


class Told(Event, frozen=True, kw_only=True):
    """The trainer said which weights the engine has: one label, or those it may have while they change."""

    weights: tuple[str, ...]


def widened(weights: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    """The labels of a time in which the weights may also have become others; an empty one for what nobody had said."""
    return (*(weights or ("",)), *(label for label in more if label not in weights)) if more else weights


class Logged(NamedTuple):
    """An event with its number in the log."""

    number: int
    event: Call | End | Expire | Told


class Asking(NamedTuple):
    """The messages of a request, and a fingerprint of those up to each; none where it has none."""

    messages: Sequence[Mapping[str, Any]] = ()
    prints: Sequence[int] = ()


def asking(call: Call) -> Asking:
    """What a call asked. Raises ValueError where its request is no JSON."""
    request = msgspec.json.decode(call.request)
    messages = request.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return Asking()
    prints: list[int] = []
    for message in messages:
        said = {name: value for name, value in message.items() if value is not None}
        data = msgspec.json.encode(said, order="deterministic")
        prints.append(xxhash.xxh3_64_intdigest(data, seed=prints[-1] if prints else 0))
    return Asking(messages, prints)


def replies_of(call: Call, server: Server, number: Number) -> list[tuple[Reply, Said | None]]:
    """The replies of a call, and what each said. Raises ValueError where there are no ids, or where it is no reply.

    `server` is how it is read where the call does not say so itself.
    """
    request = msgspec.json.decode(call.request)
    parts = [part for part in call.parts if _is_object(part)]  # a stream may hold a sign of life, or break inside one
    whole = joined(parts) if len(parts) != 1 else decode(parts[0])
    chats = [_chat(part) for part in parts]
    errors = (bytes(msgspec.json.decode(part, type=Failure).error) for part in parts)
    failed = next((error for error in errors if error not in (b"", b"null")), None)
    if not whole.choices:
        raise ValueError(f"wanted a reply, got none ({_why(call, failed)})")
    cut = call.cut or ("engine_abort" if failed is not None or len(parts) < len(call.parts) else None)
    if cut is not None:
        whole = _nothing_drawn_yet(whole, chats)
    made: list[tuple[Reply, Said | None]] = []
    groups: dict[str, str] = {}
    read = _replies(whole, request, call.server or server, number)
    for reply, choice in zip(read, whole.choices or (), strict=True):
        more: dict[str, Any] = {"weights": _weights(reply, call.weights, number)}
        if cut is not None and choice.finish_reason is None:
            more.update(ending="aborted", ending_reason=cut)
        group = reply.row.get("group_id")
        if group is not None and call.mark:
            own = derived(call.mark, f"group {len(groups)}")
            more["row"] = {**reply.row, "group_id": groups.setdefault(group, own)}
        timed = replace(reply, started_at=call.started_at, finished_at=call.finished_at, **more)
        made.append((timed, _said(chats, choice.index)))
    return made


def _replies(whole: Body, request: Any, server: Server, number: Number) -> list[Reply]:
    """The replies. Where the log-probs do not fit the tokens, these alone: they were drawn all the same."""
    try:
        return replies(whole, request, server=server, number=number)
    except ValueError as error:
        bare = tuple(msgspec.structs.replace(choice, logprobs=None) for choice in whole.choices or ())
        made = replies(msgspec.structs.replace(whole, choices=bare), request, server=server, number=number)
        LOG.warning("a call is recorded without log-probs: %s", error)
        flag = Flag(kind="unplaced_logprobs", column="logprobs")
        return [replace(reply, flags=(*reply.flags, flag)) for reply in made]


def _is_object(part: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(part), dict)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _chat(part: bytes) -> Chat:
    """What a chat says, where it says it as it should: it only links the calls of a conversation."""
    try:
        return msgspec.json.decode(part, type=Chat)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Chat()


def _weights(reply: Reply, labels: Sequence[str], number: Number) -> Weights | None:
    """What is known of the weights: what the engine said of the tokens goes before what the trainer said.

    An engine that named its newest weights alone says less than the trainer, where the two agree.
    """
    said = reply.weights
    if not labels:
        return said
    told = by_labels(len(reply.tokens), labels, number=number)
    if said is None or (said.source == "read_at_completion" and told.newest is not None and said.newest == told.newest):
        return told
    return said


def _why(call: Call, failed: bytes | None) -> str:
    if failed is not None:
        return f"the engine said {failed.decode(errors='replace')[:200]}"
    return call.cut or f"{sum(map(len, call.parts))} bytes"


def _nothing_drawn_yet(body: Body, chats: Sequence[Chat]) -> Body:
    """A stream that was cut before its first token drew none. One that said something without ids drew some."""
    spoke = {choice.index for chat in chats for choice in chat.choices if choice.speaks}
    choices = tuple(
        msgspec.structs.replace(choice, token_ids=())
        if choice.token_ids is None and choice.index not in spoke else choice
        for choice in body.choices or ()
    )  # fmt: skip
    return msgspec.structs.replace(body, choices=choices)


def _said(chats: Sequence[Chat], index: int) -> Said | None:
    """What one choice of a chat said over all parts."""
    messages = [
        message
        for chat in chats
        for choice in chat.choices
        if choice.index == index and (message := choice.message or choice.delta) is not None
    ]
    if not messages:
        return None
    tools = (tool.id for message in messages for tool in message.tool_calls or ())
    return Said(
        text="".join(message.content for message in messages if isinstance(message.content, str)),
        tools=tuple(tool for tool in tools if tool is not None),
    )
