"""SkyRL's dumps of an evaluation, `{data_source}.jsonl` (`trainer.dump_eval_results`).

Taken: input_prompt and output_response as text, score as the reward where it is one number, stop_reason, env_class; the
rest, and the rewards of single tokens, into metadata. Not in the files: ids, what was drawn, log-probs, weights, steps,
groups.
"""

from __future__ import annotations

from typing import Any, Unpack

from rollstore.exchange.intake import LINES, Intake, Options, Paths, Progress, Report
from rollstore.exchange.pieces import Texts, metadata
from rollstore.exchange.records import Made, Place, number
from rollstore.exchange.source import expand
from rollstore.store.store import Store

MISSING = "token ids and what was drawn (text only), log-probs, weight versions, steps, groups"

AGGREGATED = "aggregated_results.jsonl"
"""Metrics of all files together, in the same folder: no rollouts."""

_ENDINGS = {"length": "truncated", "abort": "aborted"}
_TAKEN = ("input_prompt", "output_response", "score", "env_class")


def import_skyrl(
    store: Store, paths: Paths, *, tokenizer: Any = None, progress: Progress | None = None, **options: Unpack[Options]
) -> Report:
    """Take SkyRL's evaluation dumps. `tokenizer` makes ids of the texts; nothing of them is an action.

    Raises ValueError without a tokenizer, and as every import StoreError, OSError, WriteError.
    """
    texts = Texts(tokenizer, "skyrl")
    with Intake(store, "skyrl", missing=MISSING, **options) as intake:
        files = [path for path in expand(paths, LINES) if not path.endswith(AGGREGATED)]
        intake.lines(files, lambda record, place: _row(record, place, texts), progress)
    return intake.report


def _row(record: dict[str, Any], place: Place, texts: Texts) -> Made:
    score = record.get("score")
    by_token = isinstance(score, list)
    made = texts.answered(
        place,
        record,
        "input_prompt",
        "output_response",
        environment=record.get("env_class"),
        reward=None if by_token else number(score, "score"),
        # `stop` is said of the last request, which in a conversation of several turns is not the task's end.
        ending=_ENDINGS.get(str(record.get("stop_reason")), "unknown"),
        metadata=metadata(record, _TAKEN[:2] + _TAKEN[3:] if by_token else _TAKEN),
    )
    return Made(rollouts=[made])
