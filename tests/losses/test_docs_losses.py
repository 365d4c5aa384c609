"""docs/losses.md is held to the code: its code runs, names are explained, what is out of scope is listed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstore import losses
from tests.losses import test_golden_policy, test_golden_rest

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"
TEXT = PAGE.read_text(encoding="utf-8")
SCOPE = TEXT.split("### Out of scope")[1]


def test_the_code_of_the_page_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, "losses.md", "exec"), names)
        if number == 1:
            first = names["model"].lm_head.weight
            assert first.grad.any()
            before = first.detach().clone()
            names["model"].zero_grad()
    assert not torch.equal(before, first)
    assert re.fullmatch(r"loss -?[0-9.]+, mean weight 1\.000\n", capsys.readouterr().out)


def test_the_pictures_of_the_page_are_there() -> None:
    pictures = re.findall(r"!\[.*\]\((.*)\)", TEXT)
    assert pictures
    for picture in pictures:
        assert (PAGE.parent / picture).read_text(encoding="utf-8").startswith("<?xml")


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
