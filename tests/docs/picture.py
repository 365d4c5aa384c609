"""docs/one_rollout.svg, the picture of the record on the concepts page: `python -m tests.docs.picture` draws it again.

What stands in it comes from the record that the page's code makes, column by column.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

import numpy as np

from rollstore import Known, Rollout

DOCS = Path(__file__).parents[2] / "docs"
SVG = DOCS / "one_rollout.svg"

LEFT, CELL, ROW = 172, 62, 26
"""Pixels: the labels, a token, a row."""

STYLE = """
  .one-rollout { --ink: #24292f; --soft: #57606a; --line: #8c959f; --drawn: #1f6feb; --on-drawn: #ffffff;
    font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; max-width: 100%; height: auto; }
  @media (prefers-color-scheme: dark) {
    .one-rollout { --ink: #e6edf3; --soft: #9aa4af; --line: #6e7681; --drawn: #58a6ff; --on-drawn: #0d1117; }
  }
  [data-md-color-scheme=default] .one-rollout { --ink: #24292f; --soft: #57606a; --line: #8c959f; --drawn: #1f6feb;
    --on-drawn: #ffffff; }
  [data-md-color-scheme=slate] .one-rollout { --ink: #e6edf3; --soft: #9aa4af; --line: #6e7681; --drawn: #58a6ff;
    --on-drawn: #0d1117; }
  .one-rollout text { fill: var(--ink); text-anchor: middle; }
  .one-rollout .name { text-anchor: start; }
  .one-rollout .soft { fill: var(--soft); }
  .one-rollout .on-drawn { fill: var(--on-drawn); font-weight: 700; }
  .one-rollout rect { fill: none; stroke: var(--line); }
  .one-rollout .drawn { fill: var(--drawn); stroke: var(--drawn); }
  .one-rollout path { stroke: var(--line); fill: none; stroke-dasharray: 2 3; }
"""


def record() -> Rollout:
    """What the code of the page makes."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "concepts.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Rollout] = {}
    exec(compile(code, "concepts.md", "exec"), names)
    return names["rollout"]


def drawing(row: Rollout) -> str:
    """The picture, as a file that also stands in a page."""
    drawn = np.flatnonzero(row.action_mask).tolist()
    heads = row.heads
    counts = heads.counts.tolist()
    firsts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    deepest = max(counts)
    marks: list[str] = []

    def at(position: float) -> float:
        return LEFT + CELL * (position + 0.5)

    def text(x: float, line: float, said: object, kind: str = "") -> None:
        named = f' class="{kind}"' if kind else ""
        marks.append(f'<text x="{x:g}" y="{ROW * line + 18:g}"{named}>{escape(str(said))}</text>')

    def name(line: float, column: str, aligned: str = "") -> None:
        text(8, line, column, "name")
        if aligned:
            text(LEFT - 14, line, aligned, "soft")

    def box(position: float, line: float, width: int = 1, kind: str = "") -> None:
        named = f' class="{kind}"' if kind else ""
        place = f'x="{LEFT + CELL * position + 2:g}" y="{ROW * line:g}" width="{CELL * width - 4}" height="{ROW - 2}"'
        marks.append(f'<rect {place} rx="3"{named}/>')

    name(0, "position")
    name(1, "tokens", "T")
    name(2, "action_mask", "T")
    for position, (token, acts) in enumerate(zip(row.tokens.tolist(), row.action_mask.tolist(), strict=True)):
        text(at(position), 0, position, "soft")
        box(position, 1, kind="drawn" if acts else "")
        text(at(position), 1, token, "on-drawn" if acts else "")
        text(at(position), 2, int(acts), "" if acts else "soft")
    name(3.2, "spans")
    for index, span in enumerate(row.spans):
        box(span.start, 3.2, span.length)
        middle = span.start + (span.length - 1) / 2
        text(at(middle), 3.2, {"template": "tmpl"}.get(span.role, span.role))
        text(at(middle), 4.1, index, "soft")
    top = 3 * ROW - 2
    for position in drawn:
        for start, end in ((top, 3.2 * ROW), (5 * ROW, 5.6 * ROW)):
            marks.append(f'<path d="M{at(position):g} {start:g}V{end:g}"/>')
    columns = {
        "action": range(len(drawn)),
        "logprobs": listed(row.logprobs),
        "weight_versions": listed(row.weight_versions),
        "trainable": [int(flag) for flag in row.trainable],
        "head_counts": counts,
    }
    for place, (column, values) in enumerate(columns.items()):
        line = 5.6 + place
        name(line, column, "" if column == "action" else "A")
        for position, value in zip(drawn, values, strict=True):
            text(at(position), line, value, "soft" if column == "action" else "")
    name(10.8, "head_tokens", "H")
    name(11.8 + deepest - 1, "head_logprobs", "H")
    for action, position in enumerate(drawn):
        for place, entry in enumerate(range(firsts[action], firsts[action + 1])):
            text(at(position), 10.8 + place, int(heads.tokens[entry]))
            text(at(position), 11.8 + deepest - 1 + place, number(float(heads.logprobs[entry])))
    height = int((10.9 + 2 * deepest) * ROW)
    width = LEFT + CELL * len(row.tokens) + 8
    body = "\n".join(f"  {mark}" for mark in marks)
    return (
        f'<svg class="one-rollout" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-labelledby="one-rollout-title one-rollout-desc">\n'
        '  <title id="one-rollout-title">One rollout, column by column</title>\n'
        f'  <desc id="one-rollout-desc">{escape(told(row))}</desc>\n'
        f"  <style>{STYLE}  </style>\n{body}\n</svg>\n"
    )


def listed(column: Known) -> list[str]:
    """The values of a column of actions; what is null in it is a question mark."""
    floats = np.issubdtype(column.values.dtype, np.floating)
    return ["?" if value is None else number(value) if floats else str(value) for value in column.to_list()]


def number(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def told(row: Rollout) -> str:
    """The picture in words."""
    drawn = np.flatnonzero(row.action_mask).tolist()
    spans = ", ".join(f"{span.role} from {span.start} to {span.start + span.length - 1}" for span in row.spans)
    said = [
        f"{len(row.tokens)} tokens at positions 0 to {len(row.tokens) - 1}; those at {', '.join(map(str, drawn))} were "
        f"drawn and are the actions 0 to {len(drawn) - 1}",
        f"spans: {spans}",
        f"one value an action: log-probs {', '.join(listed(row.logprobs))}, weight versions "
        f"{', '.join(listed(row.weight_versions))}, trainable {', '.join(str(int(flag)) for flag in row.trainable)}",
        f"heads of {', '.join(map(str, row.heads.counts.tolist()))} entries",
    ]
    return "; ".join(said) + "."


if __name__ == "__main__":
    SVG.write_text(drawing(record()), encoding="utf-8")
