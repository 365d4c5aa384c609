"""Text of models on a terminal: nothing in it may act there, and what would be invisible is written out."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

from rich.text import Text

_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
_JOINERS = "\u200c\u200d"  # they shape Persian and emoji and cannot move or hide anything else


def _shown(character: str) -> bool:
    return character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs"


def _escaped(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python keeps a byte that is no UTF-8
        code -= 0xDC00
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _runs(text: str, keep: str) -> Iterator[tuple[str, bool]]:
    """The text in runs of (what to print, whether it is an escape)."""
    start = 0
    for n, character in enumerate(text):
        if character in keep or _shown(character):
            continue
        if start < n:
            yield text[start:n], False
        yield _escaped(character), True
        start = n + 1
    if start < len(text):
        yield text[start:], False


def visible(text: str, *, keep: str = "") -> str:
    """The text with control, format and unassigned characters written as `\\x1b` or `\\u202e`, but for `keep`."""
    return text if text.isprintable() else "".join(run for run, _ in _runs(text, keep))


def append(line: Text, text: str, style: str = "", *, keep: str = "") -> None:
    """Add text to a line as `visible` writes it, escapes reversed to tell them from the same letters in the text."""
    for run, escape in _runs(text, keep):
        line.append(run, f"{style} reverse".strip() if escape else style)


def decode(pieces: Sequence[bytes | None]) -> list[str | None]:
    """The text of each token from its bytes. A character that spans tokens stands at the first; None stays None.

    Bytes that are no UTF-8 become the lone surrogates that `visible` writes as `\\xff`.
    """
    texts: list[str | None] = [None if piece is None else "" for piece in pieces]
    start = 0
    while start < len(pieces):
        stop = start
        while stop < len(pieces) and pieces[stop] is not None:
            stop += 1
        _decode_run(pieces[start:stop], texts, start)
        start = stop + 1
    return texts


def _decode_run(pieces: Sequence[bytes | None], texts: list[str | None], first: int) -> None:
    run = [piece or b"" for piece in pieces]
    token, left = -1, 0
    parts: list[list[str]] = [[] for _ in run]
    for character in b"".join(run).decode("utf-8", "surrogateescape"):
        while left <= 0:  # the token in which this character begins
            token += 1
            left += len(run[token])
        parts[token].append(character)
        left -= 1 if 0xDC80 <= ord(character) <= 0xDCFF else len(character.encode())
    for n, part in enumerate(parts, first):
        texts[n] = "".join(part)
