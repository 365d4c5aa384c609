"""The JSON of a reply as a struct of what is read of it, or a ValueError that says where it is something else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")

Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""A token id."""


def loaded(reply: bytes | str | Any) -> Any:
    """JSON text as Python values; anything else as it is. Raises ValueError for text that is no JSON."""
    if not isinstance(reply, bytes | str):
        return reply
    try:
        return msgspec.json.decode(reply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"reply: wanted JSON, got {len(reply)} bytes that are none ({error})") from None


def shaped_as(kind: type[T], value: Any, where: str = "reply") -> T:
    """The value as a `kind`. Raises ValueError with the place that does not fit."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: wanted an object, got {type(value).__name__}")  # noqa: TRY004  a value of the engine's, no argument
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"{where}: {_told(str(error))}") from None


def _told(said: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.a`" in the words of all other errors."""
    found = re.fullmatch(r"Expected (.+?)(?:, got (.+?))?(?: - at `\$\.?(.*)`)?", said, re.DOTALL)
    if found is None:
        return f"wanted another shape, got one of which is said: {said}"
    wanted, got, place = (part.replace("`", "") if part else part for part in found.groups())
    return f"{f'{place}: ' if place else ''}wanted {wanted}, got {got or 'another'}"
