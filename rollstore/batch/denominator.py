"""Ask `usable_as_behavior` for every distinct setting in a batch, and refuse with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rollstore.batch.token_batch import PENALTY_BITS, REMOVED, RESHAPED, Kind, TokenBatch
from rollstore.errors import UnsupportedRecordError
from rollstore.usable import Draw, usable_as_behavior


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of drawing that occurs in a batch, and the first row where it does."""

    behavior_kind: str
    head_kind: str
    draw: Draw | None
    row: int


def settings(batch: TokenBatch) -> tuple[Setting, ...]:
    """The distinct settings of the actions that have weight and a log-prob.

    Settings change only between runs of actions, so only where runs begin is looked at. The answer is kept with the
    batch: on an accelerator this is the one transfer to the host, once a batch and not once a loss.
    """
    kept = batch.__dict__.get("_settings")
    if kept is None:
        kept = _settings(batch)
        object.__setattr__(batch, "_settings", kept)
    return kept


@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]  # torch leaves its decorator untyped
def _settings(batch: TokenBatch) -> tuple[Setting, ...]:
    active = torch.nonzero((batch.weights != 0) & batch.valid).squeeze(-1)
    columns = (
        batch.behavior_kind,
        batch.head_kind,
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.min_p,
        batch.penalties,
    )
    table = torch.stack([column[active].to(torch.float64) for column in columns], dim=1)
    table = torch.nan_to_num(table, nan=-1.0)  # a temperature that was not recorded; NaN would begin a run everywhere
    begins = torch.ones(len(active), dtype=torch.bool, device=active.device)
    begins[1:] = (table[1:] != table[:-1]).any(dim=1)
    first = torch.nonzero(begins).squeeze(-1)
    found: dict[tuple[float, ...], int] = {}
    for values, row in zip(table[first].tolist(), batch.sequence[active[first]].tolist(), strict=True):
        found.setdefault(tuple(values), row)
    return tuple(_setting(values, row) for values, row in found.items())


def _setting(values: tuple[float, ...], row: int) -> Setting:
    kind, head_kind, temperature, top_k, top_p, min_p, bits = values
    on = {name for name, bit in PENALTY_BITS.items() if int(bits) & bit}
    draw = Draw(
        temperature=None if temperature < 0 else temperature,
        top_k=int(top_k),
        top_p=top_p,
        min_p=min_p,
        reshaped=tuple(name for name in RESHAPED if name in on),
        removed=tuple(name for name in REMOVED if name in on),
        honoured="not_honoured" not in on,
    )
    return Setting(
        behavior_kind=Kind(int(kind)).name,
        head_kind=Kind(int(head_kind)).name,
        draw=None if "unrecorded" in on else draw,
        row=row,
    )


def refuse_unusable(batch: TokenBatch, *, what: Literal["behavior", "head"] = "behavior") -> None:
    """Raise unless every recorded log-prob that has weight may be a denominator.

    what: the log-probs of the actions, or those of the heads. Raises `UnsupportedRecordError` naming the first
    rollout and the reason.
    """
    for setting in settings(batch):
        kind = setting.behavior_kind if what == "behavior" else setting.head_kind
        verdict = usable_as_behavior(kind, setting.draw, batch.trainer_transform)
        if not verdict.usable:
            where = f"rollout {batch.rollout_ids[setting.row]!r}"
            raise UnsupportedRecordError(f"{where}: its {what} log-probs cannot be a denominator: {verdict.reason}")
