"""Score centering: subtract from each action's score what the behavior policy's scores are expected to be."""

from __future__ import annotations

import torch
from torch import Tensor

from rollstore.batch import TokenBatch, refuse_unusable
from rollstore.batch.denominator import settings
from rollstore.errors import UnsupportedRecordError
from rollstore.losses.arguments import columns, finite
from rollstore.losses.heads import Head, distances, head
from rollstore.losses.inputs import count_metrics, inputs, signal_metrics
from rollstore.losses.objectives import Loss
from rollstore.losses.ratios import EXPONENT, Correction, Metrics, alone, correct, rule_metrics, statistic_of
from rollstore.losses.reducers import Reducer, base, reduced, token_mean

HELP = {
    True: "record {0}='behavior' where the engine gives the probabilities it draws with",
    False: "`as_behavior` converts where the record allows it",
}
"""What to do about a {kind} that is, or is not, unknown."""


def score_centering(
    batch: TokenBatch,
    logprobs: Tensor,
    head_logprobs: Tensor,
    *,
    weight: Correction | None = None,
    sampler_kl: float = 0.0,
    reduce: Reducer = token_mean,
) -> Loss:
    """-A[ sg(w_a) log p_a - sum_H sg(c_j) log p_j ] - beta sum_H sg(q_j - rho p_j) log p_j (Marek & Ryabinin).

    Outside the head q is taken as rho p_j, rho = (1 - sum_H q)/(1 - sum_H p). Without `weight`, w = 1 and c_j = q_j -
    rho p_j. With it (eq. 9) w is of the direct ratio p/q: c_j = q_j w(p_j/q_j) - rho w(1/rho) p_j at token level, which
    centres w s and not w times the centred score; w (q_j - rho p_j) at sequence and geometric level. sampler_kl is
    beta of eq. 8. Only the gradient is meant: implementations differ in terms without one.

    logprobs [A] and head_logprobs [H]: the trainer's at the drawn and at the recorded head ids, with gradient, under
    the transform that the batch declares. The drawn token keeps its own recorded probability, in the head or out of it.
    Actions without a head are left out and counted, but stay in the ratio of their sequence. Raises
    `UnsupportedRecordError` when the log-probs or heads are not of the behavior distribution, or a filter or penalty
    that the trainer did not apply shaped it.
    """
    if weight is not None:
        alone("weight", weight)
        if weight.numerator == "anchor":
            raise ValueError("weight: its ratio is needed at every head id, so wanted numerator 'live', got 'anchor'")
    finite("sampler_kl", sampler_kl)
    given = inputs(batch, logprobs, behavior=weight is not None)
    _refuse(batch)
    found = head(batch, head_logprobs, given.active)
    active = given.active & found.has
    done = correct(weight, batch, given.live, given.recorded, given.known, default="live")
    plain = found.q - found.rho[found.action] * found.p
    centre = plain if weight is None else _weighted(found, weight, done.weight, plain)
    score = done.weight * given.logprobs - found.sum(centre.detach() * found.log_p)
    terms = torch.where(given.possible & active, -given.advantages * score, 0)
    weights = torch.where(active & done.stays, given.weights, 0)
    loss = reduced(reduce, terms, batch, weights)
    if sampler_kl:
        towards = -found.sum(plain.detach() * found.log_p)
        loss = loss + sampler_kl * base(reduce)(towards, batch, torch.where(active, given.weights, 0))
    metrics = given.metrics | found.metrics | distances(found) | done.metrics
    metrics |= rule_metrics(done.weight, given.advantages, active)
    return loss, {"loss": loss.detach(), **signal_metrics(batch, weights), **metrics}


def sampler_kl(
    batch: TokenBatch, head_logprobs: Tensor, *, beta: float, reduce: Reducer = token_mean
) -> tuple[Tensor, Metrics]:
    """-beta sum_H sg(q_j - rho p_j) log p_j: adds beta E_q[s] to the ascent direction, towards the sampler (eq. 8).

    head_logprobs [H], with gradient. To add to any objective; it does not depend on the advantages, so it keeps the
    base reducer.
    """
    finite("beta", beta)
    columns(batch)
    _refuse(batch)
    found = head(batch, head_logprobs, batch.weights != 0)
    plain = found.q - found.rho[found.action] * found.p
    terms = -found.sum(plain.detach() * found.log_p)
    weights = torch.where(found.has, batch.weights, 0)
    term = reduced(base(reduce), terms, batch, weights)
    return beta * term, {"sampler_kl": distances(found)["head/kl"], **found.metrics, **count_metrics(batch, weights)}


def _weighted(found: Head, weight: Correction, of_action: Tensor, plain: Tensor) -> Tensor:
    """c_j [H] of the weighted centre."""
    if weight.level != "token":
        return of_action[found.action] * plain
    log_ratio = torch.where(found.q > 0, found.seen - found.log_q, 0)

    def ratio_weight(x: Tensor) -> Tensor:
        return weight.rule(statistic_of(x, weight.statistic)).weight

    at_head = torch.where(found.q > 0, found.q * ratio_weight(log_ratio), 0)
    # 1/rho is the ratio p/q that the whole tail is taken to have
    tail = torch.where(found.rho > 0, -found.rho.clamp(min=1e-30).log(), EXPONENT)
    alpha = torch.where(found.rho > 0, found.rho * ratio_weight(tail), 0)
    return at_head - alpha[found.action] * found.p


@torch.compiler.disable()  # pyright: ignore[reportUntypedFunctionDecorator]  # torch leaves its decorator untyped
def _refuse(batch: TokenBatch) -> None:
    """Raise unless the heads, and the log-probs beside them, are of the behavior distribution and usable."""
    for setting in settings(batch):
        found = (
            ("log-probs", "logprob_kind", setting.behavior_kind, setting.logprob),
            ("heads", "head_kind", setting.head_kind, setting.head),
        )
        for what, column, kind, recorded in found:
            if recorded and kind != "behavior":
                raise UnsupportedRecordError(
                    f"rollout {batch.rollout_ids[setting.row]!r}: its {what} are {kind}, and a centre is under the "
                    f"behavior distribution; {HELP[kind == 'unknown'].format(column)}"
                )
    refuse_unusable(batch)
    refuse_unusable(batch, what="head")
