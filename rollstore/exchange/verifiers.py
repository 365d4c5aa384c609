"""Results of an evaluation by verifiers before v1, `results.jsonl`: prompt and completion as messages or text.

Taken: prompt and completion through the tokenizer's chat template, reward, example_id as the prompt, is_truncated and
errors as the ending; every other field (answer, info, metrics, timing, ...) into metadata. Not in the files: ids, what
was drawn, log-probs, weights, groups.
"""

from __future__ import annotations

from typing import Any

from rollstore.exchange.chat import messages
from rollstore.exchange.pieces import Texts, metadata
from rollstore.exchange.records import Made, Place, number, refuse, text

_TAKEN = ("prompt", "completion", "reward", "example_id", "is_truncated", "tool_defs")


def is_result(record: dict[str, Any]) -> bool:
    """Whether a line is of this shape."""
    return "completion" in record and "prompt" in record


def result(record: dict[str, Any], place: Place, texts: Texts | None) -> Made:
    """One rollout of an evaluation. Raises UnsupportedRecordError, also without a tokenizer."""
    if texts is None:
        raise refuse("prompt", "a tokenizer (--tokenizer PATH), since these lines hold text", "none")
    prompt, completion, example = (record[name] for name in ("prompt", "completion", "example_id"))
    ending = "truncated" if record.get("is_truncated") else "aborted" if record.get("error") else "unknown"
    columns: dict[str, Any] = {
        "prompt_id": None if example is None else str(example),
        "reward": number(record.get("reward"), "reward"),
        "ending": ending,
        "metadata": metadata(record, _TAKEN),
    }
    if isinstance(prompt, list):
        said = [*messages(prompt, "prompt"), *messages(completion, "completion")]
        return Made(rollouts=[texts.chat(place, said, tools=record.get("tool_defs"), **columns)])
    parts = [("prompt", text(prompt, "prompt")), ("assistant", text(completion, "completion"))]
    return Made(rollouts=[texts.rollout(place, parts, **columns)])
