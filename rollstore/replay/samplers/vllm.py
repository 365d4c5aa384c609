"""Keyed sampling in vLLM: a V1 logits processor, offline or behind its HTTP server.

    llm = LLM(model, logits_processors=[KeyedNoise])
    (output,) = llm.generate(prompt, keyed(Sampler(temperature=0.8), key=7, sample=0, max_tokens=64))
    turn = recorded(output, Sampler(temperature=0.8), key=7, sample=0)

    vllm serve MODEL --logits-processors rollstore.replay.samplers.vllm:KeyedNoise
    {"prompt": ..., "temperature": 0, "vllm_xargs": {"replay_key": 7, "replay_sample": 0, "replay_temperature": 0.8}}

A keyed request is greedy for the engine: the processor applies the true temperature and filters, records the log-probs
and heads, adds the noise, and leaves of the row only the winner. So the engine's own log-probs of such a request are
those of one token and no record; `recorded` gives the true ones. In a server the processor lives in another process:
set `ROLLSTORE_VLLM_RECORDS` to a folder there, and read it with `read`. Ordinary requests in the same batch are
untouched. Speculative decoding takes no custom processors.
"""

# vLLM has an environment of its own, so its types are unknown where this is checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from rollstore.replay.draw import Turn
from rollstore.replay.samplers.slots import Drawn, Slots, read, request, turn, validate
from rollstore.schema import Sampler

__all__ = ["FOLDER", "KeyedNoise", "keyed", "read", "recorded", "request", "scorer"]

FOLDER = "ROLLSTORE_VLLM_RECORDS"

_drawn: Drawn = {}


class KeyedNoise(LogitsProcessor):
    """Draws keyed requests under the noise of their key."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuses, with ValueError, a keyed request with penalties, biases, constraints or a temperature of its own."""
        validate(sampling_params)

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        folder = os.environ.get(FOLDER)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        self.slots = Slots(_drawn, None if folder is None else Path(folder))

    def is_argmax_invariant(self) -> bool:
        """False: the noise decides the argmax, also of a batch that is greedy throughout."""
        return False

    def update_state(self, batch_update: Any) -> None:
        self.slots.update(batch_update, MoveDirectionality.SWAP)

    def apply(self, logits: Any) -> Any:
        return self.slots.apply(logits)


def keyed(
    sampler: Sampler, *, key: int, sample: int, segment: int = 0, head_size: int = 0, **options: Any
) -> SamplingParams:
    """The parameters of one keyed request. `options` are vLLM's own: max_tokens, stop_token_ids, ...

    Raises UnsupportedRecordError or ValueError for a sampler that cannot be honoured.
    """
    told = request(sampler, key=key, sample=sample, segment=segment, head_size=head_size)
    parameters = SamplingParams(temperature=0.0, extra_args=told, **options)
    validate(parameters)
    return parameters


def recorded(
    output: Any,
    sampler: Sampler,
    *,
    key: int,
    sample: int,
    segment: int = 0,
    head_size: int = 0,
    limit: int | None = None,
    stops: Sequence[int] = (),
) -> Turn:
    """What goes on record of a RequestOutput of this process, forgotten here afterwards. `batch_rows` are not known.

    `limit`, the max_tokens that were asked for (default: as many as came). Raises KeyError for a request that this
    process did not draw, ValueError where the engine's tokens are not those that were drawn.
    """
    (one,) = output.outputs
    return turn(
        _drawn.pop((key, sample, segment)),
        list(one.token_ids),
        start=len(output.prompt_token_ids),
        finish=str(one.finish_reason),
        sampler=sampler,
        key=key,
        sample=sample,
        segment=segment,
        head_size=head_size,
        limit=len(one.token_ids) if limit is None else limit,
        stops=stops,
    )


def scorer(llm: Any) -> Callable[[Sequence[NDArray[Any]]], list[NDArray[np.float32]]]:
    """How a numerical gate asks an LLM for raw log-probs of given tokens: as log-probs of a prompt."""

    def scores(sequences: Sequence[NDArray[Any]]) -> list[NDArray[np.float32]]:
        asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": np.asarray(one).tolist()} for one in sequences]
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        return [
            np.array(
                [
                    given[token].logprob
                    for given, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
                ],
                dtype=np.float32,
            )
            for output in outputs
        ]

    return scores
