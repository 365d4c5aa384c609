"""AReaL's dumps of trajectories, `rollout/{version}/{task_id}.jsonl` (`dump_to_file`).

Taken: prompt and completion as text, reward, task_id as the group, sample_idx. Into metadata: seqlen, prompt_len, and
head_version and tail_version, which are the oldest and newest of a whole batch, prompts (-1) included, and so say
nothing sure of one row. Not in the files: ids, what was drawn, log-probs, the weights of a row, endings.
"""

from __future__ import annotations

from typing import Any, Unpack

from rollstore.exchange.intake import Intake, Options, Paths, Progress, Report
from rollstore.exchange.pieces import Texts, metadata
from rollstore.exchange.records import Made, Place, number
from rollstore.store.store import Store

MISSING = "token ids and what was drawn (text only), log-probs, weight versions of a row, steps, endings"

_TAKEN = ("prompt", "completion", "reward", "task_id", "sample_idx")


def import_areal(
    store: Store, paths: Paths, *, tokenizer: Any = None, progress: Progress | None = None, **options: Unpack[Options]
) -> Report:
    """Take AReaL's trajectory dumps. `tokenizer` makes ids of the texts; nothing of them is an action.

    Raises ValueError without a tokenizer, and as every import StoreError, OSError, WriteError.
    """
    texts = Texts(tokenizer, "areal")
    with Intake(store, "areal", missing=MISSING, **options) as intake:
        intake.lines(paths, lambda record, place: _row(record, place, texts), progress)
    return intake.report


def _row(record: dict[str, Any], place: Place, texts: Texts) -> Made:
    task = record.get("task_id")
    made = texts.answered(
        place,
        record,
        "prompt",
        "completion",
        group_id=None if task is None else str(task),
        sample_index=record.get("sample_idx"),
        reward=number(record.get("reward"), "reward"),
        metadata=metadata(record, _TAKEN),
    )
    return Made(rollouts=[made])
