"""One keyed draw for each row of logits, and what goes on record of a turn: shared by every sampler that runs on torch.

Log-probs, heads and entropies are those of the distribution before the noise, under the true temperature and filters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace as with_fields
from numpy.typing import NDArray

from rollstore.replay import noise
from rollstore.replay.arguments import whole
from rollstore.replay.transform import Settings, entropy, log_probs, process_rows, written_out
from rollstore.schema import Heads, Sampler

Head = tuple[NDArray[np.int32], NDArray[np.float32]]


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
    batch_rows: NDArray[np.int32] | None
    """[m], token rows of the forward pass that produced the token, padding included; None where the engine hides it."""
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


class Choice(NamedTuple):
    """One drawn token."""

    token: int
    logprob: float
    entropy: float
    margin: float
    runner_up: int
    head: Head


@dataclass
class Growing:
    """A turn that is being drawn: at most `limit` tokens, ended by one of `stops`."""

    limit: int
    stops: frozenset[int] = frozenset()
    choices: list[Choice] = field(default_factory=list[Choice])
    rows: list[int] = field(default_factory=list[int])
    finish: str = ""

    def __post_init__(self) -> None:
        self.limit = whole("max_new_tokens", self.limit, least=0)
        self.finish = "length" if self.limit == 0 else ""

    def take(self, choice: Choice, token_rows: int) -> None:
        """One more token; sets `finish` when it was the last."""
        self.choices.append(choice)
        self.rows.append(token_rows)
        if choice.token in self.stops:
            self.finish = "stop"
        elif len(self.choices) == self.limit:
            self.finish = "length"

    def turn(self, *, start: int, head_size: int, sampler: Sampler, key: int, sample: int, segment: int) -> Turn:
        """What goes on record: the sampler written out, with where this request would have ended."""
        stops = np.array(sorted(self.stops), dtype=np.int32)
        return Turn(
            start=start,
            tokens=self._column("token", np.int32),
            logprobs=self._column("logprob", np.float32),
            heads=joined([choice.head for choice in self.choices], head_size) if head_size else None,
            entropies=self._column("entropy", np.float32),
            batch_rows=np.array(self.rows, dtype=np.int32) if len(self.rows) == len(self.choices) else None,
            margins=self._column("margin", np.float32),
            runners_up=self._column("runner_up", np.int32),
            finish=self.finish,
            sampler=with_fields(written_out(sampler), max_tokens=self.limit, stop_token_ids=stops),
            key=key,
            sample=sample,
            segment=segment,
        )

    def _column(self, name: str, dtype: Any) -> NDArray[Any]:
        return np.array([getattr(choice, name) for choice in self.choices], dtype=dtype)


def joined(heads: Sequence[Head], head_size: int) -> Heads:
    """The heads of several draws as one column."""
    return Heads(
        size=head_size,
        counts=np.array([len(ids) for ids, _ in heads], dtype=np.int32),
        tokens=np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in heads)]),
        logprobs=np.concatenate([np.empty(0, np.float32), *(values for _, values in heads)]),
    )


def draw(
    logits: torch.Tensor,
    settings: Sequence[Settings],
    *,
    keys: Sequence[int],
    samples: Sequence[int],
    segments: Sequence[int],
    positions: Sequence[int],
    head_size: int,
) -> list[Choice]:
    """One token for each row of logits [n, V]: the argmax of processed logits plus noise; the lowest id of equals."""
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
    return [Choice(*row) for row in zip(*(column.tolist() for column in columns), heads, strict=True)]


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


def _head(ids: NDArray[np.int64], values: NDArray[np.float32]) -> Head:
    """By falling log-prob, equals by id, without what the filters dropped."""
    inside = np.flatnonzero(values > -math.inf)
    order = inside[np.lexsort((ids[inside], -values[inside]))]
    return ids[order].astype(np.int32), values[order]
