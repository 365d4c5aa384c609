"""What the configuration of a vLLM engine says about the outputs it gives."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from rollstore.schema import Engine, Numerics

SIZES = (("tp", "tensor_parallel_size"), ("pp", "pipeline_parallel_size"), ("dp", "data_parallel_size"))


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What the configuration of an engine says about its outputs. The defaults say nothing."""

    logprobs_mode: str | None = None
    max_model_len: int | None = None
    custom_processors: bool = False
    """Logits processors of the user's own are loaded: what they do to the logits is not known."""
    engine: Engine | None = None
    policy: str | None = None
    vocab_size: int | None = None
    tokenizer_size: int | None = None


def configuration(llm: Any) -> Configuration:
    """From an `LLM`, `LLMEngine` or `AsyncLLM`."""
    config = _config(llm)
    model, parallel = config.model_config, getattr(config, "parallel_config", None)
    dtype = str(model.dtype).removeprefix("torch.")
    cache = getattr(getattr(config, "cache_config", None), "cache_dtype", None)
    shapes = [f"{short}={size}" for short, name in SIZES if (size := getattr(parallel, name, None)) is not None]
    numerics = Numerics(
        weights=getattr(model, "quantization", None) or dtype,
        activations=dtype,
        kv=dtype if cache == "auto" else cache,
        parallelism=",".join(shapes) or None,
    )
    vocabulary = getattr(model, "get_vocab_size", None)
    tokenizer = getattr(llm, "get_tokenizer", None)
    served = getattr(model, "served_model_name", None)
    return Configuration(
        logprobs_mode=getattr(model, "logprobs_mode", None),
        max_model_len=getattr(model, "max_model_len", None),
        custom_processors=bool(getattr(model, "logits_processors", None)),
        engine=Engine(name="vllm", version=getattr(sys.modules.get("vllm"), "__version__", None), numerics=numerics),
        policy=served if isinstance(served, str) else getattr(model, "model", None),
        vocab_size=None if vocabulary is None else int(vocabulary()),
        tokenizer_size=None if tokenizer is None else len(tokenizer()),
    )


def _config(llm: Any) -> Any:
    for owner in (llm, getattr(llm, "llm_engine", None)):
        config = getattr(owner, "vllm_config", None)
        if config is not None:
            return config
    raise TypeError(f"vllm: wanted an engine with a vllm_config, got {type(llm).__name__}")
