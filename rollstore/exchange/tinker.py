"""Segments as the fields of tinker's Datum (tinker 0.38), a JSON object a line; tinker itself is not imported.

```python
datum = tinker.Datum(
    model_input=tinker.ModelInput.from_ints(line["tokens"]),
    loss_fn_inputs={name: torch.tensor(values) for name, values in line["loss_fn_inputs"].items()},
)
```
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from rollstore.exchange.folder import STAGED, Exported, Progress, Written, about, new_file, new_folder
from rollstore.exchange.segments import log_probs, rollouts, trained
from rollstore.schema import Rollout
from rollstore.store.snapshot import Snapshot
from rollstore.store.store import Store


def export_tinker(
    store: Store,
    folder: str | os.PathLike[str],
    *,
    snapshot: Snapshot | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write segments as FOLDER/datums.jsonl: tokens (all but the last) and loss_fn_inputs, one value a token.

    target_tokens, the token after each; weights, 1.0 where that was drawn and may be trained on, as its cross entropy
    takes them; logprobs, 0.0 elsewhere, where all of the segment are known and finite. Beside them rollout_id, segment,
    step, group_id, reward. Segments of fewer than two tokens have no target and are left out. The kind of the log-probs
    and all else are lost: for its policy losses, which need advantages, see `rollstore.batch.to_tinker`. The folder as
    for every export. Raises StoreError where it is taken, CorruptionError, WriteError.
    """
    with new_folder(store, folder, snapshot, ".jsonl") as (staging, held, exported):
        count, path = 0, staging / f"datums{STAGED}"
        with new_file(path) as file:
            for row in (row for segments in rollouts(store, held, progress) for row in segments):
                if len(row.tokens) > 1:
                    file.write(msgspec.json.encode(_datum(row)) + b"\n")
                    count += 1
        exported.tables["rollouts"] = Written(count, 1, path.stat().st_size)
        about(store, held, exported, staging)
    return exported


def _datum(row: Rollout) -> dict[str, Any]:
    tokens = row.tokens.tolist()
    inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": [float(kept) for kept in trained(row)[1:]]}
    logprobs = log_probs(row)
    if logprobs is not None:
        values = iter(logprobs)
        inputs["logprobs"] = [next(values) if drawn else 0.0 for drawn in row.action_mask.tolist()[1:]]
    beside = {name: getattr(row, name) for name in ("rollout_id", "segment", "step", "group_id", "reward")}
    return {"tokens": tokens[:-1], "loss_fn_inputs": inputs} | beside
