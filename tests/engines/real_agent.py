"""The example of an agent with an ordinary OpenAI client, before a real vLLM server: the record is the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollstore
from examples import agent
from rollstore.replay.score import score_rollouts
from tests.engines import serving


def test_what_the_agent_was_answered_is_recorded_token_for_token_and_agrees_with_the_checkpoint(
    folder: str, teacher: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--logprobs-mode", "processed_logprobs", "--max-model-len", "512"]
    with serving.server(folder, *arguments) as direct:
        assert agent.main([str(direct.base_url), str(tmp_path / "store")]) == 0
    store = rollstore.open(tmp_path / "store")
    assert store.verify() == []
    found = {f"{task.prompt_id}/{sample}": store.get(f"{task.prompt_id}/{sample}") for task in agent.ASKED
             for sample in range(agent.GROUP)}  # fmt: skip
    rows = [row for segments in found.values() for row in segments]
    for row, (own, _, _) in zip(rows, score_rollouts(teacher, rows), strict=True):
        assert np.abs(row.logprobs.values - own).mean() < 1e-4
        assert (row.run_id, row.group_size, row.step, row.logprob_kind) == ("agent", agent.GROUP, 0, "behavior")
        assert row.samplers[0].temperature == 1.0
    for name, segments in found.items():
        assert sum(span.is_action for row in segments for span in row.spans) == (2 if "17*23" in name else 1)
        assert segments[-1].ending in ("terminated", "truncated")
        assert segments[-1].reward in (0.0, 1.0)
    assert "17*23/1: 2 turns" in capfd.readouterr().out
