"""A report as one HTML page: no scripts, nothing from elsewhere, every text escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from rollstore.diagnose.report.section import Section

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Inline styles are what matplotlib writes into SVG; nothing else may load or run."""

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 0.25rem; }
p { margin: 0.25rem 0 0.75rem; }
.about, .note { color: color-mix(in srgb, currentColor 70%, transparent); font-size: 0.9rem; }
nav a { margin-right: 1rem; white-space: nowrap; }
figure { margin: 0; background: #fff; border: 1px solid #ccc; border-radius: 4px; }
figure svg { display: block; width: 100%; height: auto; }
details { margin-top: 0.5rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.85rem; }
th, td { padding: 0.15rem 0.75rem 0.15rem 0; text-align: right; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 1px solid currentColor; font-weight: 600; }
"""


def page(store: str, about: str, sections: Sequence[Section]) -> str:
    """The page as text. Raises ImportError, by what to install, without matplotlib."""
    links = "".join(f'<a href="#{section.name}">{escape(section.title)}</a> ' for section in sections)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Report of {_text(store)}</title><style>{_STYLE}</style></head><body>",
            f'<h1>{_text(store)}</h1><p class="about">{_text(about)}</p><nav>{links}</nav>',
            *(part for section in sections for part in _section(section)),
            "</body></html>",
        ]
    )


def _section(section: Section) -> Iterator[str]:
    yield f'<section id="{section.name}"><h2>{_text(section.title)}</h2><p>{_text(section.says)}</p>'
    if section.draw is not None:
        drawn = section.draw()
        name = f'<svg role="img" aria-label="{escape(section.title)}" '
        yield f"<figure>{drawn[drawn.index('<svg') :].replace('<svg ', name, 1)}</figure>"
    if section.note:
        yield f'<p class="note">{_text(section.note)}</p>'
    if section.rows:
        head = "".join(f'<th scope="col">{_text(column)}</th>' for column in section.columns)
        yield "<details><summary>The numbers</summary><div class='table'><table>"
        yield f"<thead><tr>{head}</tr></thead><tbody>"
        for row in section.rows:
            yield "<tr>" + "".join(f"<td>{_text(_number(value))}</td>" for value in row) + "</tr>"
        yield "</tbody></table></div></details>"
    yield "</section>"


def _number(value: Any) -> str:
    if value is None:
        return "unknown"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _text(text: str) -> str:
    """Escaped, and without what is no character of a page: unpaired surrogates, controls."""
    sound = text.encode("utf-8", "replace").decode()
    return escape("".join(letter if letter.isprintable() or letter == " " else "\ufffd" for letter in sound))
