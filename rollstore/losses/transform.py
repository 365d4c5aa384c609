"""The recorded transform on a trainer's own logits: temperature, then top-k, top-p and min-p, or a recorded support."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Recorded(NamedTuple):
    """What to apply, each [A] or None for not at all. Values that switch a filter off (top_k 0, top_p 1, min_p 0) do.

    support_tokens [S] and support_counts [A] int64: the ids kept, flat; counts 0 keeps all.
    """

    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    support_tokens: Tensor | None = None
    support_counts: Tensor | None = None


def divisor(temperature: Tensor, dtype: torch.dtype) -> Tensor:
    """[A]; 1 where the temperature is unknown or 0, which is no distribution and is refused as a denominator."""
    return torch.where(temperature > 0, temperature, 1).to(dtype)


def dropped(logits: Tensor, how: Recorded) -> Tensor | None:
    """bool [A, V]: tokens that the filters take away from tempered `logits` [A, V]; None when there is no filter.

    top_k keeps every token at least as likely as the k-th. top_p, over what top_k left and renormalised, keeps the
    likeliest tokens until their mass reaches it. min_p keeps what is at least that share of the likeliest. A recorded
    support replaces all three where there is one.
    """
    out = None
    if how.top_k is not None or how.top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        out = torch.zeros_like(logits, dtype=torch.bool)
        if how.top_k is not None:
            place = torch.where(how.top_k > 0, how.top_k, logits.shape[-1]).clamp(max=logits.shape[-1]) - 1
            least = ordered.gather(-1, place[:, None])
            out = logits < least
            ordered = ordered.masked_fill(ordered < least, -torch.inf)
        if how.top_p is not None:
            mass = ordered.softmax(-1)
            before = mass.cumsum(-1).sub_(mass)
            late = (before >= how.top_p[:, None]) & (how.top_p[:, None] < 1)
            late[:, 0] = False
            out = out | torch.zeros_like(out).scatter(-1, order, late)
    if how.min_p is not None:
        least = logits.amax(-1, keepdim=True) + how.min_p[:, None].to(logits.dtype).log()
        low = logits < least
        out = low if out is None else out | low
    if how.support_tokens is not None and how.support_counts is not None:
        row = torch.repeat_interleave(
            torch.arange(len(logits), device=logits.device), how.support_counts, output_size=len(how.support_tokens)
        )
        outside = torch.ones_like(logits, dtype=torch.bool)
        outside[row, how.support_tokens] = False
        recorded = (how.support_counts > 0)[:, None]
        out = outside & recorded if out is None else torch.where(recorded, outside, out)
    return out
