"""What is read of a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from rollstore.batch.packer import FIELDS, OPTIONAL

COLUMNS = (
    "rollout_id", "segment", "run_id", "step", "group_id", "group_size", "tokens", "action_mask", "trainable",
    "logprobs", "logprob_kind", "head_kind", "weight_versions", "spans", "samplers", "ending", "bootstrap", "reward",
)  # fmt: skip
"""Unless more is asked for."""

HEADS = ("head_size", "head_counts", "head_tokens", "head_logprobs")


def as_arrow(table: pa.Table) -> pa.Table:
    """For a loader's `make`: batches stay tables of the rollouts schema."""
    return table


def asked(columns: Iterable[str], heads: bool, extra: Mapping[str, str] | None, joined: Iterable[str] = ()) -> set[str]:
    """The fields of a batch that are asked for, and so are never None, whatever the rows of one batch have."""
    read = {*columns}
    return {
        *(name for name in extra or () if name in OPTIONAL),
        *joined,
        *(["heads"] if heads else []),
        *(["support"] if "support_tokens" in read else []),
        *(["routed_experts"] if "routed_experts" in read else []),
    }


def check_extra(extra: Any) -> None:
    """Raises TypeError on what is no mapping of fields to columns, ValueError on a field that is none of a batch."""
    if extra is None:
        return
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra: wanted a mapping of fields to names, as {{'weights': 'x_weight'}}, got {extra!r}")
    if unknown := [name for name in extra if name not in FIELDS]:  # pyright: ignore[reportUnknownVariableType]
        raise ValueError(f"extra: wanted fields among {', '.join(FIELDS)}, got {unknown[0]!r}")


def check_columns(
    known: Sequence[str], columns: Iterable[str], extra: Mapping[str, str] | None, joined: Iterable[str] = ()
) -> None:
    """Raises ValueError on names that are not among the known columns, or for `extra` the joined ones."""
    for argument, names, there in (
        ("columns", columns, known),
        ("extra", (extra or {}).values(), (*known, *joined)),
    ):
        if absent := [name for name in names if name not in there]:
            raise ValueError(f"{argument}: rollouts has no column {', '.join(map(repr, absent))}")
