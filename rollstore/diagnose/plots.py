"""Plots as SVG, drawn by matplotlib: the extra `plot`."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from rollstore.diagnose.floor import Floor
from rollstore.diagnose.movements import Floats

_INK, _MARK = "#1f5a8a", "#b3422e"


def figure() -> Any:
    """An empty figure that no window knows. Raises ImportError, by what to install, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'rollstore[plot]'") from error
    return Figure(figsize=(7, 3.5), layout="constrained")


def svg(drawn: Any) -> str:
    """The figure as SVG text, the same bytes for the same figure."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "rollstore", "svg.fonttype": "none"}):
        drawn.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def floor_svg(floor: Floor, sizes: Floats) -> str:
    """The movements of a scorer by rank, with the p95 and the floor. sizes [movements]."""
    drawn = figure()
    axes = drawn.add_subplot()
    ordered = np.sort(sizes)
    share = np.arange(1, len(ordered) + 1) / max(1, len(ordered))
    axes.step(ordered, share, where="post", color=_INK)
    marks = {"p95": floor.p95, "floor (3 x p95)": floor.floor}
    for style, (name, value) in zip(("--", "-"), marks.items(), strict=True):
        if value is not None:
            axes.axvline(value, color=_MARK, linestyle=style, label=f"{name}: {value:.3g}")
    if floor.interval is not None:
        axes.axvspan(*floor.interval, color=_MARK, alpha=0.15, label="95% interval of the floor")
    # matplotlib reads text between dollars as a formula; names are the caller's.
    named = " ".join(part for part in (floor.scorer, floor.scorer_version, floor.setting) if part).replace("$", r"\$")
    axes.set(
        xlabel="movement of a score when its company changes", ylabel="share of scores", title=named, ylim=(0, 1.02)
    )
    axes.legend(loc="lower right")
    return svg(drawn)
