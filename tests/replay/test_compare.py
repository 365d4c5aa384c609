"""Two runs of one rollout: the same ids under other conditions, and the verdict on a flip."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from rollstore.replay import compare, noise
from rollstore.replay.conditions import Explanation
from rollstore.replay.difference import Odds, judge
from rollstore.schema import Engine, Heads, Known, LogitBias, Numerics, Rollout, Sampler, Span

SAMPLER = Sampler(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def run(drawn: list[int], *, at: dict[int, dict[int, float]], logprobs: list[float] | None, **fields: Any) -> Rollout:
    """One prompt token (position 0) and drawn tokens; `at` gives the head of some actions."""
    counts = [len(at.get(index, {})) for index in range(len(drawn))]
    entries = [item for index in range(len(drawn)) for item in at.get(index, {}).items()]
    return Rollout(
        **{
            "rollout_id": "h32",
            "tokens": [1, *drawn],
            "action_mask": np.array([False] + [True] * len(drawn)),
            "logprobs": logprobs,
            "logprob_kind": "behavior",
            "head_kind": "behavior",
            "heads": Heads(
                size=max(counts, default=0),
                counts=np.array(counts),
                tokens=np.array([token for token, _ in entries], dtype=np.int32),
                logprobs=np.array([value for _, value in entries], dtype=np.float32),
            ),
            "samplers": [SAMPLER],
            "spans": [
                Span(start=0, length=1, is_action=False),
                Span(start=1, length=len(drawn), is_action=True, sampler=0, cache_state="fresh"),
            ],
            "replay_key": 11,
            "replay_sample": 0,
        }
        | fields
    )


COMMON = [4, 8, 15, 16, 2]
A_LOGPROBS = [-0.5, -1.0, -0.25, -2.0, -0.7, -0.6931, -1.0, -1.0]
B_LOGPROBS = [-0.504, -1.001, -0.25, -1.998, -0.7, -0.6931, -9.0, -9.0]


def h32(head: dict[int, float], **fields: Any) -> tuple[Rollout, Rollout]:
    """Runs that agree up to their action 5 (position 6 here, behind one prompt token)."""
    a = run([*COMMON, 17, 30, 31], at={5: head}, logprobs=A_LOGPROBS, **fields)
    b = run([*COMMON, 23, 40, 41], at={5: head}, logprobs=B_LOGPROBS, **fields)
    return a, b


@pytest.mark.parametrize("recipe", [None, noise.RECIPE])
def test_h32_a_equal_odds_are_a_near_tie_and_nothing_behind_it_counts(recipe: str | None) -> None:
    found = compare(*h32({17: -0.6931, 23: -0.6931}, noise=recipe))
    assert found.verdict == "near_tie"
    assert found.first is not None
    assert (found.first.position, found.first.action) == (6, 5)
    assert (found.first.token_a, found.first.token_b) == (17, 23)
    assert found.first.gap == 0.0
    assert found.first.gap <= found.first.tolerance
    assert found.max_logprob_difference == pytest.approx(
        0.004, rel=1e-4
    )  # the 8.0 behind the difference is not compared
    assert found.actions == 5
    assert by_name(found.explanations)["arithmetic"].status == "possible"


@pytest.mark.parametrize("recipe", [None, noise.RECIPE])
def test_h32_b_unequal_odds_are_a_real_difference(recipe: str | None) -> None:
    found = compare(*h32({17: -0.2, 23: -1.8}, noise=recipe))
    assert found.verdict == "real"
    assert found.first is not None
    assert found.first.gap == pytest.approx(1.6, rel=1e-4)
    assert by_name(found.explanations)["arithmetic"].status == "ruled_out"


def test_h32_c_an_equal_response_with_unstable_prompt_scores_names_the_positions() -> None:
    prompt = [5, 6, 7, 8, 9]  # position 0 has no score, so the cached positions 0..3 are 1..4 here
    fields = {
        "tokens": [*prompt, 4, 8],
        "action_mask": np.array([False] * 5 + [True, True]),
        "spans": None,
    }
    a, b = (run([4, 8], at={}, logprobs=[-0.5, -1.0], **fields) for _ in range(2))
    scores = np.array([math.nan, -1.0, -2.0, -3.0, -4.0, -0.5, -1.0])
    shifted = scores - np.array([0, 7.3, 7.3, 7.3, 7.3, 0, 0])
    found = compare(a, b, token_logprobs=(scores, shifted))
    assert found.verdict == "identical"
    assert found.max_logprob_difference == 0.0
    assert found.unstable == (1, 2, 3, 4)
    assert "prompt scores unstable at 1, 2, 3, 4" in str(found)


def test_h32_d_missing_logprobs_are_not_available_and_never_equal() -> None:
    a, b = (run(COMMON, at={}, logprobs=logprobs) for logprobs in (A_LOGPROBS[:5], None))
    found = compare(a, b)
    assert found.verdict == "identical"
    assert found.logprobs == "not available: b has none"
    assert found.max_logprob_difference is None
    assert "log-probs: not available" in str(found)


def test_logprobs_of_different_kinds_are_not_compared() -> None:
    a, b = (run(COMMON, at={}, logprobs=A_LOGPROBS[:5], logprob_kind=kind) for kind in ("behavior", "raw"))
    assert compare(a, b).logprobs == "not available: a has behavior and b raw ones"


def test_conditions_tell_same_from_different_from_unknown() -> None:
    a, b = h32({17: -0.6931, 23: -0.6931})
    versions = Known(np.full(8, 3), np.ones(8, dtype=bool))
    half_known = Known(np.full(8, 3), np.arange(8) != 5)
    rows = [Known(np.full(8, count), np.ones(8, dtype=bool)) for count in (32, 1)]
    a = changed(a, weight_versions=versions, batch_rows=rows[0], engine=Engine(name="vllm", version="0.32.0"))
    b = changed(b, weight_versions=half_known, batch_rows=rows[1], engine=Engine(name="vllm", version="0.32.0"))
    found = {one.name: one for one in compare(a, b).conditions}
    assert (found["engine"].status, found["engine"].a) == ("same", "vllm 0.32.0")
    assert (found["batch rows"].status, found["batch rows"].a, found["batch rows"].b) == ("differ", "32", "1")
    assert (found["weight version"].status, found["weight version"].b) == ("unknown", None)
    assert (found["prefix cache"].status, found["tokenizer"].status) == ("unknown", "unknown")


def test_a_kept_cache_and_other_weights_remain_as_explanations() -> None:
    a, b = h32({17: -0.2, 23: -1.8})
    spans = [*(a.spans or ())]
    a = changed(a, spans=[spans[0], changed(spans[1], cache_state="retained")], weight_versions=[1] * 8)
    b = changed(b, weight_versions=[2] * 8)
    found = by_name(compare(a, b).explanations)
    assert found["KV state"].status == "possible"
    assert found["weights"].status == "possible"
    assert found["weights"].why == "weight version: 1 and 2"
    assert found["sampler"].status == "ruled_out"
    assert found["tokenizer"].status == "ruled_out"


def test_other_sampler_settings_and_another_key_remain_as_explanations() -> None:
    a, b = h32({17: -0.2, 23: -1.8}, noise=noise.RECIPE)
    hotter = changed(b, samplers=[changed(SAMPLER, temperature=1.2)])
    assert "temperature=1 and temperature=1.2" in by_name(compare(a, hotter).explanations)["sampler"].why
    other_key = compare(a, changed(b, replay_key=12))
    assert by_name(other_key.explanations)["sampler"].status == "possible"
    assert other_key.first is not None
    assert other_key.first.noise_gap is None


def test_tokens_that_were_not_drawn_differ_as_input() -> None:
    a, b = (run([4], at={}, logprobs=[-1.0]) for _ in range(2))
    found = compare(a, changed(b, tokens=[2, 4]))
    assert found.verdict == "different_input"
    assert {one.name for one in found.explanations if one.status == "ruled_out"} >= {"weights", "arithmetic", "sampler"}


def test_a_run_that_ends_earlier_differs_where_it_ends() -> None:
    a = run(COMMON, at={}, logprobs=A_LOGPROBS[:5])
    b = run(COMMON[:3], at={}, logprobs=B_LOGPROBS[:3])
    found = compare(a, b)
    assert found.verdict == "unknown"
    assert found.first is not None
    assert (found.first.position, found.first.token_a, found.first.token_b) == (4, COMMON[3], None)


def test_different_segments_are_refused() -> None:
    a = run(COMMON, at={}, logprobs=None)
    with pytest.raises(ValueError, match="wanted segment 0 as in a, got 1"):
        compare(a, changed(a, segment=1))


def test_a_candidate_beyond_the_end_of_a_head_bounds_the_margin() -> None:
    a = run([17], at={0: {17: -0.1, 5: -3.0}}, logprobs=[-0.1])
    b = run([23], at={0: {23: -0.1, 5: -3.0}}, logprobs=[-0.1])
    found = compare(a, b)
    assert found.verdict == "real"
    assert found.first is not None
    assert found.first.margin_a is None
    assert found.first.gap == pytest.approx(2.9, rel=1e-4)
    assert "b over a by at most -2.9" in str(found)


def test_a_head_shorter_than_was_asked_for_puts_other_tokens_outside_the_support() -> None:
    a = run([17, 4], at={0: {17: 0.0}, 1: {4: -0.7, 5: -0.7}}, logprobs=[0.0, -0.7])
    b = run([23, 4], at={0: {23: 0.0}, 1: {4: -0.7, 5: -0.7}}, logprobs=[0.0, -0.7])
    first = compare(a, b).first
    assert first is not None
    assert (first.a.logprob_b, first.margin_a, first.verdict) == (-math.inf, -math.inf, "real")


def test_without_heads_the_verdict_is_unknown_and_not_real() -> None:
    a, b = (changed(one, heads=None) for one in h32({17: -0.2, 23: -1.8}))
    found = compare(a, b)
    assert found.verdict == "unknown"
    assert found.first is not None
    assert found.first.gap is None
    assert by_name(found.explanations)["arithmetic"].status == "unknown"


@pytest.mark.parametrize(
    ("numerics", "verdict"),
    [
        (Numerics(weights="float32"), "real"),
        (Numerics(weights="bfloat16"), "near_tie"),
        (Numerics(weights="torch.bfloat16", lm_head="float32"), "real"),
        (Numerics(weights="float16"), "real"),
        (None, "real"),
    ],
)
def test_a_margin_of_one_step_of_bfloat16_logits_is_a_near_tie_under_bfloat16_alone(
    numerics: Numerics | None, verdict: str
) -> None:
    a, b = h32({17: -0.75, 23: -0.87}, engine=Engine(name="transformers", numerics=numerics))
    assert compare(a, b).verdict == verdict


def odds(margin: float) -> Odds:
    return Odds(logprob_a=-3.0, logprob_b=-3.0 + margin, source="model")


def test_the_same_noise_lets_one_checkpoint_keep_a_and_the_next_flip_to_b() -> None:
    # One checkpoint prefers b over a by 2.1 and samples a, the next prefers it by 2.75 and samples b.
    found = judge(
        segment=0,
        position=9,
        action=4,
        token_a=17,
        token_b=23,
        a=odds(2.1),
        b=odds(2.75),
        noise_gap=2.4,
        tolerance=0.01,
    )
    assert (found.margin_a, found.margin_b) == (pytest.approx(2.1), pytest.approx(2.75))
    assert (found.noised_margin_a, found.noised_margin_b) == (pytest.approx(-0.3), pytest.approx(0.35))
    assert found.gap == pytest.approx(0.35)
    assert found.verdict == "real"
    assert not found.contradicted


def test_a_wide_plain_margin_is_a_near_tie_where_the_noise_makes_it_one() -> None:
    found = judge(
        segment=0,
        position=9,
        action=4,
        token_a=17,
        token_b=23,
        a=odds(2.0),
        b=odds(2.002),
        noise_gap=2.001,
        tolerance=0.01,
    )
    assert found.verdict == "near_tie"


def test_noise_that_would_not_have_drawn_a_recorded_token_is_told() -> None:
    found = judge(
        segment=0, position=9, action=4, token_a=17, token_b=23, a=odds(2.0), b=odds(2.0), noise_gap=1.0, tolerance=0.01
    )
    assert found.contradicted  # b leads by 1.0 with noise in both runs, yet a was drawn in one
    assert found.verdict == "real"


def bare(rollout_id: str, tokens: list[int], **fields: Any) -> Rollout:
    mask = [False] + [True] * (len(tokens) - 1)
    return Rollout(**({"rollout_id": rollout_id, "tokens": tokens, "action_mask": mask} | fields))


def cause(a: Rollout, b: Rollout, name: str) -> Explanation:
    return by_name(compare(a, b).explanations)[name]


def test_each_run_counts_its_own_actions_where_the_masks_differ() -> None:
    a = bare("a", [1, 2, 3, 4, 5], logprobs=[-0.1, -0.2, -0.3, -0.4], logprob_kind="behavior")
    b = bare(
        "b", [1, 2, 3, 4, 9], action_mask=[0, 0, 1, 1, 1], logprobs=[-0.2, -0.3, -5.0], logprob_kind="behavior"
    )  # fmt: skip
    for one, other, drawn in ((a, b, (-0.4, -5.0)), (b, a, (-5.0, -0.4))):
        found = compare(one, other)
        assert found.first is not None
        assert (found.first.a.logprob_a, found.first.b.logprob_b) == pytest.approx(drawn)
        assert (found.actions, found.max_logprob_difference) == (2, 0.0)
    first = compare(a, b).first
    assert first is not None
    assert (first.action, first.action_b) == (3, 2)
    same = compare(a, changed(b, tokens=a.tokens))
    assert (same.verdict, same.actions) == ("identical", 3)
    assert same.max_logprob_difference == pytest.approx(4.6)


PLAIN = Sampler(temperature=1.0)


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ({"grammar": "A"}, {"grammar": "B"}, "possible"),
        ({"grammar": "A" * 100 + "1"}, {"grammar": "A" * 100 + "2"}, "possible"),
        ({"logit_bias": [LogitBias(token=3, bias=1.0)]}, {}, "possible"),
        ({"bad_words": ["no"]}, {}, "possible"),
        ({"min_tokens": 4}, {"min_tokens": 0}, "possible"),
        ({"seed": 1}, {"seed": 2}, "possible"),
        ({"extra": {"typical_p": 0.5}}, {}, "possible"),
        ({"chain": ["temperature", "top_p"]}, {"chain": ["top_p", "temperature"]}, "possible"),
        ({"chain": ["temperature", "top_p"]}, {}, "unknown"),
        ({"applied": False}, {"applied": True}, "unknown"),
        ({"applied": False, "top_k": 5}, {}, "unknown"),
        ({"top_k": -1}, {"top_k": 0}, "ruled_out"),
        ({"min_tokens": 0, "top_p": 1.0, "bad_words": []}, {}, "ruled_out"),
        ({"max_tokens": 5}, {"max_tokens": 6}, "ruled_out"),
    ],
)
def test_a_sampler_is_ruled_out_only_where_every_setting_is_known_to_agree(
    first: dict[str, Any], second: dict[str, Any], status: str
) -> None:
    a, b = (bare(name, [1, 2, token], samplers=[changed(PLAIN, **settings)])
            for name, token, settings in (("a", 3, first), ("b", 4, second)))  # fmt: skip
    for one, other in ((a, b), (b, a)):
        found = cause(one, other, "sampler")
        assert found.status == status
        if status == "possible":
            said = found.why.removeprefix("sampler: ").split(" and ")
            assert said[0] != said[-1]


def test_a_seed_is_no_cause_where_keyed_noise_drew() -> None:
    a, b = h32({17: -0.2, 23: -1.8})
    other = changed(b, samplers=[changed(SAMPLER, seed=2)])
    assert cause(changed(a, samplers=[changed(SAMPLER, seed=1)]), other, "sampler").status == "ruled_out"


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ({"replay_key": 1, "replay_sample": 0}, {"replay_key": 1, "replay_sample": 0}, "ruled_out"),
        ({"replay_key": 1, "replay_sample": 0}, {"replay_key": 1, "replay_sample": 1}, "possible"),
        ({"replay_key": 1, "replay_sample": 0}, {}, "unknown"),
        ({}, {}, "unknown"),
        ({"samplers": [Sampler(temperature=0.0)]}, {"samplers": [Sampler(temperature=0.0)]}, "ruled_out"),
    ],
)
def test_noise_is_ruled_out_only_where_it_is_known_to_be_one(
    first: dict[str, Any], second: dict[str, Any], status: str
) -> None:
    a, b = (bare(name, [1, 2, token], **fields) for name, token, fields in (("a", 3, first), ("b", 4, second)))
    assert cause(a, b, "noise").status == status


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ({"max_tokens": 2}, {"max_tokens": 3}, "possible"),
        ({"max_tokens": 3, "stop": ["x"]}, {"max_tokens": 3}, "possible"),
        ({"max_tokens": 3, "stop_token_ids": [3]}, {"max_tokens": 3}, "possible"),
        ({"max_tokens": 3}, {"max_tokens": 3}, "ruled_out"),
        ({"max_tokens": 3}, {}, "unknown"),
        ({}, {}, "unknown"),
    ],
)
def test_where_one_run_ended_its_limits_and_stops_are_a_cause(
    first: dict[str, Any], second: dict[str, Any], status: str
) -> None:
    a = bare("a", [1, 2, 3], samplers=[changed(PLAIN, **first)])
    b = bare("b", [1, 2, 3, 4], samplers=[changed(PLAIN, **second)])
    assert cause(a, b, "limits").status == cause(b, a, "limits").status == status
    if status == "possible":
        assert cause(a, b, "sampler").status == "possible"
    both = bare("b", [1, 2, 4], samplers=[changed(PLAIN, **second)])
    assert cause(a, both, "limits").status == "ruled_out"


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ({"policy": "llama"}, {"policy": "qwen"}, "possible"),
        ({"policy": "llama"}, {"policy": "llama"}, "ruled_out"),
        ({"run_id": "r1"}, {"run_id": "r2"}, "unknown"),
        ({"run_id": "r1", "policy": "llama"}, {"run_id": "r2"}, "unknown"),
        ({"run_id": "r1"}, {"run_id": "r1"}, "ruled_out"),
        ({}, {}, "unknown"),
        ({"run_id": "r1", "policy": "llama"}, {"run_id": "r1", "policy": "qwen"}, "possible"),
    ],
)
def test_equal_versions_rule_weights_out_only_within_one_policy_or_run(
    first: dict[str, Any], second: dict[str, Any], status: str
) -> None:
    a = bare("a", [1, 2, 3], weight_versions=[0, 0], **first)
    b = bare("b", [1, 2, 4], weight_versions=[0, 0], **second)
    assert cause(a, b, "weights").status == status


def keyed_raw(kind: str | None, **settings: Any) -> Any:
    """Two draws of one noise whose raw margin is 1.5 in favour of b; the noise favours a by `gap`."""
    a, b = h32({17: -2.0, 23: -0.5}, noise=noise.RECIPE, head_kind=kind, logprob_kind=kind)
    both = [changed(one, samplers=[changed(SAMPLER, **settings)]) for one in (a, b)]
    return compare(*both).first


@pytest.mark.parametrize(
    ("kind", "settings", "scale"),
    [
        ("behavior", {"temperature": 0.5, "top_k": 5}, 1.0),
        ("tempered", {"temperature": 0.5}, 1.0),
        ("raw", {"temperature": 0.5}, 2.0),
        ("raw", {"temperature": 0.5, "top_k": -1}, 2.0),
        ("raw", {"temperature": 0.5, "top_k": 5}, None),
        ("tempered", {"temperature": 0.5, "repetition_penalty": 1.1}, None),
        ("raw", {"temperature": 0.5, "applied": False}, None),
        ("raw", {"temperature": 0.0}, None),
        (None, {"temperature": 1.0}, None),
    ],
)
def test_noise_is_added_to_the_margin_of_what_drew_or_to_none(
    kind: str | None, settings: dict[str, Any], scale: float | None
) -> None:
    first = keyed_raw(kind, **settings)
    assert first.margin_a == pytest.approx(1.5)
    for noised in (first.noised_margin_a, first.noised_margin_b):
        assert noised == (None if scale is None else pytest.approx(1.5 * scale - first.noise_gap))
    if scale is None:
        assert first.verdict == "unknown"
    if kind != "behavior":
        assert not first.contradicted


def test_a_report_is_plain_data_for_json() -> None:
    a = run([17, 4], at={0: {17: 0.0}, 1: {4: -0.7, 5: -0.7}}, logprobs=[0.0, -0.7])
    b = run([23, 4], at={0: {23: 0.0}, 1: {4: -0.7, 5: -0.7}}, logprobs=[0.0, -0.7])
    data = json.loads(json.dumps(compare(a, b).to_dict(), allow_nan=False))
    assert data["first"]["margin_a"] == "-inf"
    assert data["first"]["token_b"] == 23
    assert data["verdict"] == "real"


def changed(record: Any, **fields: Any) -> Any:
    """The record with other fields, settled as a new record is."""
    values = {name: getattr(record, name) for name in record.__struct_fields__}
    return type(record)(**(values | fields))


def by_name(found: tuple[Explanation, ...]) -> dict[str, Explanation]:
    return {one.name: one for one in found}
