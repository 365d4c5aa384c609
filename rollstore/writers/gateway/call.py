"""What happens to conversations: calls as the proxy saw them, ends, and what the trainer said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
import xxhash

from rollstore.writers.openai import Server


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
        if self.tools or tools:
            return self.tools == tools
        text = (_text(message.get("content")) or "").strip()
        return bool(text) and self.text.rstrip().endswith(text)


def _text(content: Any) -> str | None:
    """What a message says, as a text or in parts that are all text; None where it holds anything else."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [None]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


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
    """Time has passed: conversations that nobody used since `before`, in seconds on their clock, are over.

    busy: rollouts of which calls are under way, which go on.
    """

    before: float | None = None
    busy: tuple[str, ...] = ()


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
