"""docs/losses.md is held to the code: its example runs, names are explained, what is out of scope is listed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from rollstore import losses
from rollstore.schema.rollouts import ROLLOUTS
from tests.losses import test_golden_policy, test_golden_rest

TEXT = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
SCOPE = TEXT.split("### Out of scope")[1]


def test_the_example_runs_on_rows_of_the_table() -> None:
    rows: list[dict[str, Any]] = [
        {
            "rollout_id": name,
            "segment": 0,
            "group_id": "g",
            "tokens": [1, 2, 3],
            "action_mask": [False, True, True],
            "logprobs": [-0.5, -0.7],
            "logprob_kind": "behavior",
            "samplers": [{"temperature": 0.7}],
            "reward": reward,
        }
        for name, reward in (("a", 1.0), ("b", 0.0))
    ]
    table = pa.Table.from_pylist(rows, schema=ROLLOUTS.arrow_schema)
    hidden = torch.randn(6, 4, requires_grad=True)
    given = {"table": table, "hidden": hidden, "output_weight": torch.randn(9, 4)}
    code = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(code) == 1
    exec(code[0], given)
    assert hidden.grad is not None
    assert hidden.grad.any()


def test_every_public_name_is_explained() -> None:
    records = {"Correction", "Groups", "Reducer", "Verdict", "Recorded", "truncated"}
    missing = [name for name in losses.__all__ if name not in records and f"`{name}" not in TEXT]
    assert missing == []


def test_what_the_golden_tests_leave_out_is_listed_with_a_reason_and_nothing_else_is() -> None:
    left_out = (
        test_golden_policy.VERL_OUT_OF_SCOPE
        | test_golden_policy.TRL_OUT_OF_SCOPE
        | test_golden_policy.KL_OUT_OF_SCOPE
        | test_golden_rest.ADVANTAGES_OUT_OF_SCOPE
        | test_golden_rest.REJECTIONS_OUT_OF_SCOPE
        | test_golden_rest.CENTRING_OUT_OF_SCOPE
        | test_golden_rest.OTHER_OUT_OF_SCOPE
    )
    rows = [line.split("|")[1:4] for line in SCOPE.splitlines() if line.startswith("|")][2:]
    named = {name for _, cases, _ in rows for name in re.findall(r"`([^`]+)`", cases)}
    assert named == left_out
    assert all(reason.strip() for _, _, reason in rows)
