"""Replies as JSON has them: chat, completions and vLLM's `/inference/v1/generate`, whole or in parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec


class Entry(msgspec.Struct, frozen=True):
    """One listed token: text or `token_id:N` in `token`, or an id."""

    token: str | None = None
    token_id: int | None = None
    logprob: float | None = None
    rank: int | None = None
    top_logprobs: tuple[Entry, ...] | None = ()

    @property
    def id(self) -> int | None:
        return token_id(self.token) if self.token_id is None else self.token_id


class Logprobs(msgspec.Struct, frozen=True):
    """Of chat and generate: `content`; of completions: the others."""

    content: tuple[Entry, ...] | None = None
    tokens: tuple[str, ...] | None = None
    token_logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None


class Span(msgspec.Struct, frozen=True):
    """Output tokens start, ..., end - 1 under one weight label."""

    version: str | int
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True):
    """One output, or a part of one."""

    index: int = 0
    finish_reason: str | None = None
    stop_reason: Any = None
    matched_stop: Any = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    logprobs: Logprobs | None = None
    routed_experts: str | None = None
    sampling_mask: tuple[tuple[int, ...], ...] | None = None
    weight_versions: tuple[Span, ...] | None = None


class Metadata(msgspec.Struct, frozen=True):
    """Where SGLang's servers put the weights."""

    weight_version: str | int | None = None
    weight_versions: tuple[Span, ...] | None = None


class Placeholder(msgspec.Struct, frozen=True):
    """Placeholder tokens of one medium in the prompt."""

    offset: int
    length: int


class Body(msgspec.Struct, frozen=True):
    """A reply, or a part of a stream; fields that are not read here are left out.

    What stands beside the tokens may be anything: a server that writes it in its own way has drawn them all the same.
    """

    id: Any = None
    request_id: Any = None
    model: Any = None
    choices: tuple[Choice, ...] | None = ()
    prompt_token_ids: tuple[int, ...] | None = None
    system_fingerprint: Any = None
    usage: Any = None
    metadata: Any = None
    mm_placeholders: dict[str, tuple[Placeholder, ...]] | None = None


def decode(body: bytes | str | Mapping[str, Any]) -> Body:
    """A reply or a part of a stream. Raises ValueError (msgspec.ValidationError) on what is none."""
    found = msgspec.json.decode(body, type=Body) if isinstance(body, bytes | str) else msgspec.convert(body, Body)
    return msgspec.structs.replace(found, choices=()) if found.choices is None else found


def text(value: Any) -> str | None:
    """A name as text; None where it is none."""
    return value or None if isinstance(value, str) else str(value) if type(value) is int else None


def cached_tokens(body: Body) -> int | None:
    """What of the prompt came from the prefix cache, where the server says it as it should."""
    details = body.usage.get("prompt_tokens_details") if isinstance(body.usage, dict) else None
    count = details.get("cached_tokens") if isinstance(details, dict) else None
    return count if type(count) is int and 0 <= count < 1 << 31 else None


def completion_tokens(body: Body) -> int | None:
    """How many tokens were drawn in all, where the server says it as it should."""
    count = body.usage.get("completion_tokens") if isinstance(body.usage, dict) else None
    return count if type(count) is int else None


def metadata(body: Body) -> Metadata | None:
    """What SGLang says beside the choices; None where it is something else."""
    try:
        return msgspec.convert(body.metadata, Metadata | None)
    except msgspec.ValidationError:
        return None


def events(stream: bytes | str) -> list[bytes]:
    """The JSON of each event of a server-sent stream; an event that was cut off is left out."""
    text = stream.encode() if isinstance(stream, str) else stream
    blocks = [block.split(b"\n") for block in text.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]]
    found = [b"\n".join(line[5:].strip() for line in block if line.startswith(b"data:")) for block in blocks]
    return [data for data in found if data and data != b"[DONE]"]


def joined(chunks: Iterable[bytes | str | Mapping[str, Any]]) -> Body:
    """The parts of a stream as one reply. What a cut stream had not sent yet stays unsaid."""
    parts = [decode(chunk) for chunk in chunks]
    choices: dict[int, list[Choice]] = {}
    for part in parts:
        for choice in part.choices or ():
            choices.setdefault(choice.index, []).append(choice)

    whole = tuple(_whole(choices[index]) for index in sorted(choices))
    once = ("id", "request_id", "model", "prompt_token_ids", "system_fingerprint", "mm_placeholders")
    return Body(
        choices=whole,
        usage=_said(reversed(parts), "usage"),
        metadata=_said(reversed(parts), "metadata"),
        **{name: _said(parts, name) for name in once},
    )


def _said(parts: Iterable[Any], name: str) -> Any:
    """The first value that is not null."""
    return next((value for part in parts if (value := getattr(part, name)) is not None), None)


def _whole(parts: Sequence[Choice]) -> Choice:
    first = next((part.logprobs for part in parts if part.logprobs is not None), None)
    said = [found for part in parts if (found := part.logprobs or _unsaid(part, first)) is not None]
    columns = ("content", "tokens", "token_logprobs", "top_logprobs")
    once = ("finish_reason", "stop_reason", "matched_stop", "prompt_token_ids", "routed_experts", "weight_versions")
    return Choice(
        index=parts[0].index,
        token_ids=_chained(parts, "token_ids"),
        sampling_mask=_chained(parts, "sampling_mask"),
        logprobs=Logprobs(**{name: _chained(said, name) for name in columns}) if said else None,
        **{name: _said(reversed(parts), name) for name in once},
    )


def _unsaid(part: Choice, like: Logprobs | None) -> Logprobs | None:
    """What stands for the log-probs of a part that has tokens and none, where another part has some."""
    if like is None or not part.token_ids:
        return None
    each = part.token_ids
    if like.content is not None:
        return Logprobs(content=tuple(Entry() for _ in each))
    return Logprobs(
        tokens=None if like.tokens is None else tuple("" for _ in each),
        token_logprobs=tuple(None for _ in each),
        top_logprobs=None if like.top_logprobs is None else tuple(None for _ in each),
    )


def _chained(parts: Iterable[Any], name: str) -> Any:
    """The values of all parts one after another; None where no part has any."""
    some = [value for part in parts if (value := getattr(part, name)) is not None]
    return tuple(item for value in some for item in value) if some else None


def token_id(token: str | None) -> int | None:
    """The N of `token_id:N`."""
    word, _, digits = (token or "").partition(":")
    return int(digits) if word == "token_id" and digits.isascii() and digits.isdigit() else None
