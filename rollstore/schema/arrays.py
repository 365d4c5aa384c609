"""Numpy arrays of records as Arrow lists: joined once, cast once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollstore.schema.column import Column
from rollstore.schema.flat import running_sum
from rollstore.schema.known import Known
from rollstore.schema.leaves import fit_leaf
from rollstore.schema.problem import Problem, at

KINDS = {"bool": "biuf", "int": "iu", "uint": "iu", "float": "iuf"}
"""Kinds of numpy dtypes that may stand in a column of Arrow numbers. Floats are no integers, whatever their value."""


def number_lists(
    values: Sequence[Any], column: Column, path: str, rows: npt.NDArray[np.int64], found: list[Problem]
) -> pa.Array:
    """A list column from arrays, `Known` pairs and None [n], which belong to `rows` [n]."""
    item = column.type.value_type
    kinds = KINDS[str(item).rstrip("0123456789")]
    nothing = np.zeros(0, np.uint8)
    parts: list[npt.NDArray[Any]] = []
    knowns: list[npt.NDArray[np.bool_] | None] = []
    for value, row in zip(values, rows, strict=True):
        array, known = (value.values, value.known) if isinstance(value, Known) else (value, None)
        if array is not None and not _numbers(array, kinds):
            shape = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            found.extend(at(path, "wrong_type", [row], shape, f"a 1-d array of {item}"))
            array = None
        if array is not None and known is not None and len(known) != len(array):
            found.extend(at(path, "wrong_length", [row], f"{len(known)} known marks", f"{len(array)} values"))
            known = None
        parts.append(nothing if array is None else array)
        knowns.append(None if array is None else known)
    lengths = [len(part) for part in parts]
    offsets = running_sum(np.array(lengths, np.int64))
    if offsets[-1] >= 2**31 - 1:
        found.append(
            Problem(
                column=path, kind="too_large", row=None, found=f"{offsets[-1]} items", wanted="fewer than 2^31-1 a call"
            )
        )
        return pa.nulls(len(values), column.type)
    whole = np.repeat(rows, lengths)
    some = [(part, known) for part, known in zip(parts, knowns, strict=True) if part.size]
    common = np.result_type(*{part.dtype for part, _ in some}) if some else np.dtype(np.uint8)
    if common.kind in kinds:
        array = _fitted(_joined([part for part, _ in some], common), _unknown(some), item, path, whole, found)
    else:  # signed and unsigned 64-bit integers have no common type but float
        ends = running_sum(np.array([len(part) for part, _ in some]))
        array = pa.concat_arrays(
            [
                _fitted(part, _unknown([(part, known)]), item, path, whole[a:b], found)
                for (part, known), a, b in zip(some, ends, ends[1:], strict=False)
            ]
        )
    missing = None if all(value is not None for value in values) else pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), array, type=column.type, mask=missing)


def _numbers(array: Any, kinds: str) -> bool:
    """Whether it is a numpy array of one dimension and of a dtype that fits. An empty one has no dtype of its own."""
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        return False
    return not array.size or (array.dtype.kind in kinds and array.dtype.itemsize <= 8)


def _unknown(parts: Sequence[tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]]) -> npt.NDArray[np.bool_] | None:
    """bool [items]: the values that are unknown; None where all are known."""
    if all(known is None or known.all() for _, known in parts):
        return None
    return ~np.concatenate([np.ones(len(part), bool) if known is None else known for part, known in parts])


def _joined(parts: Sequence[npt.NDArray[Any]], common: np.dtype[Any]) -> npt.NDArray[Any]:
    """One array [items], always a copy: what the caller does to its own afterwards is not ours to see."""
    return np.concatenate(parts, dtype=common.newbyteorder("=")) if parts else np.zeros(0, common)


def _fitted(
    items: npt.NDArray[Any],
    unknown: npt.NDArray[np.bool_] | None,
    item: pa.DataType,
    path: str,
    rows: Any,
    found: list[Problem],
) -> pa.Array:
    return fit_leaf(pa.array(items, mask=unknown), item, path, rows, found)
