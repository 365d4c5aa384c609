"""Replies as JSON has them: chat, completions and vLLM's `/inference/v1/generate`, whole or in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollstore.writers.decoding import loaded, shaped_as


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


WORDS = ("content", "reasoning", "reasoning_content", "tool_calls", "function_call", "refusal")
"""What of a message tokens were drawn for."""


class Choice(msgspec.Struct, frozen=True):
    """One output, or a part of one."""

    index: int = 0
    text: Any = None
    message: Any = None
    delta: Any = None
    finish_reason: str | None = None
    stop_reason: Any = None
    matched_stop: Any = None
    token_ids: tuple[int, ...] | None = None
    response_token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    meta_info: Any = None
    logprobs: Logprobs | None = None
    routed_experts: str | None = None
    sampling_mask: tuple[tuple[int, ...], ...] | None = None
    weight_versions: tuple[Span, ...] | None = None

    @property
    def speaks(self) -> bool:
        """Whether it has text that tokens were drawn for."""
        said = self.delta if self.message is None else self.message
        return bool(self.text) or (isinstance(said, dict) and any(map(said.get, WORDS)))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  of any shape

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probs of tokens are listed."""
        return self.logprobs is not None and bool(self.logprobs.content or self.logprobs.token_logprobs)


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
    sglext: Any = None
    mm_placeholders: dict[str, tuple[Placeholder, ...]] | None = None


def decode(body: bytes | str | Mapping[str, Any]) -> Body:
    """A reply or a part of a stream. Raises ValueError with the place that does not fit."""
    try:
        found = msgspec.json.decode(body, type=Body) if isinstance(body, bytes | str) else msgspec.convert(body, Body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = shaped_as(Body, loaded(body))  # to say where, in the words of all engines
    choices = found.choices or ()
    if found.choices is None or any(choice.response_token_ids is not None for choice in choices):
        return msgspec.structs.replace(found, choices=tuple(map(_by_one_name, choices)))
    return found


def _by_one_name(choice: Choice) -> Choice:
    """A choice whose ids stand under either name, under the one that all others look at."""
    said, other = choice.token_ids, choice.response_token_ids
    if said is not None and other is not None and said != other:
        where = f"reply: choices: choice {choice.index}: token_ids and response_token_ids"
        raise ValueError(f"{where}: wanted the same ids of both, got {len(said)} and {len(other)} that differ")
    return msgspec.structs.replace(choice, token_ids=other if said is None else said, response_token_ids=None)


def distinct(choices: Sequence[Choice]) -> None:
    """Raises ValueError where an index is below 0, or two choices of one reply or part have the same."""
    indices = [choice.index for choice in choices]
    if len(set(indices)) < len(indices) or min(indices, default=0) < 0:
        raise ValueError(f"choices: wanted each index once and none below 0, got {indices}")


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


def token_id(token: str | None) -> int | None:
    """The N of `token_id:N`."""
    word, _, digits = (token or "").partition(":")
    return int(digits) if word == "token_id" and digits.isascii() and digits.isdigit() else None
