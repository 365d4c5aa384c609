"""Log-probs of another kind as behavior log-probs, where the record allows it exactly."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rollstore.batch.arguments import check_batch, check_whole
from rollstore.batch.token_batch import PENALTY_BITS, REMOVED, RESHAPED, Heads, Kind, TokenBatch


def as_behavior(batch: TokenBatch, *, vocab_size: int | None = None) -> TokenBatch:
    """Relabel, or temper again, what is known to be the behavior distribution; leave everything else as it is.

    A tempered log-prob is the behavior's when nothing was taken away; a raw one when moreover nothing moved the logits
    and the temperature is 1. A raw one at another temperature becomes log q / T - logsumexp(head / T) where the raw
    head is complete, which takes the width of the output layer, `vocab_size`, to know: dividing by T alone is wrong.
    """
    check_batch(batch)
    if vocab_size is not None:
        check_whole("vocab_size", vocab_size, 1)

    def off(names: tuple[str, ...]) -> Tensor:
        return (batch.penalties & sum(PENALTY_BITS[name] for name in names)) == 0

    unfiltered = (batch.top_k == 0) & (batch.top_p >= 1) & (batch.min_p <= 0) & off(REMOVED)
    unfiltered = unfiltered & off(("not_honoured", "unrecorded"))
    untouched = unfiltered & off(RESHAPED)
    neutral = untouched & (batch.temperature == 1)

    def relabelled(kind: Tensor) -> Tensor:
        same = ((kind == Kind.tempered) & unfiltered) | ((kind == Kind.raw) & neutral)
        return torch.where(same, int(Kind.behavior), kind)

    changed = replace(batch, behavior_kind=relabelled(batch.behavior_kind), head_kind=relabelled(batch.head_kind))
    if vocab_size is None or batch.heads is None:
        return changed
    complete = (batch.heads.counts == vocab_size) & (batch.head_kind == Kind.raw)
    return _tempered(changed, batch.heads, complete & untouched & (batch.temperature > 0))


def _tempered(batch: TokenBatch, heads: Heads, which: Tensor) -> TokenBatch:
    """Temper the raw log-probs and heads of the actions `which` [A]."""
    places = torch.arange(batch.actions, device=which.device)
    action = torch.repeat_interleave(places, heads.counts, output_size=len(heads.tokens))
    divided = heads.logprobs.double() / batch.temperature.double()[action]
    top = torch.full((batch.actions,), -torch.inf, dtype=torch.float64, device=which.device)
    top = top.scatter_reduce(0, action, divided, "amax")
    total = torch.zeros_like(top).index_add(0, action, (divided - top[action]).exp())
    norm = top + total.log()
    own = which & (batch.behavior_kind == Kind.raw)
    logprobs = batch.behavior_logprobs.double() / batch.temperature.double() - norm
    tempered = torch.where(which[action], divided - norm[action], heads.logprobs.double()).float()
    return replace(
        batch,
        behavior_logprobs=torch.where(own, logprobs.float(), batch.behavior_logprobs),
        behavior_kind=torch.where(own, int(Kind.behavior), batch.behavior_kind),
        head_kind=torch.where(which, int(Kind.behavior), batch.head_kind),
        heads=heads._replace(logprobs=tempered),
    )
