"""A page as one HTML text that needs nothing else and lets nothing else in. Every text in it goes through `text`."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from itertools import count
from typing import Any

from rollstore.cli.text import visible

_INSIDE_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
"""What could end a script element or begin a comment, as JSON may write it as well."""


def text(value: object) -> str:
    """A text for HTML, in elements and in quoted attributes. What would be invisible or move others is written out."""
    return html.escape(visible(str(value)))


def embedded(data: Any) -> str:
    """JSON as the content of a script element: ASCII, and nothing in it that HTML reads as markup."""
    written = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return "".join(_INSIDE_SCRIPT.get(character, character) for character in written)


def style() -> str:
    """The style of all pages."""
    return _asset("view.css")


def script() -> str:
    """The script of the pages that show tokens."""
    return "".join(map(_asset, ("tokens.js", "pane.js", "view.js")))


def policy(*, served: bool) -> str:
    """The content policy: the one script and style by their digests, forms back to where the page came from."""
    parts = [
        "default-src 'none'",
        f"script-src '{_digest(script())}'",
        f"style-src '{_digest(style())}'",
        "base-uri 'none'",
        "form-action 'self'" if served else "form-action 'none'",
    ]
    return "; ".join(parts)


def page(title: str, body: str, *, data: Mapping[str, Any] | None = None, served: bool = False) -> str:
    """A whole page. `title` is plain text, `body` is HTML; with `data` the script draws it into the body."""
    drawn = ""
    if data is not None:
        drawn = f'<script type="application/json" id="data">{embedded(data)}</script>\n<script>{script()}</script>\n'
    return (
        "<!doctype html>\n"
        '<html lang="en">\n'
        '<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy(served=served))}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n"
        f"<style>{style()}</style>\n"
        f'<body class="{"drawn" if data is not None else "read"}">\n{body}\n{drawn}</body>\n</html>\n'
    )


def facts(rows: Iterable[tuple[str, object]]) -> str:
    """Names and values beneath each other."""
    cells = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in rows)
    return f"<dl>{cells}</dl>"


def table(head: Iterable[str], rows: Iterable[Iterable[str]], *, right: frozenset[int] = frozenset()) -> str:
    """A table. `head` is plain text and cells are HTML; the columns `right` hold numbers."""

    def cells(row: Iterable[str], tag: str) -> str:
        kinds = (' class="n"' if n in right else "" for n in count())
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, row, strict=False))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{cells(map(text, head), 'th')}</tr></thead><tbody>{body}</tbody></table>"


@functools.cache
def _asset(name: str) -> str:
    return files("rollstore.view").joinpath(name).read_text(encoding="utf-8")


def _digest(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"
