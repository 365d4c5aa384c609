"""prime-rl's token exports, `token_exports/step_{N}/rank_{R}.jsonl` (`enable_token_export`): what the trainer saw.

Taken: token_ids, loss_mask as what was drawn, inference_logprobs, step, env_name; trainer_logprobs and entropy as an
evaluation of the trainer. Into metadata: rank, micro_step and the numbers within them. Not taken: advantages, ratios
and masks of the loss, which follow from the rest or need the name of a training run.
"""

from __future__ import annotations

from typing import Any

from rollstore.exchange.pieces import flags_of, from_ids, judged, metadata
from rollstore.exchange.records import Made, Place, ids

_BESIDE = ("rank", "micro_step", "micro_sequence_idx", "export_sequence_idx")


def is_token_export(record: dict[str, Any]) -> bool:
    """Whether a line is of this shape."""
    return "token_ids" in record and "inference_logprobs" in record


def token_export(record: dict[str, Any], place: Place) -> Made:
    """One sequence of one micro-batch. Raises UnsupportedRecordError."""
    tokens, mask = ids(record["token_ids"], "token_ids"), flags_of(record.get("loss_mask") or [], "loss_mask").tolist()
    step = record.get("step")
    rollout = from_ids(
        place,
        tokens,
        mask,
        record["inference_logprobs"],
        step=step,
        environment=record.get("env_name"),
        logprob_kind="unknown",
        metadata=metadata({name: record.get(name) for name in _BESIDE}, ()),
    )
    fields = {"logprobs": "trainer_logprobs", "entropies": "entropy"}
    given = {name: field for name, field in fields.items() if record.get(field) is not None}
    columns = {name: judged(record[field], mask, field) for name, field in given.items()}
    name = "prime-rl token export" if step is None else f"prime-rl token export {step}"
    row = {"evaluation_id": name, "rollout_id": rollout.rollout_id, "segment": 0}
    row |= {"role": "trainer"} | columns
    return Made(rollouts=[rollout], others={"evaluations": [row] if "logprobs" in columns else []})
