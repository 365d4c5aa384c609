"""What losses do with rollouts that are stale and quantised: one store, eight trainings, reward and KL step by step.

python -m examples.off_policy_study [--out runs/off-policy] [--seeds 5] [--quick]

A tiny model with random weights learns a rule on policy for a while. Two of its earlier versions, with weights rounded
to a few levels, draw the rollouts, which are stored with the version, the log-probs and the heads of what drew them.
From the last version each loss then trains on these same rollouts alone. The trainer rounds its weights too, more
finely, in the forward pass; its backward pass goes straight through the rounding. So q and p differ by training and by
rounding, and no training can take the second away.

Reward is that of fresh answers of the trained policy; KL is KL(q || p), exact over the vocabulary, at the stored
actions. All losses of a seed see the same rollouts in the same order, and fresh answers drawn with the same numbers.
"""

from __future__ import annotations

import argparse
import copy
import csv
import importlib.util
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import rollstore
from rollstore.batch import TokenBatch, collate, select
from rollstore.losses import (
    group_mean,
    mis,
    ppo_clip,
    reinforce,
    reinforce_zero,
    score_centering,
    selected_logprobs,
    tis,
)
from rollstore.replay.samplers.transformers import generate
from rollstore.schema import Known, Rollout, Sampler

VOCABULARY, ANSWER, HEAD = 32, 6, 8
RULE = 4
"""An answer's token is right when token and prompt plus position agree modulo this: one in four by chance."""

BETA = 0.02
"""Weight of the KL to the sampler: about a tenth of a usual advantage here."""

console = Console()


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a study is."""

    warm_up: int
    """on-policy updates at most before the trainer's version"""
    stale: int
    """the rollouts are of the versions this many updates, and half as many, before the trainer's"""
    prompts: int
    members: int
    minibatches: int
    """updates of one pass over the rollouts; the anchor of PPO is taken before each pass"""
    passes: int
    fresh: int
    """answers of which a reward is the mean"""
    enough: float = 0.5
    """reward at which the warm-up ends"""
    sampler_levels: int = 12
    trainer_levels: int = 64
    warm_up_rate: float = 3e-3
    learning_rate: float = 1e-3


FULL = Scale(warm_up=400, stale=8, prompts=128, members=8, minibatches=8, passes=10, fresh=1024)
QUICK = Scale(warm_up=4, stale=2, prompts=4, members=4, minibatches=2, passes=2, fresh=32)


class Step(NamedTuple):
    """What an objective is given: the rollouts with advantages and anchor, log-probs [A] and at the heads [H]."""

    batch: TokenBatch
    logprobs: Tensor
    heads: Tensor


LOSSES: dict[str, Callable[[Step], tuple[Tensor, Any]]] = {
    "REINFORCE": lambda at: reinforce(at.batch, at.logprobs),
    "PPO+TIS": lambda at: ppo_clip(at.batch, at.logprobs, correction=tis(2.0)),
    "PPO+MIS": lambda at: ppo_clip(at.batch, at.logprobs, correction=mis(0.5, 2.0)),
    "SC": lambda at: score_centering(at.batch, at.logprobs, at.heads),
    "SC+TIS": lambda at: score_centering(at.batch, at.logprobs, at.heads, weight=tis(2.0)),
    "SC+MIS": lambda at: score_centering(at.batch, at.logprobs, at.heads, weight=mis(0.5, 2.0)),
    "SC+KL": lambda at: score_centering(at.batch, at.logprobs, at.heads, sampler_kl=BETA),
    "REINFORCE Zero": lambda at: reinforce_zero(at.batch, at.logprobs),
}
"""Advantages are `group_mean`, means are over tokens (answers are of one length). REINFORCE corrects nothing."""


class Point(NamedTuple):
    """One row of the CSV."""

    seed: int
    loss: str
    step: int
    reward: float
    kl: float


# ---- the model and its rounding


def rounded(weight: Tensor, levels: int) -> Tensor:
    """Values rounded to `levels` steps of each row's largest magnitude, both signs."""
    unit = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (levels / 2)
    return (weight / unit).round() * unit


class StraightThrough(torch.nn.Module):
    """A weight whose value is rounded and whose gradient is that of the weight as it is."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (rounded(weight, self.levels) - weight).detach()


def tiny(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def as_sampler(model: LlamaForCausalLM, levels: int) -> LlamaForCausalLM:
    """A copy as an engine would hold it: every matrix rounded, nothing to train."""
    sampler = copy.deepcopy(model).requires_grad_(False)
    for module in sampler.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(rounded(module.weight, levels))
    return sampler


def as_trainer(model: LlamaForCausalLM, levels: int) -> LlamaForCausalLM:
    """A copy that rounds in the forward pass, straight through in the backward pass."""
    trainer = copy.deepcopy(model)
    for module in list(trainer.modules()):
        if isinstance(module, torch.nn.Linear):
            torch.nn.utils.parametrize.register_parametrization(module, "weight", StraightThrough(levels))
    return trainer


@torch.no_grad()
def answers(model: LlamaForCausalLM, prompts: Tensor, noise: Tensor) -> Tensor:
    """Tokens [N, 1 + ANSWER] drawn from the model after prompts [N]; noise [ANSWER, N, V]: Gumbel numbers."""
    tokens = prompts[:, None]
    for number in range(ANSWER):
        logits = model(tokens, use_cache=False).logits[:, -1]
        tokens = torch.cat([tokens, (logits + noise[number]).argmax(-1, keepdim=True)], dim=1)
    return tokens


def gumbel(*shape: int, seed: int) -> Tensor:
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).clamp(min=1e-9)
    return -(-uniform.log()).log()


def reward(tokens: Tensor) -> Tensor:
    """Share of right tokens [N] of tokens [N, 1 + ANSWER], whose first is the prompt."""
    wanted = (tokens[:, :1] + torch.arange(1, ANSWER + 1)) % RULE
    return (tokens[:, 1:] % RULE == wanted).double().mean(-1)


def on_policy(model: LlamaForCausalLM, scale: Scale, seed: int) -> list[LlamaForCausalLM]:
    """Train by REINFORCE on own answers until enough is learned; the versions `stale`, half of it and 0 updates ago."""
    optimizer = torch.optim.Adam(model.parameters(), lr=scale.warm_up_rate)
    versions: deque[LlamaForCausalLM] = deque(maxlen=scale.stale + 1)
    for step in range(scale.warm_up + 1):
        versions.append(copy.deepcopy(model))
        prompts = torch.randint(VOCABULARY, (32,), generator=torch.Generator().manual_seed(seed * 1000 + step))
        tokens = answers(model, prompts.repeat_interleave(8), gumbel(ANSWER, 256, VOCABULARY, seed=seed * 1000 + step))
        grouped = reward(tokens).float().reshape(-1, 8)
        if grouped.mean() >= scale.enough:
            break
        advantages = (grouped - grouped.mean(-1, keepdim=True)).reshape(-1, 1)
        log_p = model(tokens[:, :-1], use_cache=False).logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])
        update(optimizer, -(advantages * log_p.squeeze(-1)).mean())
    return [versions[0], versions[len(versions) // 2], versions[-1]]


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# ---- the rollouts


def record(store: rollstore.Store, samplers: Sequence[LlamaForCausalLM], scale: Scale, seed: int) -> None:
    """Groups of answers, one half by each sampler, appended with what a trainer must know of how they were drawn."""
    prompts = torch.randint(VOCABULARY, (scale.prompts,), generator=torch.Generator().manual_seed(seed)).tolist()
    with store.writer(run=f"seed {seed}", source="study") as writer:
        for version, sampler in enumerate(samplers):
            groups = range(version, scale.prompts, len(samplers))
            rows = [(group, member) for group in groups for member in range(scale.members)]
            turns = generate(
                sampler,
                [[prompts[group]] for group, _ in rows],
                keys=seed,
                samples=[group * scale.members + member for group, member in rows],
                sampler=Sampler(temperature=1.0),
                max_new_tokens=ANSWER,
                head_size=HEAD,
            )
            writer.append(
                [
                    Rollout(
                        rollout_id=f"{group}/{member}",
                        group_id=str(group),
                        group_size=scale.members,
                        step=version,
                        tokens=(tokens := np.array([prompts[group], *turn.tokens], np.int32)),
                        action_mask=np.arange(1 + ANSWER) > 0,
                        logprobs=Known(turn.logprobs, np.isfinite(turn.logprobs)),
                        logprob_kind="behavior",
                        head_kind="behavior",
                        heads=turn.heads,
                        weight_versions=np.full(ANSWER, version),
                        samplers=[turn.sampler],
                        replay_key=turn.key,
                        replay_sample=turn.sample,
                        noise=turn.noise,
                        reward=float(reward(torch.tensor(tokens)[None].long())[0]),
                        reward_status="scored",
                        ending="truncated",
                        ending_reason="max_tokens",
                    )
                    for (group, member), turn in zip(rows, turns, strict=True)
                ]
            )


# ---- training from the store


def states(model: LlamaForCausalLM, batch: TokenBatch) -> Tensor:
    """Last hidden states [A, D] where the actions' logits stand; all rows are of one length."""
    rows = batch.tokens.reshape(batch.rows, 1 + ANSWER)
    return model.model(rows, use_cache=False).last_hidden_state.flatten(0, 1)[batch.logit_index]


def scored(model: LlamaForCausalLM, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """The trainer's log-probs at the drawn tokens [A] and at the recorded heads [H]."""
    if batch.heads is None:
        raise ValueError("heads: wanted the heads of the rollouts, got none")
    drawn, heads = batch.tokens[batch.action_index], batch.heads
    own, at_heads = selected_logprobs(states(model, batch), model.lm_head.weight, drawn, heads.tokens, heads.counts)
    if at_heads is None:
        raise ValueError("heads: wanted log-probs at the heads, got none")
    return own, at_heads


@torch.no_grad()
def log_q(samplers: Sequence[LlamaForCausalLM], batch: TokenBatch) -> Tensor:
    """[A, V] of the version that drew each action."""
    each = [sampler.lm_head(states(sampler, batch)).log_softmax(-1) for sampler in samplers]
    return torch.stack(each)[batch.weight_versions, torch.arange(batch.actions)]


@torch.no_grad()
def kl(model: LlamaForCausalLM, batch: TokenBatch, q: Tensor) -> float:
    """Mean over the stored actions of KL(q || p), exact."""
    p = model.lm_head(states(model, batch)).log_softmax(-1)
    return float((q.exp() * (q - p)).sum(-1).mean())


def train(start: LlamaForCausalLM, loss: str, batch: TokenBatch, q: Tensor, scale: Scale, seed: int) -> list[Point]:
    """One training from the stored rollouts; a point before it and after each pass."""
    trainer = as_trainer(start, scale.trainer_levels)
    optimizer = torch.optim.Adam(trainer.parameters(), lr=scale.learning_rate)
    prompts = torch.arange(scale.fresh) % VOCABULARY
    points: list[Point] = []
    for number in range(scale.passes + 1):
        tokens = answers(trainer, prompts, gumbel(ANSWER, scale.fresh, VOCABULARY, seed=10_000 + number))
        step = number * scale.minibatches
        points.append(Point(seed, loss, step, float(reward(tokens).mean()), kl(trainer, batch, q)))
        if number == scale.passes:
            break
        with torch.no_grad():
            anchored = replace(batch, anchor_logprobs=scored(trainer, batch)[0])
        order = torch.randperm(batch.rows, generator=torch.Generator().manual_seed(seed * 1000 + number))
        for rows in order.chunk(scale.minibatches):
            part = select(anchored, rows)
            update(optimizer, LOSSES[loss](Step(part, *scored(trainer, part)))[0])
    return points


def study(path: Path, seeds: int, scale: Scale) -> list[Point]:
    """All losses for each seed. path: a folder for the stores, one a seed."""
    points: list[Point] = []
    for seed in range(seeds):
        *stale, start = on_policy(tiny(seed), scale, seed)
        samplers = [as_sampler(version, scale.sampler_levels) for version in stale]
        store = rollstore.open(path / f"seed-{seed}", create=True)
        record(store, samplers, scale, seed)
        batch, _ = group_mean(collate(store.scan("rollouts").read_all()))
        q = log_q(samplers, batch)
        for loss in LOSSES:
            points += train(start, loss, batch, q, scale, seed)
        last = {point.loss: point.reward for point in points if point.seed == seed}
        console.print(f"[dim]seed {seed}: " + ", ".join(f"{name} {value:.3f}" for name, value in last.items()))
    return points


# ---- what came out


def write_csv(points: Sequence[Point], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Point._fields)
        writer.writerows(points)


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds; of one seed the value alone."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def summary(points: Sequence[Point]) -> Table:
    """The end of each training over seeds, less where it began, and less PPO+TIS, each on the same seed."""
    end = max(point.step for point in points)
    last = {(point.loss, point.seed): point for point in points if point.step == end}
    first = {(point.loss, point.seed): point for point in points if point.step == 0}
    seeds = sorted({point.seed for point in points})
    table = Table("loss", "reward", "less start", "less PPO+TIS", "seeds above it", "KL(q||p)")
    at_start = [first["PPO+TIS", seed] for seed in seeds]
    start = f"start: reward {spread([point.reward for point in at_start])}, KL {spread([p.kl for p in at_start])}"
    over = "one seed" if len(seeds) == 1 else f"mean ± sd over {len(seeds)} seeds"
    table.title = f"{start}; after {end} updates, {over}"
    for name in LOSSES:
        rewards = [last[name, seed].reward for seed in seeds]
        gained = [last[name, seed].reward - first[name, seed].reward for seed in seeds]
        less = [last[name, seed].reward - last["PPO+TIS", seed].reward for seed in seeds]
        above = f"{sum(value > 0 for value in less)} of {len(seeds)}"
        kls = [last[name, seed].kl for seed in seeds]
        table.add_row(name, spread(rewards), spread(gained), spread(less), above, spread(kls))
    return table


def plot(points: Sequence[Point], path: Path) -> None:
    """Reward and KL by step: the mean over seeds, and a band from the lowest to the highest seed."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name in LOSSES:
        own = [point for point in points if point.loss == name]
        steps = sorted({point.step for point in own})
        for axis, column in zip(axes, ("reward", "kl"), strict=True):
            values = [[getattr(point, column) for point in own if point.step == step] for step in steps]
            (drawn,) = axis.plot(steps, [statistics.mean(at) for at in values], label=name)
            low, high = [min(at) for at in values], [max(at) for at in values]
            axis.fill_between(steps, low, high, alpha=0.08, color=drawn.get_color(), linewidth=0)
    for axis, label in zip(axes, ("reward of fresh answers", "KL(q || p) at the stored actions, nats"), strict=True):
        axis.set_xlabel("updates")
        axis.set_ylabel(label)
    axes[1].set_yscale("log")
    axes[0].legend(fontsize="small", frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/off-policy"))
    parser.add_argument("--seeds", type=int, default=5, help="at least 1")
    parser.add_argument("--quick", action="store_true", help="a few seconds: shows that it runs, and nothing else")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds: wanted a number of at least 1, got {options.seeds}")
    torch.set_num_threads(1)  # products this small only wait for a second thread
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        points = study(Path(folder), 1 if options.quick else options.seeds, QUICK if options.quick else FULL)
    write_csv(points, options.out / "points.csv")
    console.print(summary(points))
    console.print(f"{options.out / 'points.csv'}: {len(points)} points")
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no plot: matplotlib is not installed (pip install matplotlib)")
        return 0
    plot(points, options.out / "study.svg")
    console.print(f"{options.out / 'study.svg'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
