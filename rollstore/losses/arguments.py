"""Checks of arguments: words, numbers, pairs, tensors, and the columns of a batch.

None waits for an accelerator: where a tensor's values are checked there, the device asserts it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollstore.batch import TokenBatch
from rollstore.usable import declared

FLOATS = (
    "behavior_logprobs", "weights", "temperature", "top_p", "min_p", "anchor_logprobs", "reference_logprobs", "values",
    "action_rewards", "advantages", "returns",
)  # fmt: skip
"""Float columns with a value an action."""
OTHERS = (
    "logit_index", "sequence", "valid", "behavior_kind", "head_kind", "top_k", "penalties", "weight_versions",
    "version_known",
)  # fmt: skip
"""The other columns with a value an action."""
ROW_FLOATS = ("rewards", "final_values")
ROW_OTHERS = ("rollout", "segment", "group", "group_size", "bootstrap", "ending", "signal")


def word(name: str, got: Any, allowed: tuple[str, ...]) -> None:
    """Raise `ValueError` unless an option given as text is one of the allowed words."""
    if got not in allowed:
        *most, last = (repr(each) for each in allowed)
        raise ValueError(f"{name}: wanted {', '.join(most)} or {last}, got {got!r}")


def number(name: str, got: Any, low: float = 0.0, high: float = math.inf, *, above: bool = False) -> None:
    """Raise `TypeError` for what is no number, `ValueError` outside [low, high] (`above`: outside (low, high])."""
    if isinstance(got, bool) or not isinstance(got, int | float | np.integer | np.floating):
        raise TypeError(f"{name}: wanted a number, got {type(got).__name__}")
    if not low <= got <= high or (above and got == low):
        least = f"above {low:g}" if above else f"of at least {low:g}"
        most = "" if high == math.inf else f" and at most {high:g}"
        raise ValueError(f"{name}: wanted a number {least}{most}, got {got!r}")


def finite(name: str, got: Any, low: float = 0.0, *, above: bool = False) -> None:
    """`number`, and not infinity."""
    number(name, got, low, above=above)
    if got == math.inf:
        raise ValueError(f"{name}: wanted a finite number, got {got!r}")


def pair(name: str, got: Any, low: float = 0.0, high: float = math.inf, *, ordered: bool = False) -> None:
    """Raise unless it is two numbers within [low, high]; `ordered`: of which the first is not above the second."""
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise TypeError(f"{name}: wanted two numbers, as (0.2, 0.2), got {got!r}")
    for at, one in enumerate(got):
        number(f"{name}[{at}]", one, low, high)
    if ordered and got[0] > got[1]:
        raise ValueError(f"{name}: wanted the lower bound first, got {tuple(got)}")


def ddof(got: Any) -> None:
    """Raise unless it is 0 or 1."""
    if isinstance(got, bool) or got not in (0, 1):
        raise ValueError(f"ddof: wanted 0 (divide by n) or 1 (by n - 1), got {got!r}")


def tensor(
    name: str, got: Any, shape: tuple[int, ...], what: str = "one value an action", *, ids: bool = False
) -> None:
    """Raise `TypeError` for what is no tensor of floats (`ids`: of integers), `ValueError` for another shape."""
    if not isinstance(got, Tensor):
        raise TypeError(f"{name}: wanted {what}, a tensor {shape}, got {type(got).__name__}")
    if got.shape != shape:
        raise ValueError(f"{name}: wanted {what} {shape}, got {tuple(got.shape)}")
    _dtype(name, got, ids)


def _dtype(name: str, got: Tensor, ids: bool) -> None:
    if ids and (got.is_floating_point() or got.dtype == torch.bool):
        raise TypeError(f"{name}: wanted an integer dtype, got {got.dtype}")
    if not ids and not got.is_floating_point():
        raise TypeError(f"{name}: wanted a float dtype, got {got.dtype}")


def mask(name: str, got: Any) -> None:
    """Raise `TypeError` for what is no tensor of bools: a weight is no mask."""
    if not isinstance(got, Tensor) or got.dtype != torch.bool:
        kind = got.dtype if isinstance(got, Tensor) else type(got).__name__
        raise TypeError(f"{name}: wanted a bool tensor, as batch.weights != 0, got {kind}")


def at_hand(values: Tensor) -> bool:
    """Whether looking at values costs nothing."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


def values(name: str, got: Tensor, fits: Tensor, wanted: str) -> None:
    """Raise `ValueError` unless `fits` (bool, of the shape of `got`) everywhere; on an accelerator the device does."""
    fine, message = fits.all(), f"{name}: wanted {wanted}"
    if not at_hand(got):
        torch._assert_async(fine, message)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]  # the check that waits for nothing
    elif not fine:
        raise ValueError(f"{message}, got {got[~fits][0].item()}")


def weights(name: str, got: Tensor) -> None:
    """Raise unless every weight [A] is a finite number of at least 0: a negative one would turn its action round."""
    values(name, got, (got >= 0) & (got < torch.inf), "finite numbers of at least 0")


def columns(batch: Any) -> None:
    """Raise, naming the column, unless every column of the batch has its shape and kind and carries no gradient.

    Weights are finite and at least 0. A column of another shape would be broadcast without a word, and one with a
    gradient would cancel the policy's (anchor) or train another model (values).
    """
    if not isinstance(batch, TokenBatch):
        raise TypeError(f"batch: wanted a TokenBatch, got {type(batch).__name__}")
    declared(batch.trainer_transform)
    for names, size, what in (
        (FLOATS, batch.actions, "one value an action"),
        (OTHERS, batch.actions, "one value an action"),
        (ROW_FLOATS, batch.rows, "one value a row"),
        (ROW_OTHERS, batch.rows, "one value a row"),
    ):
        for name in names:
            got: Tensor | None = getattr(batch, name)
            if got is None:
                continue
            if got.shape != (size,):
                raise ValueError(f"batch.{name}: wanted {what} ({size},), got {tuple(got.shape)}")
            if names is FLOATS or names is ROW_FLOATS:
                _dtype(f"batch.{name}", got, ids=False)
            if got.requires_grad:
                raise ValueError(f"batch.{name}: wanted a column without gradient, as from detach(), got one with")
    weights("batch.weights", batch.weights)


def before_counts(batch: TokenBatch, where: str) -> None:
    """Raise `ValueError` when the step has been counted already: what is about to change weights would not be seen."""
    if batch.counts is not None:
        raise ValueError(f"{where}: wanted a batch that with_counts has not counted yet, got one that it has")
