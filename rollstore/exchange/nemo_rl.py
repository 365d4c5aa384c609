"""NeMo-RL's dumps of training data, `train_data_step{step}.jsonl`.

Taken: token_ids up to input_lengths, token_loss_mask as what was drawn (it is set on generated messages only),
generation_logprobs, rewards, sample_loss_mask (0: not trained on), content as messages, the step of the file's name.
prev_logprobs become evaluations of the anchor. Into metadata: agent_ref, idx, filtered_rewards. Not taken: advantages,
which need the name of a training run. Not in the files: groups, weights, the kind of the log-probs, endings.
"""

from __future__ import annotations

import json
import re
from typing import Any, Unpack

import numpy as np

from rollstore.exchange.intake import Intake, Options, Paths, Progress, Report
from rollstore.exchange.pieces import from_ids, judged, metadata
from rollstore.exchange.records import Made, Place, ids, number, refuse
from rollstore.store.store import Store

MISSING = "groups, weight versions, the kind of the log-probs, endings, samplers"

_TAKEN = (
    "token_ids", "input_lengths", "token_loss_mask", "sample_loss_mask", "generation_logprobs", "prev_logprobs",
    "advantages", "rewards", "content",
)  # fmt: skip
_STEP = re.compile(r"train_data_step(\d+)\.jsonl")


def import_nemo_rl(
    store: Store, paths: Paths, *, progress: Progress | None = None, **options: Unpack[Options]
) -> Report:
    """Take NeMo-RL's `train_data_step*.jsonl`. Raises as every import StoreError, OSError, WriteError."""
    with Intake(store, "nemo-rl", missing=MISSING, **options) as intake:
        intake.lines(paths, _row, progress)
    return intake.report


def _row(record: dict[str, Any], place: Place) -> Made:
    record = {name: _alone(value) for name, value in record.items()}
    length = record.get("input_lengths")
    padded = ids(record.get("token_ids"), "token_ids")
    if type(length) is not int or not 0 <= length <= len(padded):
        raise refuse("input_lengths", f"0 to {len(padded)}, the length of token_ids", length)
    lists = {name: _cut(record, name, len(padded), length) for name in ("token_loss_mask", "generation_logprobs")}
    mask = lists["token_loss_mask"]
    if mask is None:
        raise refuse("token_loss_mask", "a list", None)
    found = _STEP.search(place.file)
    step = None if found is None else int(found[1])
    logprobs, trained = lists["generation_logprobs"], record.get("sample_loss_mask")
    rollout = from_ids(
        place,
        padded[:length],
        mask,
        logprobs,
        step=step,
        reward=number(record.get("rewards"), "rewards"),
        logprob_kind=None if logprobs is None else "unknown",
        trainable=np.zeros(sum(map(bool, mask)), bool) if trained == 0 else None,
        messages=None if record.get("content") is None else json.dumps(record["content"]),
        metadata=metadata(record, _TAKEN),
    )
    anchor = _cut(record, "prev_logprobs", len(padded), length)
    evaluations = [] if anchor is None else [_anchor(rollout.rollout_id, step, anchor, mask)]
    return Made(rollouts=[rollout], others={"evaluations": evaluations})


def _anchor(rollout_id: str, step: int | None, values: list[Any], mask: list[Any]) -> dict[str, Any]:
    drawn = judged(values, mask, "prev_logprobs")
    name = "nemo-rl prev_logprobs" if step is None else f"nemo-rl prev_logprobs {step}"
    return {"evaluation_id": name, "rollout_id": rollout_id, "segment": 0, "role": "anchor", "logprobs": drawn}


def _alone(value: Any) -> Any:
    """A line is a batch of one, so most of its fields are lists of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _cut(record: dict[str, Any], name: str, padded: int, length: int) -> list[Any] | None:
    """A list over the padded tokens, without the padding."""
    value = record.get(name)
    if value is None:
        return None
    if not isinstance(value, list):
        value = [value]  # of a row with one token the list was taken for a batch of one
    if len(value) != padded:
        raise refuse(name, f"a list of {padded}, one a token", value)
    return value[:length]
