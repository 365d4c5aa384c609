"""A number over the steps of a run as a small picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollstore.view.markup import text

WIDTH, HEIGHT = 460, 150
LEFT, RIGHT, TOP, BOTTOM = 48, 8, 10, 20
"""Room for what is written on the sides [px]."""

_MOST_DOTS = 80


@dataclass(frozen=True, kw_only=True)
class Point:
    """One stretch of steps: its mean (None where nothing is known) and, if there is one, the band around it."""

    step: float
    mean: float | None
    low: float | None = None
    high: float | None = None
    told: str
    """What is said of it when it is pointed at."""
    address: str


def chart(points: Sequence[Point], label: str) -> str:
    """SVG with a line through the means, the band, and a link for each point; its table has the same by keyboard."""
    values = [
        value
        for point in points
        for value in (point.mean, point.low, point.high)
        if value is not None and math.isfinite(value)
    ]
    if not values:
        return f'<p class="note">{text(label)}: nothing known</p>'
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    first, last = points[0].step, points[-1].step

    def x(step: float) -> float:
        room = WIDTH - LEFT - RIGHT
        return round(LEFT + (room / 2 if first == last else (step - first) / (last - first) * room), 1)

    def y(value: float) -> float:
        return round(TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    known = [(x(point.step), y(point.mean)) for point in points if point.mean is not None]
    band = [point for point in points if point.low is not None and point.high is not None]
    parts = [
        f'<path class="grid" d="M{LEFT} {y(value)}H{WIDTH - RIGHT}"/>'
        f'<text class="axis" x="{LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{value:.4g}</text>'
        for value in (low, high)
    ]
    if len(band) > 1:
        upper = " ".join(f"{x(point.step)},{y(point.high or 0.0)}" for point in band)
        lower = " ".join(f"{x(point.step)},{y(point.low or 0.0)}" for point in reversed(band))
        parts.append(f'<polygon class="band" points="{upper} {lower}"/>')
    if known:
        parts.append(f'<polyline class="mean" points="{" ".join(f"{a},{b}" for a, b in known)}"/>')
        if len(known) <= _MOST_DOTS:
            parts += [f'<circle class="dot" cx="{a}" cy="{b}" r="2"/>' for a, b in known]
    for place, end in ((first, "start"), (last, "end")):
        at = LEFT if end == "start" else WIDTH - RIGHT
        parts.append(f'<text class="axis" x="{at}" y="{HEIGHT - 4}" text-anchor="{end}">step {place:g}</text>')
        if first == last:
            break
    share = (WIDTH - LEFT - RIGHT) / max(1, len(points) - 1)
    for point in points:
        parts.append(
            f'<a href="{text(point.address)}" tabindex="-1"><title>{text(point.told)}</title>'
            f'<rect class="hit" x="{x(point.step) - share / 2:.1f}" y="0" width="{share:.1f}" height="{HEIGHT}" '
            'fill-opacity="0.35"/></a>'
        )
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{text(label)}">{"".join(parts)}</svg>'
    )
