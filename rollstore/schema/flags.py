"""Warnings that are kept with the row: values that are odd but may be true, found when rows are prepared."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollstore.schema.fitting import Fitted
from rollstore.schema.flat import Flat, Rows
from rollstore.schema.rollouts import ROLLOUTS
from rollstore.schema.rules.heads import STAND_IN, outside_support

FlagKind = Literal[
    "context_shifted",
    "drawn_outside_support",
    "floored_logprob",
    "head_conflict",
    "id_outside_tokenizer",
    "impossible_draw",
    "json_value",
    "logprob_above_zero",
    "nan_entropy",
    "nan_head",
    "nan_logprob",
    "sampled_id_missing",
    "text_escaped",
    "text_only",
    "unplaced_logprobs",
]

FLAG_KINDS: tuple[FlagKind, ...] = get_args(FlagKind)
"""Every flag that this library sets. What each means stands in spec/README.md; a caller may set others."""

LOGPROB_TOLERANCE = 1e-5
"""A log-prob above zero by more than this is flagged; it is kept as it is."""

FLAGS_PER_ROW = 100
"""Flags of one kind in one column of one row; where there are more, one without an index stands for the rest."""


def nan_to_null(fitted: Fitted) -> None:
    """A NaN that an engine sent is an unknown value: null, and flagged."""
    kinds: dict[str, FlagKind] = {"logprobs": "nan_logprob", "entropies": "nan_entropy"}
    for name, kind in kinds.items():
        array = fitted.columns.get(name)
        if array is None:
            continue
        lists = Flat(array)
        values = lists.numpy(np.float32(0))
        nan = np.isnan(values)
        if nan.any():
            items = pa.array(values, mask=nan | ~lists.known)
            offsets, missing = pa.array(lists.offsets.astype(np.int32)), pa.array(~lists.valid)
            fitted.columns[name] = pa.ListArray.from_arrays(offsets, items, type=array.type, mask=missing)
            _add(fitted, lists, [(nan, kind, name)])


def add_warnings(fitted: Fitted, rows: Rows) -> None:
    """Log-probs above zero, stand-ins for minus infinity, impossible draws, ids outside the tokenizer."""
    for name in ("logprobs", "head_logprobs"):
        lists = rows.list(name)
        if lists is None or not len(lists.values):
            continue
        values = lists.numpy(np.float32(0))
        if values.max() > LOGPROB_TOLERANCE:
            _add(fitted, lists, [(values > LOGPROB_TOLERANCE, "logprob_above_zero", name)])
        if values.min() <= STAND_IN:
            endless = np.isneginf(values)
            chosen: list[tuple[Any, FlagKind, str]] = [((values <= STAND_IN) & ~endless, "floored_logprob", name)]
            if name == "logprobs":
                chosen.append((endless, "impossible_draw", name))
            _add(fitted, lists, chosen)
    tokens, size = rows.list("tokens"), rows.numbers("tokenizer_size")
    if tokens is not None and size is not None:
        limit = np.where(size[1], size[0], np.iinfo(np.int32).max)
        _add(fitted, tokens, [(tokens.numpy() >= np.repeat(limit, tokens.lengths), "id_outside_tokenizer", "tokens")])
    for lists, missing in outside_support(rows):
        _add(fitted, lists, [(missing, "drawn_outside_support", "support_tokens")])


def _add(fitted: Fitted, lists: Flat, chosen: list[tuple[npt.NDArray[np.bool_], FlagKind, str]]) -> None:
    """Flags for the chosen [items] of the lists, after those that the rows have; none twice."""
    added: dict[int, list[dict[str, Any]]] = {}
    for marks, kind, column in chosen:
        items = np.flatnonzero(marks)
        if not len(items):
            continue
        owners, starts = np.unique(lists.row_of(items), return_index=True)
        for row, own in zip(owners.tolist(), np.split(items, starts[1:]), strict=True):
            places: list[int | None] = (own[:FLAGS_PER_ROW] - lists.offsets[row]).tolist()
            if len(own) > FLAGS_PER_ROW:
                places.append(None)
            flags = added.setdefault(row, [])
            flags.extend({"kind": kind, "column": column, "index": place} for place in places)
    if not added:
        return
    column = ROLLOUTS.by_name["flags"]
    array = fitted.columns.get("flags")
    current: list[Any] = [None] * fitted.count if array is None else array.to_pylist()
    for row, new in added.items():
        kept = current[row] or []
        current[row] = kept + [flag for flag in new if flag not in kept]
    fitted.columns["flags"] = pa.array(current, column.type)
