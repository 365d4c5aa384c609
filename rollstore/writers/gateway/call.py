"""One call as the proxy saw it, and the replies that are in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import msgspec
import xxhash

from rollstore.writers.openai import Server, joined, replies
from rollstore.writers.openai.body import Body, decode
from rollstore.writers.reply import Reply
from rollstore.writers.weights import Number


class Tool(msgspec.Struct, frozen=True):
    id: str | None = None


class Message(msgspec.Struct, frozen=True):
    """An assistant's message, or a part of one."""

    content: Any = None
    tool_calls: tuple[Tool, ...] | None = None


class Choice(msgspec.Struct, frozen=True):
    index: int = 0
    message: Message | None = None
    delta: Message | None = None


class Chat(msgspec.Struct, frozen=True):
    """What of a chat's reply the next request repeats, and whether the engine failed in the middle of it."""

    choices: tuple[Choice, ...] = ()
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
        tools = tuple(str(call.get("id")) for call in message.get("tool_calls") or ())
        text = message.get("content") or ""
        if self.tools or tools:
            return self.tools == tools
        return isinstance(text, str) and bool(text.strip()) and self.text.rstrip().endswith(text.strip())


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request as the engine got it, and what came back: the body, or the data of each event of a stream.

    cut: why it ended early (`engine_abort`, `cancelled`), else None. fields: columns that the client named.
    """

    request: bytes
    parts: Sequence[bytes]
    cut: str | None = None
    rollout_id: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    started_at: datetime | None = None
    finished_at: datetime | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    prints: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class End:
    """A rollout is over; `fields` are columns of its last segment."""

    rollout_id: str
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Expire:
    """Time has passed: conversations that nobody uses are over."""


def read(call: Call) -> Call:
    """The call with its messages, and a fingerprint of those up to each."""
    request = msgspec.json.decode(call.request)
    messages = request.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return call
    prints: list[int] = []
    for message in messages:
        said = {name: value for name, value in message.items() if value is not None}
        data = msgspec.json.encode(said, order="deterministic")
        prints.append(xxhash.xxh3_64_intdigest(data, seed=prints[-1] if prints else 0))
    return replace(call, messages=messages, prints=prints)


def replies_of(call: Call, server: Server, number: Number) -> list[tuple[Reply, Said | None]]:
    """The replies of a call, and what each said. Raises ValueError where there are no ids, or where it is no reply."""
    request = msgspec.json.decode(call.request)
    whole = joined(call.parts) if len(call.parts) != 1 else decode(call.parts[0])
    chats = [msgspec.json.decode(part, type=Chat) for part in call.parts]
    failed = next((bytes(chat.error) for chat in chats if bytes(chat.error) not in (b"", b"null")), None)
    if not whole.choices:
        raise ValueError(f"wanted a reply, got none ({_why(call, failed)})")
    cut = call.cut or ("engine_abort" if failed is not None else None)
    if cut is not None:
        whole = _nothing_drawn_yet(whole)
    made: list[tuple[Reply, Said | None]] = []
    for reply, choice in zip(replies(whole, request, server=server, number=number), whole.choices, strict=True):
        ended = {} if cut is None or choice.finish_reason is not None else {"ending": "aborted", "ending_reason": cut}
        timed = replace(reply, started_at=call.started_at, finished_at=call.finished_at, **ended)
        made.append((timed, _said(chats, choice.index)))
    return made


def _why(call: Call, failed: bytes | None) -> str:
    if failed is not None:
        return f"the engine said {failed.decode(errors='replace')[:200]}"
    return call.cut or f"{sum(map(len, call.parts))} bytes"


def _nothing_drawn_yet(body: Body) -> Body:
    """A stream that was cut before its first token drew none."""
    choices = tuple(
        msgspec.structs.replace(choice, token_ids=()) if choice.token_ids is None else choice for choice in body.choices
    )
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
