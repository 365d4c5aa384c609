"""The recorded transforms: from a model's logits to the distribution that sampled. Pure functions over rows of logits.

What each does, with ties and boundaries, so that an engine and a trainer keep the same tokens:

Settings are float32: an engine and a trainer that reads them from a packed batch then see the same boundary.

* `temperature` divides the logits; 0 keeps the highest logit alone (the lowest id of equal ones), with log-prob 0;
* `top_k` keeps every logit that is at least the k-th highest: equals of the k-th are all kept; 0 or less keeps all;
* `top_p` keeps a token when the tokens strictly likelier than it hold less than p together: equals of the last kept one
  are all kept, the likeliest always is; 1 or more keeps all. Masses are float32 probabilities summed in float64;
* `min_p` keeps a token when its log-prob is at least that of the likeliest plus ln(min_p); 0 or less keeps all.

Each works on what the ones before it in the chain kept, renormalised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from msgspec.structs import replace as with_fields

from rollstore.errors import UnsupportedRecordError
from rollstore.schema import Sampler

CHAIN = ("temperature", "top_k", "top_p", "min_p")
"""The order where a record names none. A step that does nothing at its setting may stand anywhere or be missing."""

Value = float | torch.Tensor
"""One value for all rows, or a tensor [n]."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What stood between the logits and one draw. The defaults do nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    chain: tuple[str, ...] = CHAIN


def settings_of(sampler: Sampler | None, where: str = "sampler") -> Settings:
    """What a recorded sampler stands for.

    A filter that is null was not asked for; an unknown temperature, an unhonoured sampler, and every penalty, bias or
    constraint raise UnsupportedRecordError, since log-probs computed without them would belong to another distribution.
    """
    if sampler is None:
        raise UnsupportedRecordError(f"{where}: wanted a recorded sampler, got none")
    if sampler.applied is False:
        raise UnsupportedRecordError(
            f"{where}: requested but not honoured (applied is false), so the true one is unknown"
        )
    if sampler.temperature is None:
        raise UnsupportedRecordError(f"{where}.temperature: wanted a number, got null")
    refused = {
        "repetition_penalty": sampler.repetition_penalty not in (None, 1.0),
        "presence_penalty": sampler.presence_penalty not in (None, 0.0),
        "frequency_penalty": sampler.frequency_penalty not in (None, 0.0),
        "min_tokens": sampler.min_tokens not in (None, 0),
        "logit_bias": bool(sampler.logit_bias),
        "bad_words": bool(sampler.bad_words),
        "grammar": bool(sampler.grammar),
    }
    named = [name for name, is_on in refused.items() if is_on]
    if named:
        raise UnsupportedRecordError(
            f"{where}: wanted temperature, top_k, top_p and min_p only, got {', '.join(named)}"
        )
    settings = Settings(
        temperature=float(sampler.temperature),
        top_k=max(0, sampler.top_k or 0),
        top_p=1.0 if sampler.top_p is None else float(sampler.top_p),
        min_p=sampler.min_p or 0.0,
    )
    if settings.temperature < 0 or not math.isfinite(settings.temperature):
        raise UnsupportedRecordError(
            f"{where}.temperature: wanted a number of at least 0, got {settings.temperature!r}"
        )
    return replace(settings, chain=_chain(sampler, settings, where))


def written_out(sampler: Sampler) -> Sampler:
    """The sampler as it is recorded after it was honoured: defaults and chain written out, `applied` true."""
    settings = settings_of(sampler)
    return with_fields(
        sampler,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        min_tokens=0,
        chain=settings.chain,
        applied=True,
    )


def process(
    logits: torch.Tensor,
    *,
    temperature: Value = 1.0,
    top_k: Value = 0,
    top_p: Value = 1.0,
    min_p: Value = 0.0,
    chain: Sequence[str] = CHAIN,
) -> torch.Tensor:
    """Logits [n, V] to processed logits [n, V], float32 or wider, -inf outside the kept support.

    Differentiable in what is kept; which tokens are kept has no gradient. Raises ValueError for an unknown step.
    """
    out = logits if logits.dtype == torch.float64 else logits.float()
    steps = {
        "temperature": (_temperature, temperature),
        "top_k": (_top_k, top_k),
        "top_p": (_top_p, top_p),
        "min_p": (_min_p, min_p),
    }
    for name in chain:
        if name not in steps:
            raise ValueError(f"chain: wanted steps out of {', '.join(CHAIN)}, got {name!r}")
        step, value = steps[name]
        column = torch.as_tensor(value, dtype=torch.float32, device=out.device).double().expand(len(out))
        out = step(out, column)
    return out


def process_rows(logits: torch.Tensor, settings: Sequence[Settings]) -> torch.Tensor:
    """`process` with each row's own settings: logits [n, V], n settings."""
    if len(settings) != len(logits):
        raise ValueError(f"settings: wanted {len(logits)}, one for each row of logits, got {len(settings)}")
    pieces: list[torch.Tensor] = []
    start = 0
    for chain, members in groupby(settings, key=lambda one: one.chain):
        rows = list(members)
        columns = {
            name: torch.tensor([getattr(row, name) for row in rows], dtype=torch.float64, device=logits.device)
            for name in CHAIN
        }
        pieces.append(process(logits[start : start + len(rows)], chain=chain, **columns))
        start += len(rows)
    return torch.cat(pieces) if len(pieces) != 1 else pieces[0]


def log_probs(processed: torch.Tensor) -> torch.Tensor:
    """Processed logits [n, V] to the log-probs of the distribution that samples, renormalised over the support."""
    return torch.log_softmax(processed, dim=-1)


def entropy(logprobs: torch.Tensor) -> torch.Tensor:
    """Entropy in nats [n] of log-probs [n, V]; tokens outside the support count nothing."""
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -math.inf, 0.0)).sum(-1)


def _chain(sampler: Sampler, settings: Settings, where: str) -> tuple[str, ...]:
    if sampler.chain is None:
        return CHAIN
    chain = tuple(sampler.chain)
    unknown = [name for name in chain if name not in CHAIN]
    if unknown:
        raise UnsupportedRecordError(f"{where}.chain: wanted steps out of {', '.join(CHAIN)}, got {', '.join(unknown)}")
    if len(set(chain)) != len(chain):
        raise UnsupportedRecordError(f"{where}.chain: wanted each step once, got {', '.join(chain)}")
    off = Settings()
    missing = [name for name in CHAIN if name not in chain and getattr(settings, name) != getattr(off, name)]
    if missing:
        raise UnsupportedRecordError(
            f"{where}.chain: wanted {', '.join(missing)} in it, which is set, got {', '.join(chain)}"
        )
    return chain


def _temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature).to(logits.dtype)[:, None]
    if not bool(greedy.any()):
        return scaled
    ids = torch.arange(logits.shape[-1], device=logits.device)
    first = torch.where(logits == logits.amax(-1, keepdim=True), ids, logits.shape[-1]).amin(-1, keepdim=True)
    return scaled.masked_fill(greedy[:, None] & (ids != first), -math.inf)


def _top_k(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    width = logits.shape[-1]
    k = torch.where(top_k > 0, top_k, width).clamp(max=width).long()
    if bool((k == width).all()):
        return logits
    highest = int(torch.where(k == width, 1, k).max())
    floor = logits.detach().topk(highest, dim=-1).values.gather(-1, (k.clamp(max=highest) - 1)[:, None])
    return logits.masked_fill((logits < floor) & (k < width)[:, None], -math.inf)


def _top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    if bool((top_p >= 1).all()):
        return logits
    fixed = logits.detach()
    kept = int((fixed > -math.inf).sum(-1).max())
    # What earlier filters dropped has no mass, so it need not be sorted.
    ordered = (
        fixed.topk(kept, dim=-1).values if 4 * kept < fixed.shape[-1] else fixed.sort(dim=-1, descending=True).values
    )
    mass = torch.exp(ordered - fixed.logsumexp(-1, keepdim=True)).double()
    likelier = mass.cumsum(-1) - mass
    count = (likelier < top_p[:, None]).sum(-1).clamp(min=1)
    floor = ordered.gather(-1, (count - 1)[:, None])
    return logits.masked_fill((logits < floor) & (top_p < 1)[:, None], -math.inf)


def _min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    if bool((min_p <= 0).all()):
        return logits
    fixed = logits.detach()
    floor = fixed.amax(-1, keepdim=True) + torch.log(min_p.clamp(min=0)).to(fixed.dtype)[:, None]
    return logits.masked_fill(fixed < floor, -math.inf)
