"""Checks of what callers hand over: whole numbers, and token ids that a model has."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollstore.schema import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def whole(name: str, value: Any, *, least: int | None = None) -> int:
    """The value as an int. Raises ValueError for what is no whole number, or below `least`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name}: wanted a whole number, got {value!r}")
    if least is not None and number < least:
        raise ValueError(f"{name}: wanted at least {least}, got {number}")
    return number


def stop_ids(tokens: Iterable[Any]) -> frozenset[int]:
    """The ids that end a turn. Raises ValueError for what is no whole number."""
    return frozenset(whole("stop_token_ids", token) for token in tokens)


def prompt_ids(model: PreTrainedModel, prompts: Sequence[Any]) -> list[NDArray[np.int64]]:
    """Each prompt as int64 [T], T at least 1. Raises ValueError for a shape, a type or an id that does not fit."""
    found: list[NDArray[np.int64]] = []
    for index, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or len(ids) == 0:
            shape = list(ids.shape)
            raise ValueError(f"prompts[{index}]: wanted a flat, non-empty list of token ids, got shape {shape}")
        if ids.dtype.kind not in "iu":
            raise ValueError(f"prompts[{index}]: wanted whole token ids, got {ids.dtype}")
        _require(f"prompts[{index}]: token", ids, vocabulary(model))
        found.append(ids.astype(np.int64))
    return found


def require_vocabulary(model: PreTrainedModel, rollouts: Iterable[Rollout]) -> None:
    """Raises ValueError, naming the rollout and the position, for a token or head id that the model does not have."""
    size = vocabulary(model)
    for rollout in rollouts:
        where = f"rollout {rollout.rollout_id!r}: segment {rollout.segment}"
        _require(f"{where}: token", np.asarray(rollout.tokens), size)
        if rollout.heads is not None and rollout.heads.tokens is not None:
            _require(f"{where}: head entry", np.asarray(rollout.heads.tokens), size)


def vocabulary(model: PreTrainedModel) -> int:
    """How many token ids the model can be fed."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def _require(where: str, ids: NDArray[Any], size: int) -> None:
    strange = np.flatnonzero((ids < 0) | (ids >= size))
    if len(strange):
        at = int(strange[0])
        raise ValueError(f"{where} {at}: wanted an id of the model's vocabulary, 0 to {size - 1}, got {int(ids[at])}")
