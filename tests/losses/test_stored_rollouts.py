"""From the store to the gradient: rollouts of a model, stored and read back, against the padded computation by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rollstore
from rollstore import Rollout, Sampler
from rollstore.batch import TokenBatch, Transform, collate
from rollstore.losses import (
    cispo,
    group_zscore,
    gspo,
    icepop,
    mis,
    ppo_clip,
    reference_kl,
    reinforce,
    reinforce_zero,
    sao,
    selected_logprobs,
    sequence_mean,
    tis,
    value_clip,
    within,
)

TEMPERATURE, PROMPT, VOCABULARY = 0.8, 3, 50
LENGTHS = [5, 2, 7, 4]
REWARDS = [1.0, 0.0, 0.5, 1.0]


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def sampled(model: LlamaForCausalLM, number: int) -> Rollout:
    """One rollout drawn at the temperature, a token at a time."""
    generator = torch.Generator().manual_seed(number)
    tokens = [1, 2, 3]
    logprobs: list[float] = []
    for _ in range(LENGTHS[number]):
        logits = model(torch.tensor([tokens])).logits[0, -1] / TEMPERATURE
        drawn = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        logprobs.append(logits.log_softmax(-1)[drawn].item())
        tokens.append(drawn)
    return Rollout(
        rollout_id=f"r{number}",
        group_id="g",
        tokens=tokens,
        action_mask=[False] * PROMPT + [True] * LENGTHS[number],
        logprobs=logprobs,
        logprob_kind="behavior",
        samplers=(Sampler(temperature=TEMPERATURE),),
        reward=REWARDS[number],
        reward_status="scored",
        ending="terminated",
    )


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> TokenBatch:
    model = tiny()
    store = rollstore.open(str(Path(tmp_path_factory.mktemp("store")) / "s"), create=True)
    with store.writer(run="r", source="test") as writer:
        writer.append([sampled(model, number) for number in range(len(LENGTHS))])
    batch, _ = group_zscore(collate(store.scan("rollouts").read_all()))
    return replace(batch, trainer_transform=Transform(temperature=True))


def packed_logprobs(model: LlamaForCausalLM, batch: TokenBatch) -> torch.Tensor:
    bounds = batch.cu_seqlens.tolist()
    rows = [batch.tokens[start:stop] for start, stop in pairwise(bounds)]
    states = torch.cat([model.model(row[None]).last_hidden_state[0] for row in rows])
    drawn = batch.tokens[batch.action_index]
    weight = model.lm_head.weight
    return selected_logprobs(states[batch.logit_index], weight, drawn, temperature=batch.temperature, chunk=4)[0]


def test_on_policy_the_ratio_is_one_and_no_correction_changes_the_gradient(stored: TokenBatch) -> None:
    model = tiny()
    wanted = None
    every = [
        make(level=level)
        for level in ("token", "sequence", "geometric")
        for make in (
            partial(tis, 2.0),
            partial(mis, 0.5, 2.0),
            partial(icepop, 0.5, 2.0),
            partial(icepop, 0.5, 2.0, inside="one"),
            partial(within, 1e-3),
            partial(within, 1e-3, statistic="k2"),
        )
    ]
    for correction in (None, *every, (tis(2.0), within(1e-3))):
        model.zero_grad()
        loss, metrics = reinforce(stored, packed_logprobs(model, stored), correction=correction)
        loss.backward()
        gradient = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
        wanted = gradient if wanted is None else wanted
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())
        for name, value in metrics.items():
            assert not name.endswith("/rejected") or value == 0
            assert not name.startswith(("tis/mean", "mis/mean", "icepop/mean", "within/mean")) or abs(value - 1) < 1e-4
    _, metrics = reinforce_zero(stored, packed_logprobs(model, stored))
    assert abs(metrics["ratio/mean"] - 1) < 1e-4


def moved() -> LlamaForCausalLM:
    """The same model a step later."""
    model = tiny()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def padded(model: LlamaForCausalLM, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs [B, W], mask [B, W]) by padding, the way trainers usually do."""
    width = PROMPT + max(LENGTHS)
    tokens = torch.zeros(len(LENGTHS), width, dtype=torch.int64)
    mask = torch.zeros(len(LENGTHS), width, dtype=torch.bool)
    for row, number in enumerate(int(name[1:]) for name in batch.rollout_ids):
        length = PROMPT + LENGTHS[number]
        start = int(batch.cu_seqlens[row])
        tokens[row, :length] = batch.tokens[start : start + length]
        mask[row, PROMPT:length] = True
    attention = torch.arange(width) < mask.sum(-1, keepdim=True) + PROMPT
    logits = model(tokens, attention_mask=attention.long()).logits[:, :-1] / TEMPERATURE
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(logprobs, (1, 0)), mask


def by_hand(name: str, p: torch.Tensor, q: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Each objective written out over a padded batch."""
    ratio = (p - q).exp()
    if name == "ppo":
        terms = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return terms[mask].mean()
    if name == "cispo":
        return (-ratio.detach().clamp(0.8, 1.2) * advantage * p)[mask].mean()
    if name == "sao":
        inside = (ratio.detach() > 0.9) & (ratio.detach() < 1.05)
        assert 0 < inside[mask].sum() < mask.sum()
        return torch.where(inside, -ratio * advantage, 0)[mask].mean()
    if name == "reference_kl":  # to the sampler, which is the reference too
        return (0.1 * ((q - p).exp() - 1 - (q - p)))[mask].mean()
    if name == "value_clip":  # p stands for the critic, q for what it said before, q + 1 for the return
        clipped = q + (p - q).clamp(-0.05, 0.05)
        assert (clipped != p)[mask].any()
        return torch.maximum((p - q - 1).square(), (clipped - q - 1).square())[mask].mean() / 2
    lengths = mask.sum(-1)
    if name == "gspo":
        root = (torch.where(mask, p - q, 0).sum(-1) / lengths).exp()
        scores = advantage[:, 0]
        return -torch.minimum(root * scores, root.clamp(0.9, 1.1) * scores).mean()
    return (torch.where(mask, -ratio * advantage, 0).sum(-1) / lengths).mean()


CALLS: dict[str, Any] = {
    "ppo": lambda b, x: ppo_clip(b, x, anchor="behavior"),
    "cispo": lambda b, x: cispo(b, x, bounds=(0.8, 1.2), anchor="behavior"),
    "gspo": lambda b, x: gspo(b, x, clip=(0.1, 0.1), anchor="behavior", reduce=sequence_mean),
    "reinforce_zero": reinforce_zero,
    "sao": lambda b, x: sao(b, x, clip=(0.1, 0.05)),
    "reference_kl": lambda b, x: reference_kl(replace(b, reference_logprobs=b.behavior_logprobs), x, beta=0.1),
    "value_clip": lambda b, x: value_clip(
        replace(b, values=b.behavior_logprobs, returns=b.behavior_logprobs + 1), x, clip=0.05
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_loss_and_gradient_are_those_of_the_padded_computation(name: str, stored: TokenBatch) -> None:
    packed, plain = moved(), moved()
    loss, _ = CALLS[name](stored, packed_logprobs(packed, stored))
    loss.backward()
    p, mask = padded(plain, stored)
    assert stored.advantages is not None
    q = torch.zeros_like(p).masked_scatter(mask, stored.behavior_logprobs)
    advantage = torch.zeros_like(p).masked_scatter(mask, stored.advantages)
    advantage = advantage.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True) + 0 * p.detach()
    wanted = by_hand(name, p, q, advantage, mask)
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
    for one, two in zip(packed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-3, atol=1e-5)
