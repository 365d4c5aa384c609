"""The card of a noise floor, to publish beside the scorer: what was measured, under which setting, and what it says."""

from __future__ import annotations

import json
from typing import Any

from rollstore.diagnose.floor import Floor

NO_RANK = (
    "A floor says how well this scorer repeats itself under this setting. It does not rank judges: a scorer that "
    "always answers the same has a floor of zero."
)


def card(floor: Floor) -> dict[str, Any]:
    """The card as plain data."""
    return {
        "card": "rollstore noise floor 1",
        "scorer": floor.scorer,
        "scorer_version": floor.scorer_version,
        "setting": floor.setting,
        "method": "each item scored alone, then again in other company within a batch; movement = |score - baseline|; "
        "floor = 3 x the 95th percentile of the movements pooled over items; 95% interval from resampled items",
        "items": floor.items,
        "scores": floor.scores,
        "items_with_baseline_alone": floor.alone,
        "batches": floor.companies,
        "batch_rows": list(floor.batch_rows),
        "floor": floor.floor,
        "floor_interval_95": None if floor.interval is None else list(floor.interval),
        "p95_movement": floor.p95,
        "median_movement": floor.median,
        "largest_movement": floor.largest,
        "share_of_scores_that_moved": floor.moved,
        "standard_deviation_of_repeats": floor.deviation,
        "does_not_say": NO_RANK,
    }


def card_json(floor: Floor) -> str:
    """The card as JSON text."""
    return json.dumps(card(floor), indent=2, allow_nan=False) + "\n"


def card_markdown(floor: Floor) -> str:
    """The card as a Markdown page."""
    low, high = floor.interval or (None, None)
    rows = (
        ("scorer", floor.scorer),
        ("version", floor.scorer_version or "not recorded"),
        ("setting", floor.setting or "not recorded"),
        ("floor", _number(floor.floor)),
        ("95% interval of the floor", "unknown" if low is None else f"{_number(low)} to {_number(high)}"),
        ("p95 of the movements", _number(floor.p95)),
        ("median, largest movement", f"{_number(floor.median)}, {_number(floor.largest)}"),
        ("scores that moved", "unknown" if floor.moved is None else f"{floor.moved:.1%}"),
        ("standard deviation of repeats", _number(floor.deviation)),
        ("items, scores", f"{floor.items:,}, {floor.scores:,}"),
        ("items whose baseline was scored alone", f"{floor.alone:,}"),
        ("batches, their sizes", f"{floor.companies:,}, {', '.join(map(str, floor.batch_rows)) or 'not recorded'}"),
    )
    meaning = "Without repeats the floor is unknown, which is not zero: no difference may be called noise or signal."
    if floor.floor is not None:
        meaning = f"Two scores that differ by no more than {_number(floor.floor)} are not told apart by this scorer."
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows)
    return f"# Noise floor of {_cell(floor.scorer)}\n\n| | |\n|---|---|\n{table}\n\n{meaning}\n\n{NO_RANK}\n"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _cell(text: str) -> str:
    """Text of a record in a table of Markdown: no line end, no bar, no tag."""
    plain = "".join(character if character.isprintable() else "?" for character in text)
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
