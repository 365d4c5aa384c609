"""What the trainer made of a rollout, for its table: log-probs of an evaluation or a use, advantages, loss weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute as pc

from rollstore.errors import DuplicateError, NotFoundError
from rollstore.schema import Rollout
from rollstore.store.store import Store

Floats = list[float | None]

_USE = ("train_run", "attempt", "train_step", "epoch")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Of one segment; lists have one value an action (A), None where not known. Lists that are nowhere are None.

    `sources`: where the lists come from. `choices`: what was left out because there is more than one of it.
    """

    logprobs: Floats | None = None
    advantages: Floats | None = None
    weights: Floats | None = None
    sources: tuple[str, ...] = field(default=())
    choices: tuple[str, ...] = field(default=())


def trained(
    store: Store, recorded: Sequence[Rollout], *, evaluation: str | None = None, step: int | None = None
) -> dict[int, Trained]:
    """What is stored beside the segments of one rollout, by segment.

    Where a rollout has one evaluation by the trainer, or one use, that is taken; where it has several, the one that is
    named: `evaluation` by its id, `step` by the training step. The log-probs of the use stand in where there is no such
    evaluation. Raises NotFoundError for a name that is not there, DuplicateError where it names two rows.
    """
    where = pc.field("rollout_id") == recorded[0].rollout_id
    names = ["evaluation_id", "segment", "role", "logprobs"]
    evaluations = store.scan("evaluations", columns=names, where=where).read_all().to_pylist()
    uses = store.scan("uses", columns=[*_USE, "segment", "logprobs", "advantages", "weights"], where=where).read_all()
    scored, first = _evaluation(evaluations, evaluation)
    used, second = _use(uses.to_pylist(), step)
    counts = {one.segment: int(np.count_nonzero(one.action_mask)) for one in recorded}
    out: dict[int, Trained] = {}
    for one in recorded:
        lists = _of_segment(used, one.segment, counts)
        sources: list[str] = []
        found = [row for row in scored if row["segment"] == one.segment and row["logprobs"] is not None]
        if len(found) > 1:
            raise DuplicateError(f"evaluation {found[0]['evaluation_id']!r}: segment {one.segment} is there twice")
        logprobs = found[0]["logprobs"] if found else lists.get("logprobs")
        if found:
            sources.append(f"trainer log-probs of evaluation {found[0]['evaluation_id']}")
        told = [
            name.removesuffix("s")
            for name in ("logprobs", "advantages", "weights")
            if name in lists and not (name == "logprobs" and found)
        ]
        if told:
            run, attempt, number, epoch = (used[0][name] for name in _USE)
            key = f"step {number} of {run}, attempt {attempt or 0}, epoch {epoch or 0}"
            sources.append(f"{', '.join(told)} of {key}")
        out[one.segment] = Trained(
            logprobs=logprobs,
            advantages=lists.get("advantages"),
            weights=lists.get("weights"),
            sources=tuple(sources),
            choices=(*first, *second),
        )
    return out


def _evaluation(rows: list[dict[str, Any]], wanted: str | None) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """(the rows of the evaluation that counts, what to say where none was chosen)."""
    if wanted is not None:
        chosen = [row for row in rows if row["evaluation_id"] == wanted]
        if not chosen:
            have = ", ".join(sorted({row["evaluation_id"] for row in rows})) or "none"
            raise NotFoundError(f"--evaluation: wanted {wanted!r}, this rollout has {have}")
        return chosen, ()
    chosen = [row for row in rows if row["role"] == "trainer"]
    names = sorted({row["evaluation_id"] for row in chosen})
    if len(names) > 1:
        return [], (f"scored by the trainer as {', '.join(names)}: choose with --evaluation",)
    return chosen, ()


def _use(rows: list[dict[str, Any]], wanted: int | None) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """(the rows of the use that counts, what to say where none was chosen)."""
    chosen = [row for row in rows if wanted is None or row["train_step"] == wanted]
    keys = sorted({tuple(str(row[name]) for name in _USE) for row in chosen})
    if wanted is not None and not chosen:
        steps = ", ".join(sorted({str(row["train_step"]) for row in rows})) or "none"
        raise NotFoundError(f"--step: wanted {wanted}, this rollout was used in {steps}")
    if len(keys) > 1:
        told = "; ".join(
            f"step {step} of {run}, attempt {attempt}, epoch {epoch}" for run, attempt, step, epoch in keys
        )
        if wanted is not None:
            raise DuplicateError(f"--step {wanted}: wanted one use, got {told}")
        return [], (f"used {len(keys)} times ({told}): choose with --step",)
    return chosen, ()


def _of_segment(rows: list[dict[str, Any]], segment: int, counts: dict[int, int]) -> dict[str, Floats]:
    """The lists of a use that belong to a segment: of a row for it, or its share of a row for the whole rollout."""
    own = [row for row in rows if row["segment"] == segment]
    whole = [row for row in rows if row["segment"] is None]
    if len(own) > 1 or len(whole) > 1:
        raise DuplicateError(f"uses: wanted one row of a use for segment {segment}, got {max(len(own), len(whole))}")
    if own:
        return {name: own[0][name] for name in ("logprobs", "advantages", "weights") if own[0][name] is not None}
    if not whole:
        return {}
    start = sum(count for number, count in counts.items() if number < segment)
    last = segment == max(counts)
    return {
        name: whole[0][name][start : None if last else start + counts[segment]]
        for name in ("logprobs", "advantages", "weights")
        if whole[0][name] is not None
    }
