"""The strategies of `rollstore.testing`, how many examples of them to take, and how to compare records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from hypothesis import Phase, settings

from rollstore.schema import FLAG_KINDS, Column, Known, Rollout
from rollstore.testing.strategies import conforming_tables, items_of, maybe, rollout_lists, valid_tables

__all__ = ["FEW", "conforming_tables", "items_of", "maybe", "plain", "rollout_lists", "valid_tables", "values_of"]

FEW = settings(max_examples=50, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
"""Shrinking a whole table takes minutes, so a failure is shown as it was found."""


def plain(value: Any, column: Column | None = None) -> Any:
    """A value of a record as comparable Python: floats as their bits, unknowns None, a NaN log-prob unknown."""
    if isinstance(value, Known):
        known = value.known & ~np.isnan(value.values) if value.values.dtype.kind == "f" else value.known
        bits = plain(value.values)
        return [item if is_known else None for item, is_known in zip(bits, known.tolist(), strict=True)]
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value.hex()
    if isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(value):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def values_of(rollout: Rollout) -> dict[str, Any]:
    """All of a rollout for comparison, without the flags that the library sets."""
    values = plain(rollout)
    values["flags"] = [flag for flag in values["flags"] or [] if flag["kind"] not in FLAG_KINDS] or None
    values["extra"] = {k: v for k, v in (values["extra"] or {}).items() if v is not None} or None
    return values
