"""Log-probs of the drawn tokens and of head ids from hidden states, without ever holding [A, V]."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollstore.losses.arguments import at_hand, number, tensor, values
from rollstore.losses.transform import Recorded, divisor, dropped

ELEMENTS = 1 << 25
"""Logits in one chunk, at most, when the caller does not say how many actions it takes: 128 MiB of float32."""
FILTERED = 8
"""Chunks are smaller by this where top_k or top_p applies: to sort logits takes as much again about eight times."""


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
    if logits.dim() != 2:
        raise ValueError(f"logits: wanted [A, V], got {tuple(logits.shape)}")
    _fitting(tokens, head_tokens, head_counts, how, *logits.shape)
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
    inputs (autocast's, when on), everything after them in float32 or wider. Only hidden and weight get a gradient.
    Raises `ValueError` or `TypeError` for what does not fit; ids outside the vocabulary on an accelerator fail there.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden, weight: wanted [A, D] and [V, D], got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if support is not None and len(support) != 2:
        raise TypeError(f"support: wanted (tokens [S], counts [A]), got {len(support)} values")
    if chunk is not None:
        number("chunk", chunk, 1)
    how = Recorded(temperature, top_k, top_p, min_p, *(support or (None, None)))
    _fitting(tokens, head_tokens, head_counts, how, len(hidden), len(weight))
    for name in ("temperature", "top_p", "min_p"):
        column: Tensor | None = getattr(how, name)
        if column is not None and column.requires_grad:
            raise ValueError(f"{name}: wanted a column without gradient, got one with: none is computed for it")
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        narrow = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(narrow), weight.to(narrow)
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise TypeError(f"hidden, weight: wanted one float dtype, got {hidden.dtype} and {weight.dtype}")
    empty = torch.zeros(0, dtype=torch.int64, device=hidden.device)
    ids = empty if head_tokens is None else head_tokens
    counts = torch.zeros_like(tokens) if head_counts is None else head_counts
    most = ELEMENTS // (1 if top_k is None and top_p is None else FILTERED)
    size = chunk or _even(len(tokens), max(1, most // weight.shape[0]))
    own, heads = _Selected.apply(hidden, weight, tokens, ids, counts, size, *how)  # pyright: ignore[reportGeneralTypeIssues]  # torch types apply() as Any
    return own, (None if head_tokens is None else heads)


def _fitting(
    tokens: Tensor, head_tokens: Tensor | None, head_counts: Tensor | None, how: Recorded, actions: int, vocabulary: int
) -> None:
    """Raise unless every argument has its shape and kind, and every id is one of the vocabulary's."""
    tensor("tokens", tokens, (actions,), "one id an action", ids=True)
    _within("tokens", tokens, vocabulary)
    if (head_tokens is None) != (head_counts is None):
        raise ValueError("head_tokens, head_counts: wanted both or neither, got one")
    lists = (("head", head_tokens, head_counts), ("support", how.support_tokens, how.support_counts))
    for name, ids, counts in lists:
        if ids is not None and counts is not None:
            tensor(f"{name}_tokens", ids, (ids.numel(),), "ids, flat over actions", ids=True)
            tensor(f"{name}_counts", counts, (actions,), ids=True)
            _within(f"{name}_tokens", ids, vocabulary)
            _add_up(name, ids, counts)
    for name in ("temperature", "top_p", "min_p", "top_k"):
        column: Tensor | None = getattr(how, name)
        if column is not None:
            tensor(name, column, (actions,), ids=name == "top_k")
    if how.temperature is not None:
        values("temperature", how.temperature, ~(how.temperature < 0), "numbers of at least 0, NaN where not recorded")


def _within(name: str, ids: Tensor, size: int) -> None:
    """Raise unless ids lie in [0, size): a negative one would silently be one from the end."""
    values(name, ids, (ids >= 0) & (ids < size), f"ids from 0 to {size - 1}")


def _add_up(name: str, ids: Tensor, counts: Tensor) -> None:
    if at_hand(counts) and int(counts.sum()) != len(ids):
        raise ValueError(_sum(name, len(ids), int(counts.sum())))


def _sum(name: str, wanted: int, got: int) -> str:
    return f"{name}_counts: wanted a sum of {wanted}, as many as {name}_tokens, got {got}"


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
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        ids: Tensor,
        counts: Tensor,
        size: int,
        *how: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        own = torch.empty(len(tokens), dtype=wide, device=hidden.device)
        heads = torch.empty(len(ids), dtype=wide, device=hidden.device)
        norms = torch.empty_like(own)
        cuts = _cuts(counts, how[-1], len(tokens), len(ids), size)
        rows = _rows(ids, counts, len(tokens))
        room = _room(hidden, weight, wide, size)
        for part in _parts(cuts, Recorded(*how)):
            z, _ = part.logits(hidden, weight, wide, room)
            local = rows[part.heads] - part.of.start
            own[part.of] = z.gather(-1, tokens[part.of][:, None]).squeeze(-1)
            heads[part.heads] = z[local, ids[part.heads]]
            top = z.amax(-1)
            norm = top + z.sub_(top[:, None]).exp_().sum(-1).log()  # in place: z is the largest thing there is
            norms[part.of] = norm
            own[part.of] -= norm
            heads[part.heads] -= norm[local]
        ctx.save_for_backward(hidden, weight, tokens, ids, rows, norms, *how)  # all: torch notices a change in place
        ctx.cuts, ctx.size = cuts, size
        return own, heads

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, ids, rows, norms, *how = ctx.saved_tensors
        grad_own, grad_heads = grads
        wide = norms.dtype
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if want_weight else None
        room = _room(hidden, weight, wide, ctx.size)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _parts(ctx.cuts, Recorded(*how)):
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
        return grad_hidden, grad_weight, *(None,) * (4 + len(how))


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


class _Cuts(NamedTuple):
    """Where each chunk's actions, head entries and support entries begin, and the end: chunks + 1 of each."""

    actions: list[int]
    heads: list[int]
    support: list[int]


def _cuts(counts: Tensor, support_counts: Tensor | None, actions: int, heads: int, size: int) -> _Cuts:
    """Cut actions into chunks, and with them their heads and supports: those bounds go to the host once."""
    bounds = [*range(0, actions, size), actions]
    none = [0] * len(bounds)
    of_heads = _bounds(counts, bounds[1:]) if heads else none
    if of_heads[-1] != heads:
        raise ValueError(_sum("head", heads, of_heads[-1]))
    return _Cuts(bounds, of_heads, none if support_counts is None else _bounds(support_counts, bounds[1:]))


def _parts(cuts: _Cuts, how: Recorded) -> Iterator[_Part]:
    """The chunks, each with its share of the transform."""
    for at, (start, stop) in enumerate(pairwise(cuts.actions)):
        share = {name: None if value is None else value[start:stop] for name, value in how._asdict().items()}
        if how.support_tokens is not None:
            share["support_tokens"] = how.support_tokens[cuts.support[at] : cuts.support[at + 1]]
        yield _Part(slice(start, stop), slice(cuts.heads[at], cuts.heads[at + 1]), Recorded(**share))


def _bounds(counts: Tensor, stops: list[int]) -> list[int]:
    """Where each chunk's flat entries begin, and the end."""
    total = torch.cumsum(counts, 0)
    return [0, *total[[stop - 1 for stop in stops]].tolist()] if stops else [0]
