"""The replies that are in one call: what was drawn is kept, and what of a reply cannot be read costs nothing else."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from rollstore.schema import Flag
from rollstore.writers.gateway.call import Call, Said
from rollstore.writers.gateway.lenient import ALIKE, BOM, EVERY, Lenient, Odd, lenient, without
from rollstore.writers.openai import Server
from rollstore.writers.openai.body import Body, Choice, completion_tokens
from rollstore.writers.openai.choices import checked, reply_of
from rollstore.writers.openai.spellings import unified
from rollstore.writers.openai.stream import pieces
from rollstore.writers.reply import Reply
from rollstore.writers.settings import samples
from rollstore.writers.uuid7 import derived, uuid7
from rollstore.writers.weights import Number, Weights, by_labels

LOG = logging.getLogger("rollstore")

BESIDE = ("logprobs", "sampling_mask", "routed_experts", "weight_versions", "metadata", "mm_placeholders")
"""Fields beside the tokens that a reply can be read without."""


class Drawn(NamedTuple):
    """One reply, what the assistant said in it, and the fields of it that could not be read."""

    reply: Reply
    said: Said | None
    left_out: tuple[str, ...] = ()


class Read(NamedTuple):
    """What is in a call. lost: why replies cannot be recorded, one line each. cut: whether one ended early."""

    drawn: list[Drawn]
    lost: list[str]
    cut: bool


class Tool(msgspec.Struct, frozen=True):
    id: str | None = None


class Message(msgspec.Struct, frozen=True):
    """An assistant's message, or a part of one."""

    content: Any = None
    tool_calls: tuple[Tool, ...] | None = None


class Part(msgspec.Struct, frozen=True):
    """A choice, as far as the next request repeats it."""

    index: int = 0
    message: Message | None = None
    delta: Message | None = None


class Chat(msgspec.Struct, frozen=True):
    """What of a chat's reply the next request repeats."""

    choices: tuple[Part, ...] = ()


class Failure(msgspec.Struct, frozen=True):
    """Whether the engine failed in the middle of a reply."""

    error: msgspec.Raw = msgspec.Raw()


def read(call: Call, server: Server, number: Number) -> Read:
    """The replies of a call. Raises ValueError where none can be recorded: no ids, parts missing, no reply at all.

    `server` is how it is read where the call does not say so itself. A stream is kept up to the first part that is
    damaged or has text without ids, unless the usage counts exactly the ids that came.
    """
    request = msgspec.json.decode(call.request)
    whole, broken, cut, odd, no_ids, read_parts = _whole(call)
    if cut is not None or broken:
        whole = _nothing_drawn_yet(whole)
    known = call.server or server
    checked(whole, request, known)
    count, groups = samples(request), dict[int, str]()
    chats = [_chat(part) for part in read_parts]
    drawn: list[Drawn] = []
    lost: list[str] = []
    for choice in whole.choices or ():
        prompt = choice.index // count
        if prompt not in groups:
            groups[prompt] = derived(call.mark, f"group {len(groups)}") if call.mark else uuid7()
        if choice.index in no_ids and not choice.token_ids:
            lost.append(f"choice {choice.index}: {no_ids[choice.index]}")
            continue
        try:
            names = odd.get(choice.index, frozenset()) | odd.get(EVERY, frozenset())
            reply, left_out = _reply(whole, choice, names, request, known, number, groups[prompt])
        except Exception as error:  # a reply may be anything
            lost.append(f"choice {choice.index}: {error}")
            continue
        more: dict[str, Any] = {"weights": _weights(reply, call.weights, number)}
        early = cut or ("engine_abort" if choice.index in broken else None)
        if early is not None and choice.finish_reason is None:
            more.update(ending="aborted", ending_reason=early)
        timed = replace(reply, started_at=call.started_at, finished_at=call.finished_at, **more)
        drawn.append(Drawn(timed, _said(chats, choice.index), left_out))
    if not drawn:
        raise ValueError("; ".join(lost))
    for index, why in broken.items():
        LOG.warning("a stream is recorded up to a hole: choice %d: %s", index, no_ids.get(index, why))
    return Read(drawn, lost, cut is not None or bool(broken))


class Whole(NamedTuple):
    """The reply of a call. broken: choices that end before a hole. cut: why it ended early. no_ids: choices of which
    some ids are none, and why. parts: its JSON."""

    body: Body
    broken: dict[int, str]
    cut: str | None
    odd: Odd
    no_ids: Mapping[int, str]
    parts: Sequence[bytes]


def _whole(call: Call) -> Whole:
    """Raises ValueError where there is no reply."""
    found: list[Lenient] = []
    signs = 0
    damaged: tuple[int, Exception] | None = None
    for part in call.parts:
        if not part.removeprefix(BOM).lstrip().startswith(b"{"):
            signs += 1  # of life: a stream may hold anything beside its parts
            continue
        try:
            found.append(lenient(part))
        except (ValueError, RecursionError) as error:
            if len(call.parts) == 1:
                raise
            damaged = damaged or (len(found), error)
    if damaged is not None and not _counted([one.body for one in found]):
        before, why = damaged
        found, signs = found[:before], signs + 1
        if not any(choice.token_ids for one in found for choice in one.body.choices or ()):
            raise ValueError(f"wanted a stream with ids, got one that is damaged before the first of them: {why}")
        LOG.warning("a stream is recorded up to a damaged part, the %d. of %d: %s", before + 1, len(call.parts), why)
    raw = [one.data for one in found]
    failed = next((error for error in map(_error, raw) if error is not None), None)
    whole, broken = (found[0].body, {}) if len(found) == 1 else pieces([one.body for one in found])
    whole = unified(whole)
    if not whole.choices:
        raise ValueError(f"wanted a reply, got none ({_why(call, failed)})")
    odd: defaultdict[int, frozenset[str]] = defaultdict(frozenset)
    for index, names in (item for one in found for item in one.odd.items()):
        odd[index] |= names
    no_ids = {index: why for one in reversed(found) for index, why in one.no_ids.items()}
    cut = call.cut or ("engine_abort" if failed is not None or signs else None)
    return Whole(whole, broken, cut, odd, no_ids, raw)


def _why(call: Call, failed: str | None) -> str:
    if failed is not None:
        return f"the engine said {failed[:200]}"
    return call.cut or f"{sum(map(len, call.parts))} bytes"


def _counted(parts: Sequence[Body]) -> bool:
    """Whether the usage counts exactly the ids that came."""
    whole, broken = pieces(parts)
    came = sum(len(choice.token_ids or ()) for choice in whole.choices or ())
    return not broken and completion_tokens(whole) == came


def _error(part: bytes) -> str | None:
    """The error that a part of a stream is."""
    error = bytes(msgspec.json.decode(part, type=Failure).error)
    return None if error in (b"", b"null") else error.decode(errors="replace")


def _reply(
    whole: Body,
    choice: Choice,
    odd: frozenset[str],
    request: Mapping[str, Any],
    server: Server,
    number: Number,
    group: str,
) -> tuple[Reply, tuple[str, ...]]:
    """(the reply, what it could not be read with). Tokens were drawn, whatever stands beside them.

    odd: what is no value of its field.
    """
    problem: ValueError | None = None
    if odd:
        LOG.warning("a call is recorded without %s, which cannot be read", ", ".join(sorted(odd)))
    for more in _fewer(*without(whole, choice, odd)):
        names = odd.union(more)
        body, bare = without(whole, choice, names)
        try:
            reply = reply_of(body, bare, request, server, number, group)
        except ValueError as error:
            problem = problem or error
            continue
        if problem is not None:
            LOG.warning("a call is recorded without %s: %s", ", ".join(more), problem)
        if "logprobs" not in names:
            return reply, tuple(names)
        flag = Flag(kind="unplaced_logprobs", column="logprobs")
        return replace(reply, flags=(*reply.flags, flag)), tuple(names - {"logprobs", *ALIKE})
    raise problem or ValueError("wanted a reply, got none")


def _fewer(whole: Body, choice: Choice) -> Iterator[tuple[str, ...]]:
    """Which fields to leave out: none, each alone, all."""
    there = tuple(name for name in BESIDE if getattr(choice, name, None) or getattr(whole, name, None))
    yield ()
    if choice.has_logprobs:
        yield from ((name,) for name in ALIKE)
    yield from ((name,) for name in there)
    if len(there) > 1:
        yield there


def _chat(part: bytes) -> Chat:
    """What a chat says, where it says it as it should: it only links the calls of a conversation."""
    try:
        return msgspec.json.decode(part, type=Chat)
    except (ValueError, RecursionError):
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


def _nothing_drawn_yet(body: Body) -> Body:
    """A stream that was cut before its first token drew none. One that said something without ids drew some."""
    choices = tuple(
        msgspec.structs.replace(choice, token_ids=()) if choice.token_ids is None and not choice.speaks else choice
        for choice in body.choices or ()
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
