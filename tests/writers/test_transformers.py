"""What transformers' generate returns becomes records: real rows without padding, and the kind of their numbers."""

from __future__ import annotations

import json
import math
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, WatermarkingConfig

from rollstore import Rollout
from rollstore.schema import to_table
from rollstore.usable import Transform, usable_as_behavior
from rollstore.writers import transformers

DATA = Path(__file__).parent.parent / "data" / "engines"
SETTINGS = {"do_sample": True, "temperature": 0.5, "top_k": 2, "max_new_tokens": 3, "eos_token_id": 2}


def steps(*rows: list[list[float]]) -> tuple[torch.Tensor, ...]:
    """Logits [B, V] of each step, from [N, V] of each row."""
    return tuple(torch.tensor([row[step] for row in rows]) for step in range(len(rows[0])))


def generated(sequences: list[list[int]], **logits: Any) -> SimpleNamespace:
    return SimpleNamespace(sequences=torch.tensor(sequences), **{"scores": None, "logits": None, **logits})


def made_of(found: Any, mask: list[list[int]], settings: Any = None, **options: Any) -> list[Rollout]:
    rollouts = transformers.rollouts(found, settings or SETTINGS, attention_mask=torch.tensor(mask), **options)
    to_table(rollouts)
    return rollouts


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.tokens.tolist() for rollout in rollouts]


def test_padding_is_cut_by_the_mask_and_by_lengths_whatever_its_id() -> None:
    for pad in (0, 2, 5):  # as an ordinary token, as the end token, as one of the prompt's own
        found = generated([[pad, 5, 7, 2, pad], [5, 6, 8, 9, 10]])
        made = made_of(found, [[0, 1], [1, 1]])
        assert tokens(made) == [[5, 7, 2], [5, 6, 8, 9, 10]]
        assert [rollout.action_mask.tolist() for rollout in made] == [
            [False, True, True],
            [False, False, True, True, True],
        ]
        assert [rollout.ending_reason for rollout in made] == ["stop_token", "max_tokens"]


def test_the_end_token_is_kept_and_one_inside_the_prompt_ends_nothing() -> None:
    made = made_of(generated([[5, 2, 6, 7, 2, 2]]), [[1, 1, 1]])
    assert tokens(made) == [[5, 2, 6, 7, 2]]


def test_an_ordinary_id_of_zero_is_no_padding() -> None:
    assert tokens(made_of(generated([[0, 0, 9, 0, 0]]), [[0, 1]])) == [[0, 9, 0, 0]]


def test_any_of_several_end_tokens_ends_a_row() -> None:
    made = made_of(generated([[5, 7, 3, 0]]), [[1]], {**SETTINGS, "eos_token_id": [2, 3]})
    assert tokens(made) == [[5, 7, 3]]


def test_rows_that_something_else_stopped_need_their_lengths() -> None:
    asked = {**SETTINGS, "stop_strings": ["."]}
    with pytest.raises(ValueError, match="lengths: wanted the new tokens of each row"):
        made_of(generated([[5, 7, 0, 0]]), [[1]], asked)
    made = made_of(generated([[5, 7, 0, 0]]), [[1]], asked, lengths=[2])
    assert tokens(made) == [[5, 7, 0]]
    assert (made[0].ending, made[0].ending_reason) == ("unknown", "unknown")
    for wrong in ([4], [1, 1], [-1]):
        with pytest.raises(ValueError, match="lengths: wanted 1 numbers up to 3"):
            made_of(generated([[5, 7, 0, 0]]), [[1]], asked, lengths=wrong)


def test_scores_are_behavior_log_probs_of_the_drawn_tokens_with_entropy_and_heads() -> None:
    logits = [[0.0, 1.0, -math.inf, -math.inf], [-math.inf, -math.inf, 0.0, 0.0]]
    made = made_of(generated([[3, 0, 2]], scores=steps(logits)), [[1]], head_size=3)[0]
    assert made.logprobs is not None
    assert made.logprobs.to_list() == pytest.approx([-1.3132617, -0.6931472])
    assert (made.logprob_kind, made.head_kind) == ("behavior", "behavior")
    assert made.entropies is not None
    assert made.entropies.to_list() == pytest.approx([0.5822031, 0.6931472])
    assert made.heads is not None
    assert made.heads.counts is not None
    assert made.heads.tokens is not None
    assert (made.heads.size, made.heads.counts.tolist()) == (3, [2, 2])  # no padding with what could not be drawn
    assert made.heads.tokens.tolist()[:2] == [1, 0]


def test_logits_are_raw_and_scores_come_first() -> None:
    logits = steps([[0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 9.0, 0.0]])
    raw = made_of(generated([[3, 1, 2]], logits=logits), [[1]])[0]
    assert (raw.logprob_kind, raw.entropies) == ("raw", None)
    assert made_of(generated([[3, 1, 2]], scores=logits, logits=logits), [[1]])[0].logprob_kind == "behavior"
    assert made_of(generated([[3, 1, 2]]), [[1]])[0].logprobs is None
    assert made_of(torch.tensor([[3, 1, 2]]), [[1]])[0].logprobs is None


def test_processors_of_the_callers_own_leave_the_kind_unknown() -> None:
    logits = steps([[0.0, 1.0, 2.0, 3.0]])
    assert made_of(generated([[3, 1]], scores=logits), [[1]], custom_processors=True)[0].logprob_kind == "unknown"


@pytest.mark.parametrize(("penalty", "kind"), [(1.0, "raw"), (1.2, "unknown")])
def test_a_greedy_pick_has_temperature_zero_and_no_behavior_log_prob(penalty: float, kind: str) -> None:
    asked = {**SETTINGS, "do_sample": False, "repetition_penalty": penalty}
    made = made_of(generated([[3, 1]], scores=steps([[0.0, 1.0, 2.0, 3.0]])), [[1]], asked)[0]
    assert made.samplers is not None
    assert (made.samplers[0].temperature, made.samplers[0].top_k, made.logprob_kind) == (0.0, 0, kind)


def test_settings_are_those_of_the_call_then_of_the_model_then_of_generate() -> None:
    config = SimpleNamespace(to_dict=lambda: {"temperature": 0.7, "top_p": None, "eos_token_id": 2})
    found = transformers.settings_of(SimpleNamespace(generation_config=config), top_p=0.9, min_p=None)
    assert (found["temperature"], found["top_p"], found["top_k"], found["eos_token_id"]) == (0.7, 0.9, 50, 2)
    assert transformers.sampler({**found, "do_sample": True}).top_k == 50


def test_settings_that_take_tokens_away_stand_as_a_grammar() -> None:
    made = transformers.sampler({**SETTINGS, "typical_p": 0.9, "no_repeat_ngram_size": 3, "eta_cutoff": 0.0})
    assert made.grammar is not None
    assert json.loads(made.grammar) == {"typical_p": 0.9, "no_repeat_ngram_size": 3}


ACTIVE = {
    "encoder_repetition_penalty": 1.5, "no_repeat_ngram_size": 3, "encoder_no_repeat_ngram_size": 3,
    "bad_words_ids": [[7]], "suppress_tokens": [7], "begin_suppress_tokens": [7], "forced_bos_token_id": 7,
    "forced_eos_token_id": 2, "sequence_bias": [[[7], 2.0]], "exponential_decay_length_penalty": [3, 1.1],
    "guidance_scale": 1.5, "watermarking_config": {"greenlist_ratio": 0.25, "bias": 2.0}, "dola_layers": "high",
    "prefix_allowed_tokens_fn": len, "negative_prompt_ids": torch.tensor([[1]]), "min_length": 9, "top_h": 0.5,
    "typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "logits_processor": [len],
    "custom_generate": "some/repo", "assistant_ensemble_weight": 0.5, "a_setting_of_a_later_release": 0.5,
}  # fmt: skip
"""Settings without a column, each at a value at which it bears on the draw."""


@pytest.mark.parametrize("name", ACTIVE)
def test_what_bears_on_the_draw_and_has_no_column_keeps_log_probs_from_being_taken_for_plain_ones(name: str) -> None:
    made = transformers.sampler({**transformers.DEFAULTS, "do_sample": True, "top_k": 0, name: ACTIVE[name]})
    assert made.grammar is not None
    assert list(json.loads(made.grammar)) == [name]
    verdict = usable_as_behavior("behavior", made, Transform(temperature=True, filters=True))
    assert not verdict.usable
    assert "grammar" in verdict.reason
    if name not in transformers.FILTERS:  # a greedy pick has no filters
        asked = {**SETTINGS, "do_sample": False, name: ACTIVE[name]}
        if name == "min_length":
            asked["min_length"] = 2  # one token of prompt, and one more
        found = generated([[3, 1]], scores=steps([[0.0, 1.0, 2.0, 3.0]]))
        assert made_of(found, [[1]], asked)[0].logprob_kind == "unknown"


@pytest.mark.parametrize("name", transformers.OPAQUE)
def test_after_what_may_do_anything_scores_are_of_no_known_distribution(name: str) -> None:
    found = generated([[3, 1]], scores=steps([[0.0, 1.0, 2.0, 3.0]]), logits=None)
    assert made_of(found, [[1]], {**SETTINGS, name: ACTIVE[name]})[0].logprob_kind == "unknown"


def test_raw_logits_under_processors_of_the_callers_own_are_no_denominator() -> None:
    found = generated([[3, 1]], logits=steps([[0.0, 1.0, 2.0, 3.0]]))
    made = made_of(found, [[1]], {**SETTINGS, "temperature": 1.0, "top_k": 0}, custom_processors=True)[0]
    assert made.samplers is not None
    verdict = usable_as_behavior(made.logprob_kind, made.samplers[0], Transform(penalties=True))
    assert verdict.reason == "a raw log-prob was recorded, which leaves out grammar"


def test_a_setting_that_is_an_object_is_told_by_what_it_holds_or_by_its_name() -> None:
    asked = {"watermarking_config": WatermarkingConfig(bias=2.5), "prefix_allowed_tokens_fn": len}
    made = transformers.sampler({**SETTINGS, **asked, "negative_prompt_ids": torch.tensor([[1]])})
    said = json.loads(made.grammar or "")
    assert said["watermarking_config"]["bias"] == 2.5
    assert (said["prefix_allowed_tokens_fn"], said["negative_prompt_ids"]) == ("len", [[1]])


def test_settings_at_which_nothing_happens_are_no_limits() -> None:
    off = {**transformers.LIMITS, **transformers.FILTERS, "watermarking_config": None, "suppress_tokens": [],
           "a_setting_of_a_later_release": False, "pixel_values": torch.zeros(1)}  # fmt: skip
    assert transformers.sampler({**SETTINGS, **off}).grammar is None


def test_every_setting_of_the_installed_transformers_is_known() -> None:
    config = set(GenerationConfig().to_dict()) | set(signature(GenerationMixin.generate).parameters) - {
        "self",
        "kwargs",
    }
    lists = (transformers.LIMITS, transformers.FILTERS, transformers.OPAQUE, transformers.CRITERIA,
             transformers.REFUSED, transformers.READ, transformers.WITHOUT_EFFECT)  # fmt: skip
    known = [name for names in lists for name in names]
    assert config - set(known) == set()
    assert len(known) == len(set(known))


ON = {
    "max_time": 9.0, "early_stopping": True, "length_penalty": 2.0, "diversity_penalty": 1.0, "use_cache": False,
    "remove_invalid_values": True, "renormalize_logits": True, "prompt_lookup_num_tokens": 3, "penalty_alpha": 0.6,
}  # fmt: skip


def test_what_is_called_without_effect_puts_nothing_between_the_model_and_the_draw() -> None:
    model = type("Model", (GenerationMixin,), {"config": SimpleNamespace(is_encoder_decoder=False)})()
    repairs = {"remove_invalid_values": "InfNanRemoveLogitsProcessor", "renormalize_logits": "LogitNormalization"}
    for name in {*GenerationConfig().to_dict()} & {*transformers.WITHOUT_EFFECT, "penalty_alpha"}:
        config = GenerationConfig(do_sample=True, **({name: ON[name]} if name in ON else {}))
        found = model._get_logits_processor(config, input_ids_seq_length=1)
        assert [type(one).__name__ for one in found] == ([repairs[name]] if name in repairs else [])


@pytest.mark.parametrize(
    ("least", "asked", "wanted"),
    [
        ({"min_length": 5}, {}, 3), ({"min_length": 1}, {}, 0), ({"min_length": 5, "min_new_tokens": 1}, {}, 1),
        ({"min_new_tokens": 2}, {}, 2),
    ],
)  # fmt: skip
def test_the_least_length_counts_the_prompt_with_its_padding(least: Any, asked: Any, wanted: int) -> None:
    made = made_of(generated([[0, 5, 7, 8, 9]]), [[0, 1]], {**SETTINGS, **least})[0]
    assert made.samplers is not None
    assert (made.samplers[0].min_tokens, made.samplers[0].grammar) == (wanted, None)


@pytest.mark.parametrize(
    "asked",
    [
        {"num_beams": 2}, {"num_beam_groups": 2}, {"constraints": [len]}, {"force_words_ids": [[7]]},
        {"penalty_alpha": 0.6, "do_sample": False}, {"token_healing": True},
    ],
)  # fmt: skip
def test_what_was_searched_for_is_refused(asked: Any) -> None:
    with pytest.raises(ValueError, match="transformers: wanted sampled sequences, got"):
        made_of(generated([[5, 7]]), [[1]], {**SETTINGS, **asked})


def test_stop_strings_are_recorded_and_criteria_of_ones_own_need_lengths() -> None:
    made = made_of(generated([[5, 7]]), [[1]], {**SETTINGS, "stop_strings": "."}, lengths=[1])[0]
    assert made.samplers is not None
    assert made.samplers[0].stop == (".",)
    with pytest.raises(ValueError, match="lengths: wanted the new tokens of each row, as stopping_criteria ended some"):
        made_of(generated([[5, 7]]), [[1]], {**SETTINGS, "stopping_criteria": [len]})


def test_a_generation_config_that_was_asked_for_stands_before_the_models_own() -> None:
    model = SimpleNamespace(generation_config=GenerationConfig(temperature=0.7, top_p=0.5))
    found = transformers.settings_of(model, generation_config=GenerationConfig(top_p=0.9, do_sample=True), top_k=3)
    assert (found["temperature"], found["top_p"], found["top_k"], found["do_sample"]) == (0.7, 0.9, 3, True)


def test_a_limit_on_the_whole_length_is_a_limit_on_new_tokens() -> None:
    asked = {**SETTINGS, "max_new_tokens": None, "max_length": 3}
    made = made_of(generated([[5, 7, 8]]), [[1]], asked)[0]
    assert made.samplers is not None
    assert (made.samplers[0].max_tokens, made.ending_reason) == (2, "max_tokens")


def test_samples_of_one_prompt_are_one_group() -> None:
    made = made_of(generated([[5, 7], [5, 8], [6, 9], [6, 4]]), [[1], [1]])
    assert [rollout.sample_index for rollout in made] == [0, 1, 0, 1]
    assert [made[0].group_id == made[1].group_id, made[1].group_id == made[2].group_id] == [True, False]


@pytest.mark.parametrize(
    ("mask", "settings", "message"),
    [
        ([[1, 0]], {}, "wanted padding on the left only"),
        ([[1, 1]], {"num_beams": 4}, "got the best of 4 beams"),
        ([[1, 1], [1, 1]], {}, "wanted rows for 2 prompts"),
    ],
)
def test_what_cannot_be_placed_is_refused(mask: list[list[int]], settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made_of(generated([[5, 7, 2]]), mask, {**SETTINGS, **settings})


def test_scores_of_another_number_of_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="scores: wanted 2 steps, one for each new token, got 1"):
        made_of(generated([[3, 1, 2]], scores=steps([[0.0, 1.0, 2.0, 3.0]])), [[1]])


@pytest.mark.parametrize(
    ("name", "which", "kind"), [("hf_scores", "scores", "behavior"), ("hf_logits", "logits", "raw")]
)
def test_recorded_log_probs_come_back_from_the_logits_that_gave_them(name: str, which: str, kind: str) -> None:
    rec = json.loads((DATA / f"{name}.json").read_text())["recs"][0]
    vocabulary, drawn = 49152, rec["token_ids"][:4]
    rows = []
    for token, logprob in zip(drawn, rec["logprobs"], strict=False):
        row = np.full(vocabulary, -np.inf, np.float32)
        row[token], row[token + 1] = logprob, np.log1p(-np.exp(min(logprob, -1e-9)))
        rows.append(row.tolist())
    found = generated([rec["prompt_token_ids"] + drawn], **{which: steps(rows)})
    made = made_of(found, [[1] * len(rec["prompt_token_ids"])], {**SETTINGS, **rec["sampling"], "max_new_tokens": 4})[0]
    assert made.logprobs is not None
    assert made.logprobs.to_list() == pytest.approx(rec["logprobs"][:4], abs=1e-6)
    assert made.logprob_kind == kind
