"""Trainer against sampler: the split of the log-ratio, its statistics, and the sizes that real engines have."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import rollstore
from examples import smollm2
from rollstore.errors import DuplicateError, NotFoundError
from rollstore.replay import evaluate, mismatch
from rollstore.replay.ratio import QUANTILES, summarise
from rollstore.schema import TABLES, Engine, Known, Rollout, Sampler, Span

RECORDED = Path(__file__).parent.parent / "data" / "engines"


def store_of(path: Path, *rollouts: Rollout) -> Any:
    store = rollstore.open(path, create=True)
    with store.writer(run="r") as writer:
        writer.append(list(rollouts))
    return store


def rollout(rollout_id: str = "a", **fields: Any) -> Rollout:
    """Four actions of versions 3, 3, 4, 4 behind one observation; the third is not trainable."""
    return Rollout(
        **{
            "rollout_id": rollout_id, "run_id": "r", "tokens": [1, 2, 3, 4, 5], "action_mask": [0, 1, 1, 1, 1],
            "logprobs": [-1.0, -2.0, -3.0, -0.5], "logprob_kind": "behavior", "weight_versions": [3, 3, 4, 4],
            "trainable": [True, True, False, True], "samplers": (Sampler(temperature=1.0),),
            "engine": Engine(name="vllm", version="1"),
            "spans": (
                Span(start=0, length=1, is_action=False),
                Span(start=1, length=2, is_action=True, sampler=0, cache_state="fresh"),
                Span(start=3, length=2, is_action=True, sampler=0, cache_state="retained"),
            ),
        }
        | fields
    )  # fmt: skip


def scored(store: Any, evaluation_id: str, version: int | None, logprobs: list[float | None], **fields: Any) -> None:
    row = {
        "evaluation_id": evaluation_id, "run_id": "r", "rollout_id": "a", "segment": 0, "kind": "behavior",
        "weight_version": version, "logprobs": logprobs,
    } | fields  # fmt: skip
    declared = TABLES["evaluations"].arrow_schema
    store.append("evaluations", pa.Table.from_pylist([row], schema=pa.schema([declared.field(name) for name in row])))


def test_the_statistics_are_those_of_a_case_done_by_hand() -> None:
    q, p = np.log([0.5, 0.25]), np.log([0.25, 0.5])
    found = summarise(p, q)
    assert found is not None
    assert found.k1 == pytest.approx(0.0)
    assert found.k2 == pytest.approx(math.log(2) ** 2 / 2)
    assert found.k3 == pytest.approx(((0.5 - 1 + math.log(2)) + (2 - 1 - math.log(2))) / 2)
    assert found.mean_abs == pytest.approx(math.log(2))
    assert (found.least, found.most) == pytest.approx((-math.log(2), math.log(2)))
    assert found.max_probability_difference == pytest.approx(0.25)
    assert found.effective_sample_size == pytest.approx(2.5**2 / 4.25 / 2)
    assert found.second_moment == pytest.approx(4.25 / 2)
    assert found.quantiles[QUANTILES.index(0.5)] == pytest.approx(0.0)
    assert summarise(np.zeros(0), np.zeros(0)) is None


def test_a_ratio_too_large_for_a_float_is_infinite_and_its_sample_size_is_not() -> None:
    found = summarise(np.array([-1.0, -1.0]), np.array([-1000.0, -1.0]))
    assert found is not None
    assert math.isinf(found.second_moment)
    assert found.effective_sample_size == pytest.approx(0.5)


def test_the_log_ratio_is_split_into_weight_movement_and_disagreement_by_each_actions_version(tmp_path: Path) -> None:
    store = store_of(tmp_path / "s", rollout())
    scored(store, "at3", 3, [-1.1, -2.3, -9.0, -9.0])
    scored(store, "at4", 4, [-1.5, -2.0, -9.0, -0.6])
    found = mismatch(store, evaluations=["at3", "at4"], current=4)
    assert found.parts["total"].mean == pytest.approx((-0.5 + 0.0 - 0.1) / 3, abs=1e-6)
    assert found.parts["disagreement"].mean == pytest.approx((-0.1 - 0.3 - 0.1) / 3, abs=1e-6)
    assert found.parts["weight movement"].mean == pytest.approx((-0.4 + 0.3 + 0.0) / 3, abs=1e-6)
    assert {name: part.n for name, part in found.parts.items()} == dict.fromkeys(found.parts, 3)
    assert found.left_out == {"not trainable": 1}
    told = {(one.dimension, one.value): one.parts["total"].n for one in found.slices}
    assert told == {
        ("lag", "0"): 1, ("lag", "1"): 2, ("position", "0-15"): 3, ("length", "0-15"): 3, ("engine", "vllm 1"): 3,
        ("cache_state", "fresh"): 2, ("cache_state", "retained"): 1,
    }  # fmt: skip
    furthest = found.extremes[0]
    assert (furthest.part, furthest.rollout_id, furthest.position, furthest.token) == ("total", "a", 1, 2)
    assert furthest.difference == pytest.approx(-0.5, abs=1e-6)
    text = str(found)
    assert "left out: 1 actions: not trainable" in text
    assert "cache_state retained" in text
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["parts"]["total"]["n"] == 3


def test_long_rollouts_fall_into_ranges_that_double(tmp_path: Path) -> None:
    length = 40
    long = Rollout(
        rollout_id="a", run_id="r", tokens=list(range(length)), action_mask=[0] + [1] * (length - 1),
        logprobs=[-1.0] * (length - 1), logprob_kind="behavior", samplers=(Sampler(temperature=1.0),),
    )  # fmt: skip
    store = store_of(tmp_path / "s", long)
    scored(store, "e", 0, [-1.0] * (length - 1))
    found = mismatch(store, evaluations="e")
    by = {(one.dimension, one.value): one.parts["total"].n for one in found.slices}
    assert (by["position", "0-15"], by["position", "16-31"], by["position", "32-63"]) == (15, 16, 8)
    assert by["length", "32-63"] == 39
    assert by["lag", "unknown"] == 39
    assert set(found.parts) == {"total"}  # of unknown versions nothing can be split


def test_what_cannot_be_compared_is_left_out_by_reason(tmp_path: Path) -> None:
    filtered = (Sampler(temperature=1.0, repetition_penalty=1.2),)
    cases = {
        "recorded as raw, evaluated as behavior": rollout(logprob_kind="raw"),
        "temperature 0 draws from no distribution": rollout(samplers=(Sampler(temperature=0.0),)),
        "the trainer did not declare that it applied repetition_penalty": rollout(samplers=filtered),
        "no recorded log-prob": rollout(logprobs=None),
        "no evaluation of its version": rollout(),
    }
    for number, (reason, one) in enumerate(cases.items()):
        store = store_of(tmp_path / str(number), one)
        missing = reason.startswith("no evaluation")
        scored(store, "e", 7, [None] * 4 if missing else [-1.0] * 4)
        found = mismatch(store, evaluations="e")
        assert found.parts == {}
        assert found.left_out[reason] >= 3


def test_an_evaluation_applies_the_recorded_order_so_a_filter_before_the_temperature_is_compared(
    tmp_path: Path,
) -> None:
    llamacpp = Sampler(temperature=0.7, top_p=0.9, chain=("top_k", "top_p", "min_p", "temperature"))
    store = store_of(tmp_path, rollout(samplers=(llamacpp,)))
    scored(store, "e", 7, [-1.0] * 4)
    found = mismatch(store, evaluations="e")
    assert (found.parts["total"].n, found.left_out) == (3, {"not trainable": 1})


def test_a_token_outside_the_trainers_support_is_counted_and_in_no_mean(tmp_path: Path) -> None:
    store = store_of(tmp_path / "s", rollout())
    scored(store, "e", 3, [-math.inf, -2.0, -3.0, -0.5])
    found = mismatch(store, evaluations="e")
    assert found.outside == 1
    assert (found.parts["total"].n, found.parts["total"].mean) == (2, 0.0)


def test_segments_without_these_evaluations_are_counted_and_a_row_stored_twice_counts_once(tmp_path: Path) -> None:
    store = store_of(tmp_path / "s", rollout(), rollout("b"))
    with store.writer() as writer:
        writer.append(rollout())
    scored(store, "e", 3, [-1.0, -2.0, -3.0, -0.5])
    found = mismatch(store, evaluations="e")
    assert (found.actions, found.unscored) == (4, 1)


def test_a_double_match_and_an_undecided_version_raise(tmp_path: Path) -> None:
    store = store_of(tmp_path / "s", rollout())
    scored(store, "e", 3, [-1.0] * 4)
    scored(store, "f", 3, [-1.0] * 4)
    scored(store, "g", 4, [-1.0] * 4)
    with pytest.raises(DuplicateError, match="rollout 'a': segment 0: wanted one evaluation of version 3, got two"):
        mismatch(store, evaluations=["e", "f"])
    with pytest.raises(ValueError, match=r"current: wanted the version of the trainer, got none; .* 3, 4"):
        mismatch(store, evaluations=["e", "g"])
    with pytest.raises(ValueError, match="current: wanted one of the evaluated versions 3, got 9"):
        mismatch(store, evaluations="e", current=9)
    with pytest.raises(NotFoundError, match="wanted rows of 'h', the store has none"):
        mismatch(store, evaluations=["e", "h"])


def recorded(name: str, kind: str) -> list[Rollout]:
    """What a real vLLM returned, its numbers taken for log-probs of `kind`."""
    read = json.loads((RECORDED / name).read_text(encoding="utf-8"))
    out: list[Rollout] = []
    for number, one in enumerate(read["recs"]):
        sampling = {key: one["sampling"][key] for key in ("temperature", "top_p", "top_k")}
        prompt, drawn = one["prompt_token_ids"], one["token_ids"]
        logprobs = np.array(one["logprobs"], dtype=np.float32)
        out.append(
            Rollout(
                rollout_id=str(number), tokens=[*prompt, *drawn], action_mask=[0] * len(prompt) + [1] * len(drawn),
                logprobs=Known(logprobs, np.ones(len(logprobs), dtype=bool)), logprob_kind=kind,
                weight_versions=[0] * len(drawn), samplers=(Sampler(**sampling),),
            )
        )  # fmt: skip
    return out


@pytest.mark.model
def test_real_engines_have_the_sizes_that_were_measured(tmp_path: Path) -> None:
    model, _ = smollm2.load()
    sizes: dict[str, tuple[float, float]] = {}
    for name in ("vllm_proc_fp32", "vllm_proc_bf16", "vllm_raw_fp32"):
        store = store_of(tmp_path / name, *recorded(f"{name}.json", "behavior"))
        evaluate(store, model, evaluation_id="e", weight_version=0)
        part = mismatch(store, evaluations="e").parts["disagreement"]
        sizes[name] = (part.mean_abs, part.k3)
    assert sizes["vllm_proc_fp32"][0] < 1e-5
    assert sizes["vllm_proc_fp32"][1] < 1e-9
    assert sizes["vllm_proc_bf16"] == pytest.approx((0.030, 1.3e-3), rel=0.15)
    # The raw number mistaken for behavior; with the two sides changed about, this k3 is 5.2e-2.
    assert sizes["vllm_raw_fp32"] == pytest.approx((0.275, 7.5e-2), rel=0.15)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_an_evaluation_of_another_number_of_actions_is_refused_by_name(tmp_path: Path, count: int) -> None:
    store = store_of(tmp_path, rollout())
    scored(store, "e", 3, [-1.0] * count)
    said = f"evaluation 'e': rollout 'a': segment 0: wanted 4 log-probs, one for each action, got {count}"
    with pytest.raises(ValueError, match=said):
        mismatch(store, evaluations="e")


def test_no_evaluations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="evaluations: wanted at least one id, got none"):
        mismatch(store_of(tmp_path, rollout()), evaluations=[])
