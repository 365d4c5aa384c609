"""Gradients of a model against those of the same weights in another arithmetic: no forward that agrees proves them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """How far one gradient stands from another."""

    relative: float
    """|g - r| / |r| over all parameters."""
    cosine: float
    worst: str
    """The parameter with the largest relative error of its own, among those that matter."""
    worst_relative: float
    bitwise: bool


def compare_gradients(
    model: PreTrainedModel, reference: PreTrainedModel, sequences: Sequence[NDArray[Any]]
) -> Gradients:
    """The gradient of the mean log-prob of all tokens of some sequences, by both models, which share their weights.

    Parameters whose reference gradient is below a millionth of the whole take no part in `worst`. Raises ValueError
    where the models' parameters are not the same ones.
    """
    mine, theirs = _gradient(model, sequences), _gradient(reference, sequences)
    if mine.keys() != theirs.keys():
        odd = sorted(mine.keys() ^ theirs.keys())[0]
        raise ValueError(f"reference: wanted the same parameters as the model, got another set: {odd}")
    norms = {name: float(one.double().norm()) for name, one in theirs.items()}
    whole = math.sqrt(sum(norm**2 for norm in norms.values()))
    errors = {name: float((mine[name].double() - theirs[name].double()).norm()) for name in theirs}
    dot = sum(float((mine[name].double() * theirs[name].double()).sum()) for name in theirs)
    own = math.sqrt(sum(float(one.double().norm()) ** 2 for one in mine.values()))
    matter = {name: errors[name] / norms[name] for name in norms if norms[name] > 1e-6 * whole} or {"": math.nan}
    worst = max(matter, key=lambda name: matter[name])
    return Gradients(
        relative=math.sqrt(sum(error**2 for error in errors.values())) / whole if whole else math.nan,
        cosine=dot / (own * whole) if own and whole else math.nan,
        worst=worst,
        worst_relative=matter[worst],
        bitwise=all(
            mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in theirs
        ),
    )


def _gradient(model: PreTrainedModel, sequences: Sequence[NDArray[Any]]) -> dict[str, torch.Tensor]:
    held = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    count = sum(len(one) - 1 for one in sequences)
    for one in sequences:
        tokens = torch.from_numpy(one)[None].to(model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        taken = torch.log_softmax(wide, -1).gather(-1, tokens[0, 1:, None])
        (taken.sum() / count).backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    for name, parameter in model.named_parameters():
        parameter.grad = held[name]
    return found
