"""Values of a wrong shape in a record are told by the name of the field."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rollstore.errors import SchemaError
from rollstore.schema import Heads, Rollout, Sampler, to_table

NO_SEQUENCE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a version": (Rollout, {"weight_versions": 3}, "weight_versions: wanted one value per action, got int"),
    "a log-prob": (Rollout, {"logprobs": -1.0}, "logprobs: wanted one value per action, got float"),
    "log-probs by number": (Rollout, {"logprobs": {1: -0.5}}, "logprobs: wanted one value per action, got dict"),
    "a span": (Rollout, {"spans": 3}, "spans: wanted a sequence, got int"),
    "a text for tokens": (Rollout, {"tokens": "567"}, "tokens: wanted a sequence, got str"),
    "a set of tokens": (Rollout, {"tokens": {5, 6}}, "tokens: wanted a sequence, got set"),
    "a text for stop strings": (Sampler, {"stop": "END"}, "stop: wanted a sequence, got str"),
    "a ragged list": (Heads, {"tokens": [[1], [2, 3]]}, "tokens: wanted a sequence, got list"),
}


@pytest.mark.parametrize("case", NO_SEQUENCE)
def test_what_is_no_sequence_is_a_type_error_that_names_the_field(case: str) -> None:
    kind, change, message = NO_SEQUENCE[case]
    needed = {"rollout_id": "a", "tokens": [5, 6], "action_mask": [0, 1]} if kind is Rollout else {}
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        kind(**(needed | change))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a number for heads": ({"heads": 5}, "heads: wrong_type: row 1 has a int, wanted a Heads"),
    "a number for tokens": ({"tokens": 5}, "tokens: wrong_type: row 1 has int64 of shape (), wanted a 1-d array"),
    "a number for an engine": ({"engine": 5}, "engine: wrong_type: row 1 has a int, wanted a Engine"),
    "a number among spans": ({"spans": [5]}, "spans: wrong_type: row 1 has a int, wanted a Span"),
    "extras in a list": ({"extra": [1]}, "extra: wrong_type: row 1 has a list, wanted a mapping of x_ names"),
    "a number as a name": ({"extra": {5: 1, "x_a": 2}}, "extra: wrong_type: row 1 has the name 5, wanted a name"),
    "a name that is no UTF-8": ({"extra": {"x_\ud800": 1}}, r"extra: wrong_type: row 1 has the name 'x_\ud800'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_misuse_is_refused_at_append_by_column_and_row(case: str) -> None:
    change, message = REFUSED[case]
    good: dict[str, Any] = {"tokens": [5, 6], "action_mask": [0, 1]}
    with pytest.raises(SchemaError) as refused:
        to_table([Rollout(rollout_id="a", **good), Rollout(rollout_id="b", **(good | change))])
    assert any(str(problem).startswith(message) for problem in refused.value.problems)
    str(refused.value).encode()
