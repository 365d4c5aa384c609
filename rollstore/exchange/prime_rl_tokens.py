"""prime-rl's token exports, `token_exports/step_{N}/rank_{R}.jsonl` (`enable_token_export`): what the trainer saw.

Taken: token_ids, loss_mask as what was drawn, inference_logprobs, step, env_name; trainer_logprobs and entropy as an
evaluation of the trainer. Into metadata: rank, micro_step and the numbers within them. Not taken: advantages, ratios
and masks of the loss, which follow from the rest or need the name of a training run.
"""

from __future__ import annotations

from typing import Any

from rollstore.exchange.pieces import flags_of, from_ids, metadata
from rollstore.exchange.records import Made, Place, ids, refuse

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
    columns = {"logprobs": _drawn(record, "trainer_logprobs", mask), "entropies": _drawn(record, "entropy", mask)}
    row = {"evaluation_id": f"prime-rl token export {step}", "rollout_id": rollout.rollout_id, "segment": 0}
    row |= {"role": "trainer"} | {name: values for name, values in columns.items() if values is not None}
    return Made(rollouts=[rollout], others={"evaluations": [] if columns["logprobs"] is None else [row]})


def _drawn(record: dict[str, Any], name: str, mask: list[bool]) -> list[float | None] | None:
    """The values of drawn tokens; those that were not finite are null in the file."""
    values = record.get(name)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != len(mask):
        raise refuse(name, f"{len(mask)} values, one a token", values)
    return [None if v is None else float(v) for v, is_drawn in zip(values, mask, strict=True) if is_drawn]
