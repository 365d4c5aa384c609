"""Dumps of other programs, in the shapes their own code writes: what is taken of each, and what stays null."""

from __future__ import annotations

import json
import math
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from rollstore import exchange
from rollstore.schema import Rollout
from rollstore.store.store import Store
from tests.exchange.dumps import bytes_tokenizer, read_lines, write_lines

DUMPS = Path(__file__).parents[1] / "data" / "dumps"
TOKENIZER = bytes_tokenizer()
NEVER = ("logprobs", "weight_versions", "heads", "samplers", "group_id", "replay_key", "bootstrap")


def rollouts(store: Store) -> list[Rollout]:
    ids = store.scan("rollouts").read_all()["rollout_id"].to_pylist()
    return [segment for id_ in dict.fromkeys(ids) for segment in store.get(id_)]


def scores(store: Store, table: str = "scores") -> list[dict[str, Any]]:
    left_out = ("written_by", "written_row")
    found = store.scan(table).read_all().to_pylist()
    return [{k: v for k, v in row.items() if v is not None and k not in left_out} for row in found]


def decoded(rollout: Rollout) -> list[tuple[str | None, str]]:
    spans = rollout.spans or ()
    return [(s.role, TOKENIZER.decode(rollout.tokens[s.start : s.start + s.length])) for s in spans]


def is_text_only(rollout: Rollout) -> bool:
    return (
        not rollout.action_mask.any()
        and {span.origin for span in rollout.spans or ()} == {"synthetic"}
        and "text_only" in {flag.kind for flag in rollout.flags or ()}
        and rollout.tokenizer is not None
    )


def test_verl_writes_text_a_score_and_a_step(store: Store, tmp_path: Path) -> None:
    record = {"input": "user\n1+1?", "output": "2", "gts": "2", "score": 1.0, "step": 7, "acc": True, "request_id": "q"}
    write_lines(tmp_path / "in" / "7.jsonl", [record, {**record, "score": float("nan")}, {**record, "output": None}])
    write_lines(tmp_path / "in" / "10.jsonl", [{**record, "step": 10, "score": 0.0}])
    report = exchange.import_verl(store, [tmp_path / "in"], tokenizer=TOKENIZER)
    assert (report.total.taken, report.total.refused) == (3, 1)
    assert list(report.causes) == ["output: wanted a text"]
    first, unscored, later = rollouts(store)
    assert is_text_only(first)
    assert decoded(first) == [("prompt", "user\n1+1?"), ("assistant", "2")]
    assert (first.reward, first.reward_status, first.step, later.step) == (1.0, "scored", 7, 10)
    assert first.metadata == {"gts": "2", "acc": True, "request_id": "q"}
    assert (unscored.reward, unscored.reward_status) == (None, None)
    assert [getattr(first, name) for name in (*NEVER, "ending")] == [None] * (len(NEVER) + 1)
    with pytest.raises(ValueError, match="verl: wanted a tokenizer"):
        exchange.import_verl(store, [tmp_path / "in"])


def test_a_dataproto_dump_of_verl_is_refused_with_the_reason(store: Store, tmp_path: Path) -> None:
    torch.save({"batch": torch.zeros(2)}, tmp_path / "batch.pt")
    good = write_lines(tmp_path / "1.jsonl", [{"input": "a", "output": "b", "score": 1.0, "step": 1}])
    files = [tmp_path / "batch.pt", good]
    report = exchange.import_verl(store, files, tokenizer=TOKENIZER, rejects=tmp_path / "bad")
    assert (report.total.taken, report.total.refused) == (1, 1)
    entry = read_lines(tmp_path / "bad")[0]
    assert entry["file"] == str(tmp_path / "batch.pt")
    assert "a DataProto dump holds Python classes and runs code when it is read" in entry["reason"]


def test_trl_writes_texts_or_chats_and_a_column_for_each_reward_function(store: Store, tmp_path: Path) -> None:
    table = {"step": [3, 3], "prompt": ["1+1?", "2+2?"], "completion": ["2", "5"]}
    table |= {"accuracy": [1.0, math.nan], "brevity": [0.5, 0.25], "source": ["a", None], "advantage": [0.7, -0.7]}
    pd.DataFrame(table).to_parquet(tmp_path / "completions_00003.parquet")
    said = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]
    answers = [[{"role": "assistant", "content": "you"}], [{"role": "assistant", "content": "me"}]]
    chats = {"step": [4, 4], "prompt": said, "completion": answers, "accuracy": [0.0, 1.0], "advantage": [0.0, 0.0]}
    pd.DataFrame(chats).to_parquet(tmp_path / "completions_00004.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no more")
    report = exchange.import_trl(store, [tmp_path], tokenizer=TOKENIZER)
    assert (report.total.taken, report.total.refused) == (4, 1)
    text, _, chat, _ = rollouts(store)
    assert is_text_only(text)
    assert is_text_only(chat)
    assert (decoded(text), decoded(chat)) == (
        [("prompt", "1+1?"), ("assistant", "2")],
        [("user", "<user>hi\n"), ("assistant", "<assistant>you\n")],
    )
    # How the functions' rewards are weighted is not in the file, so there is no sum.
    assert (text.reward, text.reward_status, text.step) == (None, None, 3)
    assert text.metadata == {"source": "a", "advantage": 0.7}
    judged = [(s["scorer"], s.get("value"), s["status"]) for s in scores(store)]
    assert judged[:4] == [
        ("accuracy", 1.0, "scored"), ("brevity", 0.5, "scored"),
        ("accuracy", None, "unscored"), ("brevity", 0.25, "scored"),
    ]  # fmt: skip
    again = exchange.import_trl(store, [tmp_path], tokenizer=TOKENIZER, resume=True)
    assert (again.total.taken, again.total.present, again.rows) == (0, 4, {})


SAMPLE = {
    "group_index": 2, "index": 9, "rollout_id": None, "prompt": "q", "tokens": [1, 2, 3, 4, 5, 6], "response": "a",
    "response_length": 4, "label": "42", "reward": 1.0, "loss_mask": [1, 0, 1, 1], "weight_versions": ["3", "4"],
    "rollout_log_probs": [-0.5, 0.0, -1.5, -2.0], "rollout_top_p_token_ids": torch.tensor([3, 7, 5, 6, 8, 9]),
    "rollout_top_p_token_offsets": torch.tensor([0, 2, 2, 3, 6]), "rollout_routed_experts": None,
    "remove_sample": False, "teacher_log_probs": None, "status": "truncated", "metadata": {"round": 1},
    "multimodal_inputs": None, "spec_info": {"spec_verify_ct": 0}, "prefix_cache_info": {"cached_tokens": 0},
    "non_generation_time": 0.0,
}  # fmt: skip


def test_slime_writes_samples_with_ids_masks_and_log_probs(store: Store, tmp_path: Path) -> None:
    other = {
        **SAMPLE,
        "reward": {"a": 1.0, "b": 0.0},
        "loss_mask": None,
        "rollout_log_probs": None,
        "status": "aborted",
    }
    other |= {"rollout_top_p_token_ids": None, "weight_versions": [], "remove_sample": True}
    bad = [{**SAMPLE, "response_length": 7}, {**SAMPLE, "loss_mask": [1]}, {**SAMPLE, "tokens": "text"}]
    torch.save({"rollout_id": 12, "samples": [SAMPLE, other, *bad]}, tmp_path / "rollout_12.pt")
    report = exchange.import_slime(store, [tmp_path / "rollout_12.pt"])
    assert (report.total.taken, report.total.refused) == (2, 3)
    first, second = rollouts(store)
    assert (first.tokens.tolist(), first.action_mask.tolist()) == (
        [1, 2, 3, 4, 5, 6],
        [False] * 2 + [True, False, True, True],
    )
    assert (first.logprobs.to_list(), first.logprob_kind) == ([-0.5, -1.5, -2.0], "unknown")
    assert (first.reward, first.step, first.group_id, first.ending, first.bootstrap) == (
        1.0,
        12,
        "2",
        "truncated",
        None,
    )
    assert (first.weight_version_min, first.weight_version_max) == (None, 4)
    assert first.weight_version_source == "read_at_completion"
    assert (first.support_counts.tolist(), first.support_tokens.tolist()) == ([2, 1, 3], [3, 7, 5, 6, 8, 9])
    assert first.metadata["metadata"] == {"round": 1}
    assert first.metadata["weight_versions"] == ["3", "4"]
    assert (second.action_mask.sum(), second.logprobs, second.reward, second.ending) == (4, None, None, "aborted")
    assert second.metadata["reward"] == {"a": 1.0, "b": 0.0}
    assert (second.trainable.tolist(), second.weight_version_max, first.trainable) == ([False] * 4, None, None)


def test_samples_that_slimes_own_class_wrote_are_taken(store: Store) -> None:
    report = exchange.import_slime(store, [DUMPS / "slime-rollout-12.pt"])
    assert (report.total.taken, report.total.refused) == (2, 0)
    done, cut = rollouts(store)
    assert (done.tokens.tolist(), done.logprobs.to_list()) == ([1, 2, 3, 4, 5, 6], [-0.5, -0.25, -1.5])
    assert done.action_mask.tolist() == [False, False, True, True, False, True]
    assert (done.ending, cut.ending, done.step, cut.action_mask.tolist()) == (
        "terminated", "truncated", 12, [False, False, True],
    )  # fmt: skip


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_runs_code_is_refused_with_the_reason_and_does_not_run(
    zipped: bool, store: Store, tmp_path: Path
) -> None:
    file, mark = tmp_path / "rollout_1.pt", tmp_path / "ran"
    torch.save({"rollout_id": 1, "samples": [SAMPLE, _Attack(mark)]}, file, _use_new_zipfile_serialization=zipped)
    torch.save({"rollout_id": 2, "samples": [SAMPLE]}, tmp_path / "rollout_2.pt")
    (tmp_path / "rollout_3.pt").write_bytes(b"PK\x03\x04 and no more")
    report = exchange.import_slime(store, [tmp_path], rejects=tmp_path / "bad")
    assert not mark.exists()
    assert (report.total.taken, report.total.refused) == (1, 2)
    reason = read_lines(tmp_path / "bad")[0]["reason"]
    assert reason.startswith("file: wanted plain data (torch.load with weights_only), got UnpicklingError")
    assert "mkdir" in reason
    torch.load(file, weights_only=False)  # the file does what it is meant to, once somebody lets it
    assert mark.exists()


def test_nemo_rl_writes_padded_batches_of_one(store: Store, tmp_path: Path) -> None:
    record = {
        "agent_ref": ["a"], "content": [["q", "a"]], "rewards": [1.0], "filtered_rewards": [0.5], "input_lengths": [4],
        "token_ids": [[1, 2, 3, 4, 0, 0]], "token_loss_mask": [[0, 0, 1, 1, 0, 0]], "sample_loss_mask": [1.0],
        "advantages": [[0.1] * 6], "generation_logprobs": [[0.0, 0.0, -0.5, -0.25, 0.0, 0.0]],
        "prev_logprobs": [[0.0, -3.0, -0.625, -0.375, 0.0, 0.0]], "idx": 0,
    }  # fmt: skip
    masked = {**record, "sample_loss_mask": [0.0], "idx": 1}
    bad = {**record, "input_lengths": [9], "idx": 2}
    file = write_lines(tmp_path / "train_data_step30.jsonl", [record, masked, bad])
    report = exchange.import_nemo_rl(store, [file])
    assert (report.total.taken, report.total.refused) == (2, 1)
    first, second = rollouts(store)
    assert (first.tokens.tolist(), first.action_mask.tolist()) == ([1, 2, 3, 4], [False, False, True, True])
    assert (first.logprobs.to_list(), first.step, first.reward, first.group_id) == ([-0.5, -0.25], 30, 1.0, None)
    assert (first.trainable, second.trainable.tolist()) == (None, [False, False])
    assert first.metadata == {"agent_ref": "a", "filtered_rewards": 0.5, "idx": 0}
    evaluation = scores(store, "evaluations")[0]
    assert (evaluation["role"], evaluation["logprobs"]) == ("anchor", [-0.625, -0.375])
    assert (evaluation["rollout_id"], evaluation["evaluation_id"]) == (first.rollout_id, "nemo-rl prev_logprobs 30")


def node(parent: int | None, role: str, tokens: list[int], drawn: int = 0, **more: Any) -> dict[str, Any]:
    mask = [False] * (len(tokens) - drawn) + [True] * drawn
    logprobs = [-0.5] * drawn
    message = {"role": role, "content": f"{role} {tokens}"}
    return {"parent": parent, "message": message, "sampled": drawn > 0, "token_ids": tokens, "mask": mask,
            "logprobs": logprobs, "timestamp": 1.0, "is_content": [], **more}  # fmt: skip


def trace(nodes: list[Any], **more: Any) -> dict[str, Any]:
    return {
        "version": 1, "id": "t1", "verifiers": {"version": "1.0"}, "task": {"type": "T", "data": {}, "key": "task-9"},
        "agent": {"config": {}, "name": "solver", "trainable": True}, "nodes": nodes,
        "calls": [{"node": n, "model": "m", "sampling": {"temperature": 0.5, "effort": "x"}, "finish_reason": finish}
                  for n, finish in ((1, "tool_calls"), (3, "stop"))],
        "rewards": {"right": {"score": 1.0, "weight": 2.0}, "short": {"score": 0.5, "weight": 1.0}},
        "metrics": {"turns": 2.0}, "info": {}, "errors": [], "ok": True, "is_completed": True,
        "stop_condition": "agent_completed", "timing": {"start": 1000.0}, **more,
    }  # fmt: skip


LINEAR = [
    node(None, "user", [1, 2]), node(0, "assistant", [3, 4, 5], 2),
    node(1, "tool", [6]), node(2, "assistant", [7, 8], 2),
]  # fmt: skip


def test_prime_rl_writes_episodes_of_traces_whose_paths_are_segments(store: Store, tmp_path: Path) -> None:
    run = {"type": "train", "id": "run-1", "work": {"type": "train", "step": 5, "policy": {"start": 3, "end": 4}}}
    episode = {"id": "e", "env": {"id": "gsm", "name": "math"}, "task": {}, "group": {"id": "g"}, "run": run,
               "ok": True, "traces": [trace(LINEAR)]}  # fmt: skip
    branching = [*LINEAR, node(1, "user", [9]), node(4, "assistant", [10, 11], 1)]
    lines = [episode, trace(branching, id="t2", rewards={"right": None}, stop_condition="max_turns"),
             {"id": "e2", "traces": [], "errors": [{"type": "X"}]}]  # fmt: skip
    report = exchange.import_prime_rl(store, [write_lines(tmp_path / "traces.jsonl", lines)])
    assert (report.total.taken, report.total.refused) == (2, 1)
    first, left, right = rollouts(store)
    assert first.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert first.action_mask.tolist() == [False] * 3 + [True, True, False, True, True]
    assert (first.environment, first.group_id, first.run_id, first.step, first.prompt_id) == (
        "math",
        "g",
        "run-1",
        5,
        "task-9",
    )
    assert (first.weight_version_min, first.weight_version_max, first.weight_version_source) == (3, 4, "start_end")
    assert (first.reward, first.ending, first.policy) == (2.5, "terminated", "m")
    assert first.started_at == datetime.fromtimestamp(1000, UTC)
    assert [(s.temperature, s.extra) for s in first.samplers] == [(0.5, {"effort": "x"})]
    assert [(s.role, s.start, s.length, s.origin, s.sampler) for s in first.spans] == [
        ("user", 0, 2, None, None), ("assistant", 2, 1, None, None), ("assistant", 3, 2, "sampled", 0),
        ("tool", 5, 1, None, None), ("assistant", 6, 2, "sampled", 0),
    ]  # fmt: skip
    # What was drawn before the paths parted is an action in one of them.
    assert (left.segment, left.action_mask.sum(), left.ending, left.reward_status) == (0, 4, None, None)
    assert (right.segment, right.tokens.tolist()) == (1, [1, 2, 3, 4, 5, 9, 10, 11])
    assert right.action_mask.tolist() == [False] * 7 + [True]
    assert right.spans[2].origin == "carried"
    assert (right.reward, right.reward_status, right.ending, right.ending_reason) == (
        None,
        "unscored",
        "truncated",
        "max_turns",
    )
    judged = {(s["rollout_id"], s["scorer"]): (s.get("value"), s["status"]) for s in scores(store)}
    assert judged == {
        ("t1", "right"): (1.0, "scored"),
        ("t1", "short"): (0.5, "scored"),
        ("t2", "right"): (None, "unscored"),
    }


def test_a_trace_without_ids_is_text_and_one_that_goes_in_circles_is_refused(store: Store, tmp_path: Path) -> None:
    bare = [{"parent": None, "message": {"role": "user", "content": "hi"}, "sampled": False},
            {"parent": 0, "message": {"role": "assistant", "content": "you"}, "sampled": True}]  # fmt: skip
    circle = [node(1, "user", [1]), node(0, "assistant", [2, 3], 1), node(1, "tool", [4])]
    short = [{**LINEAR[0], "mask": [True]}, *LINEAR[1:]]
    file = write_lines(tmp_path / "t.jsonl", [trace(bare), trace(circle, id="c"), trace(short, id="s")])
    without = exchange.import_prime_rl(store, [file])
    assert without.total.refused == 3
    assert "nodes: wanted token ids, or a tokenizer (--tokenizer PATH) for their text" in without.causes
    report = exchange.import_prime_rl(store, [file], tokenizer=TOKENIZER)
    assert (report.total.taken, report.total.refused) == (1, 2)
    only = rollouts(store)[0]
    assert is_text_only(only)
    assert decoded(only) == [("user", "<user>hi\n"), ("assistant", "<assistant>you\n")]


def test_records_that_verifiers_itself_wrote_are_taken(store: Store) -> None:
    report = exchange.import_prime_rl(store, [DUMPS / "verifiers-0.4.0-traces.jsonl"], tokenizer=TOKENIZER)
    assert (report.total.taken, report.rows) == (2, {"rollouts": 2, "scores": 3, "evaluations": 2})
    with_ids, text = store.get("trace-1", segment=0), store.get("trace-2", segment=0)
    assert with_ids.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert with_ids.action_mask.tolist() == [False] * 3 + [True, True, False, True, True]
    assert np.allclose(with_ids.logprobs.values, [-0.5, -0.1235, -0.75, -1.5])
    assert (with_ids.reward, with_ids.ending, with_ids.group_id, with_ids.step) == (2.5, "terminated", "g1", 4)
    assert (with_ids.environment, with_ids.prompt_id, with_ids.samplers[0].max_tokens) == ("math", "sum-9", 9)
    acted = [span for span in with_ids.spans if span.is_action]
    assert [(s.api_finish, s.started_at.second, s.finished_at.second) for s in acted] == [
        ("tool_calls", 1, 2), ("stop", 3, 4),
    ]  # fmt: skip
    by_role = {row["role"]: row for row in scores(store, "evaluations")}
    assert by_role["reference"]["logprobs"] == [-1.0, -2.0, None, None]
    assert by_role["trainer"]["logprobs"] == [-0.625, -0.25, None, None]
    assert by_role["trainer"]["entropies"] == [0.5, 0.25, None, None]
    assert is_text_only(text)
    assert (text.reward, text.reward_status) == (None, "unscored")


def test_prime_rls_token_exports_bring_the_trainers_log_probs_along(store: Store, tmp_path: Path) -> None:
    record = {
        "schema_version": 1, "step": 8, "rank": 0, "micro_step": 1, "export_sequence_idx": 2, "env_name": "math",
        "token_ids": [1, 2, 3, 4], "position_ids": [0, 1, 2, 3], "loss_mask": [False, False, True, True],
        "inference_logprobs": [0.0, 0.0, -0.5, None], "trainer_logprobs": [0.0, -2.0, -0.625, -1.0],
        "entropy": [0.0, 0.5, 0.25, 0.125], "advantages": [0.0, 0.0, 1.0, 1.0], "is_masked": [None] * 4,
    }  # fmt: skip
    bad = [{**record, "trainer_logprobs": [0.0]}, {**record, "loss_mask": [True]}, {**record, "token_ids": "x"}]
    report = exchange.import_prime_rl(store, [write_lines(tmp_path / "rank_0.jsonl", [record, *bad])])
    assert (report.total.taken, report.total.refused) == (1, 3)
    only = rollouts(store)[0]
    assert (only.tokens.tolist(), only.action_mask.tolist()) == ([1, 2, 3, 4], [False, False, True, True])
    assert (only.logprobs.to_list(), only.step, only.environment) == ([-0.5, None], 8, "math")
    assert only.metadata == {"rank": 0, "micro_step": 1, "export_sequence_idx": 2}
    evaluation = scores(store, "evaluations")[0]
    assert (evaluation["role"], evaluation["logprobs"]) == ("trainer", [-0.625, -1.0])
    assert (evaluation["entropies"], evaluation["rollout_id"]) == ([0.25, 0.125], only.rollout_id)
    assert evaluation["evaluation_id"] == "prime-rl token export 8"


def test_a_token_export_without_a_step_gets_no_step_made_of_it(store: Store, tmp_path: Path) -> None:
    record = {"token_ids": [1, 2], "loss_mask": [False, True], "inference_logprobs": [0.0, -0.5],
              "trainer_logprobs": [0.0, -0.625], "step": None}  # fmt: skip
    assert exchange.import_prime_rl(store, [write_lines(tmp_path / "rank_0.jsonl", [record])]).total.taken == 1
    assert [row["evaluation_id"] for row in scores(store, "evaluations")] == ["prime-rl token export"]


@pytest.mark.parametrize("form", ["nemo-rl", "atropos", "token export", "trace"])
def test_what_another_pass_did_not_say_of_a_token_is_unknown_and_costs_nothing_else(
    form: str, store: Store, tmp_path: Path
) -> None:
    values = [0.0, -0.5, None, math.nan]
    common = {"token_ids": [1, 2, 3, 4], "step": 1}
    mask = [False, True, True, True]
    dumps: dict[str, tuple[Any, Any]] = {
        "nemo-rl": (exchange.import_nemo_rl, {
            "token_ids": [[1, 2, 3, 4]], "input_lengths": [4], "token_loss_mask": [[0, 1, 1, 1]], "rewards": [1.0],
            "prev_logprobs": [values],
        }),
        "atropos": (exchange.import_atropos, {
            "tokens": [[1, 2, 3, 4]] * 2, "masks": [[-100, 2, 3, 4]] * 2, "scores": [1.0, 0.0],
            "ref_logprobs": [values, None],
        }),
        "token export": (exchange.import_prime_rl, {
            **common, "loss_mask": mask, "inference_logprobs": [0.0] * 4, "trainer_logprobs": values,
        }),
        "trace": (exchange.import_prime_rl, trace([
            node(None, "user", [1]), node(0, "assistant", [2, 3, 4], 3, reference_logprobs=values[1:]),
        ], calls=[])),
    }  # fmt: skip
    read, record = dumps[form]
    report = read(store, [write_lines(tmp_path / "a.jsonl", [record])])
    assert report.causes == {}
    (evaluation,) = scores(store, "evaluations")
    assert evaluation["logprobs"] == [-0.5, None, None]


def test_results_of_an_older_verifiers_are_text(store: Store, tmp_path: Path) -> None:
    said = {"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "you"}]}
    record = {"example_id": 3, **said, "reward": 0.5, "is_truncated": True, "metrics": {"a": 1.0}, "a": 1.0}
    plain = {"example_id": 4, "prompt": "hi", "completion": "you", "reward": 0.0, "error": {"error": "x"}}
    file = write_lines(tmp_path / "results.jsonl", [record, plain, {**record, "completion": None}])
    assert exchange.import_prime_rl(store, [file]).total.refused == 3
    report = exchange.import_prime_rl(store, [file], tokenizer=TOKENIZER)
    assert (report.total.taken, report.total.refused) == (2, 1)
    chat, text = rollouts(store)
    assert is_text_only(chat)
    assert (chat.prompt_id, chat.reward, chat.ending, text.ending) == ("3", 0.5, "truncated", "aborted")
    assert chat.metadata == {"metrics": {"a": 1.0}, "a": 1.0}
    assert decoded(chat) == [("user", "<user>hi\n"), ("assistant", "<assistant>you\n")]
    assert decoded(text) == [("prompt", "hi"), ("assistant", "you")]


def test_skyrl_writes_texts_scores_and_stop_reasons(store: Store, tmp_path: Path) -> None:
    record = {"input_prompt": "<u>1+1?", "output_response": "2", "score": 1.0, "stop_reason": "length",
              "env_class": "gsm8k", "env_extras": {"answer": "2"}, "data_source": "openai/gsm8k"}  # fmt: skip
    write_lines(tmp_path / "in" / "gsm8k.jsonl", [record, {**record, "score": [0.0, 1.0], "stop_reason": "stop"}])
    write_lines(tmp_path / "in" / "aggregated_results.jsonl", [{"eval/all/avg_score": 0.5}])
    report = exchange.import_skyrl(store, [tmp_path / "in"], tokenizer=TOKENIZER)
    assert (report.total.taken, report.total.refused) == (2, 0)
    first, second = rollouts(store)
    assert is_text_only(first)
    assert (first.reward, first.ending, first.environment) == (1.0, "truncated", "gsm8k")
    assert first.metadata["env_extras"] == {"answer": "2"}
    assert (second.reward, second.ending, second.metadata["score"]) == (None, "unknown", [0.0, 1.0])


def test_areal_writes_texts_with_versions_of_a_whole_batch(store: Store, tmp_path: Path) -> None:
    record = {"task_id": 4, "sample_idx": 1, "seqlen": 9, "prompt_len": 5, "head_version": -1, "tail_version": 3,
              "reward": 0.5, "prompt": "1+1?", "completion": "2"}  # fmt: skip
    report = exchange.import_areal(store, [write_lines(tmp_path / "4.jsonl", [record])], tokenizer=TOKENIZER)
    assert report.total.taken == 1
    only = rollouts(store)[0]
    assert is_text_only(only)
    assert (only.group_id, only.sample_index, only.reward) == ("4", 1, 0.5)
    assert (only.weight_version_min, only.weight_version_max) == (None, None)
    assert only.metadata == {"seqlen": 9, "prompt_len": 5, "head_version": -1, "tail_version": 3}


def test_atropos_writes_groups_with_minus_100_for_what_was_not_drawn(store: Store, tmp_path: Path) -> None:
    group = {
        "tokens": [[1, 2, 3], [1, 2, 4, 5]], "masks": [[-100, -100, 3], [-100, -100, 4, 5]], "scores": [1.0, -1.0],
        "inference_logprobs": [[1.0, 1.0, -0.5], [1.0, 1.0, -0.25, 1.0]], "ref_logprobs": None, "advantages": None,
        "messages": [[{"role": "user", "content": "q"}], None], "generation_params": {"temperature": 1.0},
    }  # fmt: skip
    with_ref = {**group, "inference_logprobs": None, "ref_logprobs": [[0.0, -1.0, -0.75], [0.0, -1.0, -0.5, -0.625]]}
    bad = {**group, "masks": [[-100, -100, 3], [1]]}
    file = write_lines(tmp_path / "groups.jsonl", [group, with_ref, bad, {**group, "scores": [1.0]}])
    report = exchange.import_atropos(store, [file])
    assert (report.total.taken, report.total.refused, report.rows) == (2, 2, {"rollouts": 4, "evaluations": 2})
    one, two, _, _ = rollouts(store)
    assert (one.group_id, one.group_size, two.sample_index, two.reward) == (two.group_id, 2, 1, -1.0)
    assert two.action_mask.tolist() == [False, False, True, True]
    assert (two.logprobs.to_list(), two.logprob_kind) == ([-0.25, None], "unknown")
    assert json.loads(one.messages) == [{"role": "user", "content": "q"}]
    assert one.metadata == {"generation_params": {"temperature": 1.0}}
    assert [row["logprobs"] for row in scores(store, "evaluations")] == [[-0.75], [-0.5, -0.625]]


def test_chats_go_through_the_template_and_keep_their_messages(store: Store, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]
    bad = [{"messages": []}, {"messages": ["hi"]}, {"text": "hi"}]
    file = write_lines(tmp_path / "chat.jsonl", [{"messages": said, "source": "x", "weight": 1}, *bad])
    report = exchange.import_chat(store, [file], tokenizer=TOKENIZER)
    assert (report.total.taken, report.total.refused) == (1, 3)
    only = rollouts(store)[0]
    assert is_text_only(only)
    assert decoded(only) == [("user", "<user>hi\n"), ("assistant", "<assistant>you\n")]
    assert (json.loads(only.messages), only.metadata) == (said, {"source": "x", "weight": 1})
    assert only.chat_template is not None
    plain = exchange.import_chat(store, [file], tokenizer=bytes_tokenizer(None))
    assert plain.causes["messages: wanted a tokenizer with a chat template"] == 1


WHOLE_ONLY = {
    "takes back what it said": "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "wants an answer at the end": "{% if messages[-1]['role'] != 'assistant' %}{{ raise_exception('no') }}{% endif %}"
    "2{% for m in messages %}{{ m['content'] }}{% endfor %}",
}


@pytest.mark.parametrize("name", WHOLE_ONLY)
def test_a_template_that_does_not_go_message_by_message_makes_one_span(name: str, store: Store, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]
    file = write_lines(tmp_path / "chat.jsonl", [{"messages": said}, {"messages": said[:1]}])
    report = exchange.import_chat(store, [file], tokenizer=bytes_tokenizer(WHOLE_ONLY[name]))
    assert decoded(rollouts(store)[0]) == [(None, "2hiyou")]
    assert report.total.refused == (name == "wants an answer at the end")


@pytest.mark.parametrize("name", ["verl", "skyrl", "areal", "chat", "nemo_rl", "atropos", "prime_rl", "atif"])
def test_whatever_stands_on_a_line_no_import_ends_by_it(name: str, store: Store, tmp_path: Path) -> None:
    odd: list[Any] = ["", 1, -1.5, None, True, [], {}, [[]], [None], {"a": [1]}, "text", [1, "2"], [[1], [2.5]]]
    fields = (
        "input", "output", "score", "step", "prompt", "completion", "messages", "tokens", "masks", "scores",
        "token_ids", "input_lengths", "token_loss_mask", "nodes", "id", "traces", "steps", "agent", "input_prompt",
        "output_response", "rewards", "task", "timing", "calls", "run", "env", "inference_logprobs", "reward",
        "prev_logprobs", "loss_mask", "trainer_logprobs", "example_id",
    )  # fmt: skip
    lines: list[Any] = [{field: value} for field in fields for value in odd]
    lines += [{**dict.fromkeys(fields, first), "schema_version": "ATIF-v1.8"} for first in odd]
    lines += [{"id": "x", "nodes": [value, value]} for value in odd]
    lines += [{"schema_version": "ATIF-v1.8", "steps": [value]} for value in odd]
    options: dict[str, Any] = {} if name in ("nemo_rl", "atropos") else {"tokenizer": TOKENIZER}
    good = write_lines(tmp_path / "odd.jsonl", lines)
    report = getattr(exchange, f"import_{name}")(store, [good], **options)
    assert report.total.taken + report.total.refused == len(lines)
    assert report.total.refused > len(lines) * 0.8
    assert store.verify() == []


def test_whatever_a_sample_of_slime_holds_no_import_ends_by_it(store: Store, tmp_path: Path) -> None:
    odd: list[Any] = ["", 1, -1.5, None, True, [], {}, [[]], "text", [1, "2"], {1: 2}, torch.tensor([[1]]), 2**80]
    samples: list[Any] = [{**SAMPLE, name: value} for name in SAMPLE for value in odd]
    samples += [*odd, {**SAMPLE, 5: 6}]
    torch.save({"rollout_id": 1, "samples": samples}, tmp_path / "a.pt")
    report = exchange.import_slime(store, [tmp_path / "a.pt"])
    assert report.total.taken + report.total.refused == len(samples)
    assert report.total.taken > 50
    assert report.total.refused > 50
    assert store.verify() == []
