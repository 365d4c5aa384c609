"""Replies of which something beside the tokens is not as it should be: what can be read is kept, the rest is named."""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollstore.schema.rules.heads import STAND_IN
from rollstore.writers.gateway.asking import BOM
from rollstore.writers.openai.body import Body, Choice, Entry, Logprobs, decode
from rollstore.writers.reply import LARGEST_ID, ids

EVERY = -1
"""Stands for all choices of a reply."""

ALIKE = ("ranks", "heads")
"""What of listed log-probs can be left out alone."""

Odd = Mapping[int, frozenset[str]]
"""Choice -> what of it cannot be read: fields, or one of `ALIKE`."""


class Lenient(NamedTuple):
    """A reply or a part of a stream, its JSON as everybody reads it, and what of it cannot be read.

    no_ids: choice -> why what stands for the ids of its drawn tokens is none.
    """

    body: Body
    data: bytes
    odd: Odd
    no_ids: Mapping[int, str]


BESIDE = ("finish_reason", "logprobs", "routed_experts", "sampling_mask", "weight_versions")
"""Fields of a choice that its tokens can be read without."""

IDS = ("prompt_token_ids", "token_ids", "response_token_ids")

UNREAD = {"logprobs": {"content": [{}]}}
"""Stands for log-probs or ids that cannot be read, so that a part without ids is seen to have drawn."""

_Kind = type[Body] | type[Choice] | type[Entry] | type[Logprobs]
_COLUMNS = {"rank": "ranks", "top_logprobs": "heads"}


def lenient(data: bytes) -> Lenient:
    """A reply or a part of a stream. Raises ValueError where it is none, and where the ids of its prompt are none.

    Whole numbers that were written as 3.0 are ids.
    """
    body = None
    with contextlib.suppress(ValueError):
        body = decode(data)
    if body is not None and all(_in_range(choice.token_ids) for choice in body.choices or ()):
        return Lenient(body, data, {}, {})
    value, plain = _loaded(data)
    odd: defaultdict[int, frozenset[str]] = defaultdict(frozenset)
    no_ids: dict[int, str] = {}
    choices = value.get("choices")
    if isinstance(choices, list):
        value = {**value, "choices": [_readable(choice, odd, no_ids) for choice in choices]}
    value = {**value, "prompt_token_ids": _whole_numbers(value.get("prompt_token_ids"))}
    if not _is(value.get("mm_placeholders"), _type(Body, "mm_placeholders")):
        value = {**value, "mm_placeholders": None}
        odd[EVERY] |= {"mm_placeholders"}
    return Lenient(decode(value), plain, odd, no_ids)


def without(body: Body, choice: Choice, names: Iterable[str]) -> tuple[Body, Choice]:
    """A reply and one of its choices without these fields."""
    gone = dict.fromkeys(names)
    bare = msgspec.structs.replace(choice, **{n: None for n in gone if n in Choice.__struct_fields__})
    said = bare.logprobs
    if said is not None and gone.keys() & set(ALIKE):
        no_heads = {"top_logprobs": None} if "heads" in gone else {}
        fields = {**no_heads, **({"rank": None} if "ranks" in gone else {})}
        content = said.content and tuple(msgspec.structs.replace(entry, **fields) for entry in said.content)
        bare = msgspec.structs.replace(bare, logprobs=msgspec.structs.replace(said, content=content, **no_heads))
    beside = {n: None for n in gone if n in Body.__struct_fields__ and n not in Choice.__struct_fields__}
    return msgspec.structs.replace(body, **beside), bare


def _loaded(data: bytes) -> tuple[dict[str, Any], bytes]:
    """(the object, its JSON): also of a text that not everybody takes for JSON. Raises ValueError where it is none."""
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        text = data.removeprefix(BOM).decode(errors="replace")
        try:
            value = _clean(json.loads(text, parse_float=_number, parse_constant=_number))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"reply: wanted JSON, got {len(data)} bytes that are none ({error})") from None
        data = msgspec.json.encode(value)
    if not isinstance(value, dict):
        raise ValueError(f"reply: wanted an object, got {type(value).__name__}")  # noqa: TRY004  a reply, no argument
    return value, data


def _number(text: str) -> float | str:
    """A number as JSON has it. Minus infinity is written as engines do whose JSON has none; others are no numbers."""
    value = float(text)
    return value if math.isfinite(value) else STAND_IN if value < 0 else text


def _clean(value: Any) -> Any:
    """The same without half characters and without integers of more than 64 bits, which cannot be written."""
    if isinstance(value, dict):
        return {_clean(key): _clean(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_clean(one) for one in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return str(value) if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64 else value


def _in_range(tokens: Sequence[int] | None) -> bool:
    return not tokens or (min(tokens) >= 0 and max(tokens) <= LARGEST_ID)


def _whole_numbers(value: Any) -> Any:
    """A list in which numbers without a fraction are integers, as they are in JSON; anything else as it is."""
    if not isinstance(value, list):
        return value
    listed: list[Any] = value
    return [int(one) if isinstance(one, float) and one.is_integer() else one for one in listed]


def _readable(choice: Any, odd: defaultdict[int, frozenset[str]], no_ids: dict[int, str]) -> Any:
    """A choice as far as it can be read; what cannot is noted."""
    if not isinstance(choice, dict) or not _is(choice.get("index", 0), int):
        return choice
    fields: dict[str, Any] = {**choice, **{name: _whole_numbers(choice.get(name)) for name in IDS}}
    index: int = fields.get("index", 0)
    for name in ("token_ids", "response_token_ids"):
        try:
            ids(name, () if fields[name] is None else fields[name])
        except ValueError as error:
            no_ids[index] = str(error)
            return {"index": index, **UNREAD}
    names = {n for n in BESIDE if not _is(fields.get(n), _type(Choice, n))}
    made = {**fields, **dict.fromkeys(names)}
    if "logprobs" in names:
        found = _content(fields["logprobs"]) or _listed(fields["logprobs"])
        made["logprobs"], more = found or (UNREAD["logprobs"], {"logprobs"})
        names = (names - {"logprobs"}) | more
    if names:
        odd[index] |= names
    return made


def _content(said: Any) -> tuple[Any, set[str]] | None:
    """Log-probs of a chat, and what of them cannot be read; None where one of a drawn token cannot."""
    entries: Any = said.get("content") if isinstance(said, dict) else None
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        return None
    odd = {
        name for name in Entry.__struct_fields__ if not all(_is(one.get(name), _type(Entry, name)) for one in entries)
    }
    if "logprob" in odd:
        return None
    made = [{**one, **dict.fromkeys(odd)} for one in entries]
    return {"content": made}, {_COLUMNS[name] for name in odd if name in _COLUMNS}


def _listed(said: Any) -> tuple[Any, set[str]] | None:
    """The same of completions."""
    if not isinstance(said, dict) or said.get("content") is not None:
        return None
    kept = {name: said.get(name) for name in ("tokens", "token_logprobs", "top_logprobs")}
    odd = {name for name, value in kept.items() if not _is(value, _type(Logprobs, name))}
    if "token_logprobs" in odd or kept["token_logprobs"] is None:
        return None
    return {**kept, **dict.fromkeys(odd)}, {"heads"} if "top_logprobs" in odd else set()


def _type(kind: _Kind, name: str) -> Any:
    """What a field may be."""
    return _TYPES[kind][name]


def _is(value: Any, kind: Any) -> bool:
    """Whether a value may stand in a field."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


_TYPES: dict[_Kind, dict[str, Any]] = {
    kind: {field.name: field.type for field in msgspec.structs.fields(kind)} for kind in (Body, Choice, Entry, Logprobs)
}
