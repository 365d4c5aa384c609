"""The parts of a streamed reply as one reply, and where a part is missing between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollstore.writers.openai.body import Body, Choice, Entry, Logprobs, completion_tokens, decode, distinct


class Pieces(NamedTuple):
    """The parts of a stream as one reply. broken: choices that end before a hole, and what stands there."""

    whole: Body
    broken: dict[int, str]


def events(stream: bytes | str) -> list[bytes]:
    """The JSON of each event of a server-sent stream; an event that was cut off is left out."""
    text = stream.encode() if isinstance(stream, str) else stream
    plain = text.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    blocks = [block.split(b"\n") for block in plain.split(b"\n\n")[:-1]]
    found = [b"\n".join(line[5:].strip() for line in block if line.startswith(b"data:")) for block in blocks]
    return [data for data in found if data and data != b"[DONE]"]


def joined(chunks: Iterable[bytes | str | Mapping[str, Any]]) -> Body:
    """The parts of a stream as one reply. What a cut stream had not sent yet stays unsaid.

    Raises ValueError where a part is none, and where a part of a choice that has ids elsewhere has text and none.
    """
    whole, broken = pieces([decode(chunk) for chunk in chunks])
    for index, why in broken.items():
        raise ValueError(f"stream: choice {index}: {why}")
    return whole


def pieces(parts: Sequence[Body]) -> Pieces:
    """The same, where a choice keeps what stands before its hole, without an ending.

    What says more than its ids do is a hole: text without ids, as far as no tokens before it came without text (parsers
    of tools and reasoning hold text back). Where the usage counts exactly the ids that came, there is none.
    """
    choices: dict[int, list[Choice]] = {}
    for part in parts:
        distinct(part.choices or ())
        for choice in part.choices or ():
            choices.setdefault(choice.index, []).append(choice)
    usage = _usage(parts, choices)
    came = sum(len(one.token_ids or ()) for some in choices.values() for one in some)
    holes = {} if usage is not None and usage.get("completion_tokens") == came else _holes(choices)
    if holes and usage is not None:  # it counts what is left out too
        usage = {name: value for name, value in usage.items() if name != "completion_tokens"}
    whole = tuple(_before(choices[i], holes[i]) if i in holes else _whole(choices[i]) for i in sorted(choices))
    once = ("id", "request_id", "model", "prompt_token_ids", "system_fingerprint", "mm_placeholders")
    body = Body(
        choices=whole,
        usage=usage,
        metadata=_said(reversed(parts), "metadata"),
        sglext={name: value for part in parts if isinstance(part.sglext, dict) for name, value in part.sglext.items()},
        **{name: _said(parts, name) for name in once},
    )
    return Pieces(body, {index: f"part {at} has text and no token ids" for index, at in holes.items()})


def _usage(parts: Sequence[Body], choices: Mapping[int, Any]) -> dict[str, Any] | None:
    """What was counted in all. Counts that come with a choice are of that choice so far; without choices, of all."""
    last: dict[str, Any] | None = None
    counts: dict[int, int] = {}
    for part in parts:
        count = completion_tokens(part)
        if not isinstance(part.usage, dict):
            continue
        last = part.usage
        if not part.choices:
            counts = {} if count is None else dict.fromkeys(choices, 0) | {-1: count}
        elif count is not None and len(part.choices) == 1:
            counts.pop(-1, None)
            counts[part.choices[0].index] = count
    if last is None:
        return None
    rest = {name: value for name, value in last.items() if name != "completion_tokens"}
    return {**rest, "completion_tokens": sum(counts.values())} if counts.keys() >= choices.keys() else rest


def _holes(choices: Mapping[int, Sequence[Choice]]) -> dict[int, int]:
    """Choice -> the first of its parts that says more than its ids do; none of a choice without any ids."""
    holes: dict[int, int] = {}
    for index, parts in choices.items():
        if all(part.token_ids is None for part in parts):
            continue
        held_back = False
        for at, part in enumerate(parts):
            if part.token_ids:
                held_back = not part.speaks
            elif part.has_logprobs or (part.speaks and not held_back):
                holes[index] = at
                break
    return holes


def _before(parts: Sequence[Choice], hole: int) -> Choice:
    """A choice up to a hole, where its end is not known. Without any ids before, it has text and none."""
    some = any(part.token_ids for part in parts[:hole])
    whole = _whole(parts[: hole if some else hole + 1])
    token_ids = whole.token_ids if some else None
    return msgspec.structs.replace(whole, token_ids=token_ids, finish_reason=None, stop_reason=None, matched_stop=None)


def _said(parts: Iterable[Any], name: str) -> Any:
    """The first value that is not null."""
    return next((value for part in parts if (value := getattr(part, name)) is not None), None)


def _whole(parts: Sequence[Choice]) -> Choice:
    first = next((part.logprobs for part in parts if part.logprobs is not None), None)
    said = [found for part in parts if (found := part.logprobs or _unsaid(part, first)) is not None]
    speaker = next((part for part in parts if part.speaks), None)
    columns = ("content", "tokens", "token_logprobs", "top_logprobs")
    once = ("finish_reason", "stop_reason", "matched_stop", "prompt_token_ids", "routed_experts", "weight_versions")
    return Choice(
        index=parts[0].index,
        text=None if speaker is None else speaker.text,
        delta=None if speaker is None else speaker.delta,
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
