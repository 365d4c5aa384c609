"""The numerical gate between a real vLLM and transformers: float32 passes; bfloat16 and a mix-up of kinds are named."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from vllm import SamplingParams

from examples import smollm2
from rollstore import Rollout
from rollstore.replay.cases import Case, cases, near_tie
from rollstore.replay.gate import gate
from rollstore.replay.samplers.vllm import scorer
from rollstore.replay.verdict import Gate
from rollstore.writers import vllm
from tests.engines.conftest import load
from tests.engines.settings import PROMPTS

SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "max_tokens": 16, "logprobs": 0, "seed": 7}
"""As in the other tests of this folder."""


@pytest.fixture(scope="module")
def sequences(teacher: Any) -> list[Case]:
    _, tokenizer = smollm2.load()
    found = cases(tokenizer, longest=240)
    return [*found, *near_tie(teacher, found)]


class Kept:
    def __init__(self) -> None:
        self.rows: list[Rollout] = []

    def append(self, data: list[Rollout]) -> None:
        self.rows += data


def checked(llm: Any, teacher: Any, sequences: list[Case]) -> Gate:
    kept = Kept()
    with vllm.record(llm, kept):
        llm.generate(PROMPTS, SamplingParams(**SAMPLING), use_tqdm=False)
    engine = kept.rows[0].engine
    assert engine is not None
    found = gate(teacher, sequences, engine=engine, scorer=scorer(llm), drawn=kept.rows)
    print("\n" + "\n".join(found.lines()))
    return found


def causes(found: Gate, section: str) -> set[str | None]:
    return {check.cause for check in found.checks if check.section == section and not check.passed}


@pytest.fixture(scope="module")
def narrow(folder: str) -> Iterator[Any]:
    llm = load(folder, "processed_logprobs", dtype="bfloat16")
    yield llm
    del llm
    gc.collect()


def test_float32_passes_at_a_k3_of_1e_4(processed: Any, teacher: Any, sequences: list[Case]) -> None:
    found = checked(processed, teacher, sequences)
    assert found.passed
    assert {check.section for check in found.checks} == {"batch", "cache", "engine", "draws"}


def test_raw_numbers_called_behavior_fail_and_are_named(raw: Any, teacher: Any, sequences: list[Case]) -> None:
    kept = Kept()
    with vllm.record(raw, kept):
        raw.generate(PROMPTS, SamplingParams(**SAMPLING), use_tqdm=False)
    mixed = [replace(row, logprob_kind="behavior", heads=None) for row in kept.rows]
    found = gate(teacher, sequences[:1], engine=kept.rows[0].engine, drawn=mixed)
    print("\n" + "\n".join(found.lines()))
    (cause,) = causes(found, "draws")
    assert str(cause).startswith("the numbers are raw log-probs and are called behavior")


def test_bfloat16_fails_and_its_rounding_is_named(narrow: Any, teacher: Any, sequences: list[Case]) -> None:
    found = checked(narrow, teacher, sequences)
    assert not found.passed
    (cause,) = causes(found, "engine")
    assert str(cause).startswith("rounding of bfloat16")
