"""Arrow data in plain types: dictionaries, run ends, views and extension types decoded, nested ones too.

A part holds none of them, so the caller's x_ columns lose them as well; the values stay the same.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.schema.flat import is_known, running_sum

t = pa.types


def decoded(array: pa.Array) -> pa.Array:
    """The array without its own encoding; its children keep theirs."""
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    type_ = array.type
    if t.is_dictionary(type_):
        return decoded(array.dictionary_decode())
    if t.is_run_end_encoded(type_):
        return decoded(pc.run_end_decode(array))
    if t.is_string_view(type_):
        return array.cast(pa.string())
    if t.is_binary_view(type_):
        return array.cast(pa.binary())
    if t.is_list_view(type_) or t.is_large_list_view(type_) or t.is_fixed_size_list(type_):
        known = is_known(array)
        lengths = np.where(known, pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False), 0)
        offsets = pa.array(running_sum(lengths))
        return pa.LargeListArray.from_arrays(offsets, array.flatten(), mask=pa.array(~known))
    return array


def decoded_deep(array: pa.Array) -> pa.Array:
    """The array without any encoding at any depth. Large lists and large strings stay as they are."""
    array = decoded(array)
    type_ = array.type
    if is_plain(type_):
        return array
    if t.is_struct(type_):
        children = [decoded_deep(child) for child in array.flatten()]
        fields = [pa.field(f.name, c.type) for f, c in zip(type_, children, strict=True)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
    if t.is_list(type_) or t.is_large_list(type_):
        known = is_known(array)
        lengths = np.where(known, pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False), 0)
        kind = pa.ListArray if t.is_list(type_) else pa.LargeListArray
        offsets = pa.array(running_sum(lengths), pa.int32() if t.is_list(type_) else pa.int64())
        return kind.from_arrays(offsets, decoded_deep(array.flatten()), mask=pa.array(~known))
    return array


def is_plain(type_: pa.DataType) -> bool:
    """Whether a part may hold the type: no encodings, no unions, and every item has a type of its own."""
    if (
        isinstance(type_, pa.BaseExtensionType)
        or t.is_dictionary(type_)
        or t.is_run_end_encoded(type_)
        or t.is_union(type_)
        or t.is_null(type_)
    ):
        return False
    if t.is_string_view(type_) or t.is_binary_view(type_) or t.is_list_view(type_) or t.is_large_list_view(type_):
        return False
    return all(is_plain(type_.field(n).type) for n in range(type_.num_fields))
