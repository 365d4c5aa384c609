"""forks, evaluate, mismatch and gate, on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest

from rollstore.replay.samplers.transformers import generate
from rollstore.replay.verdict import passed_gates
from rollstore.schema import TABLES, Known, Rollout, Sampler, Span
from rollstore.store.store import open as open_store
from tests.cli.story import Run
from tests.test_loop import tiny_model, tiny_tokenizer

SAMPLER = Sampler(temperature=0.9, top_k=20)
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("checkpoint")
    tokenizer = tiny_tokenizer()
    tiny_model(len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Other weights of the same shape."""
    path = tmp_path_factory.mktemp("moved")
    tiny_model(len(tiny_tokenizer()), seed=1).save_pretrained(path)
    return str(path)


@pytest.fixture
def sampled(tmp_path: Path) -> str:
    """A group of four, drawn by the checkpoint's weights."""
    model = tiny_model(len(tiny_tokenizer()))
    turns = generate(model, [PROMPT] * 4, keys=3, samples=range(4), sampler=SAMPLER, max_new_tokens=6)
    path = str(tmp_path / "sampled")
    spans = (Span(start=0, length=3, is_action=False), Span(start=3, length=6, is_action=True, sampler=0))
    with open_store(path, create=True).writer(run="r") as writer:
        for number, turn in enumerate(turns):
            writer.append(
                Rollout(
                    rollout_id=f"g/{number}", run_id="r", group_id="g", sample_index=number,
                    tokens=[*PROMPT, *turn.tokens], action_mask=[False] * 3 + [True] * 6, logprobs=turn.logprobs,
                    logprob_kind="behavior", weight_versions=[0] * 6, samplers=(turn.sampler,), spans=spans,
                )
            )  # fmt: skip
    return path


def test_forks_reports_what_a_shared_generation_would_have_saved(sampled: str, run: Run) -> None:
    result = run("forks", sampled)
    assert result.exit_code == 0
    assert "1 groups, 4 samples:" in result.stdout
    read = json.loads(run("forks", sampled, "--json").stdout)
    assert read["total"]["forward_rows_alone"] == 4 * 8
    assert read["groups"][0]["forks"][0] == {"parent": None, "position": 0}
    assert json.loads(run("forks", sampled, "--run", "other", "--json").stdout)["groups"] == []


def test_evaluate_scores_once_and_goes_on_where_it_stopped(sampled: str, checkpoint: str, run: Run) -> None:
    arguments = ("evaluate", sampled, "--model", checkpoint, "--id", "trainer-0", "--weight-version", "0")
    assert json.loads(run(*arguments, "--rollout", "g/1", "--json").stdout) == {
        "evaluation_id": "trainer-0",
        "added": 1,
    }
    assert run(*arguments, "--packed").stdout == "3 segments scored under trainer-0\n"
    assert run(*arguments).stdout == "0 segments scored under trainer-0\n"
    other = run("evaluate", sampled, "--model", checkpoint, "--id", "trainer-0", "--weight-version", "1")
    assert (other.exit_code, other.stdout) == (2, "")
    assert "wanted weight_version 0 as its rows have, got 1" in other.stderr
    nowhere = run("evaluate", sampled, "--model", "someone/something", "--id", "x")
    assert nowhere.stderr == "rollstore: someone/something: wanted a folder with a checkpoint, found none\n"


def test_mismatch_splits_the_ratio_and_fails_above_a_k3(sampled: str, checkpoint: str, moved: str, run: Run) -> None:
    run("evaluate", sampled, "--model", checkpoint, "--id", "same", "--weight-version", "0")
    run("evaluate", sampled, "--model", moved, "--id", "next", "--weight-version", "1")
    arguments = ("mismatch", sampled, "--evaluation", "same", "--evaluation", "next", "--current", "1")
    result = run(*arguments, "--most-k3", "1e-4")
    assert result.exit_code == 0
    assert "weight movement" in result.stdout
    read = json.loads(run(*arguments, "--json").stdout)
    assert read["parts"]["disagreement"]["k3"] < 1e-8
    assert read["parts"]["weight movement"]["mean_abs"] > 0.01
    assert len(read["parts"]["total"]["quantiles"]) == len(read["quantiles_at"])
    wrong = run("mismatch", sampled, "--evaluation", "next")
    assert wrong.exit_code == 0
    assert "total" in wrong.stdout
    # Nothing of the same version can be compared, so nothing shows that the k3 is small.
    assert run("mismatch", sampled, "--evaluation", "next", "--most-k3", "1").exit_code == 1
    missing = run("mismatch", sampled, "--evaluation", "nobody")
    assert (missing.exit_code, missing.stdout) == (2, "")


def test_gate_passes_the_same_weights_keeps_the_result_and_writes_junit(
    sampled: str, checkpoint: str, tmp_path: Path, run: Run
) -> None:
    junit = tmp_path / "gate.xml"
    result = run(
        "gate", "--model", checkpoint, "--against", checkpoint, "--store", sampled, "--run", "r", "--longest", "40",
        "--grad", "--junit", str(junit), "--weight-version", "0",
    )  # fmt: skip
    assert result.exit_code == 0, result.stdout
    assert "passed: gate-" in result.stdout
    assert "proves nothing" not in result.stdout
    (gate_id,) = passed_gates(open_store(sampled))
    assert gate_id in result.stdout
    suite = ElementTree.parse(junit).getroot()
    assert suite.get("failures") == "0"
    sections = {case.get("classname") for case in suite}
    assert sections == {"gate.batch", "gate.cache", "gate.engine", "gate.draws", "gate.gradients"}


def test_gate_fails_with_a_table_and_the_cause(checkpoint: str, moved: str, tmp_path: Path, run: Run) -> None:
    arguments = ("gate", "--model", checkpoint, "--longest", "40", "--against")
    narrow = run(*arguments, checkpoint, "--against-dtype", "bfloat16", "--bitwise")
    assert narrow.exit_code == 1
    assert "not bitwise equal" in narrow.stdout
    assert "cause: rounding of bfloat16" in narrow.stdout
    assert "no gradients were checked: a forward that agrees proves nothing about them" in narrow.stdout
    limits = tmp_path / "gate.toml"
    limits.write_text("[engine]\nk3 = 1000\n")
    assert run(*arguments, moved, "--thresholds", str(limits)).exit_code == 0
    read = json.loads(run(*arguments, moved, "--json").stdout)
    assert read["passed"] is False
    assert any("k3" in why for check in read["checks"] for why in check["why"])


def test_gate_says_what_it_was_not_given(checkpoint: str, sampled: str, tmp_path: Path, run: Run) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[engine]\nk4 = 1\n")
    for arguments, said in (
        (("--model", checkpoint, "--run", "r"), "--run: wanted --store with it"),
        (("--model", checkpoint, "--store", sampled, "--run", "zzz"), "wanted rollouts of run 'zzz' with log-probs"),
        (("--model", checkpoint, "--thresholds", str(wrong)), "wanted keys out of k3"),
        (("--model", str(tmp_path / "none")), "wanted a folder with a checkpoint, found none"),
    ):
        result = run("gate", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr
        assert result.stderr.count("\n") == 1


def test_gate_fails_where_nothing_could_be_compared_and_counts_what_was_left_out(
    checkpoint: str, tmp_path: Path, run: Run
) -> None:
    path = str(tmp_path / "empty")
    nothing = Known(np.zeros(2), np.zeros(2, dtype=bool))
    with open_store(path, create=True).writer(run="r") as writer:
        writer.append(
            Rollout(
                rollout_id="x", run_id="r", tokens=[1, 2, 3], action_mask=[False, True, True], logprobs=nothing,
                logprob_kind="behavior", samplers=(SAMPLER,),
            )
        )  # fmt: skip
    result = run("gate", "--model", checkpoint, "--longest", "40", "--store", path, "--run", "r", "--json")
    assert result.exit_code == 1
    read = json.loads(result.stdout)
    assert (read["passed"], read["skipped"]) == (False, {"no log-probs": 1})
    assert passed_gates(open_store(path)) == set()


def test_gate_writes_infinities_as_every_command_does(
    checkpoint: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def infinite(_: object, sequences: list[np.ndarray]) -> list[np.ndarray]:
        return [np.full(len(one) - 1, -np.inf if len(sequences) > 1 else -1.0, np.float32) for one in sequences]

    monkeypatch.setattr("rollstore.replay.score.token_logprobs", infinite)
    read = json.loads(run("gate", "--model", checkpoint, "--longest", "40", "--json").stdout)
    batch = [check for check in read["checks"] if check["section"] == "batch"]
    assert {check["k3"] for check in batch} == {"Infinity"}


def test_an_evaluation_that_does_not_fit_its_rollout_is_told_in_one_line(sampled: str, run: Run) -> None:
    row = {
        "evaluation_id": "e", "run_id": "r", "rollout_id": "g/0", "segment": 0, "kind": "behavior",
        "weight_version": 0, "logprobs": [-1.0] * 5,
    }  # fmt: skip
    declared = TABLES["evaluations"].arrow_schema
    schema = pa.schema([declared.field(name) for name in row])
    open_store(sampled).append("evaluations", pa.Table.from_pylist([row], schema=schema))
    result = run("mismatch", sampled, "--evaluation", "e")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "evaluation 'e': rollout 'g/0': segment 0: wanted 6 log-probs" in result.stderr


def test_evaluate_tells_a_rollout_that_is_not_stored_and_a_token_the_model_lacks(
    sampled: str, checkpoint: str, tmp_path: Path, run: Run
) -> None:
    missing = run("evaluate", sampled, "--model", checkpoint, "--id", "e", "--rollout", "nope")
    assert missing.exit_code == 2
    assert "rollout 'nope': wanted a stored rollout" in missing.stderr
    tiny_model(4).save_pretrained(tmp_path / "small")
    small = run("evaluate", sampled, "--model", str(tmp_path / "small"), "--id", "e")
    assert small.exit_code == 2
    assert "wanted an id of the model's vocabulary, 0 to 3, got " in small.stderr
