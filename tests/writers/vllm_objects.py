"""Objects with the attribute names of vLLM's own, and recorded outputs of a real one as such objects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DATA = Path(__file__).parent.parent / "data" / "engines"


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class Flat:
    """FlatLogprobs."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)


def flat(positions: Sequence[Sequence[tuple[int, float, int | None]]]) -> Flat:
    made = Flat()
    for position in positions:
        made.start_indices.append(len(made.token_ids))
        for token, logprob, rank in position:
            made.token_ids.append(token)
            made.logprobs.append(logprob)
            made.ranks.append(rank)
        made.end_indices.append(len(made.token_ids))
    return made


def dicts(positions: Sequence[Sequence[tuple[int, float, int | None]]]) -> list[dict[int, Logprob]]:
    return [{token: Logprob(logprob, rank) for token, logprob, rank in position} for position in positions]


def params(**settings: Any) -> SimpleNamespace:
    """SamplingParams after its own checks, defaults written out."""
    defaults: dict[str, Any] = {
        "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": 16, "min_tokens": 0, "seed": None,
        "logit_bias": None, "bad_words": [], "stop": [], "stop_token_ids": [], "logprobs": None,
        "structured_outputs": None, "allowed_token_ids": None, "extra_args": None, "ignore_eos": False,
        "output_kind": SimpleNamespace(name="FINAL_ONLY"),
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **settings})


def completion(tokens: Sequence[int], **fields: Any) -> SimpleNamespace:
    defaults: dict[str, Any] = {
        "index": 0, "text": "", "token_ids": tuple(tokens), "logprobs": None, "finish_reason": "stop",
        "stop_reason": None, "weight_versions": None, "routed_experts": None, "sampling_mask": None,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **fields})


def output(prompt: Sequence[int] | None, *completions: SimpleNamespace, **fields: Any) -> SimpleNamespace:
    defaults: dict[str, Any] = {"request_id": "0", "num_cached_tokens": 0, "metrics": None, "finished": True}
    ids = None if prompt is None else list(prompt)
    return SimpleNamespace(prompt_token_ids=ids, outputs=list(completions), **{**defaults, **fields})


def spans(*triples: tuple[str, int, int]) -> list[SimpleNamespace]:
    return [SimpleNamespace(version=version, start=start, end=end) for version, start, end in triples]


def engine(mode: str = "processed_logprobs", **model: Any) -> SimpleNamespace:
    """What of an LLM `configuration` reads."""
    defaults: dict[str, Any] = {
        "logprobs_mode": mode, "max_model_len": 2048, "logits_processors": None, "dtype": "torch.float32",
        "quantization": None, "model": "/models/smol", "served_model_name": "smol", "get_vocab_size": lambda: 49152,
    }  # fmt: skip
    config = SimpleNamespace(
        model_config=SimpleNamespace(**{**defaults, **model}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
    )
    return SimpleNamespace(vllm_config=config, get_tokenizer=lambda: range(49152))


def recorded(name: str) -> tuple[list[SimpleNamespace], list[SimpleNamespace], dict[str, Any]]:
    """(RequestOutputs, SamplingParams, what stood in the file) of a real run: temperature 0.8, top_p 0.9, top_k 50."""
    run = json.loads((DATA / f"{name}.json").read_text())
    outputs, asked = [], []
    for number, rec in enumerate(run["recs"]):
        drawn = completion(
            rec["token_ids"],
            text=rec["text"],
            logprobs=dicts(rec["topk"]),
            finish_reason=rec["finish_reason"],
            stop_reason=rec["stop_reason"],
            weight_versions=spans(*((s["version"], s["start"], s["end"]) for s in rec["weight_versions"])),
        )
        cached = rec["num_cached_tokens"]
        outputs.append(output(rec["prompt_token_ids"], drawn, request_id=str(number), num_cached_tokens=cached))
        asked.append(params(**rec["sampling"], max_tokens=48, logprobs=5))
    return outputs, asked, run
