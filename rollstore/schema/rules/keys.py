"""Noise keys: key, sample and recipe come together, and one run draws no noise twice in a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollstore.schema.flat import Ints, Rows
from rollstore.schema.problem import Problem, at
from rollstore.schema.rules.lengths import same_extents
from rollstore.schema.rules.spans import partition


@dataclass(frozen=True)
class _Draws:
    """Actions of one row under one key and sample, each of which may be null."""

    row: int
    key: int | None
    sample: int | None
    positions: Ints | None = None
    """Positions in the segment; None: every action of the row."""


def keys(rows: Rows) -> Iterator[Problem]:
    """Key, sample and recipe come together, in the row or over each of its action spans; no noise is drawn twice."""
    if not any(rows.known(name).any() for name in ("replay_key", "replay_sample", "noise")) and not rows.overridden & {
        "replay_key",
        "replay_sample",
    }:
        return
    noise, draws = rows.known("noise"), _draws(rows)
    keyed = [draw for draw in draws if draw.key is not None and draw.sample is not None and noise[draw.row]]
    some = np.zeros(rows.count, bool)
    some[[draw.row for draw in draws if draw.key is not None]] = True
    part = {draw.row for draw in draws if (draw.key is None) != (draw.sample is None)}
    part.update(np.flatnonzero(noise != some).tolist())
    wanted = "replay_key, replay_sample and noise together, in the row or its spans"
    yield from at("replay_key", "incomplete_key", sorted(part), "part of a key", wanted)
    yield from _repeated(rows, keyed)


def _draws(rows: Rows) -> list[_Draws]:
    key, sample = rows.objects("replay_key"), rows.objects("replay_sample")
    draws = {row: [_Draws(row, key[row], sample[row])] for row in range(rows.count)}
    cut = partition(rows) if rows.overridden & {"replay_key", "replay_sample"} else None
    if cut is not None:
        fields = rows.children("spans")
        own_key, own_sample, is_action = (fields[n].to_pylist() for n in ("replay_key", "replay_sample", "is_action"))
        replaced: dict[int, list[_Draws]] = {}
        overriding: set[int] = set()
        for span, row in enumerate(cut.lists.rows.tolist()):
            if own_key[span] is not None or own_sample[span] is not None:
                overriding.add(row)
            if is_action[span] and cut.whole[row]:
                positions = np.arange(cut.start[span], cut.start[span] + cut.length[span])
                used_key = key[row] if own_key[span] is None else own_key[span]
                used_sample = sample[row] if own_sample[span] is None else own_sample[span]
                replaced.setdefault(row, []).append(_Draws(row, used_key, used_sample, positions))
        draws.update({row: found for row, found in replaced.items() if row in overriding})
    return [draw for of_row in draws.values() for draw in of_row]


def _repeated(rows: Rows, keyed: list[_Draws]) -> Iterator[Problem]:
    """Draws of other rollouts, or of this one elsewhere, under the same (run, step, key, sample, segment, position)."""
    tokens, mask = rows.list("tokens"), rows.list("action_mask")
    if tokens is None or mask is None or not same_extents(tokens, mask) or len(keyed) < 2:
        return
    runs, steps, segments, ids = (rows.objects(name) for name in ("run_id", "step", "segment", "rollout_id"))
    scopes: dict[Any, list[_Draws]] = {}
    for draw in keyed:
        scopes.setdefault((runs[draw.row], steps[draw.row], segments[draw.row], draw.key, draw.sample), []).append(draw)
    repeated: dict[int, int] = {}
    for scope in scopes.values():
        if len({ids[draw.row] for draw in scope}) < 2:
            continue
        first: dict[int, int] = {}
        for draw in scope:
            positions = draw.positions
            if positions is None:
                positions = np.flatnonzero(rows.drawn[mask.offsets[draw.row] : mask.offsets[draw.row + 1]])
            for position in positions.tolist():
                other = first.setdefault(position, draw.row)
                if ids[other] != ids[draw.row]:
                    repeated.setdefault(draw.row, other)
                    break
    found = lambda r: f"the key, sample, segment and positions of row {repeated[r]}"  # noqa: E731  one use, one line
    yield from at("replay_key", "noise_repeated", sorted(repeated), found, "no noise twice in one step of a run")
