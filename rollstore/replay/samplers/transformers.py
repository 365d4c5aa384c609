"""Keyed sampling from a transformers causal language model.

Each draw is argmax(processed logits + noise), with the noise of `rollstore.replay.noise` at the token's absolute
position in the segment. Log-probs, heads and entropies are those of the distribution before the noise, under the true
temperature and filters.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import PreTrainedModel

from rollstore.replay.arguments import prompt_ids, stop_ids, whole
from rollstore.replay.draw import Growing, Turn, draw
from rollstore.replay.transform import settings_of
from rollstore.schema import Engine, Numerics, Sampler

__all__ = ["Turn", "generate"]


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[NDArray[Any] | Sequence[int]],
    *,
    keys: int | Sequence[int],
    samples: int | Sequence[int],
    sampler: Sampler | Sequence[Sampler],
    max_new_tokens: int | Sequence[int],
    segments: int | Sequence[int] = 0,
    head_size: int = 0,
    stop_token_ids: Sequence[int] = (),
    rows: int | None = None,
) -> list[Turn]:
    """Draws one turn for each prompt, all prompts in one batch.

    A prompt is everything the model saw so far in its segment: for a further turn, the first prompt, the drawn tokens
    and what was observed since. Nothing but (prompt, key, sample, segment, sampler, weights) decides the tokens, up
    to the rounding that a batch's shape brings; `rows` pads the batch to that many rows, so that two runs multiply
    matrices of one shape. Give each row its own (key, sample): rows that share both share their noise.

    Raises ValueError for arguments that do not fit, UnsupportedRecordError for a sampler that cannot be honoured.
    """
    ids = prompt_ids(model, prompts)
    n = len(ids)
    if n == 0:
        return []
    whole("head_size", head_size, least=0)
    keys, samples, segments = _each("keys", keys, n), _each("samples", samples, n), _each("segments", segments, n)
    samplers = [sampler] * n if isinstance(sampler, Sampler) else list(sampler)
    if len(samplers) != n:
        raise ValueError(f"sampler: wanted one or {n}, one for each prompt, got {len(samplers)}")
    settings = [settings_of(one) for one in samplers]
    limits = _each("max_new_tokens", max_new_tokens, n)
    stops = stop_ids(stop_token_ids)
    growing = [Growing(limit=limit, stops=stops) for limit in limits]
    extra = max(0, (rows or n) - n)
    if rows is not None and rows < n:
        raise ValueError(f"rows: wanted at least {n}, one for each prompt, got {rows}")

    forward = _Forward(model, ids + [ids[0]] * extra)
    while any(not row.finish for row in growing):
        chosen = draw(
            forward.logits[:n],
            settings,
            keys=keys,
            samples=samples,
            segments=segments,
            positions=[len(prompt) + len(row.choices) for prompt, row in zip(ids, growing, strict=True)],
            head_size=head_size,
        )
        for row, choice in zip(growing, chosen, strict=True):
            if not row.finish:
                row.take(choice, forward.token_rows)
        if all(row.finish for row in growing):
            break
        # A finished row stays in the batch, so that the shape is the same for all of a run.
        forward.step([choice.token for choice in chosen] + [chosen[0].token] * extra)
    named = zip(growing, ids, samplers, keys, samples, segments, strict=True)
    return [
        row.turn(start=len(prompt), head_size=head_size, sampler=one, key=key, sample=sample, segment=segment)
        for row, prompt, one, key, sample, segment in named
    ]


class _Forward:
    """A left-padded batch with its KV cache: `logits` [rows, V] after the last token; `step` appends one a row."""

    def __init__(self, model: PreTrainedModel, prompts: list[NDArray[np.int64]]) -> None:
        self.model = model
        longest = max(len(prompt) for prompt in prompts)
        tokens = np.zeros((len(prompts), longest), dtype=np.int64)
        mask = np.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        # Positions count from each row's own first token: padding on the left must not shift them.
        positions = np.maximum(mask.cumsum(1) - 1, 0)
        self.mask = torch.from_numpy(mask).to(model.device)
        self.positions = torch.from_numpy(positions).to(model.device)
        self.cache: Any = None
        self.cache_name, self.options = cached_call(model)
        self._run(torch.from_numpy(tokens).to(model.device))

    def step(self, tokens: list[int]) -> None:
        column = torch.tensor(tokens, dtype=torch.int64, device=self.mask.device)[:, None]
        self.mask = torch.cat((self.mask, torch.ones_like(column)), dim=1)
        self.positions = self.positions[:, -1:] + 1
        self._run(column)

    def _run(self, tokens: torch.Tensor) -> None:
        out = self.model(
            input_ids=tokens,
            attention_mask=self.mask,
            position_ids=self.positions,
            use_cache=True,
            **{self.cache_name: self.cache},
            **self.options,
        )
        self.cache = getattr(out, self.cache_name)
        self.logits = out.logits[:, -1].float()
        self.token_rows = tokens.numel()


def described(model: PreTrainedModel) -> Engine:
    """What a transformers model is as an engine, for the record."""
    dtype = str(model.dtype).removeprefix("torch.")
    attention = getattr(model.config, "_attn_implementation", None)
    return Engine(
        name="transformers",
        version=transformers.__version__,
        numerics=Numerics(weights=dtype, activations=dtype, kv=dtype, lm_head=dtype, attention=attention),
    )


@torch.inference_mode()
def decoded_logprobs(model: PreTrainedModel, tokens: NDArray[Any], count: int) -> NDArray[np.float32]:
    """Raw log-probs [count] of the last `count` tokens, each from a decode over the cache of those before it."""
    ids = np.asarray(tokens, dtype=np.int64)
    start = len(ids) - count
    forward = _Forward(model, [ids[:start]])
    found: list[float] = []
    for token in ids[start:].tolist():
        found.append(float(torch.log_softmax(forward.logits[0], -1)[token]))
        if len(found) < count:
            forward.step([token])
    return np.array(found, dtype=np.float32)


def cached_call(model: PreTrainedModel) -> tuple[str, dict[str, Any]]:
    """How a model's forward is called with a cache: the argument's name, and what asks for the last logits alone."""
    accepted = inspect.signature(model.forward).parameters
    # The argument was renamed in transformers, and the old name warns.
    name = "cache" if "cache" in accepted else "past_key_values"
    return name, {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}


def _each(name: str, value: int | Sequence[int], n: int) -> list[int]:
    if not isinstance(value, Iterable):
        return [whole(name, value)] * n
    values = [whole(name, one) for one in value]
    if len(values) != n:
        raise ValueError(f"{name}: wanted one integer or {n}, one for each prompt, got {len(values)}")
    return values
