"""The fork tree of a group as a picture: one line a member, which leaves the line it shares its beginning with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollstore.replay.forks import Fork
from rollstore.view.markup import text

WIDTH, ROW, LEFT, RIGHT = 900, 22, 120, 200
"""Of the picture, of a line, and of what is written on both sides [px]."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One member: `label` in front, `note` behind, `pane` is its number on the page."""

    label: str
    note: str
    pane: int
    length: int
    prompt: int
    """Tokens before its first action."""


def picture(lines: Sequence[Line], forks: Sequence[Fork]) -> str:
    """SVG of the tree, one fork a line. Lines are ordered so that none crosses another."""
    if not lines:
        return ""
    order = _order(forks)
    row = {member: n for n, member in enumerate(order)}
    common = min((fork.position for fork in forks if fork.parent is not None), default=0)
    longest = max(line.length for line in lines)
    start = common - max(1, (longest - common) // 12) if common > longest // 3 else 0
    span = max(1, longest - start)

    def x(position: int) -> float:
        return round(LEFT + max(0, position - start) / span * (WIDTH - LEFT - RIGHT), 1)

    def y(member: int) -> float:
        return 14 + ROW * row[member] + ROW / 2

    parts: list[str] = []
    for member in order:
        line, fork = lines[member], forks[member]
        begin = fork.position if fork.parent is not None else start
        told = f"{line.label}: {_told(line, fork, lines)}"
        parts.append(
            f'<a href="#pane-{line.pane}" class="line" data-pane="{line.pane}" '
            f'data-at="{fork.position if fork.parent is not None else line.prompt}">'
            f"<title>{text(told)}</title>"
            f'<rect class="hit" x="0" y="{y(member) - ROW / 2}" width="{WIDTH}" height="{ROW}"/>'
            f'<text x="{LEFT - 10}" y="{y(member) + 4}" text-anchor="end">{text(_short(line.label, 16))}</text>'
            f'<text class="note" x="{x(line.length) + 8}" y="{y(member) + 4}">{text(_short(line.note, 26))}</text>'
        )
        if fork.parent is not None:
            parts.append(
                f'<path d="M{x(begin)} {y(fork.parent)}V{y(member)}H{x(line.length)}"/>'
                f'<circle cx="{x(begin)}" cy="{y(fork.parent)}" r="3"/>'
            )
        else:
            parts.append(f'<path d="M{x(begin)} {y(member)}H{x(line.length)}"/>')
            if start < line.prompt < line.length:
                parts.append(f'<path class="prompt" d="M{x(line.prompt)} {y(member) - 5}v10"/>')
        parts.append("</a>")
    height = 14 + ROW * len(lines) + 16
    scale = f"{start:,}" if not start else f"token {start:,} (all share the first {common:,})"
    return (
        f'<svg class="tree" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="group" '
        f'aria-label="Where the members fork">'
        f'<text class="axis" x="{LEFT}" y="10">{text(scale)}</text>'
        f'<text class="axis" x="{WIDTH - RIGHT}" y="10" text-anchor="end">{longest:,} tokens</text>'
        f"{''.join(parts)}</svg>"
    )


def _order(forks: Sequence[Fork]) -> list[int]:
    """Members so that each follows what it forked from, the latest forks first."""
    children: dict[int | None, list[int]] = {}
    for member, fork in enumerate(forks):
        children.setdefault(fork.parent, []).append(member)
    out: list[int] = []
    todo = children.get(None, [])[::-1]
    while todo:
        member = todo.pop()
        out.append(member)
        todo += sorted(children.get(member, []), key=lambda child: (forks[child].position, -child))
    return out


def _told(line: Line, fork: Fork, lines: Sequence[Line]) -> str:
    if fork.parent is None:
        return f"{line.length:,} tokens"
    parent = lines[fork.parent].label
    if fork.position == line.length:
        return f"{line.length:,} tokens, all of them the beginning of {parent}"
    return f"{line.length:,} tokens, leaves {parent} at token {fork.position:,}"


def _short(label: str, most: int) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"
