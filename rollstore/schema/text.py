"""Texts that Arrow cannot hold as they are, and metadata values that are no texts: one reversible rule each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

ESCAPED = "text_escaped"
"""Flag: the texts of that column had lone surrogates; there `\\` stands as `\\\\` and a surrogate as `\\uXXXX`."""

AS_JSON = "json_value"
"""Flag: the metadata value at that index was not a string and stands as JSON."""

DEEPEST = 256
"""Lists and mappings in one another, in a metadata value that is no text. Python's json takes some 1000, less those
frames of the program that writes or reads it."""

_TO_ESCAPE = re.compile(r"[\\\ud800-\udfff]")
_ESCAPED = re.compile(r"\\(\\|u[0-9a-f]{4})")


def escape(value: Any) -> Any:
    """A text, or every text inside a mapping or sequence, as UTF-8 can hold it."""
    if isinstance(value, str):
        return _TO_ESCAPE.sub(lambda m: "\\\\" if m[0] == "\\" else f"\\u{ord(m[0]):04x}", value)
    if isinstance(value, Mapping):
        return {escape(k): escape(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(escape(v) for v in value)
    return value


def as_stored(text: str) -> str:
    """A text as a table holds it: escaped where UTF-8 cannot hold it as it is."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return escape(text)
    return text


def unescape(value: Any) -> Any:
    """What `escape` was given."""
    if isinstance(value, str):
        return _ESCAPED.sub(lambda m: "\\" if m[1] == "\\" else chr(int(m[1][1:], 16)), value)
    if isinstance(value, Mapping):
        return {unescape(k): unescape(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(unescape(v) for v in value)
    return value


def to_json(value: Any) -> str:
    """Strict JSON that reads back as the same value (a tuple as a list). Raises TypeError or ValueError otherwise."""
    try:
        return json.dumps(_native(value, DEEPEST), allow_nan=False)
    except RecursionError:
        raise ValueError("a value nested deeper than this program's stack is long") from None


def from_json(text: str) -> Any:
    """What `to_json` was given; integers of any size stay exact."""
    return json.loads(text)


def _native(value: Any, levels: int) -> Any:
    if isinstance(value, np.generic):
        return _native(value.item(), levels)
    if value is None or isinstance(value, str | int | float):
        return value
    if not isinstance(value, list | tuple | Mapping):
        raise TypeError(f"a {type(value).__name__}")
    if not levels:
        raise ValueError(f"a value nested more than {DEEPEST} deep")
    if isinstance(value, list | tuple):
        return [_native(v, levels - 1) for v in value]
    if not all(isinstance(key, str) for key in value):
        raise TypeError("a mapping with keys that are no texts")
    return {key: _native(v, levels - 1) for key, v in value.items()}
