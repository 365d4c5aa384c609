"""The study of examples/off_policy_study.py runs, and its parts are what they say."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import pytest
import torch

from examples import off_policy_study as study


def test_the_quick_study_writes_a_point_for_every_loss_and_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study.main(["--quick", "--out", str(tmp_path)]) == 0
    with (tmp_path / "points.csv").open(encoding="utf-8") as file:
        points = list(csv.DictReader(file))
    steps = {0, study.QUICK.minibatches, 2 * study.QUICK.minibatches}
    assert {(point["loss"], int(point["step"])) for point in points} == {
        (name, step) for name in study.LOSSES for step in steps
    }
    assert all(0 <= float(point["reward"]) <= 1 and float(point["kl"]) > 0 for point in points)
    start = {(point["reward"], point["kl"]) for point in points if point["step"] == "0"}
    assert len(start) == 1
    assert len({point["kl"] for point in points if int(point["step"]) == max(steps)}) > 4
    plotted = importlib.util.find_spec("matplotlib") is not None
    assert (tmp_path / "study.svg").exists() == plotted
    out = capsys.readouterr().out
    assert ("matplotlib is not installed" in out) != plotted
    assert "one seed" in out
    assert "nan" not in out


def test_no_seeds_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        study.main(["--seeds", "0", "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert "--seeds: wanted a number of at least 1, got 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_trainer_rounds_its_values_and_passes_the_gradient_straight_through() -> None:
    weight = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    seen = study.StraightThrough(8)(weight)
    torch.testing.assert_close(seen, study.rounded(weight, 8))
    assert all(len(row.unique()) <= 9 for row in seen)
    slope = torch.arange(24.0).reshape(3, 8)
    (seen * slope).sum().backward()
    torch.testing.assert_close(weight.grad, slope)


def test_a_right_token_agrees_with_prompt_plus_position() -> None:
    right = [5, 6, 7, 8, 9, 10, 11]
    tokens = torch.tensor([right, [5, *(token + 1 for token in right[1:])], [5, 6, 7, 8, 0, 0, 0]])
    assert study.reward(tokens).tolist() == [1.0, 0.0, 0.5]
