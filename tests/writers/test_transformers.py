"""What transformers' generate returns becomes records: real rows without padding, and the kind of their numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollstore import Rollout
from rollstore.schema import to_table
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
