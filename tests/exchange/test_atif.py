"""ATIF trajectories, written and read by the format's own package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atif import Agent, FinalMetrics, Metrics, Observation, ObservationResult, Step, ToolCall, Trajectory

from rollstore.exchange import import_atif
from rollstore.store.store import Store
from tests.exchange.dumps import bytes_tokenizer, write_lines
from tests.exchange.test_foreign_dumps import decoded, is_text_only, rollouts


def metrics(prompt: list[int], drawn: list[int], **more: Any) -> Metrics:
    logprobs = [-0.25] * len(drawn)
    return Metrics(prompt_token_ids=prompt, completion_token_ids=drawn, logprobs=logprobs, **more)


def trajectory(steps: list[Step], **more: Any) -> Trajectory:
    agent = Agent(name="tester", version="1", model_name="m")
    return Trajectory(schema_version="ATIF-v1.8", session_id="shared", agent=agent, steps=steps, **more)


def with_ids(**more: Any) -> Trajectory:
    call = ToolCall(tool_call_id="c", function_name="add", arguments={"a": 1})
    answer = Observation(results=[ObservationResult(source_call_id="c", content="2")])
    return trajectory(
        [
            Step(step_id=1, source="user", message="1+1?"),
            Step(step_id=2, source="agent", message="", tool_calls=[call], observation=answer,
                 metrics=metrics([1, 2], [3, 4], cached_tokens=1)),
            Step(step_id=3, source="agent", message="2", reasoning_content="so", metrics=metrics([1, 2, 3, 4, 5], [6])),
            # The context was cut: what it kept is context here.
            Step(step_id=4, source="agent", message="done", metrics=metrics([1, 6], [7])),
        ],
        final_metrics=FinalMetrics(total_steps=4), **more,
    )  # fmt: skip


def test_steps_with_ids_become_the_segments_that_the_model_saw(store: Store, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(with_ids(trajectory_id="t-1").to_json_dict()), encoding="utf-8")
    report = import_atif(store, [tmp_path / "t.json"])
    assert (report.total.taken, report.rows) == (1, {"rollouts": 2})
    first, second = store.get("t-1")
    assert first.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.action_mask.tolist() == [False, False, True, True, False, True]
    assert (first.logprobs.to_list(), first.logprob_kind) == ([-0.25] * 3, "unknown")
    assert [(span.role, span.cached_tokens) for span in first.spans] == [
        ("prompt", None), ("assistant", 1), ("tool", None), ("assistant", None),
    ]  # fmt: skip
    assert (second.tokens.tolist(), second.action_mask.tolist()) == ([1, 6, 7], [False, False, True])
    assert (first.policy, first.ending, second.ending, second.reward) == ("m", "continued", "unknown", None)
    assert (second.metadata["session_id"], second.metadata["agent"]["name"]) == ("shared", "tester")
    said = json.loads(second.messages)
    assert [message["role"] for message in said] == ["user", "assistant", "tool", "assistant", "assistant"]
    assert said[1]["tool_calls"][0]["function_name"] == "add"


def test_a_trajectory_of_text_needs_a_tokenizer_and_subagents_are_rollouts_of_their_own(
    store: Store, tmp_path: Path
) -> None:
    text = trajectory([Step(step_id=1, source="user", message="hi"), Step(step_id=2, source="agent", message="you")])
    parent = with_ids(trajectory_id="parent", subagent_trajectories=[with_ids(trajectory_id="child")])
    lines = [one.to_json_dict() for one in (text, parent)] + [{"schema_version": "ATIF-v2.0", "steps": []}]
    file = write_lines(tmp_path / "t.jsonl", lines)
    without = import_atif(store, [file])
    assert (without.total.taken, without.total.refused) == (1, 2)
    assert "schema_version: wanted ATIF-v1.x" in without.causes
    assert {row.rollout_id for row in rollouts(store)} == {"parent", "child"}
    report = import_atif(store, [file], tokenizer=bytes_tokenizer(), resume=True)
    assert (report.total.taken, report.total.present, report.total.refused) == (1, 1, 1)
    made = next(row for row in rollouts(store) if row.rollout_id.startswith("atif-"))
    assert is_text_only(made)
    assert decoded(made) == [("user", "<user>hi\n"), ("assistant", "<assistant>you\n")]


def test_copied_context_is_no_action_a_second_time(store: Store, tmp_path: Path) -> None:
    steps = [
        Step(step_id=1, source="agent", message="a", metrics=metrics([1], [2]), is_copied_context=True),
        Step(step_id=2, source="agent", message="b", metrics=metrics([1, 2, 3], [4])),
    ]
    import_atif(store, [write_lines(tmp_path / "t.jsonl", [trajectory(steps).to_json_dict()])])
    only = rollouts(store)[0]
    assert (only.tokens.tolist(), only.action_mask.tolist()) == ([1, 2, 3, 4], [False, False, False, True])
