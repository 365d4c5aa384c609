"""Real engines on the CPU, each loaded once, and the same checkpoint in transformers to compare with."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # cores are shared with whatever else runs here
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from examples import smollm2
from tests.engines.settings import SETTINGS


@pytest.fixture(scope="session")
def folder() -> str:
    return str(smollm2.path())


def load(folder: str, mode: str, **settings: Any) -> Any:
    from vllm import LLM

    return LLM(folder, logprobs_mode=mode, **{**SETTINGS, **settings})


@pytest.fixture(scope="session")
def processed(folder: str) -> Any:
    return load(folder, "processed_logprobs")


@pytest.fixture(scope="session")
def raw(folder: str) -> Any:
    return load(folder, "raw_logprobs")


@pytest.fixture(scope="session")
def narrow(folder: str) -> Any:
    return load(folder, "processed_logprobs", dtype="bfloat16")


@pytest.fixture(scope="session")
def teacher() -> Any:
    """The checkpoint in transformers, float32."""
    return smollm2.load()[0]
