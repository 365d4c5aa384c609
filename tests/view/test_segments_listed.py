"""Segments of one rollout that do not say the same: both lists show the first that says it, and the range of all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollstore import Rollout
from rollstore.cli import app
from rollstore.store.store import open as open_store
from rollstore.view.listing import Filter, Listing


def segment(number: int, versions: Sequence[int | None], **columns: Any) -> Rollout:
    if versions and None not in versions:
        columns["weight_versions"] = versions
    elif versions:
        columns["weight_version_max"] = max(version for version in versions if version is not None)
    mask = [0] + [1] * len(versions)
    cause = {"segment_cause": "context_edit"} if number else {}
    return Rollout(
        rollout_id="r",
        segment=number,
        tokens=range(len(mask)),
        action_mask=mask,
        ending="continued",
        **cause,
        **columns,
    )


def listed(path: Path, segments: Sequence[Rollout]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rollout as `ls` and as the pages list it."""
    store = open_store(path, create=True)
    for one in segments:  # a part each, in this order
        store.append("rollouts", [one])
    (row,) = json.loads(CliRunner().invoke(app, ["ls", str(path), "--json"]).stdout)["rollouts"]
    listing = Listing(store)
    (seen,) = listing.rollouts(Filter())
    listing.close()
    return row, seen


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_group_step_and_run_are_those_of_the_first_segment_that_has_them(order: Sequence[int], tmp_path: Path) -> None:
    segments = [
        segment(0, [7], run_id="one", sample_index=3),
        segment(1, [3, 4], run_id="two", group_id="g1", step=5, environment="e1"),
        segment(2, [9], run_id="three", group_id="g2", step=6, environment="e2", sample_index=1),
    ]
    row, seen = listed(tmp_path / "s", [segments[n] for n in order])
    for found in (row, seen):
        told = [found[name] for name in ("run_id", "group_id", "step", "sample_index")]
        assert told == ["one", "g1", 5, 3]
    assert seen["environment"] == "e1"
    assert (row["weight_version_min"], row["weight_version_max"]) == (3, 9)
    assert (seen["version_min"], seen["version_max"]) == (3, 9)


@pytest.mark.parametrize(
    ("versions", "wanted"),
    [
        ([[7], [None, 8]], (None, 8)),  # of the second segment only the newest is known
        ([[7], []], (7, 7)),  # it drew nothing
        ([[], []], (None, None)),
        ([[None, 7], [2]], (None, 7)),
    ],
)
def test_the_oldest_version_is_unknown_where_a_segment_that_drew_does_not_know_its_own(
    versions: list[list[int | None]], wanted: tuple[int | None, int | None], tmp_path: Path
) -> None:
    row, seen = listed(tmp_path / "s", [segment(n, each) for n, each in enumerate(versions)])
    assert (row["weight_version_min"], row["weight_version_max"]) == wanted
    assert (seen["version_min"], seen["version_max"]) == wanted
