"""One reply of an engine in the record's own words: engine modules make these, `conversation` makes rollouts of them.

Nothing is guessed: what an engine did not say stays null.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollstore.schema import Flag, Heads, Known, LogitBias, Media, Sampler
from rollstore.writers.weights import Weights

Ints = npt.NDArray[np.int64]

LARGEST_ID = 2**31 - 1


class Support(NamedTuple):
    """The ids kept by the filters: `counts` [A], `tokens` flat over actions. Count 0: not reported for that action."""

    counts: Ints
    tokens: Ints


class Routing(NamedTuple):
    """Experts of the tokens start, ..., start + rows - 1: ids flat over (token, layer, choice)."""

    experts: npt.NDArray[np.uint16]
    start: int
    rows: int
    layers: int
    k: int


class Place(NamedTuple):
    """Placeholder tokens of one medium in the prompt: `length` ids from `start`."""

    start: int
    length: int
    media: Media


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What one request brought: prompt [P] as the model saw it, drawn tokens [A], and what the engine said of each.

    `logprobs`, `ranks`, `entropies` and `batch_rows` are [A]; None: not reported.
    """

    prompt: Ints
    tokens: Ints
    sampler: Sampler | None = None
    logprobs: Known | None = None
    logprob_kind: str | None = None
    heads: Heads | None = None
    head_kind: str | None = None
    ranks: Known | None = None
    entropies: Known | None = None
    batch_rows: Known | None = None
    support: Support | None = None
    routing: Routing | None = None
    weights: Weights | None = None
    media: tuple[Place, ...] = ()
    request_id: str | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None
    engine_finish: str | None = None
    api_finish: str | None = None
    ending: str = "unknown"
    ending_reason: str | None = None
    started_at: datetime | None = None
    """When the request was sent, by the clock of whoever recorded it."""
    finished_at: datetime | None = None
    flags: tuple[Flag, ...] = ()
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further columns of the row: engine, policy, group_id, sample_index, requested_at, ..."""


def ids(name: str, values: Any) -> Ints:
    """int64 [n]. Raises ValueError where there are no ids: nothing is rebuilt from text."""
    if values is None or isinstance(values, str):
        raise ValueError(f"{name}: wanted token ids, got {'none' if values is None else 'text'}")
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # lists of several lengths
        array = np.asarray(values, object)
    is_list = array.ndim == 1 and (array.dtype.kind in "iu" or not array.size)
    if isinstance(values, list | tuple) and not (is_list and bool not in set(map(type, values))):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]  of any shape
        _refuse_first(name, values)  # pyright: ignore[reportUnknownArgumentType]
    if not is_list:
        got = f"{array.dtype} of shape {array.shape}" if array.ndim else type(values).__name__
        raise ValueError(f"{name}: wanted a list of token ids, got {got}")
    if array.size and (array.min() < 0 or array.max() > LARGEST_ID):
        odd = array.min() if array.min() < 0 else array.max()
        raise ValueError(f"{name}: wanted token ids from 0 to {LARGEST_ID}, got {odd}")
    return array.astype(np.int64)


def _refuse_first(name: str, values: Sequence[Any]) -> None:
    """Raise ValueError with the first that is no id. True is none, though it counts as 1."""
    for at, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"{name}[{at}]: wanted a token id, got {value!r:.40}")  # noqa: TRY004  a value of the engine's, no argument
        if not 0 <= value <= LARGEST_ID:
            raise ValueError(f"{name}: wanted token ids from 0 to {LARGEST_ID}, got {value}")


def aligned(name: str, values: Any, tokens: Ints) -> Any:
    """The values. Raises ValueError where there is not one of them for each drawn token."""
    if len(values) != len(tokens):
        raise ValueError(f"{name}: wanted {len(tokens)} entries, one for each drawn token, got {len(values)}")
    return values


def nothing_drawn() -> Known:
    """The log-probs of no tokens: an empty list, which is not the same as a list that was not reported."""
    return Known(np.zeros(0, np.float64), np.zeros(0, bool))


def shaped(sampler: Sampler) -> bool:
    """Whether anything but temperature and the filters moves the logits or takes tokens away."""
    return (
        sampler.repetition_penalty not in (None, 1.0)
        or sampler.presence_penalty not in (None, 0.0)
        or sampler.frequency_penalty not in (None, 0.0)
        or bool(sampler.min_tokens or sampler.logit_bias or sampler.bad_words or sampler.grammar)
    )


def greedy_kind(sampler: Sampler) -> str:
    """Kind of what engines report for a greedy pick: the log-softmax of the logits, without a temperature.

    It is no log-prob of the pick, which is certain; a record with temperature 0 is never a denominator.
    """
    return "unknown" if shaped(sampler) else "raw"


def biases(given: Mapping[Any, Any] | None) -> tuple[LogitBias, ...] | None:
    """{token id: bias}, with ids as JSON has them or not."""
    return tuple(LogitBias(token=int(token), bias=float(bias)) for token, bias in (given or {}).items()) or None


def words(given: Iterable[str] | str | None) -> tuple[str, ...] | None:
    """One string, several, or none."""
    return ((given,) if isinstance(given, str) else tuple(given or ())) or None


def support(kept: Any, tokens: Ints) -> Support:
    """From a list of ids, or None where nothing was said, for each drawn token."""
    sets = [
        np.asarray(() if members is None else members, np.int64) for members in aligned("sampling mask", kept, tokens)
    ]
    flat = np.concatenate(sets) if sets else np.zeros(0, np.int64)
    return Support(np.array([len(members) for members in sets], np.int64), flat)


def routing(experts: Any, tokens: int) -> Routing:
    """From experts [n, layers, k] of the n tokens before the last one: that was drawn and never went through the model.

    Raises ValueError for another shape, for more rows than tokens, and for ids that are not in 0, ..., 65535.
    """
    array = np.asarray(experts)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise ValueError(f"routed_experts: wanted ids of shape (tokens, layers, k), got {array.dtype} of {array.shape}")
    rows, layers, k = array.shape
    if rows > max(tokens - 1, 0):
        raise ValueError(f"routed_experts: wanted at most {max(tokens - 1, 0)} rows for {tokens} tokens, got {rows}")
    if array.size and (array.min() < 0 or array.max() > 65535):
        raise ValueError(f"routed_experts: wanted ids from 0 to 65535, got {array.min()} to {array.max()}")
    return Routing(array.astype(np.uint16).reshape(-1), tokens - 1 - rows, rows, layers, k)
