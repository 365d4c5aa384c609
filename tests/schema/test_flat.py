"""Lists as numpy sees them, whatever they are a slice of."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstore.schema.flat import bits, flat, is_known

BOOLS = st.lists(st.booleans(), max_size=40)


@settings(max_examples=200, deadline=None)
@given(BOOLS, st.data())
def test_the_bits_of_any_slice_are_its_own(values: list[bool], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    found = bits(pa.array(values, pa.bool_()).slice(start, stop - start))
    assert found.dtype == np.bool_
    assert found.tolist() == values[start:stop]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.none() | st.lists(st.none() | st.booleans(), max_size=9), max_size=9), st.data())
def test_the_masks_of_any_slice_of_lists_are_its_own(
    values: list[list[bool | None] | None], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(values)))
    rows = values[start:]
    found = flat(pa.array(values, pa.list_(pa.bool_())).slice(start))
    items = [item for row in rows for item in row or ()]
    assert found.numpy(missing=True).tolist() == [item is not False for item in items]
    assert found.known.tolist() == [item is not None for item in items]
    assert found.valid.tolist() == [row is not None for row in rows]


def test_what_is_known_of_a_slice_is_of_its_rows_alone() -> None:
    array = pa.array([None, 1, None, 3, 4, None, 6, 7, None, 9])
    assert is_known(array.slice(3, 6)).tolist() == [True, True, False, True, True, False]
