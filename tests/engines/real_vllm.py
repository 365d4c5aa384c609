"""Records of a real vLLM agree with a teacher-forced forward of the same checkpoint, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import rollstore
from rollstore import Rollout
from rollstore.replay.score import score_rollouts
from rollstore.usable import Transform, usable_as_behavior
from rollstore.writers import vllm
from tests.engines.figures import differences, mean
from tests.engines.settings import PROMPTS

SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "max_tokens": 24, "logprobs": 5, "seed": 7}


class Kept:
    def __init__(self) -> None:
        self.rows: list[Rollout] = []

    def append(self, data: list[Rollout]) -> None:
        self.rows += data


def sampled(llm: Any, prompts: list[str] = PROMPTS, **settings: Any) -> list[Rollout]:
    from vllm import SamplingParams

    kept = Kept()
    with vllm.record(llm, kept):
        llm.generate(prompts, SamplingParams(**{**SAMPLING, **settings}), use_tqdm=False)
    rollstore.schema.to_table(kept.rows)
    return kept.rows


def test_processed_log_probs_are_those_of_the_distribution_that_drew(processed: Any, teacher: Any) -> None:
    rollouts = sampled(processed)
    assert {rollout.logprob_kind for rollout in rollouts} == {"behavior"}
    assert mean(differences(rollouts, teacher, "behavior"), "vLLM, float32, processed") < 1e-4


def test_narrow_weights_move_them_and_the_filters_of_the_checkpoint_leave_out_what_was_drawn(
    narrow: Any, teacher: Any
) -> None:
    rollouts = sampled(narrow)
    assert {rollout.engine.numerics.weights for rollout in rollouts} == {"bfloat16"}
    assert 1e-3 < mean(differences(rollouts, teacher, "behavior"), "vLLM, bfloat16, processed") < 0.3


def test_heads_are_the_likeliest_tokens_of_that_distribution(processed: Any, teacher: Any) -> None:
    rollouts = sampled(processed)
    for rollout, (_, heads, _) in zip(rollouts, score_rollouts(teacher, rollouts), strict=True):
        assert rollout.heads is not None
        assert np.abs(rollout.heads.logprobs - heads).max() < 1e-3
        counts = rollout.heads.counts if rollout.heads.counts is not None else [rollout.heads.size] * len(rollout.ranks)
        assert 1 <= min(counts) <= max(counts) <= 5


def test_raw_log_probs_are_raw_and_mistaken_for_behavior_they_are_far_off(raw: Any, teacher: Any) -> None:
    rollouts = sampled(raw)
    assert {rollout.logprob_kind for rollout in rollouts} == {"raw"}
    right, wrong = differences(rollouts, teacher, "raw"), differences(rollouts, teacher, "behavior")
    assert mean(right, "vLLM, float32, raw, as raw") < 1e-4
    assert mean(wrong, "the same, taken for behavior") > 0.05
    assert not usable_as_behavior("raw", rollouts[0].samplers[0], Transform(temperature=True, filters=True)).usable


def test_flat_and_listed_log_probs_give_one_record(processed: Any) -> None:
    listed, flat = sampled(processed), sampled(processed, flat_logprobs=True)
    for one, other in zip(listed, flat, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert np.allclose(one.logprobs.values, other.logprobs.values, atol=1e-5)
        assert one.ranks.to_list() == other.ranks.to_list()
        assert one.heads.tokens.tolist() == other.heads.tokens.tolist()


def test_a_greedy_request_has_a_log_softmax_without_temperature(processed: Any, teacher: Any) -> None:
    rollouts = sampled(processed, temperature=0.0)
    assert {(r.logprob_kind, r.samplers[0].temperature, r.samplers[0].top_k) for r in rollouts} == {("raw", 0.0, 0)}
    assert np.abs(differences(rollouts, teacher, "raw")).mean() < 1e-4


def test_a_stop_string_cuts_no_token(processed: Any) -> None:
    (rollout,) = sampled(processed, PROMPTS[:1], stop=[" the", "."], max_tokens=60)
    tokenizer = processed.get_tokenizer()
    assert (rollout.ending, rollout.ending_reason) == ("terminated", "stop_string")
    text = tokenizer.decode(rollout.tokens[rollout.action_mask])
    assert any(stop in text for stop in (" the", "."))


def test_samples_of_one_prompt_equal_solo_runs_with_the_seeds_that_are_recorded(processed: Any) -> None:
    together = sampled(processed, PROMPTS[:1], n=3)
    assert [rollout.samplers[0].seed for rollout in together] == [7, 8, 9]
    for rollout in together:
        (alone,) = sampled(processed, PROMPTS[:1], seed=rollout.samplers[0].seed)
        assert alone.tokens.tolist() == rollout.tokens.tolist()


def test_the_two_limits_on_length_are_told_apart(processed: Any) -> None:
    (short,) = sampled(processed, PROMPTS[:1], max_tokens=3, ignore_eos=True)
    (full,) = sampled(processed, ["a " * 250], max_tokens=None, ignore_eos=True)
    assert (short.ending, short.ending_reason) == ("truncated", "max_tokens")
    assert (full.ending, full.ending_reason, len(full.tokens)) == ("truncated", "context_limit", 256)


def test_every_step_of_the_engine_is_seen_with_its_token_rows(processed: Any) -> None:
    rollouts = sampled(processed, ignore_eos=True)
    rows = [rollout.batch_rows.to_list() for rollout in rollouts]
    assert [len(r) for r in rows] == [24, 24, 24]
    prompts = sum(int((~rollout.action_mask).sum()) for rollout in rollouts)
    assert max(max(r) for r in rows) >= 3  # at least one pass for all three
    assert sum({r[0]: r[0] for r in rows}.values()) >= prompts - sum(s.cached_tokens or 0 for s in _actions(rollouts))


def _actions(rollouts: list[Rollout]) -> list[Any]:
    return [rollout.spans[-1] for rollout in rollouts]


def test_the_weights_are_labelled_as_the_engine_was_told(processed: Any) -> None:
    engine = processed.llm_engine
    before = engine.get_weight_version()
    try:
        engine.set_weight_version("step-42")
        (rollout,) = sampled(processed, PROMPTS[:1])
    finally:
        engine.set_weight_version(before)
    assert set(rollout.weight_versions.to_list()) == {42}
    assert rollout.spans[-1].weight_label == "step-42"
    (rollout,) = sampled(processed, PROMPTS[:1])
    assert (rollout.weight_versions, rollout.spans[-1].weight_label) == (None, "default")


def test_the_prefix_cache_is_recorded(processed: Any) -> None:
    prompt = "word " * 200  # more than a block of the cache, which is 128 tokens on a CPU
    processed.reset_prefix_cache()
    (first,), (second,) = sampled(processed, [prompt]), sampled(processed, [prompt])
    assert (first.spans[-1].cached_tokens, first.spans[-1].cache_state) == (0, "fresh")
    assert second.spans[-1].cached_tokens > 0
    assert second.spans[-1].cache_state == "unknown"


def test_what_was_queued_and_what_was_chatted_is_kept(processed: Any) -> None:
    from vllm import SamplingParams

    kept, asked = Kept(), SamplingParams(**{**SAMPLING, "n": 2, "max_tokens": 3})
    with vllm.record(processed, kept):
        processed.chat([{"role": "user", "content": "hi"}], asked, use_tqdm=False)
        processed.enqueue(PROMPTS[:2], [asked, asked], use_tqdm=False)
        processed.wait_for_completion(use_tqdm=False)
    assert len(kept.rows) == 6
    assert {rollout.samplers[0].temperature for rollout in kept.rows} == {0.8}
    assert {rollout.group_size for rollout in kept.rows} == {2}
    assert all(rollout.batch_rows is not None for rollout in kept.rows)


def test_one_line_keeps_a_run_in_a_store(processed: Any, tmp_path: Path) -> None:
    from vllm import SamplingParams

    store = rollstore.open(tmp_path / "s", create=True)
    with store.writer(run="r", source="vllm-0") as writer, vllm.record(processed, writer):
        outputs = processed.generate(PROMPTS, SamplingParams(**SAMPLING), use_tqdm=False)
    table = store.scan("rollouts").read_all()
    assert sorted(table["tokens"].to_pylist()) == sorted(
        output.prompt_token_ids + list(output.outputs[0].token_ids) for output in outputs
    )
    assert set(table["policy"].to_pylist()) == {
        processed.model_config.served_model_name or processed.model_config.model
    }
    assert table["engine"][0].as_py()["numerics"]["weights"] == "float32"
    assert table["tokenizer_size"][0].as_py() == len(processed.get_tokenizer())
