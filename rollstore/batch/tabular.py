"""A caller's table as the packer reads it: text as text, lists as lists; what is neither is refused by column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rollstore.errors import UnsupportedRecordError
from rollstore.schema.flat import Flat, plain, running_sum
from rollstore.schema.rollouts import ROLLOUTS

TEXTS = ("rollout_id", "run_id", "group_id", "logprob_kind", "head_kind", "ending")
NUMBERS = (
    "segment", "step", "group_size", "reward", "bootstrap", "head_size", "final_values", "routed_start",
    "routed_count", "routed_layers", "routed_k",
)  # fmt: skip
LISTS = (
    "tokens", "action_mask", "trainable", "logprobs", "weight_versions", "head_counts", "head_tokens", "head_logprobs",
    "support_counts", "support_tokens", "routed_experts", "weights",
)  # fmt: skip
STRUCTS = ("spans", "samplers")
FLOATS = ("reward", "final_values", "logprobs", "head_logprobs", "weights")
"""Of these, and of the caller's own columns, integers, truth values and decimals are taken as the numbers they are."""
FLAGS = ("action_mask", "trainable", "bootstrap")
"""Of these, numbers are taken as truth values."""


def readable(table: Any, *, lists: Sequence[str] = (), numbers: Sequence[str] = ()) -> pa.Table | pa.RecordBatch:
    """The table with dictionaries of text as text, list views and lists of a fixed size as lists, and numbers as floats
    where a NaN may have to stand among them, as integers elsewhere.

    lists, numbers: more columns that hold a list of numbers a row, and a number. Raises `TypeError` for what is no
    table of Arrow, `UnsupportedRecordError` naming a column of another type, or a number that would become another.
    """
    if not isinstance(table, pa.Table | pa.RecordBatch):
        raise TypeError(f"table: wanted a pyarrow Table or RecordBatch, got {type(table).__name__}")
    ids = table.column("rollout_id") if table.schema.names.count("rollout_id") == 1 else None
    for at, field in enumerate(table.schema):
        if pa.types.is_null(field.type):
            continue
        column = table.column(at)
        changed, asked = column, field.name in (*lists, *numbers)
        wide = asked or field.name in FLOATS
        if field.name in (*LISTS, *STRUCTS, *lists):
            struct = field.name in STRUCTS and field.name not in lists
            changed = _list(field, column, ids, numeric=not struct, wide=wide)
        if field.name in TEXTS:
            changed = _text(field, column)
        if field.name in (*NUMBERS, *numbers):
            _refuse(field, _numeric(field.type, wide), "a number a row")
            kind = _wanted(field.name, field.type, wide)
            changed = column if kind is None else _cast(field.name, plain(column), kind, ids)
        if changed is not column:
            table = table.set_column(at, field.name, changed)
    return table


def _text(field: Any, column: Any) -> Any:
    """Without a dictionary around it: equal texts may stand twice in one, and some that no row has."""
    coded = pa.types.is_dictionary(field.type)
    kind = field.type.value_type if coded else field.type
    _refuse(field, _kind(kind) == "text", "text")
    return column.cast(kind) if coded else column


def _list(field: Any, column: Any, ids: Any, *, numeric: bool, wide: bool) -> Any:
    kind, types = field.type, pa.types
    view = types.is_list_view(kind) or types.is_large_list_view(kind)
    fixed = types.is_fixed_size_list(kind)
    items = kind.value_type if _kind(kind) == "list" else None
    fits = items is not None and (
        types.is_null(items) or (_numeric(items, wide) if numeric else types.is_struct(items))
    )
    _refuse(field, fits, f"a list of {'numbers' if numeric else 'structs'} a row")
    if not numeric:
        if types.is_null(items):
            return pa.nulls(len(column))
        _refuse_fields(field.name, ROLLOUTS.arrow_schema.field(field.name).type.value_type, items)
    if view:
        column = _laid_out(plain(column))
    if fixed:
        column = column.cast(pa.list_(items))
    wanted = _wanted(field.name, items, wide) if numeric else None
    if wanted is None:
        return column
    # Arrow's own cast of a list that is a slice looks at what lies beyond it.
    found = Flat(plain(column))
    values = _cast(field.name, found.values, wanted, ids, found)
    return pa.LargeListArray.from_arrays(pa.array(found.offsets), values, mask=pa.array(~found.valid))


def _laid_out(views: Any) -> pa.Array:
    """A list view as lists that lie one after another. (Arrow's own cast leaves out the last offset.)"""
    sizes = views.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    offsets = pa.array(running_sum(sizes), pa.int64())
    return pa.LargeListArray.from_arrays(offsets, views.flatten(), mask=views.is_null())


def _wanted(name: str, kind: Any, wide: bool) -> Any:
    """What the numbers of a column are cast to; None where they stay as they are."""
    types = pa.types
    if wide:
        return None if types.is_floating(kind) else pa.float64()
    if name in FLAGS:
        return None if types.is_boolean(kind) else pa.bool_()
    plain_integer = types.is_integer(kind) and not types.is_uint64(kind)
    return None if plain_integer else pa.int64()


def _cast(name: str, values: Any, wanted: Any, ids: Any, lists: Flat | None = None) -> Any:
    """Numbers of another type, none of them another number. lists: whose items they are, if they are."""
    if pa.types.is_boolean(wanted) and pa.types.is_floating(values.type):
        values = _cast(name, values, pa.int64(), ids, lists)
    try:
        return values.cast(wanted)
    except pa.ArrowInvalid:
        item = _misfit(values, wanted)
    row, wide = item if lists is None else int(lists.row_of(item)), pa.types.is_floating(wanted)
    where = name if ids is None else f"rollout {ids[row].as_py()!r}: {name}"
    what = "numbers that float64 holds, integers of at most 2**53" if wide else "whole numbers of 64 bits, signed"
    raise UnsupportedRecordError(f"{where}: wanted {what}, got {values[item].as_py()}")


def _misfit(values: pa.Array, wanted: Any) -> int:
    """The first value that cannot be cast; there is one."""
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            values.slice(low, middle - low).cast(wanted)
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low


def _numeric(kind: Any, wide: bool) -> bool:
    exact = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or (wide and pa.types.is_decimal(kind))
    return exact or pa.types.is_floating(kind)


def _kind(found: Any) -> str | None:
    """What values of a type are, where it does not matter how they are laid out; None for any other type."""
    types = pa.types
    if types.is_string(found) or types.is_large_string(found) or types.is_string_view(found):
        return "text"
    if _numeric(found, wide=False):
        return "number"
    if types.is_struct(found):
        return "struct"
    views = types.is_list_view(found) or types.is_large_list_view(found)
    if views or types.is_list(found) or types.is_large_list(found) or types.is_fixed_size_list(found):
        return "list"
    return None


def _refuse(field: Any, fits: bool, wanted: str) -> None:
    if not fits:
        raise UnsupportedRecordError(f"{field.name}: wanted {wanted}, got {field.type}")


def _refuse_fields(name: str, wanted: Any, found: Any) -> None:
    """Raise where a field, or what a list holds, is of another kind than the schema's."""
    if pa.types.is_null(found) or pa.types.is_dictionary(found):
        return
    kind = _kind(wanted)
    if _kind(found) != kind:
        raise UnsupportedRecordError(f"{name}: wanted a {kind}, got {found}")
    if kind == "list":
        _refuse_fields(name, wanted.value_type, found.value_type)
    for field in found if kind == "struct" else ():
        at = wanted.get_field_index(field.name)
        if at >= 0:
            _refuse_fields(f"{name}.{field.name}", wanted.field(at).type, field.type)
