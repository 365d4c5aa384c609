"""verl's dumps of generations, both ways: `{step}.jsonl` (`trainer.rollout_data_dir`, `validation_data_dir`; verl 0.9).

Taken: input and output as text, score as the reward, step; everything else (gts, the reward function's extras) into
metadata. Not in the files: ids, what was drawn, log-probs, weights, endings, groups, special tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, BinaryIO, Unpack

import msgspec

from rollstore.exchange.folder import STAGED, Exported, Written, about, new_folder, sync
from rollstore.exchange.intake import LINES, Intake, Options, Paths, Progress, Report
from rollstore.exchange.pieces import Texts, metadata
from rollstore.exchange.records import Made, Place, Record, number
from rollstore.exchange.segments import Decoder, rollouts
from rollstore.exchange.source import expand, opened
from rollstore.schema import Rollout
from rollstore.store.snapshot import Snapshot
from rollstore.store.store import Store

MISSING = "token ids and what was drawn (text only), special tokens, log-probs, weight versions, endings, groups"

_OPEN = 64  # files of steps that are open at once
_PICKLES = (b"PK\x03\x04", b"\x80")
_REFUSED = (
    "file: wanted {step}.jsonl, got a pickle: a DataProto dump holds Python classes and runs code when it is read. "
    "Where verl is installed, read it and write its tensors as JSONL for `import jsonl --mapping`"
)


def import_verl(
    store: Store, paths: Paths, *, tokenizer: Any = None, progress: Progress | None = None, **options: Unpack[Options]
) -> Report:
    """Take verl's `{step}.jsonl`. `tokenizer` makes ids of the texts; nothing of them is an action.

    Raises ValueError without a tokenizer, and as every import StoreError, OSError, WriteError.
    """
    texts = Texts(tokenizer, "verl")
    with Intake(store, "verl", missing=MISSING, **options) as intake:
        for path in expand(paths, (*LINES, ".pt", ".pkl")):
            if _is_pickle(path):
                intake.take(path, _refused())
            else:
                intake.lines([path], lambda record, place: _row(record, place, texts), progress)
    return intake.report


def export_verl(
    store: Store,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any,
    snapshot: Snapshot | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write rollouts as verl dumps them: FOLDER/{step}.jsonl with input, output, score and step; no ids.

    input is what stands before a segment's first action, output all that follows, special tokens included; ids, ending,
    group and the like are lost. Rollouts without a step are in `none.jsonl`; a reward that is null is a null score.
    For tensors see `rollstore.batch.to_verl`. The folder as for every export.

    Raises ValueError without a tokenizer, StoreError where the folder is taken, CorruptionError, WriteError.
    """
    if tokenizer is None:
        raise ValueError("export verl: wanted a tokenizer (--tokenizer PATH), since verl's files hold text, got none")
    decoder = Decoder(tokenizer)
    with new_folder(store, folder, snapshot, ".jsonl") as (staging, held, exported), ExitStack() as files:
        open_files: dict[str, BinaryIO] = {}
        rows = 0
        for row in (row for segments in rollouts(store, held, progress) for row in segments):
            name = "none" if row.step is None else str(row.step)
            if name not in open_files:
                if len(open_files) >= _OPEN:  # runs have thousands of steps: a file is opened again for more
                    files.close()
                    open_files.clear()
                open_files[name] = files.enter_context((staging / f"{name}{STAGED}").open("ab"))
            open_files[name].write(msgspec.json.encode(_line(row, decoder)) + b"\n")
            rows += 1
        files.close()
        written = sorted(staging.iterdir())
        for path in written:
            sync(path)
        exported.tables["rollouts"] = Written(rows, len(written), sum(path.stat().st_size for path in written))
        about(store, held, exported, staging)
    return exported


def _line(row: Rollout, decoder: Decoder) -> dict[str, Any]:
    acts = row.action_mask.nonzero()[0]
    cut = int(acts[0]) if len(acts) else len(row.tokens)
    prompt, response = decoder.text(row.tokens[:cut]), decoder.text(row.tokens[cut:])
    line = {"input": prompt, "output": response, "score": row.reward, "step": row.step}
    return line | {"rollout_id": row.rollout_id, "segment": row.segment}


def _is_pickle(path: str) -> bool:
    with opened(path) as file:
        return file.peek(4).startswith(_PICKLES)


def _refused() -> Iterator[Record]:
    yield Record(row=None, reason=_REFUSED)


def _row(record: dict[str, Any], place: Place, texts: Texts) -> Made:
    made = texts.answered(
        place,
        record,
        "input",
        "output",
        step=record.get("step"),
        reward=number(record.get("score"), "score"),
        metadata=metadata(record, ("input", "output", "score", "step")),
    )
    return Made(rollouts=[made])
