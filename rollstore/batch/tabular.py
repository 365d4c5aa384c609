"""A caller's table as the packer reads it: text as text, lists as lists; what is neither is refused by column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rollstore.errors import UnsupportedRecordError
from rollstore.schema.flat import plain, running_sum

TEXTS = ("rollout_id", "run_id", "group_id", "logprob_kind", "head_kind", "ending")
NUMBERS = ("segment", "step", "group_size", "reward", "bootstrap", "head_size", "final_values")
LISTS = (
    "tokens", "action_mask", "trainable", "logprobs", "weight_versions", "head_counts", "head_tokens", "head_logprobs",
    "support_counts", "support_tokens", "routed_experts", "weights",
)  # fmt: skip
STRUCTS = ("spans", "samplers")
FLOATS = ("reward", "final_values", "logprobs", "head_logprobs", "weights")
"""Of these, and of the caller's own columns, integers, truth values and decimals are taken as the numbers they are."""


def readable(table: Any, *, lists: Sequence[str] = (), numbers: Sequence[str] = ()) -> pa.Table | pa.RecordBatch:
    """The table with dictionaries of text as text, list views and lists of a fixed size as lists, and numbers as floats
    where a NaN may have to stand among them.

    lists, numbers: more columns that hold a list of numbers a row, and a number. Raises `TypeError` for what is no
    table of Arrow, `UnsupportedRecordError` naming a column of another type.
    """
    if not isinstance(table, pa.Table | pa.RecordBatch):
        raise TypeError(f"table: wanted a pyarrow Table or RecordBatch, got {type(table).__name__}")
    for at, field in enumerate(table.schema):
        if pa.types.is_null(field.type):
            continue
        column = table.column(at)
        changed, wide = column, field.name in (*FLOATS, *lists, *numbers)
        if field.name in TEXTS:
            changed = _text(field, column)
        elif field.name in LISTS or field.name in lists or field.name in STRUCTS:
            changed = _list(field, column, numeric=field.name not in STRUCTS, wide=wide)
        elif field.name in NUMBERS or field.name in numbers:
            _refuse(field, _numeric(field.type, wide), "a number a row")
            changed = column if not wide or pa.types.is_floating(field.type) else column.cast(pa.float64())
        if changed is not column:
            table = table.set_column(at, field.name, changed)
    return table


def _text(field: Any, column: Any) -> Any:
    """Without a dictionary around it: equal texts may stand twice in one, and some that no row has."""
    coded = pa.types.is_dictionary(field.type)
    kind = field.type.value_type if coded else field.type
    _refuse(field, pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind), "text")
    return column.cast(kind) if coded else column


def _list(field: Any, column: Any, *, numeric: bool, wide: bool) -> Any:
    kind, types = field.type, pa.types
    view = types.is_list_view(kind) or types.is_large_list_view(kind)
    fixed = types.is_fixed_size_list(kind)
    items = kind.value_type if view or fixed or types.is_list(kind) or types.is_large_list(kind) else None
    fits = items is not None and (
        types.is_null(items) or (_numeric(items, wide) if numeric else types.is_struct(items))
    )
    _refuse(field, fits, f"a list of {'numbers' if numeric else 'structs'} a row")
    if view:
        column = _laid_out(plain(column))
    if wide and not types.is_floating(items):
        return column.cast(pa.large_list(pa.float64()))
    return column.cast(pa.list_(items)) if fixed else column


def _laid_out(views: Any) -> pa.Array:
    """A list view as lists that lie one after another. (Arrow's own cast leaves out the last offset.)"""
    sizes = views.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    offsets = pa.array(running_sum(sizes), pa.int64())
    return pa.LargeListArray.from_arrays(offsets, views.flatten(), mask=views.is_null())


def _numeric(kind: Any, wide: bool) -> bool:
    exact = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or (wide and pa.types.is_decimal(kind))
    return exact or pa.types.is_floating(kind)


def _refuse(field: Any, fits: bool, wanted: str) -> None:
    if not fits:
        raise UnsupportedRecordError(f"{field.name}: wanted {wanted}, got {field.type}")
