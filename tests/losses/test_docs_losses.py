"""docs/losses.md is held to the code: its example runs, names are explained, what is out of scope is listed."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import rollstore
from rollstore import Heads, Rollout, Sampler, losses
from rollstore.batch import TokenBatch
from tests.losses import test_golden_policy, test_golden_rest

TEXT = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
SCOPE = TEXT.split("### Out of scope")[1]


def test_the_examples_run_on_rows_of_the_table_and_on_a_store(tmp_path: Path) -> None:
    rollouts = [
        Rollout(
            rollout_id=name,
            group_id="g",
            group_size=2,
            tokens=[1, 2, 3],
            action_mask=[False, True, True],
            logprobs=[-0.5, -0.7],
            logprob_kind="behavior",
            head_kind="behavior",
            heads=Heads(size=2, tokens=[2, 5, 3, 4], logprobs=[-0.5, -1.5, -0.7, -1.0]),
            samplers=[Sampler(temperature=0.7)],
            reward=reward,
            reward_status="scored",
        )
        for name, reward in (("a", 1.0), ("b", 0.0), ("c", 0.5))
    ]
    store = rollstore.open(tmp_path / "s", create=True)
    with store.writer(run="r", source="test") as writer:
        writer.append(rollouts)
    table = store.scan("rollouts").read_all()
    hidden, weight = torch.randn(9, 4, requires_grad=True), torch.randn(9, 4)
    seen: list[int] = []

    def states_of(batch: TokenBatch) -> torch.Tensor:
        seen.append(batch.rows)
        return hidden[batch.logit_index]

    given = {"table": table, "hidden": hidden, "output_weight": weight, "store": store, "states_of": states_of}
    code = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(code) == 2
    for block in code:
        hidden.grad = None
        exec(block, given)
        assert hidden.grad is not None
        assert hidden.grad.any()
    assert seen == [2, 1]


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
