"""Arrays in records: plain numpy where every value is known, a (values, known) pair where single values may not be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
"""A one-dimensional numpy array. Sequences are turned into one when a record is made."""


class Known(NamedTuple):
    """Values of which single ones may be unknown. What stands in `values` where `known` is false means nothing."""

    values: Array
    """[n]"""
    known: npt.NDArray[np.bool_]
    """bool [n]"""

    def __len__(self) -> int:
        return len(self.values)

    def to_list(self) -> list[Any]:
        """Python values, None where unknown."""
        return [v if k else None for v, k in zip(self.values.tolist(), self.known.tolist(), strict=True)]


def known(values: Any) -> Known:
    """A pair from a pair, an array (all known) or a sequence with None for the unknown.

    Integers stay integers, whatever is unknown; a float NaN is kept as it is (the writer turns it into unknown and
    flags the row). Raises ValueError or TypeError on what is neither.
    """
    if isinstance(values, Known) or (isinstance(values, tuple) and len(values) == 2 and _are_columns(*values)):
        return Known(array(values[0]), np.asarray(values[1], bool))
    if isinstance(values, np.ndarray) and values.dtype != object:
        return Known(values, np.ones(len(values), bool))
    items = list(values)
    mask = np.array([item is not None for item in items], bool)
    return Known(array([0 if item is None else item for item in items]), mask)


def _are_columns(values: Any, marks: Any) -> bool:
    """Whether two things are a column and its marks, and not two numbers."""
    return isinstance(values, np.ndarray | list) and isinstance(marks, np.ndarray | list)


def array(values: Any) -> Array:
    """A numpy array of a sequence. Integers too wide for any one dtype stay Python's, for the writer to report."""
    made = np.asarray(values)
    if made.dtype == np.float64 and isinstance(values, list | tuple) and _all_integers(values):
        return np.array(values, object)
    return made


def _all_integers(values: Any) -> bool:
    return len(values) > 0 and all(isinstance(value, int | np.integer) for value in values)


def settle(record: msgspec.Struct) -> None:
    """Called when a record is made: sequences become arrays, lists of records tuples, unknowns a pair.

    Values are not judged here: what does not fit the schema is reported by the writer, all of it at once. Raises
    TypeError, by the field's name, on what is no sequence at all, or is a text.
    """
    for name, wanted, settled in _settled_fields(type(record)):
        value = getattr(record, name)
        if value is not None and (not isinstance(value, wanted) or wanted is Known):
            if isinstance(value, str | bytes | Mapping | Set):
                raise _misfit(name, wanted, value)
            try:
                made = settled(value)
            except (TypeError, ValueError) as error:
                raise _misfit(name, wanted, value) from error
            msgspec.structs.force_setattr(record, name, made)


def _misfit(name: str, wanted: type, value: Any) -> TypeError:
    what = "one value per action" if wanted is Known else "a sequence"
    return TypeError(f"{name}: wanted {what}, got {type(value).__name__}")


@cache
def _settled_fields(kind: type[msgspec.Struct]) -> list[tuple[str, type, Callable[[Any], Any]]]:
    """(field, the type it shall have, how to get there) for the fields that callers may give in another shape."""
    ways: dict[str, tuple[type, Callable[[Any], Any]]] = {
        "Array": (np.ndarray, array),
        "Known": (Known, known),
        "tuple": (tuple, tuple),
    }
    fields: list[tuple[str, type, Callable[[Any], Any]]] = []
    for name, annotation in kind.__annotations__.items():
        way = ways.get(re.split(r"\W", annotation)[0])
        if way is not None:
            fields.append((name, *way))
    return fields
