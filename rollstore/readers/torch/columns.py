"""What is read of a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rollstore.batch.packer import FIELDS, OPTIONAL
from rollstore.usable import Draw, declared, draw

COLUMNS = (
    "rollout_id", "segment", "run_id", "step", "group_id", "group_size", "tokens", "action_mask", "trainable",
    "logprobs", "logprob_kind", "head_kind", "weight_versions", "spans", "samplers", "ending", "bootstrap", "reward",
)  # fmt: skip
"""Unless more is asked for."""

HEADS = ("head_size", "head_counts", "head_tokens", "head_logprobs")
TOGETHER = (
    HEADS,
    ("support_counts", "support_tokens"),
    ("routed_experts", "routed_start", "routed_count", "routed_layers", "routed_k"),
)
"""Columns of which none can be understood without the others."""


def as_arrow(table: pa.Table) -> pa.Table:
    """For a loader's `make`: batches stay tables of the rollouts schema."""
    return table


def asked(columns: Iterable[str], heads: bool, extra: Mapping[str, str] | None, joined: Iterable[str] = ()) -> set[str]:
    """The fields of a batch that are asked for, and so are never None, whatever the rows of one batch have."""
    read = {*_understood(columns)}
    return {
        *(name for name in extra or () if name in OPTIONAL),
        *joined,
        *(["heads"] if heads or {*HEADS} <= read else []),
        *(["support"] if "support_tokens" in read else []),
        *(["routed_experts"] if "routed_experts" in read else []),
    }


def to_read(
    schema: pa.Schema, columns: Sequence[str], *, heads: bool, extra: Mapping[str, str] | None, packed: bool,
    joined: Iterable[str] = (),
) -> tuple[str, ...]:  # fmt: skip
    """The columns of rollouts that are read of a row. packed: for a batch, which wants what cannot be understood alone
    together; else rows come as they are. Raises ValueError on names that rollouts lacks, on columns of a type that
    their field of a batch cannot have, and on a field that is both joined and read."""
    _check_names(schema.names, columns, extra, joined)
    _check_types(schema, extra)
    named = _understood(columns) if packed else columns
    fields = [name for name in (extra or {}).values() if name in schema.names]
    return tuple(dict.fromkeys([*COLUMNS, *named, *(HEADS if heads else ()), *fields]))


def _understood(columns: Iterable[str]) -> tuple[str, ...]:
    """These columns, each with those that it cannot be understood without."""
    named = tuple(columns)
    return tuple(dict.fromkeys([*named, *(name for group in TOGETHER if {*group} & {*named} for name in group)]))


def check_extra(extra: Any) -> None:
    """Raises TypeError on what is no mapping of fields to columns, ValueError on a field that is none of a batch."""
    if extra is None:
        return
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra: wanted a mapping of fields to names, as {{'weights': 'x_weight'}}, got {extra!r}")
    if unknown := [name for name in extra if name not in FIELDS]:  # pyright: ignore[reportUnknownVariableType]
        raise ValueError(f"extra: wanted fields among {', '.join(FIELDS)}, got {unknown[0]!r}")


def _check_names(
    known: Sequence[str], columns: Iterable[str], extra: Mapping[str, str] | None, joined: Iterable[str] = ()
) -> None:
    """Raises ValueError on names that are not among the known columns, or for `extra` the joined ones, and on a field
    that is to be both joined and read from another column."""
    for argument, names, there in (
        ("columns", columns, known),
        ("extra", (extra or {}).values(), (*known, *joined)),
    ):
        if absent := [name for name in names if name not in there]:
            raise ValueError(f"{argument}: rollouts has no column {', '.join(map(repr, absent))}")
    if twice := [name for name in joined if (extra or {}).get(name, name) != name]:
        raise ValueError(f"extra: {twice[0]}: wanted a column or an evaluation, got both")


def _check_types(known: pa.Schema, extra: Mapping[str, str] | None) -> None:
    """Raises ValueError on a known column of a type that its field of a batch cannot have."""
    for field, name in (extra or {}).items():
        if name in known.names:
            held = known.field(name).type
            of, wanted = (held, "a number") if field == "final_values" else (_items(held), "a list of numbers")
            if not _numeric(of):
                raise ValueError(f"extra: {field}: wanted a column with {wanted} a row, got {name!r} of {held}")


def _items(held: Any) -> Any:
    """The type of a list's items; what is no list, none that a number has."""
    types = pa.types
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return held.value_type if any(of(held) for of in lists) else pa.null() if types.is_null(held) else pa.string()


def _numeric(held: Any) -> bool:
    """As `collate` takes them; a column of nulls holds nothing else."""
    types = pa.types
    kinds = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null)
    return any(of(held) for of in kinds)


def check_sampler(sampler: Any, trainer_transform: Any) -> None:
    """Raises TypeError on what is no sampler with settings that are numbers, or no `Transform`."""
    if trainer_transform is not None:
        declared(trainer_transform)
    if sampler is None or isinstance(sampler, Draw):
        return
    if isinstance(sampler, type):
        raise TypeError(f"sampler: wanted a Sampler, as Sampler(temperature=1.0), got the class {sampler.__name__}")
    for name in ("temperature", "top_k", "top_p", "min_p"):
        if not isinstance(value := getattr(sampler, name, None), int | float | np.number | None):
            raise TypeError(f"sampler: {name}: wanted a number or None, got {value!r}")
    if not isinstance(grammar := getattr(sampler, "grammar", None), str | None):
        raise TypeError(f"sampler: grammar: wanted a text or None, got {grammar!r}")
    draw(sampler)
