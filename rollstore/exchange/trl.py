"""TRL: a tokenised dataset out; in, its completions, `completions/completions_{step}.parquet` (TRL 1.16).

A GRPOTrainer writes those with `log_completions`. Taken: prompt and completion, as texts or as messages through the
tokenizer's chat template; step; each column of floating-point numbers as a score of that name, which is how reward
functions are logged. Their weights are not, so the reward is null. advantage and other columns go into metadata. Not in
the files: ids, what was drawn, log-probs, weights, endings, groups.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Unpack

import pyarrow as pa
import pyarrow.parquet as pq

from rollstore.exchange.chat import messages
from rollstore.exchange.folder import STAGED, Exported, Written, about, new_file, new_folder
from rollstore.exchange.intake import Intake, Options, Paths, Progress, Report
from rollstore.exchange.pieces import Texts, metadata
from rollstore.exchange.records import Made, Place, Record, first_line, made, number
from rollstore.exchange.segments import rollouts, trained
from rollstore.exchange.source import expand, fingerprint, opened
from rollstore.schema import Rollout
from rollstore.store.snapshot import Snapshot
from rollstore.store.store import Store

MISSING = "token ids and what was drawn (text only), the reward (only its parts), log-probs, weight versions, groups"

_TAKEN = ("prompt", "completion", "step")
_ROWS = 256
_IGNORED = -100  # what TRL, and torch's cross entropy, leave out


def import_trl(
    store: Store, paths: Paths, *, tokenizer: Any = None, progress: Progress | None = None, **options: Unpack[Options]
) -> Report:
    """Take TRL's completions. `tokenizer` makes ids of the texts; nothing of them is an action.

    Raises ValueError without a tokenizer, and as every import StoreError, OSError, WriteError.
    """
    texts = Texts(tokenizer, "trl")
    with Intake(store, "trl", missing=MISSING, **options) as intake:
        for path in expand(paths, (".parquet",)):
            intake.take(path, _rows(path, texts, progress))
    return intake.report


def export_trl(
    store: Store,
    folder: str | os.PathLike[str],
    *,
    snapshot: Snapshot | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write segments as a dataset that TRL's trainers take as tokenised: FOLDER/train-00000.parquet.

    input_ids, and labels in which -100 is a token that was not drawn or must not be trained on; beside them rollout_id,
    segment, step, reward. `datasets.load_dataset("parquet", data_dir=FOLDER)` reads it. Log-probs, versions, heads and
    all else are lost: for GRPO's inputs see `rollstore.batch.to_trl`. The folder as for every export.

    Raises StoreError where the folder is taken, CorruptionError, WriteError.
    """
    with new_folder(store, folder, snapshot, ".parquet") as (staging, held, exported):
        count, path = 0, staging / f"train-00000{STAGED}"
        with new_file(path) as file, pq.ParquetWriter(file, _TOKENISED, compression="zstd") as writer:
            batch: list[dict[str, Any]] = []
            for row in (row for segments in rollouts(store, held, progress) for row in segments):
                batch.append(_tokenised(row))
                count += 1
                if len(batch) == _ROWS:
                    writer.write_table(pa.Table.from_pylist(batch, _TOKENISED))
                    batch = []
            writer.write_table(pa.Table.from_pylist(batch, _TOKENISED))
        exported.tables["rollouts"] = Written(count, 1, path.stat().st_size)
        about(store, held, exported, staging)
    return exported


_TOKENISED = pa.schema(
    [
        ("input_ids", pa.list_(pa.int64())),
        ("labels", pa.list_(pa.int64())),
        ("rollout_id", pa.string()),
        ("segment", pa.int32()),
        ("step", pa.int64()),
        ("reward", pa.float64()),
    ]
)


def _tokenised(row: Rollout) -> dict[str, Any]:
    tokens = row.tokens.tolist()
    labels = [token if kept else _IGNORED for token, kept in zip(tokens, trained(row), strict=True)]
    beside = {"rollout_id": row.rollout_id, "segment": row.segment, "step": row.step, "reward": row.reward}
    return {"input_ids": tokens, "labels": labels} | beside


def _rows(path: str, texts: Texts, progress: Progress | None) -> Iterator[Record]:
    with opened(path, None if progress is None else lambda size: progress(path, size)) as file:
        mark, row = fingerprint(file), 0
        try:
            read = pq.ParquetFile(file)
            scores = [field.name for field in read.schema_arrow if pa.types.is_floating(field.type)]
            scores = [name for name in scores if name != "advantage"]
            for batch in read.iter_batches(_ROWS):
                for record in batch.to_pylist():
                    row += 1
                    place = Place(format="trl", file=path, fingerprint=mark, row=row)
                    yield made(row, None, lambda r=record, p=place: _row(r, p, scores, texts))
        except pa.ArrowException as error:
            yield Record(row=None, reason=f"file: wanted Parquet, got: {first_line(error)}")


def _row(record: dict[str, Any], place: Place, scores: list[str], texts: Texts) -> Made:
    prompt, completion = record.get("prompt"), record.get("completion")
    kept = metadata(record, (*_TAKEN, *scores))
    columns: dict[str, Any] = {"step": record.get("step"), "metadata": kept}
    if isinstance(prompt, list):
        said = [*messages(prompt, "prompt"), *messages(completion, "completion")]
        # Parquet gives every message the fields of all: a null one was never there.
        rollout = texts.chat(place, [{k: v for k, v in one.items() if v is not None} for one in said], **columns)
    else:
        rollout = texts.answered(place, record, "prompt", "completion", **columns)
    judged = [_score(rollout.rollout_id, name, number(record.get(name), name)) for name in scores]
    return Made(rollouts=[rollout], scores=judged)


def _score(rollout_id: str, name: str, value: float | None) -> dict[str, Any]:
    """A reward function that returned nothing did not score: it stands there as NaN."""
    status = "unscored" if value is None else "scored"
    return {"rollout_id": rollout_id, "scorer": name, "value": value, "status": status}
