"""Groups of Atropos, a line each (`data_path_to_save_groups`): the lists of a ScoredDataGroup side by side.

Taken: tokens; masks, in which -100 is a token that the policy did not write; inference_logprobs where they are not the
1.0 that stands for none; scores as rewards; messages. The sequences of a line are one group. ref_logprobs become
evaluations. Into metadata: generation_params, overrides, advantages as they are. Not in the files: which kind of
log-probs these are, weights, steps, endings.
"""

from __future__ import annotations

import json
from typing import Any, Unpack

from rollstore.exchange.intake import Intake, Options, Paths, Progress, Report
from rollstore.exchange.pieces import from_ids, judged, metadata
from rollstore.exchange.records import Made, Place, ids, number, refuse
from rollstore.store.store import Store

MISSING = "the kind of the log-probs, weight versions, steps, endings, samplers"

MASKED, NO_LOGPROB = -100, 1.0

_TAKEN = ("tokens", "masks", "scores", "messages", "inference_logprobs", "ref_logprobs", "images")


def import_atropos(
    store: Store, paths: Paths, *, progress: Progress | None = None, **options: Unpack[Options]
) -> Report:
    """Take groups that an Atropos environment saved: a rollout a sequence, a group a line.

    Raises as every import StoreError, OSError, WriteError.
    """
    with Intake(store, "atropos", missing=MISSING, **options) as intake:
        intake.lines(paths, _group, progress)
    return intake.report


def _group(record: dict[str, Any], place: Place) -> Made:
    sequences = record.get("tokens")
    if not isinstance(sequences, list):
        raise refuse("tokens", "a list of sequences", sequences)
    count = len(sequences)
    lists = {name: _each(record.get(name), name, count) for name in _TAKEN[1:6]}
    kept = metadata(record, _TAKEN)
    rollouts: list[Any] = []
    evaluations: list[dict[str, Any]] = []
    for n in range(count):
        tokens, mask = ids(sequences[n], "tokens"), ids(lists["masks"][n], "masks")
        logprobs, said = lists["inference_logprobs"][n], lists["messages"][n]
        if logprobs is not None:
            logprobs = [None if value == NO_LOGPROB else value for value in logprobs]
        drawn = [value != MASKED for value in mask]
        rollout = from_ids(
            place,
            tokens,
            drawn,
            logprobs,
            rollout_id=f"{place.id()}-{n}",
            group_id=place.id(),
            group_size=count,
            sample_index=n,
            reward=number(lists["scores"][n], "scores"),
            logprob_kind=None if logprobs is None else "unknown",
            messages=None if said is None else json.dumps(said),
            metadata=kept,
        )
        rollouts.append(rollout)
        reference = lists["ref_logprobs"][n]
        if reference is not None:
            evaluations.append(
                {
                    "evaluation_id": "atropos ref_logprobs",
                    "rollout_id": rollout.rollout_id,
                    "segment": 0,
                    "role": "reference",
                    "logprobs": judged(reference, drawn, "ref_logprobs"),
                }
            )
    return Made(rollouts=rollouts, others={"evaluations": evaluations})


def _each(value: Any, name: str, count: int) -> list[Any]:
    """One value a sequence; nulls where the group has none."""
    if value is None:
        if name == "masks":
            raise refuse(name, "a list, one a sequence", None)
        return [None] * count
    if not isinstance(value, list) or len(value) != count:
        raise refuse(name, f"a list of {count}, one a sequence", value)
    return value
