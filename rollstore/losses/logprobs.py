"""Log-probs of the drawn tokens and of head ids from hidden states, without ever holding [A, V]."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollstore.losses.transform import Recorded, divisor, dropped

ELEMENTS = 1 << 25
"""Logits in one chunk, at most, when the caller does not say how many actions it takes: 128 MiB of float32."""


def logprobs_of_logits(
    logits: Tensor,
    tokens: Tensor,
    head_tokens: Tensor | None = None,
    head_counts: Tensor | None = None,
    *,
    how: Recorded | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(log-probs of `tokens` [A], of `head_tokens` [H] or None) from logits [A, V], with gradient; the plain way.

    head_counts [A]: how many of head_tokens belong to each action. how: the recorded transform to apply. A token
    that a filter takes away has log-prob -inf. Computed in float32 or wider.
    """
    how = how or Recorded()
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if how.temperature is not None:
        z = z / divisor(how.temperature, z.dtype)[:, None]
    gone = dropped(z.detach(), how)
    if gone is not None:
        z = z.masked_fill(gone, -torch.inf)
    log_p = z - z.logsumexp(-1, keepdim=True)
    own = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    if head_tokens is None:
        return own, None
    return own, log_p[_rows(head_tokens, head_counts, len(z)), head_tokens]


def selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    head_tokens: Tensor | None = None,
    head_counts: Tensor | None = None,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    support: tuple[Tensor, Tensor] | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(log-probs of `tokens` [A], of `head_tokens` [H] or None) from hidden [A, D] and weight [V, D], with gradient.

    A chunk of actions at a time; the backward pass computes each chunk's logits again, so [A, V] never exists. Values
    and gradients are those of `logprobs_of_logits(hidden @ weight.T, ...)`. head_counts [A] says how many of
    head_tokens [H] belong to each action. temperature, top_k, top_p, min_p [A] and support (tokens [S], counts [A]):
    the recorded transform to apply, where asked. chunk: actions at a time. Products are taken in the dtype of the
    inputs (autocast's, when on), everything after them in float32 or wider.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden, weight: wanted [A, D] and [V, D], got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if tokens.shape != hidden.shape[:1]:
        raise ValueError(f"tokens: wanted one id an action ({len(hidden)},), got {tuple(tokens.shape)}")
    if (head_tokens is None) != (head_counts is None):
        raise ValueError("head_tokens, head_counts: wanted both or neither, got one")
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        narrow = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(narrow), weight.to(narrow)
    empty = torch.zeros(0, dtype=torch.int64, device=hidden.device)
    ids = empty if head_tokens is None else head_tokens
    counts = torch.zeros_like(tokens) if head_counts is None else head_counts
    how = Recorded(temperature, top_k, top_p, min_p, *(support or (None, None)))
    size = chunk or _even(len(tokens), max(1, ELEMENTS // weight.shape[0]))
    own, heads = _Selected.apply(hidden, weight, tokens, ids, counts, how, size)  # pyright: ignore[reportGeneralTypeIssues]  # torch types apply() as Any
    return own, (None if head_tokens is None else heads)


def _even(actions: int, most: int) -> int:
    """Actions at a time, so that chunks of at most `most` are about as large as one another."""
    pieces = max(1, -(-actions // most))
    return max(1, -(-actions // pieces))


def _rows(head_tokens: Tensor, head_counts: Tensor | None, actions: int) -> Tensor:
    if head_counts is None:
        raise ValueError("head_counts: wanted the entries of each action, got None")
    places = torch.arange(actions, device=head_tokens.device)
    return torch.repeat_interleave(places, head_counts, output_size=len(head_tokens))


class _Selected(torch.autograd.Function):
    """The chunked computation. Saves its inputs and two numbers an action, nothing of size V."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, ids: Tensor, counts: Tensor, how: Recorded, size: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        own = torch.empty(len(tokens), dtype=wide, device=hidden.device)
        heads = torch.empty(len(ids), dtype=wide, device=hidden.device)
        norms = torch.empty_like(own)
        rows = _rows(ids, counts, len(tokens))
        parts = _parts(tokens, counts, len(ids), how, size)
        room = _room(hidden, weight, wide, size)
        for part in parts:
            z, _ = part.logits(hidden, weight, wide, room)
            local = rows[part.heads] - part.of.start
            own[part.of] = z.gather(-1, tokens[part.of][:, None]).squeeze(-1)
            heads[part.heads] = z[local, ids[part.heads]]
            top = z.amax(-1)
            norm = top + z.sub_(top[:, None]).exp_().sum(-1).log()  # in place: z is the largest thing there is
            norms[part.of] = norm
            own[part.of] -= norm
            heads[part.heads] -= norm[local]
        ctx.save_for_backward(hidden, weight, tokens, ids, rows, norms)
        ctx.parts, ctx.size = parts, size
        return own, heads

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, ids, rows, norms = ctx.saved_tensors
        grad_own, grad_heads = grads
        wide = norms.dtype
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if want_weight else None
        room = _room(hidden, weight, wide, ctx.size)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in ctx.parts:
                z, gone = part.logits(hidden, weight, wide, room)
                local = rows[part.heads] - part.of.start
                total = grad_own[part.of].clone().index_add_(0, local, grad_heads[part.heads])
                dz = z.sub_(norms[part.of][:, None]).exp_().mul_(-total[:, None])
                dz.scatter_add_(-1, tokens[part.of][:, None], grad_own[part.of][:, None])
                dz.index_put_((local, ids[part.heads]), grad_heads[part.heads], accumulate=True)
                if gone is not None:
                    dz.masked_fill_(gone, 0)  # a token that a filter took away is -inf whatever its logit
                if part.how.temperature is not None:
                    dz.div_(divisor(part.how.temperature, wide)[:, None])
                dz = dz.to(weight.dtype)
                if grad_hidden is not None:
                    torch.mm(dz, weight, out=grad_hidden[part.of])
                if grad_weight is not None:
                    if weight.dtype == wide:
                        grad_weight.addmm_(dz.T, hidden[part.of])
                    else:
                        grad_weight.add_(dz.T @ hidden[part.of])
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _room(hidden: Tensor, weight: Tensor, wide: torch.dtype, size: int) -> Tensor | None:
    """Space [size, V] for the logits of one chunk after another; None where they must be widened, and are new anyway.

    Getting as much memory anew for each chunk, page by page, costs as much as the arithmetic on it.
    """
    if weight.dtype != wide:
        return None
    return torch.empty(min(size, len(hidden)), len(weight), dtype=wide, device=weight.device)


class _Part(NamedTuple):
    """One chunk of actions, its head entries, and the transform on it."""

    of: slice
    heads: slice
    how: Recorded

    def logits(
        self, hidden: Tensor, weight: Tensor, wide: torch.dtype, room: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(tempered and filtered logits [C, V] of the chunk, in `room` if given; which of them were taken away)."""
        own = hidden[self.of]
        z = (own @ weight.T).to(wide) if room is None else torch.mm(own, weight.T, out=room[: len(own)])
        if self.how.temperature is not None:
            z.div_(divisor(self.how.temperature, wide)[:, None])
        gone = dropped(z, self.how)
        return (z if gone is None else z.masked_fill_(gone, -torch.inf)), gone


def _parts(tokens: Tensor, counts: Tensor, heads: int, how: Recorded, size: int) -> list[_Part]:
    """Cut actions into chunks, and with them their heads and supports. With heads the bounds go to the host once."""
    starts = list(range(0, len(tokens), size))
    stops = [min(start + size, len(tokens)) for start in starts]
    bounds = _bounds(counts, stops) if heads else [0] * (len(stops) + 1)
    support_bounds = _bounds(how.support_counts, stops) if how.support_counts is not None else [0] * (len(stops) + 1)

    def cut(start: int, stop: int, at: int) -> Recorded:
        values = {
            name: value[start:stop]
            for name, value in how._asdict().items()
            if value is not None and name != "support_tokens"
        }
        if how.support_tokens is not None:
            values["support_tokens"] = how.support_tokens[support_bounds[at] : support_bounds[at + 1]]
        return Recorded(**values)

    return [
        _Part(slice(start, stop), slice(bounds[at], bounds[at + 1]), cut(start, stop, at))
        for at, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


def _bounds(counts: Tensor, stops: list[int]) -> list[int]:
    """Where each chunk's flat entries begin, and the end."""
    total = torch.cumsum(counts, 0)
    return [0, *total[[stop - 1 for stop in stops]].tolist()] if stops else [0]
