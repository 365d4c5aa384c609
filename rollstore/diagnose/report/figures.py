"""The plots of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollstore.diagnose.plots import figure, svg

if TYPE_CHECKING:
    from rollstore.diagnose.report.means import Mean

COLORS: tuple[str, ...] = ("#1f5a8a", "#b3422e", "#4f8f4a", "#8a6fb0", "#c08a2d", "#5f6b73")
"""Dark enough to stand on white; of unlike lightness, for those who see red and green alike."""

_BAND = 0.18


def tails(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> str:
    """Share of actions whose log-ratio is further from zero than x, by lag; both axes logarithmic."""
    drawn = figure()
    axes = drawn.add_subplot()
    for color, (name, (edges, shares)) in zip(_colors(), curves.items(), strict=False):
        some = [(edge, share) for edge, share in zip(edges, shares, strict=True) if share > 0]
        axes.step([edge for edge, _ in some], [share for _, share in some], where="post", color=color, label=name)
    axes.axvline(1.0, color=COLORS[5], linestyle=":", label="1 nat")
    axes.set(xscale="log", yscale="log", xlabel="|ln p - ln q|, nats", ylabel="share of actions beyond")
    axes.legend(loc="lower left", fontsize="small")
    return svg(drawn)


def line(
    means: Sequence[Mean], *, x: str, y: str, labels: Sequence[str] | None = None, low: float | None = None
) -> str:
    """One line of means with a band of their intervals."""
    drawn = figure()
    _line(drawn.add_subplot(), means, x=x, y=y, labels=labels, low=low)
    return svg(drawn)


def two_lines(first: Sequence[Mean], second: Sequence[Mean], *, x: str, ys: tuple[str, str]) -> str:
    """Two lines under one another over the same x."""
    drawn = figure()
    upper, lower = drawn.subplots(2, sharex=True)
    _line(upper, first, x="", y=ys[0])
    _line(lower, second, x=x, y=ys[1], color=COLORS[1], low=0.0)
    return svg(drawn)


def shares(keys: Sequence[Any], parts: Mapping[str, Sequence[float]], *, x: str, y: str) -> str:
    """Shares that add up to one, stacked, by key."""
    drawn = figure()
    axes = drawn.add_subplot()
    axes.stackplot(
        list(range(len(keys))) if _texts(keys) else list(keys), *parts.values(), labels=list(parts), step="mid",
        colors=_colors()[: len(parts)], alpha=0.85,
    )  # fmt: skip
    if _texts(keys):
        axes.set_xticks(range(len(keys)), list(keys))
    axes.set(xlabel=x, ylabel=y, ylim=(0, 1))
    axes.margins(x=0)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(parts), frameon=False, fontsize="small")
    return svg(drawn)


def quantiles(keys: Sequence[int], rows: Mapping[str, Sequence[tuple[float | None, ...]]], *, x: str) -> str:
    """For each name the median by key with a band from the 10th to the 90th percentile, under one another."""
    drawn = figure()
    drawn.set_figheight(1.6 * len(rows) + 0.6)
    every = drawn.subplots(len(rows), sharex=True, squeeze=False)[:, 0]
    for axes, color, (name, values) in zip(every, _colors(), rows.items(), strict=False):
        some = [(key, value) for key, value in zip(keys, values, strict=True) if value[1] is not None]
        at = [key for key, _ in some]
        axes.fill_between(at, [v[0] for _, v in some], [v[2] for _, v in some], color=color, alpha=_BAND)
        axes.plot(at, [v[1] for _, v in some], color=color, marker="o" if len(at) < 30 else None, markersize=3)
        axes.set(ylabel=name)
    every[-1].set(xlabel=x)
    return svg(drawn)


def over_time(rewards: Sequence[Mean], hours: Sequence[float], discarded: Sequence[float | None]) -> str:
    """Mean reward with its interval over hours, and the share discarded so far on an axis of its own."""
    drawn = figure()
    axes = drawn.add_subplot()
    _line(axes, rewards, x="hours since the first rollout ended", y="mean reward", at=hours)
    if any(value is not None for value in discarded):
        other = axes.twinx()
        other.plot(hours, [float("nan") if v is None else v for v in discarded], color=COLORS[1], linestyle="--")
        other.set(ylabel="share discarded so far", ylim=(0, 1))
        other.yaxis.label.set_color(COLORS[1])
    return svg(drawn)


def bars(values: Mapping[str, float], *, x: str) -> str:
    """One bar a name."""
    drawn = figure()
    axes = drawn.add_subplot()
    axes.barh(list(values)[::-1], list(values.values())[::-1], color=COLORS[0])
    axes.set(xlabel=x)
    return svg(drawn)


def _line(
    axes: Any, means: Sequence[Mean], *, x: str, y: str, labels: Sequence[str] | None = None, low: float | None = None,
    color: str = COLORS[0], at: Sequence[float] | None = None,
) -> None:  # fmt: skip
    if at is None:
        means = [mean for mean in means if mean.key is not None]
        at = list(range(len(means))) if labels is not None else [float(mean.key or 0) for mean in means]
    banded = [(place, mean.interval) for place, mean in zip(at, means, strict=True) if mean.interval is not None]
    axes.fill_between(
        [place for place, _ in banded], [ends[0] for _, ends in banded], [ends[1] for _, ends in banded], color=color,
        alpha=_BAND, label="95% interval",
    )  # fmt: skip
    axes.plot(at, [mean.mean for mean in means], color=color, marker="o" if len(means) < 30 else None, markersize=3)
    if labels is not None:
        axes.set_xticks(range(len(labels)), list(labels), fontsize="small")
    axes.set(xlabel=x, ylabel=y)
    values = [mean.mean for mean in means]
    room = (max(values) - min(values)) or abs(values[0]) or 1.0  # an interval of two clusters would flatten the rest
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom, min(values) - room) if low is None else low, min(top, max(values) + room))


def _texts(keys: Sequence[Any]) -> bool:
    return any(isinstance(key, str) for key in keys) or len(keys) < 2


def _colors() -> list[str]:
    return list(COLORS) * 8
