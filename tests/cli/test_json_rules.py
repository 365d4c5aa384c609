"""The rules of every `--json` document."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rollstore import Heads, Known, Rollout, Span
from rollstore.cli.document import document


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), '"NaN"'),
        (float("-inf"), '"-Infinity"'),
        (np.float32("inf"), '"Infinity"'),
        (2**64 - 1, "18446744073709551615"),
        (np.uint64(2**64 - 1), "18446744073709551615"),
        (-(2**63), "-9223372036854775808"),
        (-0.0, "-0.0"),
        (None, "null"),
        (np.bool_(True), "true"),
        ("\ud800", '"\\ud800"'),
        ("é\x1b", '"\\u00e9\\u001b"'),
        (b"\x00\xff", '"AP8="'),
        (datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), '"2026-01-02T03:04:05.000006Z"'),
        (date(2026, 1, 2), '"2026-01-02"'),
        (timedelta(milliseconds=1500), "1.5"),
        (Decimal(2**100), str(2**100)),
        (Decimal("1.50"), "1.5"),
        (Decimal("0.1234567890123456789"), '"0.1234567890123456789"'),
        (Decimal("NaN"), '"NaN"'),
        (pa.MonthDayNano([1, 2, 3]), '{"months": 1, "days": 2, "nanoseconds": 3}'),
        (Known(np.array([1, 2]), np.array([True, False])), "[1, null]"),
        ({1: (float("inf"), [b""])}, '{"1": ["Infinity", [""]]}'),
    ],
)
def test_each_kind_of_value_has_one_spelling(value: Any, written: str) -> None:
    assert document(value, indent=None) == written


def test_a_record_is_written_by_its_column_names() -> None:
    rollout = Rollout(
        rollout_id="a", tokens=[1, 2], action_mask=[False, True], logprobs=[None], extra={"x_mood": "good"},
        heads=Heads(size=1, tokens=[2], logprobs=[-0.5]), spans=(Span(start=0, length=2, is_action=False),),
    )  # fmt: skip
    read = json.loads(document(rollout))
    assert (read["tokens"], read["logprobs"], read["reward"]) == ([1, 2], [None], None)
    assert (read["head_size"], read["head_tokens"], read["head_counts"]) == (1, [2], None)
    assert (read["x_mood"], read["spans"][0]["length"]) == ("good", 2)
    assert "heads" not in read
    assert "extra" not in read
