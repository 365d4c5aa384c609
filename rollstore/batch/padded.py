"""Padded matrices, as trainers want them, from a packed batch; lengths are the stored ones, ids decide nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rollstore.batch.arguments import check_batch, check_whole
from rollstore.batch.token_batch import TokenBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class Padded:
    """B rows of width W. tokens, position_ids int64 [B, W]; attention_mask, action_mask bool [B, W]; lengths int64 [B].

    token_row, token_column int64 [T] and row, column int64 [A]: where the tokens and the actions of the batch stand.
    """

    tokens: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    lengths: Tensor
    token_row: Tensor
    token_column: Tensor
    row: Tensor
    column: Tensor

    def spread(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[A] -> [B, W]: each at the place of its token; `fill` elsewhere."""
        _check_values(values, self.row, "an action", fill)
        return _at(values, self.row, self.column, self.tokens.shape, fill)

    def shifted(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[A] -> [B, W - 1]: each at the place of the logits that score it, as `logits[:, :-1]` has them."""
        _check_values(values, self.row, "an action", fill)
        rows, width = self.tokens.shape
        return _at(values, self.row, self.column - 1, (rows, max(width - 1, 0)), fill)

    def of_tokens(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[T] -> [B, W]: anything with a value a token, as marks of media."""
        _check_values(values, self.token_row, "a token", fill)
        return _at(values, self.token_row, self.token_column, self.tokens.shape, fill)

    def flat(self, matrix: Tensor) -> Tensor:
        """[B, W] or, shifted, [B, W - 1] -> [A]. Raises ValueError on another shape."""
        rows, width = self.tokens.shape
        _check_matrix(matrix, rows)
        if matrix.shape[1] not in (width, width - 1):
            raise ValueError(f"matrix: wanted width {width}, or {width - 1} shifted, got {matrix.shape[1]}")
        return matrix[self.row, self.column - (width - matrix.shape[1])]


def to_padded(
    batch: TokenBatch, *, side: Literal["left", "right"] = "right", pad_id: int = 0, width: int | None = None
) -> Padded:
    """Rows padded on one side with `pad_id`, to the longest or to `width`.

    A position in a row counts from its first token, wherever that stands; of padding it is 0. Raises ValueError where
    a row is longer than `width`.
    """
    if side not in ("left", "right"):
        raise ValueError(f"side: wanted 'left' or 'right', got {side!r}")
    check_batch(batch)
    check_whole("pad_id", pad_id)
    batch.unshared("to_padded")
    lengths = batch.cu_seqlens.long().diff()
    width = _width(lengths, width, "width")
    row = torch.repeat_interleave(torch.arange(batch.rows, device=lengths.device), lengths)
    gap = width - lengths if side == "left" else torch.zeros_like(lengths)
    column = batch.position_ids + gap[row]
    shape, at, place = (batch.rows, width), batch.action_index, batch.position_ids
    ones = torch.ones_like(column, dtype=torch.bool)
    actions = torch.ones_like(at, dtype=torch.bool)
    return Padded(
        tokens=_at(batch.tokens, row, column, shape, pad_id),
        position_ids=_at(place, row, column, shape, 0),
        attention_mask=_at(ones, row, column, shape, 0),
        action_mask=_at(actions, row[at], column[at], shape, 0),
        lengths=lengths,
        token_row=row,
        token_column=column,
        row=row[at],
        column=column[at],
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Responses:
    """Prompts and responses apart: what stands before a row's first action, and all that follows.

    prompts int64 [B, P], padded on the left; responses int64 [B, R], on the right: tool outputs between actions are
    part of them. prompt_mask, response_attention, action_mask bool. position_ids int64 [B, P + R] of both together.
    row, column int64 [A]: where the actions stand in responses.
    """

    prompts: Tensor
    prompt_mask: Tensor
    responses: Tensor
    response_attention: Tensor
    action_mask: Tensor
    position_ids: Tensor
    row: Tensor
    column: Tensor

    def spread(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[A] -> [B, R]; `fill` where there is no action."""
        _check_values(values, self.row, "an action", fill)
        return _at(values, self.row, self.column, self.responses.shape, fill)

    def flat(self, matrix: Tensor) -> Tensor:
        """[B, R] -> [A]. Raises ValueError on another shape."""
        rows, width = self.responses.shape
        _check_matrix(matrix, rows)
        if matrix.shape[1] != width:
            raise ValueError(f"matrix: wanted width {width}, of responses alone, got {matrix.shape[1]}")
        return matrix[self.row, self.column]


def to_responses(
    batch: TokenBatch, *, pad_id: int = 0, prompt_width: int | None = None, response_width: int | None = None
) -> Responses:
    """Cut each row at its first action; one without actions is all prompt. Raises ValueError where one is too long."""
    check_batch(batch)
    check_whole("pad_id", pad_id)
    batch.unshared("to_responses")
    lengths = batch.cu_seqlens.long().diff()
    row = torch.repeat_interleave(torch.arange(batch.rows, device=lengths.device), lengths)
    at = batch.action_index
    first = lengths.scatter_reduce(0, row[at], batch.position_ids[at], "amin", include_self=True)
    prompt_width = _width(first, prompt_width, "prompt_width")
    response_width = _width(lengths - first, response_width, "response_width")
    # Prompts end, and responses begin, at one column in every row.
    column = batch.position_ids - first[row] + prompt_width
    shape = (batch.rows, prompt_width + response_width)
    tokens = _at(batch.tokens, row, column, shape, pad_id)
    attention = _at(torch.ones_like(column, dtype=torch.bool), row, column, shape, 0)
    actions = _at(torch.ones_like(at, dtype=torch.bool), row[at], column[at], shape, 0)
    return Responses(
        prompts=tokens[:, :prompt_width],
        prompt_mask=attention[:, :prompt_width],
        responses=tokens[:, prompt_width:],
        response_attention=attention[:, prompt_width:],
        action_mask=actions[:, prompt_width:],
        position_ids=_at(batch.position_ids, row, column, shape, 0),
        row=row[at],
        column=column[at] - prompt_width,
    )


def _check_values(values: Any, of: Tensor, what: str, fill: Any) -> None:
    """Raise unless there is one value for each item of `of`, and `fill` is a number of their type."""
    if not isinstance(values, Tensor):
        raise TypeError(f"values: wanted a tensor, got {type(values).__name__}")
    if values.shape != of.shape:
        raise ValueError(f"values: wanted one value {what} {tuple(of.shape)}, got {tuple(values.shape)}")
    if not isinstance(fill, int | float | np.number):
        raise TypeError(f"fill: wanted a number, got {fill!r}")
    if not (values.is_floating_point() or values.is_complex()):
        info = None if values.dtype == torch.bool else torch.iinfo(values.dtype)
        least, most = (0, 1) if info is None else (info.min, info.max)
        if not (least <= fill <= most and fill == int(fill)):
            raise ValueError(f"fill: wanted a whole number from {least} to {most}, got {fill}")


def _check_matrix(matrix: Any, rows: int) -> None:
    """Raise unless it has that many rows."""
    if not isinstance(matrix, Tensor):
        raise TypeError(f"matrix: wanted a tensor, got {type(matrix).__name__}")
    if matrix.dim() < 2 or len(matrix) != rows:
        raise ValueError(f"matrix: wanted {rows} rows and a width, got {tuple(matrix.shape)}")


def _width(lengths: Tensor, wanted: int | None, name: str) -> int:
    if wanted is not None:
        check_whole(name, wanted)
    longest = int(lengths.max()) if len(lengths) else 0
    if wanted is not None and longest > wanted:
        raise ValueError(f"{name}: wanted rows of at most {wanted} tokens, got one of {longest}")
    return longest if wanted is None else wanted


def _at(values: Tensor, row: Tensor, column: Tensor, shape: tuple[int, ...] | torch.Size, fill: float) -> Tensor:
    """A matrix with `values` at the given places; differentiable in them."""
    matrix = torch.full(tuple(shape), fill, dtype=values.dtype, device=values.device)
    return matrix.index_put((row, column), values)
