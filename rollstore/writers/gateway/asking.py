"""What the gateway adds to a request, and hides in the reply again: ids and log-probs that the client did not ask for.

Everything else keeps its bytes: values are moved as they stand in the JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

PATHS = ("/chat/completions", "/inference/v1/generate", "/completions")
"""How the paths of calls that are recorded end."""

UNRECORDED = ("/responses", "/messages", "/generate", "/completion", "/infill", "/api/chat")
"""How the paths of other calls end that draw tokens: they are passed on, and counted as not recorded."""

NULL = msgspec.Raw(b"null")
TRUE = msgspec.Raw(b"true")

Fields = dict[str, msgspec.Raw]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as it goes to the engine. `hidden`: fields of the reply, and an event of a stream, that the client did
    not ask for. `headers`: what goes with it beside the client's."""

    body: bytes
    hidden: frozenset[str]
    headers: tuple[tuple[bytes, bytes], ...] = ()


def asked(path: str, body: bytes, heads: int) -> Asked | None:
    """The request with what the record needs asked for as well; None where it cannot be recorded as it is.

    heads: so many of the likeliest tokens, unless the client asks for log-probs itself: then its own number stands, as
    texts. A body that is no JSON object or nested too deeply, a reply that echoes its prompt, and beams are left alone.
    """
    try:
        fields = msgspec.json.decode(body, type=Fields)
    except (ValueError, RecursionError):
        return None
    if _true(fields, "echo") or _true(fields, "use_beam_search"):
        return None
    if path.endswith("/generate"):
        return _generate(fields, body, heads)
    hidden: set[str] = set()
    if not _true(fields, "return_token_ids"):
        fields["return_token_ids"] = TRUE
        hidden |= {"token_ids", "response_token_ids", "prompt_token_ids"}
    chat = path.endswith(PATHS[0])
    if not (_true(fields, "logprobs") or _true(fields, "top_logprobs") if chat else _given(fields, "logprobs")):
        hidden.add("logprobs")
        fields["logprobs"] = TRUE if chat else _number(heads)
        if heads:
            fields["return_tokens_as_token_ids"] = TRUE
            if chat:
                fields["top_logprobs"] = _number(heads)
    return Asked(body=msgspec.json.encode(fields) if hidden else body, hidden=frozenset(hidden))


IN_THE_END = "sglext_ids"
"""The event in which SGLang lists the ids of a whole stream, under `FRAMED`."""

BESIDE = tuple((f"x-sglext-return-{name}-ids".encode(), b"1") for name in ("input", "output"))
FRAMED = (b"x-sglext-ids-framed", b"1")


def asked_beside(ask: Asked) -> Asked | None:
    """The same for an engine that refuses `return_token_ids`, as SGLang (0.5.23) does in streamed chats.

    It lists the ids at the end of the stream instead, in an event that can be told from the others and left out. None
    where the gateway did not ask for ids, or it is no stream.
    """
    fields = msgspec.json.decode(ask.body, type=Fields)
    if "token_ids" not in ask.hidden or not _true(fields, "stream"):
        return None
    del fields["return_token_ids"]
    body = msgspec.json.encode(fields)
    if any(_true(fields, f"return_{name}_ids_in_sglext") for name in ("input", "output")):
        return Asked(body=body, hidden=ask.hidden, headers=BESIDE)  # the client has them where it wants them
    return Asked(body=body, hidden=ask.hidden | {IN_THE_END}, headers=(*BESIDE, FRAMED))


def shown(reply: bytes, hidden: frozenset[str]) -> bytes:
    """A reply, or one event of a stream, with the hidden fields null, as they are where nobody asks for them."""
    if not hidden:
        return reply
    try:
        top = msgspec.json.decode(reply, type=Fields)
        choices = msgspec.json.decode(top["choices"], type=list[Fields])
    except (ValueError, RecursionError, KeyError):
        return reply  # an error, or something that is no reply
    for fields in (top, *choices):
        fields.update((name, NULL) for name in hidden if name in fields)
    return msgspec.json.encode({**top, "choices": choices})


_BLANK = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
"""The end of a line and a blank one. A line feed that comes later still begins the next event, and says nothing."""

BOM = b"\xef\xbb\xbf"
"""What some servers write before a text."""


class Events:
    """Cuts a server-sent stream into its events as the bytes come."""

    def __init__(self) -> None:
        self._rest = b""

    def cut(self, data: bytes) -> Iterator[bytes]:
        """The events that are whole by now, each with its blank line."""
        self._rest += data
        while True:
            found = _BLANK.search(self._rest)
            if found is None:
                return
            event, self._rest = self._rest[: found.end()], self._rest[found.end() :]
            yield event

    def rest(self) -> bytes:
        """What came behind the last blank line."""
        rest, self._rest = self._rest, b""
        return rest


def begins_events(body: bytes) -> bool:
    """Whether a body is a stream, whatever its header says."""
    return body.removeprefix(BOM).lstrip().startswith((b"data:", b"event:", b"id:", b"retry:", b":"))


def payload(event: bytes) -> bytes:
    """The data of an event; nothing of a comment."""
    lines = [line[5:].strip() for line in event.removeprefix(BOM).splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def shown_event(event: bytes, data: bytes, hidden: frozenset[str]) -> bytes:
    """An event with the hidden fields of its data null; nothing of a hidden one. One without JSON keeps its bytes."""
    if IN_THE_END in hidden and f"event: {IN_THE_END}".encode() in event.splitlines():
        return b""
    visible = shown(data, hidden)
    if visible is data:
        return event
    if data in event:
        return event.replace(data, visible, 1)
    others = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    return b"\n".join([*others, b"data: " + visible]) + b"\n\n"  # data over several lines


def _generate(fields: Fields, body: bytes, heads: int) -> Asked | None:
    """vLLM's `/inference/v1/generate`, which always sends ids."""
    try:
        params = msgspec.json.decode(fields.get("sampling_params", b"{}"), type=Fields)
    except (ValueError, RecursionError):
        return None
    if _given(params, "logprobs"):
        return Asked(body=body, hidden=frozenset())
    wanted = {**fields, "sampling_params": {**params, "logprobs": _number(heads)}}
    return Asked(body=msgspec.json.encode(wanted), hidden=frozenset({"logprobs"}))


def _given(fields: Mapping[str, Any], name: str) -> bool:
    return name in fields and bytes(fields[name]) != b"null"


def _true(fields: Mapping[str, Any], name: str) -> bool:
    return _given(fields, name) and bytes(fields[name]) not in (b"false", b"0")


def _number(value: int) -> msgspec.Raw:
    return msgspec.Raw(str(value).encode())
