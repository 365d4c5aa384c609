"""Teacher-forced scoring: what a model gives to tokens that were already drawn, each under its own recorded sampler."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from rollstore.batch.token_batch import PENALTY_BITS, TokenBatch
from rollstore.errors import UnsupportedRecordError
from rollstore.replay.arguments import require_vocabulary
from rollstore.replay.conditions import sampler_at
from rollstore.replay.transform import CHAIN, Settings, entropy, log_probs, process, process_rows, settings_of
from rollstore.schema import Rollout, Sampler
from rollstore.usable import FILTERS_FIRST

KINDS = ("behavior", "tempered", "raw")


class Scored(NamedTuple):
    """Log-probs in nats, in the order of the batch. -inf where a token lies outside the model's kept support."""

    logprobs: torch.Tensor
    """[A]"""
    head_logprobs: torch.Tensor | None
    """[H], at the recorded head ids; None when the batch has no heads."""
    entropies: torch.Tensor
    """[A], of the scored distribution, without gradient."""


def score(
    model: PreTrainedModel, batch: TokenBatch, *, kind: str = "behavior", rows_at_once: int | None = None
) -> Scored:
    """Scores the actions of a packed batch, with gradient unless the caller turned it off.

    `kind`: `behavior` applies each action's recorded temperature and filters and renormalises over what they keep
    (so that `batch.trainer_transform` may say Transform(temperature=True, filters=True)), `tempered` the temperature
    alone, `raw` neither. The rows run padded on the right, `rows_at_once` of them in one forward pass (default: all).

    A batch does not carry the order of the transforms: temperature, top_k, top_p, min_p is taken. Raises
    UnsupportedRecordError for a batch that shares prefixes between rows and, naming the rollout, for penalties,
    constraints and unknown samplers, and under `behavior` for a top-p or min-p before the temperature; ValueError for
    an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: wanted one of {', '.join(KINDS)}, got {kind!r}")
    batch.unshared("score")
    if kind != "raw":
        _refuse(batch, kind)
    step = max(1, rows_at_once or batch.rows)
    pieces = [_piece(model, batch, top, min(top + step, batch.rows), kind) for top in range(0, batch.rows, step)]
    if not pieces:
        none = torch.zeros(0, device=model.device)
        return Scored(none, None if batch.heads is None else none, none)
    heads = None if batch.heads is None else torch.cat([piece[1] for piece in pieces])
    return Scored(torch.cat([piece[0] for piece in pieces]), heads, torch.cat([piece[2] for piece in pieces]))


class Segment(NamedTuple):
    """What a model gives to one recorded segment. Nats; -inf outside the model's kept support."""

    logprobs: NDArray[np.float32]
    """[A]"""
    head_logprobs: NDArray[np.float32] | None
    """[H], at the recorded head ids; None without heads."""
    entropies: NDArray[np.float32]
    """[A]"""
    token_logprobs: NDArray[np.float32]
    """[T]: of an action as in `logprobs`, of an observation raw, since no sampler stands there; position 0 is NaN."""


@torch.inference_mode()
def score_rollouts(
    model: PreTrainedModel, rollouts: Sequence[Rollout], *, kind: str = "behavior"
) -> list[tuple[NDArray[np.float32], NDArray[np.float32] | None, NDArray[np.float32]]]:
    """(log-probs [A], at the recorded head ids or None, entropies [A]) of each segment, in one padded forward pass.

    Each action stands under its own recorded sampler, whatever the order of its chain. `kind` and errors: see `score`.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: wanted one of {', '.join(KINDS)}, got {kind!r}")
    if not rollouts:
        return []
    require_vocabulary(model, rollouts)
    actions = [np.flatnonzero(rollout.action_mask) for rollout in rollouts]
    row = np.repeat(np.arange(len(rollouts)), [len(at) for at in actions])
    logits = _logits(model, _ids(rollouts), torch.from_numpy(row), torch.from_numpy(np.concatenate(actions) - 1))
    return _scored(logits, rollouts, actions, kind)


@torch.inference_mode()
def score_segments(
    model: PreTrainedModel, rollouts: Sequence[Rollout], *, kind: str = "behavior", packed: bool = False
) -> list[Segment]:
    """As `score_rollouts`, with the log-prob of every token, in one forward pass: padded on the right, or packed.

    `packed` puts the segments behind one another in one row, with positions that start again at each; the model must
    keep them apart by that, as `packs` finds out. Holds the logits of all tokens at once.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: wanted one of {', '.join(KINDS)}, got {kind!r}")
    if not rollouts:
        return []
    require_vocabulary(model, rollouts)
    ids = _ids(rollouts)
    lengths = [len(one) for one in ids]
    row = torch.from_numpy(np.repeat(np.arange(len(ids)), [length - 1 for length in lengths]))
    column = torch.cat([torch.arange(length - 1) for length in lengths])
    logits = _packed_logits(model, ids) if packed else _logits(model, ids, row, column)
    following = torch.cat([one[1:] for one in ids]).to(logits.device)
    raw = _taken(logits, following).cpu().numpy()
    starts = np.cumsum([0, *[length - 1 for length in lengths]])
    actions = [np.flatnonzero(rollout.action_mask) for rollout in rollouts]
    at = np.concatenate([start + own - 1 for start, own in zip(starts, actions, strict=False)])
    found = _scored(logits[torch.from_numpy(at).to(logits.device)], rollouts, actions, kind)
    out: list[Segment] = []
    for index, (logprobs, heads, entropies) in enumerate(found):
        every = np.concatenate([[np.nan], raw[starts[index] : starts[index + 1]]]).astype(np.float32)
        every[actions[index]] = logprobs
        out.append(Segment(logprobs, heads, entropies, every))
    return out


def packs(model: PreTrainedModel, rollouts: Sequence[Rollout], *, tolerance: float = 0.02) -> bool:
    """Whether the model keeps packed segments apart: scored packed, two segments are what they are when padded."""
    first = rollouts[:2]
    pairs = zip(
        score_segments(model, first, kind="raw", packed=True), score_segments(model, first, kind="raw"), strict=True
    )
    return all(bool((np.abs(a.token_logprobs - b.token_logprobs)[1:] <= tolerance).all()) for a, b in pairs)


def _ids(rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.asarray(rollout.tokens, dtype=np.int64)) for rollout in rollouts]


def _taken(logits: torch.Tensor, tokens: torch.Tensor, at_once: int = 512) -> torch.Tensor:
    """Raw log-probs [n] of tokens [n] under logits [n, V], in float32, a few rows at a time."""
    pieces = [
        log_probs(logits[top : top + at_once].float()).gather(-1, tokens[top : top + at_once, None])[:, 0]
        for top in range(0, len(tokens), at_once)
    ]
    return torch.cat(pieces) if pieces else logits.new_zeros(0)


def _scored(
    logits: torch.Tensor, rollouts: Sequence[Rollout], actions: Sequence[NDArray[np.int64]], kind: str
) -> list[tuple[NDArray[np.float32], NDArray[np.float32] | None, NDArray[np.float32]]]:
    """From the logits [A, V] that predict each action."""
    settings = [one for rollout, at in zip(rollouts, actions, strict=True) for one in _settings(rollout, at, kind)]
    logprobs = log_probs(process_rows(logits, settings)) if settings else logits
    spread = entropy(logprobs).cpu().numpy()
    out: list[tuple[NDArray[np.float32], NDArray[np.float32] | None, NDArray[np.float32]]] = []
    start = 0
    for rollout, at in zip(rollouts, actions, strict=True):
        own = logprobs[start : start + len(at)].cpu().numpy()
        taken = np.take_along_axis(own, np.asarray(rollout.tokens)[at].astype(np.int64)[:, None], 1)[:, 0]
        out.append((taken, _at_heads(own, rollout), spread[start : start + len(at)]))
        start += len(at)
    return out


@torch.inference_mode()
def token_logprobs(model: PreTrainedModel, sequences: Sequence[NDArray[Any]]) -> list[NDArray[np.float32]]:
    """Raw log-probs [T - 1] of each sequence's tokens given those before, in one forward pass, padded on the right."""
    rows = [torch.from_numpy(np.asarray(one, dtype=np.int64)) for one in sequences]
    lengths = [len(one) - 1 for one in rows]
    row = torch.from_numpy(np.repeat(np.arange(len(rows)), lengths))
    logits = _logits(model, rows, row, torch.cat([torch.arange(length) for length in lengths]))
    taken = _taken(logits, torch.cat([one[1:] for one in rows]).to(logits.device)).cpu().numpy()
    return np.split(taken, np.cumsum(lengths)[:-1])


@torch.inference_mode()
def next_logprobs(model: PreTrainedModel, tokens: NDArray[Any], sampler: Sampler | None) -> NDArray[np.float32]:
    """Behavior log-probs [V] of the token that follows `tokens`, under a recorded sampler."""
    ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
    logits = _logits(model, [ids], torch.zeros(1, dtype=torch.int64), torch.tensor([len(ids) - 1]))
    return log_probs(process_rows(logits, [settings_of(sampler)]))[0].cpu().numpy()


def _logits(
    model: PreTrainedModel, rows: Sequence[torch.Tensor], row: torch.Tensor, column: torch.Tensor
) -> torch.Tensor:
    """Logits [n, V] at n places (row, column) of a batch padded on the right."""
    device = model.device
    lengths = torch.tensor([len(ids) for ids in rows])
    tokens = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device)
    mask = (torch.arange(tokens.shape[1])[None] < lengths[:, None]).long().to(device)
    row, column = row.to(device), column.to(device)
    options: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        # Most of a prompt is never asked for, and a row of logits is as wide as the vocabulary.
        options["logits_to_keep"], column = column.unique(return_inverse=True)
    return model(input_ids=tokens, attention_mask=mask, use_cache=False, **options).logits[row, column]


def _packed_logits(model: PreTrainedModel, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits [sum of (length - 1), V] that predict each row's tokens but its first, all rows in one."""
    tokens = torch.cat(list(rows))[None].to(model.device)
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None].to(model.device)
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
    last = torch.cumsum(torch.tensor([len(row) for row in rows]), 0) - 1
    inner = torch.ones(len(logits), dtype=torch.bool)
    inner[last] = False
    return logits[inner.to(logits.device)]


def _piece(
    model: PreTrainedModel, batch: TokenBatch, first: int, end: int, kind: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    starts = batch.cu_seqlens.long()
    rows = [batch.tokens[int(starts[row]) : int(starts[row + 1])] for row in range(first, end)]
    chosen = (batch.sequence >= first) & (batch.sequence < end)
    row = batch.sequence[chosen]
    logits = _logits(model, rows, row - first, batch.logit_index[chosen] - starts[row])
    chain = {"raw": (), "tempered": CHAIN[:1], "behavior": CHAIN}[kind]
    values = {name: getattr(batch, name)[chosen].to(logits.device) for name in chain}
    logprobs = log_probs(process(logits, chain=chain, **values))
    tokens = batch.tokens[batch.action_index[chosen]].to(logits.device)
    taken = logprobs.gather(-1, tokens[:, None])[:, 0]
    spread = entropy(logprobs.detach())
    if batch.heads is None:
        return taken, taken[:0], spread
    counts = batch.heads.counts
    ids = batch.heads.tokens[chosen.repeat_interleave(counts)].to(logits.device)
    local = torch.arange(len(taken), device=logits.device).repeat_interleave(counts[chosen].to(logits.device))
    return taken, logprobs[local, ids], spread


def _settings(rollout: Rollout, at: NDArray[np.int64], kind: str) -> list[Settings]:
    if kind == "raw":
        return [Settings()] * len(at)
    found: list[Settings] = []
    known: dict[int, Settings] = {}
    for position in at.tolist():
        sampler = sampler_at(rollout, position)
        settings = known.get(id(sampler))
        if settings is None:
            settings = settings_of(sampler, f"rollout {rollout.rollout_id!r}: token {position}: sampler")
            if kind == "tempered":
                settings = Settings(temperature=settings.temperature)
            known[id(sampler)] = settings
        found.append(settings)
    return found


def _at_heads(logprobs: NDArray[np.float32], rollout: Rollout) -> NDArray[np.float32] | None:
    heads = rollout.heads
    if heads is None or heads.tokens is None:
        return None
    counts = np.full(len(logprobs), heads.size or 0) if heads.counts is None else heads.counts
    return logprobs[np.repeat(np.arange(len(logprobs)), counts), heads.tokens]


def _refuse(batch: TokenBatch, kind: str) -> None:
    order = PENALTY_BITS[FILTERS_FIRST] if kind == "tempered" else 0  # no filter is applied, so none comes first
    penalties = batch.penalties & ~order
    wrong = (penalties != 0) | batch.temperature.isnan()
    if not bool(wrong.any()):
        return
    at = int(wrong.nonzero()[0, 0])
    bits = int(penalties[at])
    names = [name for name, bit in PENALTY_BITS.items() if bits & bit]
    if math.isnan(float(batch.temperature[at])) and "unrecorded" not in names:
        names.append("an unknown temperature")
    raise UnsupportedRecordError(
        f"rollout {batch.rollout_ids[int(batch.sequence[at])]!r}: action {at} of the batch: "
        f"wanted a sampler of temperature, top_k, top_p and min_p, got {', '.join(names)}"
    )
