"""What a model wrote can neither act on a terminal nor hide in it."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from rollstore.cli.text import append, decode, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\rb\nc\td", "a\\rb\\nc\\td"),
        ("\x9b2J\x7f\x00", "\\x9b2J\\x7f\\x00"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\U000e0041", "\\U000e0041"),
        ("\u2028", "\\u2028"),
        ("\ud800", "\\ud800"),
        ("日本 é\u00a0x", "日本 é\u00a0x"),
        ("👨\u200d👩", "👨\u200d👩"),
    ],
)
def test_control_and_format_characters_are_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_no_control_character_of_unicode_passes() -> None:
    every = [
        c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"}
    ]
    assert len(every) > 2048 + 65
    assert {c for c in every if c in visible(f"a{c}b")} == {"\u200c", "\u200d"}


def test_kept_characters_stay_themselves() -> None:
    assert visible("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"


def test_rich_markup_in_a_text_is_only_text() -> None:
    line = Text()
    append(line, "[bold]x[/bold] :smile:")
    console = Console(width=80, force_terminal=True, color_system="standard")
    with console.capture() as caught:
        console.print(line)
    assert caught.get() == "[bold]x[/bold] :smile:\n"


def test_an_escape_looks_different_from_the_same_letters() -> None:
    line = Text()
    append(line, "\\x1b\x1b", "green")
    assert [(line.plain[s.start : s.end], s.style) for s in line.spans] == [
        ("\\x1b", "green"),
        ("\\x1b", "green reverse"),
    ]


def test_a_character_that_spans_tokens_stands_at_the_first() -> None:
    snowman = "☃".encode()
    assert decode([b"a" + snowman[:1], snowman[1:2], snowman[2:] + b"b", b""]) == ["a☃", "", "b", ""]


def test_bytes_that_are_no_text_are_kept_apart() -> None:
    assert [visible(text or "") for text in decode([b"\xff", b"\xe2\x98", b"ok"])] == ["\\xff", "\\xe2\\x98", "ok"]


def test_an_unknown_token_splits_the_text_around_it() -> None:
    assert decode([b"\xc3", None, b"\xa9"]) == ["\udcc3", None, "\udca9"]


@given(st.lists(st.none() | st.binary(max_size=4)))
def test_no_byte_is_lost_in_decoding(pieces: list[bytes | None]) -> None:
    texts = decode(pieces)
    assert [text is None for text in texts] == [piece is None for piece in pieces]
    together = b"".join((text or "").encode("utf-8", "surrogateescape") for text in texts)
    assert together == b"".join(piece or b"" for piece in pieces)
