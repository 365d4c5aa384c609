"""Texts that Arrow cannot hold as they are, and metadata values that are no texts: one reversible rule each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ESCAPED = "text_escaped"
"""Flag: the texts of that column had lone surrogates; there `\\` stands as `\\\\` and a surrogate as `\\uXXXX`."""

AS_JSON = "json_value"
"""Flag: the metadata value at that index was not a string and stands as JSON."""

_TO_ESCAPE = re.compile(r"[\\\ud800-\udfff]")
_ESCAPED = re.compile(r"\\(\\|u[0-9a-f]{4})")


def escape(value: Any) -> Any:
    if isinstance(value, str):
        return _TO_ESCAPE.sub(lambda m: "\\\\" if m[0] == "\\" else f"\\u{ord(m[0]):04x}", value)
    if isinstance(value, Mapping):
        return {escape(k): escape(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return tuple(escape(v) for v in value)
    return value


def unescape(value: Any) -> Any:
    if isinstance(value, str):
        return _ESCAPED.sub(lambda m: "\\" if m[1] == "\\" else chr(int(m[1][1:], 16)), value)
    if isinstance(value, Mapping):
        return {unescape(k): unescape(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return tuple(unescape(v) for v in value)
    return value
