"""Rollouts of the real model, recorded and read back: losses from the packed batch against the padded computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import rollstore
from examples import smollm2
from rollstore.batch import Kind, TokenBatch, Transform
from rollstore.errors import UnsupportedRecordError
from rollstore.losses import (
    cispo,
    group_mean,
    gspo,
    icepop,
    mis,
    ppo_clip,
    reference_kl,
    reinforce,
    reinforce_zero,
    sao,
    score_centering,
    tis,
    value_clip,
    with_counts,
    within,
)
from rollstore.readers.torch import RolloutLoader
from rollstore.replay.samplers.transformers import generate
from rollstore.replay.score import Scored, score
from rollstore.schema import Known, Rollout, Sampler

pytestmark = pytest.mark.model

QUESTIONS = ("Name a colour.", "Why is the sky blue? Answer in one sentence, please.")
REWARDS = (1.0, 0.0, 0.25, 1.0)
HEAD = 8
PLAIN, FILTERED = Sampler(temperature=1.0), Sampler(temperature=0.8, top_k=50, top_p=0.95)
WATCHED = "model.layers.24.self_attn.o_proj.weight"
"""The one parameter whose gradient is looked at: what is above it in the network takes part."""


class Case(NamedTuple):
    """One way of sampling: the rollouts as the store has them, as a batch, and what the trainer gives to them."""

    sampler: Sampler
    rollouts: list[Rollout]
    store: rollstore.Store
    batch: TokenBatch
    scored: Scored
    moved: Scored
    """after the watched parameter has moved"""
    plain: Tensor
    """[B, W, V] log-probs by padding, unmoved"""
    plain_moved: Tensor


@pytest.fixture(scope="module")
def loaded() -> Any:
    model, tokenizer = smollm2.load()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == WATCHED)
    return model, tokenizer


def watched(model: Any) -> Tensor:
    return model.get_parameter(WATCHED)


@contextmanager
def a_step_later(model: Any) -> Iterator[None]:
    """The trainer after an update that the sampler has not seen. What autograd keeps for its gradients stays valid."""
    parameter = watched(model)
    before = parameter.data
    noise = torch.randn(before.shape, generator=torch.Generator().manual_seed(5))
    parameter.data = before + 0.3 * before.std() * noise
    yield
    parameter.data = before


@pytest.fixture(scope="module", params=[PLAIN, FILTERED], ids=["temperature 1", "filtered"])
def case(request: pytest.FixtureRequest, loaded: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model, tokenizer = loaded
    store = rollstore.open(tmp_path_factory.mktemp("rollouts") / "store", create=True)
    rollouts = drawn(model, tokenizer, request.param)
    with store.writer(run="r", source="transformers") as writer:
        writer.append(rollouts)
    (batch,) = batches(store, request.param, tokens_per_batch=4096)
    stored = [store.get(name)[0] for name in batch.rollout_ids]
    scored, plain = score(model, batch), padded(model, stored, request.param)
    with a_step_later(model):
        moved, plain_moved = score(model, batch), padded(model, stored, request.param)
    batch = replace(batch, anchor_logprobs=scored.logprobs.detach())
    return Case(request.param, stored, store, batch, scored, moved, plain, plain_moved)


def drawn(model: Any, tokenizer: Any, sampler: Sampler) -> list[Rollout]:
    """Two answers to each question, twelve tokens at most."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in QUESTIONS
        for _ in range(2)
    ]
    turns = generate(
        model,
        prompts,
        keys=7,
        samples=range(len(prompts)),
        sampler=sampler,
        max_new_tokens=[12, 9, 12, 7],
        head_size=HEAD,
        stop_token_ids=[tokenizer.eos_token_id],
    )
    return [
        Rollout(
            rollout_id=f"{number}",
            group_id=f"{number // 2}",
            group_size=2,
            tokens=np.array([*prompt, *turn.tokens], dtype=np.int32),
            action_mask=np.arange(len(prompt) + len(turn.tokens)) >= len(prompt),
            logprobs=Known(turn.logprobs, np.isfinite(turn.logprobs)),
            logprob_kind="behavior",
            head_kind="behavior",
            heads=turn.heads,
            samplers=[turn.sampler],
            reward=REWARDS[number],
            reward_status="scored",
            ending="truncated" if turn.finish == "length" else "terminated",
        )
        for number, (prompt, turn) in enumerate(zip(prompts, turns, strict=True))
    ]


def batches(store: rollstore.Store, sampler: Sampler, *, tokens_per_batch: int) -> list[TokenBatch]:
    transform = Transform(temperature=True, filters=sampler is FILTERED)
    loader = RolloutLoader(
        store,
        tokens_per_batch=tokens_per_batch,
        whole_groups=True,
        heads=True,
        trainer_transform=transform,
        prefetch=0,
    )
    return [group_mean(batch)[0] for batch in loader]


def padded(model: Any, rollouts: list[Rollout], sampler: Sampler) -> Tensor:
    """Log-probs [B, W, V] of the token at each place, one padded forward pass, filters by one sort of all tokens."""
    width = max(len(rollout.tokens) for rollout in rollouts)
    tokens = torch.zeros(len(rollouts), width, dtype=torch.int64)
    attention = torch.zeros_like(tokens)
    for row, rollout in enumerate(rollouts):
        tokens[row, : len(rollout.tokens)] = torch.tensor(np.asarray(rollout.tokens, dtype=np.int64))
        attention[row, : len(rollout.tokens)] = 1
    logits = model(input_ids=tokens, attention_mask=attention, use_cache=False).logits / sampler.temperature
    if sampler is FILTERED:
        p, order = logits.detach().softmax(-1).sort(-1, descending=True)
        p[..., 50:] = 0
        p = p / p.sum(-1, keepdim=True)
        gone = (p.cumsum(-1) - p >= 0.95) | (p == 0)
        logits = logits.masked_fill(torch.zeros_like(gone).scatter(-1, order, gone), -torch.inf)
    return logits.log_softmax(-1).roll(1, dims=1)  # the logits before a token score it


class Rows(NamedTuple):
    """Columns [B, W] of the padded way: the trainer's log-probs, the recorded ones, advantages, the mask."""

    p: Tensor
    q: Tensor
    advantages: Tensor
    mask: Tensor


def rows(case: Case, log_p: Tensor) -> Rows:
    """What a trainer keeps beside a padded batch, from the rollouts and not from the packed batch."""
    size, width = log_p.shape[:2]
    tokens, mask = torch.zeros(size, width, dtype=torch.int64), torch.zeros(size, width, dtype=torch.bool)
    q, advantages = torch.zeros(size, width), torch.zeros(size, width)
    rewards = {rollout.rollout_id: rollout.reward for rollout in case.rollouts}
    for row, rollout in enumerate(case.rollouts):
        length = len(rollout.tokens)
        tokens[row, :length] = torch.tensor(np.asarray(rollout.tokens, dtype=np.int64))
        mask[row, :length] = torch.tensor(np.asarray(rollout.action_mask))
        assert rollout.logprobs is not None
        q[row, mask[row]] = torch.tensor(np.asarray(rollout.logprobs.values))
        first = int(rollout.rollout_id) // 2 * 2
        mean = (rewards[f"{first}"] + rewards[f"{first + 1}"]) / 2
        advantages[row] = rollout.reward - mean
    own = log_p.gather(-1, tokens[..., None]).squeeze(-1)
    return Rows(torch.where(mask, own, 0), q, advantages, mask)


def gradient(model: Any, loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, watched(model), retain_graph=True)[0]


def same(one: Tensor, other: Tensor, order: float = 1e-4) -> None:
    """Equal to `order` of the largest entry."""
    torch.testing.assert_close(one, other, rtol=0, atol=order * other.abs().max().item())


def test_on_policy_the_ratio_is_one(case: Case) -> None:
    assert bool(case.batch.valid.all())
    ratio = (case.scored.logprobs.detach() - case.batch.behavior_logprobs).exp()
    assert (ratio - 1).abs().max() < 1e-4
    _, metrics = reinforce_zero(case.batch, case.scored.logprobs)
    assert abs(metrics["ratio/mean"] - 1) < 1e-4


CORRECTIONS = {
    "tis": tis(2.0),
    "mis": mis(0.5, 2.0),
    "icepop": icepop(0.5, 2.0),
    "tis sequence": tis(2.0, level="sequence"),
    "icepop geometric": icepop(0.5, 2.0, level="geometric"),
    "icepop one": icepop(0.5, 2.0, inside="one"),
    "within": within(1e-3),
    "within k2": within(1e-3, statistic="k2"),
    "within geometric": within(1e-3, level="geometric"),
}


def test_on_policy_no_correction_changes_loss_or_gradient(case: Case, loaded: Any) -> None:
    model, _ = loaded
    plain, _ = ppo_clip(case.batch, case.scored.logprobs)
    wanted = gradient(model, plain)
    assert wanted.abs().max() > 0
    for name, correction in CORRECTIONS.items():
        loss, metrics = ppo_clip(case.batch, case.scored.logprobs, correction=correction)
        assert abs(loss.item() - plain.item()) < 1e-4
        # a product over twelve actions is off by the sum of what each is off by
        same(gradient(model, loss), wanted, 1e-3 if "sequence" in name else 1e-4)
        assert metrics[f"{name.split()[0]}/rejected"] == 0


def ppo_by_hand(at: Rows, anchor: Tensor) -> Tensor:
    ratio, w = (at.p - anchor).exp(), (anchor - at.q).exp().clamp(max=1.5)
    surrogate = w * torch.minimum(ratio * at.advantages, ratio.clamp(0.9, 1.1) * at.advantages)
    return -surrogate[at.mask].mean()


def gspo_by_hand(at: Rows, anchor: Tensor) -> Tensor:
    root = (torch.where(at.mask, at.p - anchor, 0).sum(-1) / at.mask.sum(-1)).exp()
    advantages = at.advantages[:, 0]
    return -torch.minimum(root * advantages, root.clamp(0.98, 1.02) * advantages).mean()


def cispo_by_hand(at: Rows, anchor: Tensor) -> Tensor:
    weight = (at.p - anchor).detach().exp().clamp(0.8, 1.2)
    return -(weight * at.advantages * at.p)[at.mask].mean()


def zero_by_hand(at: Rows, anchor: Tensor) -> Tensor:
    terms = torch.where(at.mask, (at.p - at.q).exp() * at.advantages, 0)
    return -(terms.sum(-1) / at.mask.sum(-1)).mean()


def reinforce_by_hand(at: Rows, anchor: Tensor) -> Tensor:
    w = (at.p - at.q).detach().exp()
    return -(torch.where((w >= 0.7) & (w <= 1.4), w, 0) * at.advantages * at.p)[at.mask].mean()


def sao_by_hand(at: Rows, anchor: Tensor) -> Tensor:
    ratio = (at.p - at.q).exp()
    inside = (ratio.detach() > 0.9) & (ratio.detach() < 1.1)
    assert 0 < inside[at.mask].sum() < at.mask.sum()
    return torch.where(inside, -ratio * at.advantages, 0)[at.mask].mean()


def reference_by_hand(at: Rows, anchor: Tensor) -> Tensor:
    x = at.p - anchor
    return (0.1 * ((-x).exp() - 1 + x))[at.mask].mean()


def value_by_hand(at: Rows, anchor: Tensor) -> Tensor:
    """The trainer's log-probs stand for a critic's values, the sampler's for the returns."""
    clipped = anchor + (at.p - anchor).clamp(-0.05, 0.05)
    assert bool((clipped != at.p)[at.mask].any())
    return torch.maximum((at.p - at.q).square(), (clipped - at.q).square())[at.mask].mean() / 2


BY_HAND: dict[str, tuple[Callable[[TokenBatch, Tensor], tuple[Tensor, Any]], Callable[[Rows, Tensor], Tensor]]] = {
    "ppo tis": (lambda b, x: ppo_clip(b, x, clip=(0.1, 0.1), correction=tis(1.5)), ppo_by_hand),
    "gspo": (lambda b, x: gspo(b, x, clip=(0.02, 0.02)), gspo_by_hand),
    "cispo": (lambda b, x: cispo(b, x, bounds=(0.8, 1.2)), cispo_by_hand),
    "reinforce zero": (reinforce_zero, zero_by_hand),
    "reinforce mis": (lambda b, x: reinforce(b, x, correction=mis(0.7, 1.4)), reinforce_by_hand),
    "sao": (lambda b, x: sao(b, x, clip=(0.1, 0.1)), sao_by_hand),
    "reference_kl": (
        lambda b, x: reference_kl(replace(b, reference_logprobs=b.anchor_logprobs), x, beta=0.1),
        reference_by_hand,
    ),
    "value_clip": (
        lambda b, x: value_clip(
            replace(b, values=b.anchor_logprobs, returns=b.behavior_logprobs),
            torch.where(b.weights != 0, x, 0),
            clip=0.05,
        ),
        value_by_hand,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_off_policy_loss_and_gradient_are_those_of_the_padded_computation(name: str, case: Case, loaded: Any) -> None:
    model, _ = loaded
    packed, by_hand = BY_HAND[name]
    kept = case.moved.logprobs.detach() > -torch.inf  # the moved trainer's filters may take a drawn token away
    batch = replace(case.batch, weights=kept.float())
    loss, _ = packed(batch, case.moved.logprobs)
    at = rows(case, case.plain_moved)
    at = at._replace(mask=at.mask & (at.p.detach() > -torch.inf))
    at = at._replace(p=torch.where(at.mask, at.p, 0), q=torch.where(at.mask, at.q, 0))
    anchor = torch.where(at.mask, rows(case, case.plain).p.detach(), 0)
    wanted = by_hand(at, anchor)
    assert (at.p - at.q).abs().max() > 0.01
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-5)
    same(gradient(model, loss), gradient(model, wanted))


def test_micro_batches_from_the_loader_add_up_to_the_one_batch(case: Case, loaded: Any) -> None:
    model, _ = loaded
    wanted, _ = ppo_clip(case.batch, case.scored.logprobs, anchor="behavior")
    loss, total = torch.zeros(()), torch.zeros_like(watched(model))
    micro = with_counts(batches(case.store, case.sampler, tokens_per_batch=len(case.batch.tokens) - 1))
    assert len(micro) == 2
    for batch in micro:
        part, _ = ppo_clip(batch, score(model, batch).logprobs, anchor="behavior")
        loss, total = loss + part.detach(), total + gradient(model, part)
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-5)
    same(total, gradient(model, wanted))


def centred_by_hand(case: Case) -> Tensor:
    """Score centering action by action, from the recorded heads and the padded log-probs of the moved trainer."""
    at = rows(case, case.plain_moved)
    terms: list[Tensor] = []
    for row, rollout in enumerate(case.rollouts):
        heads = rollout.heads
        assert heads is not None
        stops = np.cumsum(heads.counts)
        for number, place in enumerate(torch.nonzero(at.mask[row]).squeeze(-1)):
            entries = slice(stops[number] - heads.counts[number], stops[number])
            log_p = case.plain_moved[row, place, torch.tensor(np.asarray(heads.tokens)[entries]).long()]
            q, p = torch.tensor(np.asarray(heads.logprobs)[entries]).exp(), log_p.detach().exp()
            q_tail, p_tail = 1 - q.sum(), (1 - p.sum()).clamp(min=1e-6)
            rho = torch.where(q_tail <= 1e-6, 0, q_tail / p_tail)
            possible = log_p.detach() > -torch.inf  # the moved trainer's filters may take a token away
            centre = ((q - rho * p) * torch.where(possible, log_p, 0)).sum()
            own = at.p[row, place]
            terms.append(at.advantages[row, place] * (own - centre) if own > -torch.inf else torch.zeros(()))
    return -torch.stack(terms).mean()


def test_score_centering_from_recorded_heads_is_that_of_the_padded_computation(case: Case, loaded: Any) -> None:
    model, _ = loaded
    assert case.moved.head_logprobs is not None
    loss, metrics = score_centering(case.batch, case.moved.logprobs, case.moved.head_logprobs)
    assert (metrics["head/missing"], metrics["tokens"]) == (0, case.batch.actions)
    same(gradient(model, loss), gradient(model, centred_by_hand(case)), 1e-3)


def test_on_policy_the_centre_is_zero(case: Case, loaded: Any) -> None:
    model, _ = loaded
    assert case.scored.head_logprobs is not None
    loss, metrics = score_centering(case.batch, case.scored.logprobs, case.scored.head_logprobs)
    plain, _ = reinforce(case.batch, case.scored.logprobs)
    same(gradient(model, loss), gradient(model, plain), 1e-3)
    assert metrics["head/l1"] < 1e-4
    assert metrics["tokens"] == case.batch.actions


def test_centring_refuses_raw_records_and_filters_that_the_trainer_does_not_apply(case: Case) -> None:
    heads = case.scored.head_logprobs
    assert heads is not None
    kind = torch.full_like(case.batch.head_kind, int(Kind.raw))
    for columns, reason in (({"behavior_kind": kind}, "its log-probs are raw"), ({"head_kind": kind}, "heads are raw")):
        with pytest.raises(UnsupportedRecordError, match=reason):
            score_centering(replace(case.batch, **columns), case.scored.logprobs, heads)
    if case.sampler is FILTERED:
        tempered = replace(case.batch, trainer_transform=Transform(temperature=True))
        with pytest.raises(UnsupportedRecordError, match="did not declare that it applied top_k=50"):
            score_centering(tempered, case.scored.logprobs, heads)
