"""What transformers' generate really draws with SmolLM2, beside a teacher-forced forward of the same checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples import smollm2
from rollstore import Rollout
from rollstore.schema import to_table
from rollstore.usable import Transform, usable_as_behavior
from rollstore.writers import transformers
from tests.engines.figures import differences, mean
from tests.engines.settings import PROMPTS

ASKED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def loaded() -> Any:
    return smollm2.load()


def sampled(loaded: Any, **output: bool) -> list[Rollout]:
    model, tokenizer = loaded
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    torch.manual_seed(7)
    generated = model.generate(**inputs, **ASKED, return_dict_in_generate=True, **output)
    settings = transformers.settings_of(model, **ASKED)
    rows = transformers.rollouts(generated, settings, attention_mask=inputs["attention_mask"], head_size=5)
    to_table(rows)
    return rows


def test_scores_are_those_of_the_distribution_that_drew(loaded: Any) -> None:
    rows = sampled(loaded, output_scores=True)
    assert mean(differences(rows, loaded[0], "behavior"), "transformers, float32, `scores`") < 1e-4


def test_logits_are_raw_and_refused_as_a_denominator(loaded: Any) -> None:
    rows = sampled(loaded, output_logits=True)
    assert mean(differences(rows, loaded[0], "raw"), "transformers, float32, `logits`, as raw") < 1e-4
    assert mean(differences(rows, loaded[0], "behavior"), "the same, taken for behavior") > 0.05
    assert rows[0].samplers is not None
    assert not usable_as_behavior("raw", rows[0].samplers[0], Transform(temperature=True, filters=True)).usable
