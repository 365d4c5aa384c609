"""Settings of a request as an engine reads them: leniently. What has no place in its column is kept as it was asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rollstore.schema.rollouts import SAMPLER_COLUMNS
from rollstore.writers.effects import spelled

OTHER_NAMES = {
    "max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}  # fmt: skip
"""Names of engines for columns of the sampler."""

NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "max_completion_tokens", "min_tokens", "seed",
)  # fmt: skip
"""Settings of chats and completions that are numbers with a column."""

_COLUMNS = {column.name: column for column in SAMPLER_COLUMNS}
_SEQUENCES = {"stop": str, "bad_words": str, "stop_token_ids": int}


def readable(asked: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(the settings, numbers as their columns have them; those that fit none, as JSON).

    Servers take a number in quotation marks and a whole one with a point. A seed may have any size here. Of `asked`
    only settings that have a column are looked at; the others are handed through.
    """
    kept, others = dict(asked), dict[str, str]()
    for name, value in asked.items():
        column = OTHER_NAMES.get(name, name)
        if value is None or (column not in _COLUMNS and name != "n"):
            continue
        found = _fitting(column, value)
        if found is None:
            others[name] = spelled(value)
            del kept[name]
        else:
            kept[name] = found
    return kept, others


def samples(request: Mapping[str, Any]) -> int:
    """How many outputs of each prompt were asked for."""
    asked = settings_of(request)
    return max(readable({"n": asked.get("n")})[0].get("n") or 1, 1)


def settings_of(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the settings of a request stand: in it, or in its `sampling_params`, which chats and completions ignore."""
    own = None if "messages" in request or "prompt" in request else request.get("sampling_params")
    return own if isinstance(own, Mapping) and own else request


def whole_number(value: Any) -> int | None:
    """A whole number, as servers read it; None where it is none."""
    if isinstance(value, str) and value.strip().removeprefix("-").isdecimal() and value.isascii():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _number(value)
    return int(number) if number is not None and number == int(number) else None


def _fitting(column: str, value: Any) -> Any:
    """The value for a column; None where it has none."""
    if column == "n":
        return whole_number(value)
    if column == "logit_bias":
        return value if isinstance(value, Mapping) and all(map(_is_bias, value.items())) else None
    if column in _SEQUENCES:
        return _several(column, value)
    of = _COLUMNS[column]
    if pa.types.is_floating(of.type):
        number = _number(value)
        low, high = (-_LARGEST if of.minimum is None else of.minimum), (_LARGEST if of.maximum is None else of.maximum)
        return number if number is not None and low <= number <= high else None
    if pa.types.is_integer(of.type):
        number = whole_number(value)
        low = -(1 << 31) if of.minimum is None else of.minimum
        return number if number is not None and (column == "seed" or low <= number < 1 << 31) else None
    return value


_LARGEST = 3.4028234e38


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value) if isinstance(value, str) else value
        return number if math.isfinite(number) else None
    except (ValueError, OverflowError):
        return None


def _several(column: str, value: Any) -> Any:
    if isinstance(value, str):
        return value if _SEQUENCES[column] is str else None
    if not isinstance(value, Sequence) or any(isinstance(one, bool) for one in value):
        return None
    fits = all(isinstance(one, _SEQUENCES[column]) for one in value)
    return value if fits and (_SEQUENCES[column] is str or all(0 <= one < 1 << 31 for one in value)) else None


def _is_bias(pair: tuple[Any, Any]) -> bool:
    token, bias = whole_number(pair[0]), -_LARGEST if pair[1] == -math.inf else _number(pair[1])  # -inf bans a token
    return token is not None and 0 <= token < 1 << 31 and bias is not None and abs(bias) <= _LARGEST
