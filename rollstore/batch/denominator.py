"""Ask `usable_as_behavior` for every distinct setting in a batch, and refuse with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from rollstore.batch.arguments import check_batch
from rollstore.batch.token_batch import PENALTY_BITS, REMOVED, RESHAPED, Kind, TokenBatch, divisible
from rollstore.errors import UnsupportedRecordError
from rollstore.usable import FILTERS_FIRST, Draw, usable_as_behavior

What = Literal["behavior", "head"]
COLUMNS = ("behavior_kind", "head_kind", "temperature", "top_k", "top_p", "min_p", "penalties")
"""What a setting is made of, beside what was recorded."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of drawing that occurs in a batch, and the first row where it does.

    logprob, head: whether the actions drawn so have a recorded log-prob, and a head.
    """

    behavior_kind: str
    head_kind: str
    draw: Draw | None
    row: int
    logprob: bool
    head: bool


def settings(batch: TokenBatch) -> tuple[Setting, ...]:
    """The distinct settings of the actions that have weight, and a log-prob or a head.

    Settings change only between runs of actions, so only where runs begin is looked at. The answer is kept with the
    batch until one of its columns is changed in place: on an accelerator this is the one transfer to the host, once a
    batch and not once a loss. Raises `UnsupportedRecordError` where `valid` denies log-probs that are there.
    """
    check_batch(batch)
    versions = _versions(batch)
    kept = batch.__dict__.get("_settings")
    if kept is None or versions is None or kept[0] != versions:
        kept = (versions, _settings(batch))
        object.__setattr__(batch, "_settings", kept)
    return kept[1]


def _versions(batch: TokenBatch) -> tuple[int, ...] | None:
    """How often each column has been written to. None where torch does not count that (inference mode)."""
    columns = [batch.weights, batch.valid, batch.behavior_logprobs, *(getattr(batch, name) for name in COLUMNS)]
    if batch.heads is not None:
        columns.append(batch.heads.counts)
    if any(column.is_inference() for column in columns):
        return None
    return tuple(column._version for column in columns)


def _settings(batch: TokenBatch) -> tuple[Setting, ...]:
    _refuse_stale(batch)
    recorded = batch.recorded
    has_head = torch.zeros_like(recorded) if batch.heads is None else batch.heads.counts > 0
    active = torch.nonzero((batch.weights != 0) & (recorded | has_head)).squeeze(-1)
    columns = (recorded, has_head, *(getattr(batch, name) for name in COLUMNS))
    table = torch.stack([column[active].to(torch.float64) for column in columns], dim=1)
    table = torch.nan_to_num(table, nan=-1.0)  # a temperature that was not recorded; NaN would begin a run everywhere
    begins = torch.ones(len(active), dtype=torch.bool, device=active.device)
    begins[1:] = (table[1:] != table[:-1]).any(dim=1)
    first = torch.nonzero(begins).squeeze(-1)
    found: dict[tuple[float, ...], int] = {}
    for values, row in zip(table[first].tolist(), batch.sequence[active[first]].tolist(), strict=True):
        found.setdefault(tuple(values), row)
    return tuple(_setting(values, row) for values, row in found.items())


def _refuse_stale(batch: TokenBatch) -> None:
    """Raise where a log-prob was set and `valid` was not: the actions would silently be left out as missing."""
    denied = (batch.weights != 0) & divisible(batch.behavior_logprobs) & ~batch.valid
    if bool(denied.any()):
        row = int(batch.sequence[denied][0])
        raise UnsupportedRecordError(
            f"rollout {batch.rollout_ids[row]!r}: batch.valid: wanted True where there is a behavior log-prob, got "
            f"False for {int(denied.sum())} of them in the batch; set valid with them, or weight 0 to leave them out"
        )


def _setting(values: tuple[float, ...], row: int) -> Setting:
    logprob, head, kind, head_kind, temperature, top_k, top_p, min_p, bits = values
    on = {name for name, bit in PENALTY_BITS.items() if int(bits) & bit}
    draw = Draw(
        temperature=None if temperature < 0 else temperature,
        top_k=int(top_k),
        top_p=top_p,
        min_p=min_p,
        reshaped=tuple(name for name in RESHAPED if name in on),
        removed=tuple(name for name in REMOVED if name in on),
        honoured="not_honoured" not in on,
        filters_first=FILTERS_FIRST in on,
    )
    return Setting(
        behavior_kind=Kind(int(kind)).name,
        head_kind=Kind(int(head_kind)).name,
        draw=None if "unrecorded" in on else draw,
        row=row,
        logprob=bool(logprob),
        head=bool(head),
    )


@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]  # torch leaves its decorator untyped
def refuse_unusable(batch: TokenBatch, *, what: What = "behavior") -> None:
    """Raise unless every recorded log-prob that has weight may be a denominator.

    what: the log-probs of the actions, or those of the heads. Raises `UnsupportedRecordError` naming the first rollout
    and the reason.
    """
    if what not in get_args(What):
        raise ValueError(f"what: wanted 'behavior' or 'head', got {what!r}")
    for setting in settings(batch):
        recorded = setting.logprob if what == "behavior" else setting.head
        kind = setting.behavior_kind if what == "behavior" else setting.head_kind
        verdict = usable_as_behavior(kind, setting.draw, batch.trainer_transform)
        if recorded and not verdict.usable:
            where = f"rollout {batch.rollout_ids[setting.row]!r}"
            raise UnsupportedRecordError(f"{where}: its {what} log-probs cannot be a denominator: {verdict.reason}")
