"""The numerical gate: what passes, what fails, and which cause is named."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from msgspec.structs import replace

import rollstore
from rollstore.readers.torch import RolloutLoader
from rollstore.replay import layout
from rollstore.replay.cases import Case, cases, near_tie
from rollstore.replay.gate import gate
from rollstore.replay.gradients import compare_gradients
from rollstore.replay.limits import DEFAULT, Limits, read_limits, strict
from rollstore.replay.samplers.transformers import decoded_logprobs, described
from rollstore.replay.score import score_rollouts, token_logprobs
from rollstore.replay.verdict import FORWARD_ONLY, Gate, fingerprint, keep, passed_gates
from rollstore.schema import Engine, Known, Numerics, Rollout
from tests.test_loop import tiny_model, tiny_tokenizer

ENGINE = Engine(name="vllm", version="1", numerics=Numerics(weights="float32"))
SEQUENCES = [Case(name=name, tokens=np.array(ids)) for name, ids in {"a": range(1, 30), "b": [5] * 12}.items()]


def checked(model: Any, **options: Any) -> Gate:
    return gate(model, SEQUENCES, **({"engine": ENGINE} | options))


def replace_limits(**changes: Any) -> Limits:
    return dataclasses.replace(DEFAULT, **changes)


def failed(found: Gate) -> set[str]:
    return {check.section for check in found.checks if not check.passed}


def test_the_sequences_are_fixed_and_hold_what_engines_get_wrong() -> None:
    tokenizer = tiny_tokenizer()
    found = {case.name: case.tokens for case in cases(tokenizer, longest=300)}
    assert list(found) == ["prose", "mixed scripts", "code", "special tokens", "repeated", "very long"]
    assert len(found["very long"]) == 300
    assert len(set(found["repeated"].tolist())) == 1
    special = set(tokenizer.all_special_ids)
    assert special <= set(found["special tokens"].tolist())
    assert not special & set(found["prose"].tolist())
    again = {case.name: case.tokens.tolist() for case in cases(tokenizer, longest=300)}
    assert again == {name: tokens.tolist() for name, tokens in found.items()}
    with pytest.raises(ValueError, match="longest: wanted at least 16 tokens, got 3"):
        cases(tokenizer, longest=3)


def test_a_near_tie_is_where_the_two_likeliest_tokens_lie_closest(model: Any) -> None:
    first, second = near_tie(model, SEQUENCES)
    assert first.tokens[:-1].tolist() == second.tokens[:-1].tolist()
    gap = token_logprobs(model, [first.tokens])[0][-1] - token_logprobs(model, [second.tokens])[0][-1]
    with torch.no_grad():
        for case in SEQUENCES:
            top = model(torch.from_numpy(case.tokens)[None]).logits[0].topk(2).values
            assert gap <= float((top[:, 0] - top[:, 1]).min()) + 1e-4
    assert gap >= -1e-5
    assert near_tie(model, []) == []


def test_the_same_weights_pass_and_the_report_says_what_that_does_not_prove(model: Any) -> None:
    found = checked(model, scorer=lambda sequences: token_logprobs(model, sequences))
    assert found.passed
    assert {check.section for check in found.checks} == {"batch", "cache", "engine"}
    assert all(check.k3 is not None and check.k3 < 1e-9 for check in found.checks)
    assert FORWARD_ONLY in found.lines()
    assert found.lines()[-1].startswith("vllm 1 passed: gate-")


def test_a_bfloat16_engine_fails_and_its_rounding_is_named(model: Any) -> None:
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    found = checked(model, scorer=lambda sequences: token_logprobs(narrow, sequences))
    assert failed(found) == {"engine"}
    causes = {check.cause for check in found.checks if not check.passed}
    assert len(causes) == 1
    assert str(causes.pop()).startswith("rounding of bfloat16: the engine differs by")


def test_other_weights_fail_and_no_rounding_is_blamed(model: Any, other_model: Any) -> None:
    found = checked(model, scorer=lambda sequences: token_logprobs(other_model, sequences))
    assert failed(found) == {"engine"}
    assert "cause: neither a narrower dtype: weights, tokens or attention differ" in found.lines()


def called_behavior(rollouts: list[Rollout], model: Any, kind: str) -> list[Rollout]:
    """The records with log-probs of another kind under the name of behavior."""
    out: list[Rollout] = []
    for rollout in rollouts:
        values = score_rollouts(model, [rollout], kind=kind)[0][0]
        out.append(replace(rollout, logprobs=Known(values, np.ones(len(values), dtype=bool)), heads=None))
    return out


@pytest.mark.parametrize("kind", ["raw", "tempered"])
def test_a_number_of_another_kind_fails_and_is_named(model: Any, record: Callable[..., Rollout], kind: str) -> None:
    rollouts = [record(rollout_id=f"r{n}", sample=n) for n in range(3)]
    assert checked(model, drawn=rollouts).passed
    found = checked(model, drawn=called_behavior(rollouts, model, kind))
    assert failed(found) == {"draws"}
    (check,) = [check for check in found.checks if check.section == "draws"]
    assert str(check.cause).startswith(f"the numbers are {kind} log-probs and are called behavior")


def test_draws_without_log_probs_are_no_pass(model: Any, record: Callable[..., Rollout]) -> None:
    nothing = Known(np.zeros(16), np.zeros(16, dtype=bool))
    for drawn in (record(logprobs=None), record(logprobs=nothing), record(logprob_kind=None, heads=None)):
        found = checked(model, drawn=[drawn])
        assert failed(found) == {"draws"}
        assert sum(found.to_dict()["skipped"].values()) == 1
        assert any(line.startswith("not checked: 1 drawn rollouts: ") for line in found.lines())


def test_rollouts_that_cannot_be_checked_are_counted_beside_those_that_were(
    model: Any, record: Callable[..., Rollout]
) -> None:
    found = checked(model, drawn=[record(), record(sample=3, logprob_kind=None, heads=None)])
    assert found.passed
    assert found.skipped == {"log-probs of no known kind": 1}


def test_draws_that_the_trainer_rules_out_whole_leave_nothing_compared(
    model: Any, record: Callable[..., Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    def outside(_: Any, rollouts: Any, **__: Any) -> Any:
        return [(np.full(int(one.action_mask.sum()), -np.inf, dtype=np.float32), None, None) for one in rollouts]

    monkeypatch.setattr("rollstore.replay.score.score_rollouts", outside)
    (check,) = [one for one in checked(model, drawn=[record()]).checks if one.section == "draws"]
    assert (check.passed, check.n) == (False, 0)
    assert check.why == ("nothing compared", "16 tokens outside the trainer's support")


def test_an_engine_that_returns_nan_is_told_so_with_the_first_place(model: Any) -> None:
    def broken(sequences: Any) -> Any:
        found = [one.copy() for one in token_logprobs(model, sequences)]
        found[1][[4, 7]] = np.nan
        return found

    (check,) = [one for one in checked(model, scorer=broken).checks if not one.passed]
    assert check.cause == "the engine returned NaN: 2 of 11 log-probs, the first at 4 of engine: b"


def test_an_engine_that_is_infinitely_off_or_says_too_little_does_not_pass(model: Any) -> None:
    def broken(sequences: Any) -> Any:
        found = [one.copy() for one in token_logprobs(model, sequences)]
        found[0][3] = -np.inf
        return found

    found = checked(model, scorer=broken)
    assert [check.case for check in found.checks if not check.passed] == ["a"]
    with pytest.raises(
        ValueError, match="scorer: wanted one log-prob for each token but the first, got others for 'a'"
    ):
        checked(model, scorer=lambda sequences: [one[:-1] for one in token_logprobs(model, sequences)])


def test_a_bitwise_gate_wants_the_last_bit(model: Any) -> None:
    def nudged(sequences: Any) -> Any:
        found = [token_logprobs(model, [one])[0].copy() for one in sequences]
        found[1][2] = np.nextafter(found[1][2], np.float32(0))
        return found

    limits = {"engine": Limits(bitwise=True)}
    exact = checked(model, limits=limits, scorer=lambda s: [token_logprobs(model, [one])[0] for one in s])
    assert "engine" not in failed(exact)
    found = checked(model, limits=limits, scorer=nudged)
    assert [(check.case, check.why) for check in found.checks if not check.passed] == [("b", ("not bitwise equal",))]
    assert all(strict({})[name].bitwise for name in ("engine", "draws", "cache", "batch", "layout"))
    assert strict({})["engine"].k3 == DEFAULT.k3


def test_a_cached_decode_scores_what_a_prefill_scores(model: Any) -> None:
    tokens = SEQUENCES[0].tokens
    whole = token_logprobs(model, [tokens])[0]
    np.testing.assert_allclose(decoded_logprobs(model, tokens, 10), whole[-10:], atol=1e-5)


def test_two_processes_that_share_each_product_agree_but_for_rounding(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    found = checked(model, checkpoint=str(tmp_path))
    own = [check for check in found.checks if check.section == "layout"]
    assert [check.case for check in own] == ["a", "b"]
    assert all(check.passed for check in own)
    assert not all(check.bitwise for check in own)  # the halves were really added up


def test_a_process_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho first >&2\necho no such model >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(RuntimeError, match="layout: a process of two ended with status 3, saying: no such model"):
        layout.scores(str(tmp_path), [SEQUENCES[0].tokens], dtype="float32")


def test_gradients_are_held_against_a_reference_and_a_wrong_backward_is_found(model: Any) -> None:
    exact = copy.deepcopy(model).double()
    sound = checked(model, reference=exact)
    assert sound.passed
    assert FORWARD_ONLY not in sound.lines()
    broken = copy.deepcopy(model)
    broken.model.layers[0].mlp.down_proj.weight.register_hook(lambda grad: grad * 1.5)
    found = checked(broken, reference=exact)
    assert failed(found) == {"gradients"}  # the forward is the same
    (check,) = [check for check in found.checks if not check.passed]
    assert "worst in model.layers.0.mlp.down_proj.weight: 0.5; cosine" in str(check.cause)


def test_a_gradient_check_leaves_the_models_gradients_as_they_were(model: Any) -> None:
    marked = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = marked
    assert compare_gradients(model, model, [SEQUENCES[0].tokens]).bitwise
    assert model.lm_head.weight.grad is marked
    model.zero_grad(set_to_none=True)


def test_a_junit_file_has_a_case_a_check_and_says_why_one_failed(model: Any, other_model: Any) -> None:
    found = checked(model, scorer=lambda sequences: token_logprobs(other_model, sequences))
    suite = ElementTree.fromstring(found.junit())
    assert (suite.get("tests"), suite.get("failures")) == ("6", "2")
    failures = suite.findall(".//failure")
    assert all("k3" in str(one.get("message")) for one in failures)
    assert failures[0].text == "neither a narrower dtype: weights, tokens or attention differ"


def test_a_result_is_kept_with_the_fingerprint_and_a_loader_can_refuse_engines_without_one(
    model: Any, other_model: Any, tmp_path: Path, record: Callable[..., Rollout]
) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    good = checked(model)
    bad = checked(model, scorer=lambda sequences: token_logprobs(other_model, sequences))
    keep(store, good)
    keep(store, bad)
    assert passed_gates(store) == passed_gates(store, engine=ENGINE) == {good.gate_id}
    assert passed_gates(store, engine=replace(ENGINE, version="2")) == set()
    told = replace(ENGINE, numerics=replace(ENGINE.numerics, gate=good.gate_id))
    assert fingerprint(told) == fingerprint(ENGINE)  # an id is no property of the arithmetic
    with store.writer(run="r") as writer:
        writer.append(record(rollout_id="gated", engine=told))
        writer.append(record(rollout_id="bare", sample=3, engine=ENGINE))
    assert not store.verify()
    where = pc.field("engine", "numerics", "gate").isin(list(passed_gates(store)))
    assert [batch.rollout_ids for batch in RolloutLoader(store, tokens_per_batch=512, where=where)] == [["gated"]]


def test_limits_come_from_a_small_file_and_what_does_not_belong_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gate.toml"
    path.write_text("[engine]\nk3 = 1e-5\nmax_abs = 1\n[batch]\nbitwise = true\n")
    named = {"engine": replace_limits(k3=1e-5, max_abs=1), "batch": replace_limits(bitwise=True)}
    assert read_limits(path) == named  # what a section does not name is as without a file
    path.write_text("[engine]\n[cache]\nk3 = inf\n")
    assert read_limits(path) == {"engine": DEFAULT, "cache": replace_limits(k3=math.inf)}
    for text, said in {
        "[engin]\nk3 = 1": "wanted sections out of engine, .* got 'engin'",
        "[engine]\nk4 = 1": "engine: wanted keys out of k3, .* got 'k4'",
        "[engine]\nk3 = -1": "engine.k3: wanted a number of at least 0, got -1",
        "[engine]\nk3 = true": "engine.k3: wanted a number of at least 0, got True",
        "[engine]\nbitwise = 1": "engine.bitwise: wanted true or false, got 1",
        "[engine]\nrelative = 1e-3": "engine: wanted keys out of k3, mean_abs, max_abs, bitwise, got 'relative'",
        "[gradients]\nk3 = 1e-4": "gradients: wanted keys out of relative, bitwise, got 'k3'",
        "k3 =": "wanted a TOML file",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            read_limits(path)
    path.write_bytes(b"[engine]\n# \xff\n")
    with pytest.raises(ValueError, match=r"gate.toml: wanted a TOML file in UTF-8, got"):
        read_limits(path)


def test_a_transformers_model_says_what_it_is(model: Any) -> None:
    told = described(model)
    assert (told.name, told.numerics.weights) == ("transformers", "float32")  # type: ignore[union-attr]
    assert fingerprint(told) != fingerprint(described(copy.deepcopy(model).to(torch.bfloat16)))


def test_without_sequences_there_is_no_gate(model: Any) -> None:
    with pytest.raises(ValueError, match="cases: wanted at least one sequence, got none"):
        gate(model, [], engine=ENGINE)


def test_the_shipped_sequences_fit_a_model(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    small = tiny_model(len(tokenizer))
    found = cases(tokenizer, longest=48)
    assert gate(small, [*found, *near_tie(small, found)], engine=described(small)).passed
