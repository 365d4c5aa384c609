"""Keyed sampling from a transformers causal language model.

Each draw is argmax(processed logits + noise), with the noise of `rollstore.replay.noise` at the token's absolute
position in the segment. Log-probs, heads and entropies are those of the distribution before the noise, under the true
temperature and filters.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace as with_fields
from numpy.typing import NDArray
from transformers import PreTrainedModel

from rollstore.replay import noise
from rollstore.replay.transform import Settings, entropy, log_probs, process_rows, settings_of, written_out
from rollstore.schema import Heads, Sampler


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the model drew for one prompt: m tokens, with what must be recorded of them."""

    start: int
    """Position of the first drawn token: the length of the prompt."""
    tokens: NDArray[np.int32]
    """[m], the stop token included."""
    logprobs: NDArray[np.float32]
    """[m], nats, of the behavior distribution."""
    heads: Heads | None
    """The top `head_size` of the behavior distribution; None when none were asked for."""
    entropies: NDArray[np.float32]
    """[m], nats."""
    batch_rows: NDArray[np.int32]
    """[m], token rows of the forward pass that produced the token, padding included."""
    margins: NDArray[np.float32]
    """[m], by how much the winner beat the runner-up, noise included; inf from a support of one."""
    runners_up: NDArray[np.int32]
    """[m], the token that came second; -1 from a support of one."""
    finish: str
    """`stop` or `length`, the engine's word."""
    sampler: Sampler
    """As honoured, with defaults and chain written out."""
    key: int
    sample: int
    segment: int
    noise: str = noise.RECIPE


class _Row:
    """One growing turn."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.steps: list[tuple[int, float, float, int, float, int]] = []
        self.heads: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []
        self.finish = "length" if limit == 0 else ""


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
    ids = [np.asarray(prompt, dtype=np.int64) for prompt in prompts]
    n = len(ids)
    if n == 0:
        return []
    for index, prompt in enumerate(ids):
        if prompt.ndim != 1 or len(prompt) == 0:
            raise ValueError(
                f"prompts[{index}]: wanted a flat, non-empty list of token ids, got shape {list(prompt.shape)}"
            )
    keys, samples, segments = _each("keys", keys, n), _each("samples", samples, n), _each("segments", segments, n)
    samplers = [sampler] * n if isinstance(sampler, Sampler) else list(sampler)
    if len(samplers) != n:
        raise ValueError(f"sampler: wanted one or {n}, one for each prompt, got {len(samplers)}")
    settings = [settings_of(one) for one in samplers]
    growing = [_Row(limit) for limit in _each("max_new_tokens", max_new_tokens, n)]
    extra = max(0, (rows or n) - n)
    if rows is not None and rows < n:
        raise ValueError(f"rows: wanted at least {n}, one for each prompt, got {rows}")

    forward = _Forward(model, ids + [ids[0]] * extra)
    stops = set(stop_token_ids)
    while any(not row.finish for row in growing):
        logits = forward.logits[:n]
        positions = [len(prompt) + len(row.steps) for prompt, row in zip(ids, growing, strict=True)]
        chosen = _draw(logits, settings, keys, samples, segments, positions, head_size)
        for index, row in enumerate(growing):
            if row.finish:
                continue
            token, logprob, spread, margin, second, head = chosen[index]
            row.steps.append((token, logprob, spread, forward.token_rows, margin, second))
            row.heads.append(head)
            if token in stops:
                row.finish = "stop"
            elif len(row.steps) == row.limit:
                row.finish = "length"
        if all(row.finish for row in growing):
            break
        # A finished row stays in the batch, so that the shape is the same for all of a run.
        forward.step([choice[0] for choice in chosen] + [chosen[0][0]] * extra)
    return [
        _turn(row, len(prompt), head_size, _asked(one, row.limit, stops), key, sample, segment)
        for row, prompt, one, key, sample, segment in zip(growing, ids, samplers, keys, samples, segments, strict=True)
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
        accepted = inspect.signature(model.forward).parameters
        # The argument was renamed in transformers, and the old name warns.
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
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


_Choice = tuple[int, float, float, float, int, tuple[NDArray[np.int32], NDArray[np.float32]]]


def _draw(
    logits: torch.Tensor,
    settings: list[Settings],
    keys: list[int],
    samples: list[int],
    segments: list[int],
    positions: list[int],
    head_size: int,
) -> list[_Choice]:
    """For each row: token, log-prob, entropy, margin, runner-up, head."""
    processed = process_rows(logits, settings)
    logprobs = log_probs(processed)
    where = {"key": keys, "sample": samples, "segment": segments, "positions": positions}
    tokens, scores = _noised(processed, where)
    best = scores.amax(-1, keepdim=True)
    # Of equal scores the lowest id wins, on every device.
    token = torch.where(scores == best, tokens, processed.shape[-1]).amin(-1, keepdim=True)
    others = scores.masked_fill(tokens == token, -math.inf)
    second = others.amax(-1, keepdim=True)
    runner_up = torch.where(second > -math.inf, tokens.gather(-1, others.argmax(-1, keepdim=True)), -1)
    head = logprobs.topk(min(head_size, logprobs.shape[-1]), dim=-1)
    columns = (
        token[:, 0],
        logprobs.gather(-1, token)[:, 0],
        entropy(logprobs),
        (best - second)[:, 0],
        runner_up[:, 0],
    )
    heads = [
        _head(ids, values) for ids, values in zip(head.indices.cpu().numpy(), head.values.cpu().numpy(), strict=True)
    ]
    return list(zip(*(column.tolist() for column in columns), heads, strict=True))


def _noised(processed: torch.Tensor, where: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidate ids and their processed logits plus noise, [n, k] each: the support where it is small, else all ids."""
    width = processed.shape[-1]
    kept = int((processed > -math.inf).sum(-1).max())
    if 8 * kept < width:
        values, tokens = processed.topk(kept, dim=-1)
        drawn = noise.gumbel_at(**where, tokens=tokens.cpu().numpy())
        return tokens, values + torch.from_numpy(drawn).to(values.device)
    tokens = torch.arange(width, device=processed.device).expand_as(processed)
    if processed.device.type == "cpu":
        return tokens, processed + torch.from_numpy(noise.gumbel(**where, vocab_size=width))
    return tokens, processed + noise.gumbel_torch(**where, vocab_size=width, device=processed.device)


def _head(ids: NDArray[np.int64], values: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """By falling log-prob, equals by id, without what the filters dropped."""
    inside = np.flatnonzero(values > -math.inf)
    order = inside[np.lexsort((ids[inside], -values[inside]))]
    return ids[order].astype(np.int32), values[order]


def _turn(row: _Row, start: int, head_size: int, sampler: Sampler, key: int, sample: int, segment: int) -> Turn:
    heads = None
    if head_size:
        heads = Heads(
            size=head_size,
            counts=np.array([len(ids) for ids, _ in row.heads], dtype=np.int32),
            tokens=np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in row.heads)]),
            logprobs=np.concatenate([np.empty(0, np.float32), *(values for _, values in row.heads)]),
        )
    return Turn(
        start=start,
        tokens=np.array([step[0] for step in row.steps], dtype=np.int32),
        logprobs=np.array([step[1] for step in row.steps], dtype=np.float32),
        heads=heads,
        entropies=np.array([step[2] for step in row.steps], dtype=np.float32),
        batch_rows=np.array([step[3] for step in row.steps], dtype=np.int32),
        margins=np.array([step[4] for step in row.steps], dtype=np.float32),
        runners_up=np.array([step[5] for step in row.steps], dtype=np.int32),
        finish=row.finish,
        sampler=sampler,
        key=key,
        sample=sample,
        segment=segment,
    )


def _asked(sampler: Sampler, limit: int, stops: set[int]) -> Sampler:
    """What goes on record: the sampler written out, with where this request would have ended."""
    return with_fields(written_out(sampler), max_tokens=limit, stop_token_ids=np.array(sorted(stops), dtype=np.int32))


def _each(name: str, value: int | Sequence[int], n: int) -> list[int]:
    if isinstance(value, int):
        return [value] * n
    values = [int(one) for one in value]
    if len(values) != n:
        raise ValueError(f"{name}: wanted one integer or {n}, one for each prompt, got {len(values)}")
    return values
