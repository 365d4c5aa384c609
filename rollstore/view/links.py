"""Addresses of the pages, for those that are served; a page in a file has none to go to."""

from __future__ import annotations

from urllib.parse import quote

from rollstore.view.markup import text


def address(path: str, **given: object) -> str:
    """A path with its query. What is None or empty is left out."""
    pairs = [f"{name}={quote(str(value), safe='', errors='surrogatepass')}" for name, value in given.items()
             if value is not None and value != ""]  # fmt: skip
    return path + ("?" + "&".join(pairs) if pairs else "")


def link(shown: object, path: str, **given: object) -> str:
    """HTML of a link."""
    return f'<a href="{text(address(path, **given))}">{text(shown)}</a>'
