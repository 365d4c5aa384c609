"""What `rollstore.batch.ranges` does with a flat array, as compiled loops: one pass, and no lock of the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rollstore.batch.ranges import Ints, Part
from rollstore.compiled import compiled


def take(part: Part, values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    out = np.empty(part.count, dtype)
    _take(values, part.begins, part.lengths, out)
    return out


def positions(part: Part) -> Ints:
    out = np.empty(part.count, np.int64)
    _positions(part.lengths, out)
    return out


def marked(part: Part, marks: npt.NDArray[np.bool_], count: int) -> Ints:
    out = np.empty(count + 1, np.int64)  # the last place takes what is written before it is known to have a mark
    _marked(marks.view(np.uint8), part.begins, part.lengths, out)
    return out[:count]


# Numba looks at every index for one that counts from the end, unless it is that of a loop: so a list is cut out first.


@compiled
def _take(values: Any, begins: Any, lengths: Any, out: Any) -> None:
    at = 0
    for row in range(len(begins)):
        end = at + lengths[row]
        found, wanted = values[begins[row] : begins[row] + lengths[row]], out[at:end]
        for item in range(len(wanted)):
            wanted[item] = found[item]
        at = end


@compiled
def _positions(lengths: Any, out: Any) -> None:
    at = 0
    for row in range(len(lengths)):
        end = at + lengths[row]
        wanted = out[at:end]
        for item in range(len(wanted)):
            wanted[item] = item
        at = end


@compiled
def _marked(marks: Any, begins: Any, lengths: Any, out: Any) -> None:
    at, count = 0, np.uint64(0)
    for row in range(len(begins)):
        found = marks[begins[row] : begins[row] + lengths[row]]
        for item in range(len(found)):
            out[count] = at + item
            count += np.uint64(found[item])
        at += len(found)
