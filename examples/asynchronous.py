"""Asynchronous GRPO in two processes that share nothing but a store and the newest weights: an engine and a trainer.

python -m examples.asynchronous [STORE] [--steps 30]

The engine draws prompt groups under whatever weights are newest and records them; the trainer follows the store, takes
whole groups as they are finished, none that is more than two versions old, corrects for the age of each action with
truncated importance sampling, publishes the next weights, and commits the step. The model is tiny and random, and its
reward is the share of even tokens, so that a run takes seconds; what it prints comes from the store. What a restart of
either does, docs/loading.md says.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rollstore
from rollstore.batch import Transform
from rollstore.losses import group_mean, reinforce, tis, token_mean, with_counts
from rollstore.readers.duckdb import connect
from rollstore.readers.torch import RolloutLoader
from rollstore.replay.samplers.transformers import described, generate
from rollstore.replay.score import score
from rollstore.schema import Sampler

SAMPLER = Sampler(temperature=1.0)
VOCABULARY, PROMPTS, GROUP, NEW, MOST_LAG = 64, 4, 8, 12, 2


def tiny() -> Any:
    """A model of random weights, the same in both processes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


def publish(model: Any, folder: Path, version: int) -> None:
    """Weights appear whole, under their version."""
    torch.save(model.state_dict(), folder / "next")
    os.replace(folder / "next", folder / f"{version:06d}.pt")


def newest(folder: Path) -> int:
    """The last version that was published."""
    return max(int(path.stem) for path in folder.glob("*.pt"))


def engine(store: str, weights: Path, enough: Path) -> None:
    """Draw groups until there is enough."""
    torch.set_num_threads(1)
    model, held, asked = tiny(), -1, 0
    with rollstore.open(store).writer(run="engine", source="transformers") as writer:
        while not enough.exists():
            if (version := newest(weights)) != held:
                model.load_state_dict(torch.load(weights / f"{version:06d}.pt", weights_only=True))
                held = version
            prompt = [1, 2 + asked % PROMPTS]
            turns = generate(
                model, [prompt] * GROUP, keys=asked, samples=range(GROUP), sampler=SAMPLER, max_new_tokens=NEW
            )
            for number, turn in enumerate(turns):
                with writer.rollout(
                    rollout_id=f"{asked}/{number}", group_id=str(asked), group_size=GROUP, engine=described(model),
                    prompt_id=str(prompt[1]), replay_key=asked, replay_sample=number, noise=turn.noise,
                    logprob_kind="behavior", weight_version_source="per_span",
                ) as recorder:  # fmt: skip
                    recorder.observe(prompt, role="user")
                    recorder.act(turn.tokens, logprobs=turn.logprobs, weight_versions=held, sampler=turn.sampler)
                    reward = float((turn.tokens % 2 == 0).mean())
                    recorder.end("truncated", reason="max_tokens", reward=reward)
            writer.flush()  # the group is there for the trainer
            asked += 1


def train(store: str, weights: Path, steps: int) -> None:
    """Follow the store for so many steps."""
    torch.set_num_threads(1)
    model, version = tiny(), newest(weights)
    model.load_state_dict(torch.load(weights / f"{version:06d}.pt", weights_only=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    following = RolloutLoader(
        rollstore.open(store), follow=True, train_run="trainer", rollouts_per_batch=2, whole_groups=True,
        version=lambda: newest(weights), max_lag=MOST_LAG, timeout=120.0, poll=0.05,
    )  # fmt: skip
    for loaded in following:
        batch = replace(group_mean(loaded)[0], trainer_transform=Transform(temperature=True))
        (batch,) = with_counts([batch])
        loss, _ = reinforce(batch, score(model, batch).logprobs, correction=tis(high=2.0), reduce=token_mean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        version += 1
        publish(model, weights, version)
        following.commit(weight_version=version - 1)
        if version >= steps:
            break
    following.close()


def main(arguments: list[str] | None = None) -> int:
    """Run both, and say from the store what happened."""
    parser = argparse.ArgumentParser(description="An engine and a trainer that share a store.")
    parser.add_argument("store", nargs="?", help="kept there; unless given, thrown away")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        store, weights, enough = options.store or f"{folder}/store", Path(folder) / "weights", Path(folder) / "enough"
        rollstore.open(store, create=True)
        weights.mkdir()
        publish(tiny(), weights, 0)
        spawn = multiprocessing.get_context("spawn")
        drawing = spawn.Process(target=engine, args=(store, weights, enough))
        training = spawn.Process(target=train, args=(store, weights, options.steps))
        drawing.start()
        training.start()
        training.join()
        enough.touch()
        drawing.join()
        if training.exitcode or drawing.exitcode:
            print(f"engine left with {drawing.exitcode}, trainer with {training.exitcode}", file=sys.stderr)
            return 1
        report(rollstore.open(store))
    print(f"Done in {time.monotonic() - began:.0f} s.")
    return 0


def report(store: rollstore.Store) -> None:
    """Reward and age of what was trained on, by thirds of the run; and what became of the rest."""
    with connect(store) as connection:
        thirds = connection.execute("""
            SELECT any_value(third), min(train_step), max(train_step), avg(reward), avg(lag), max(lag), avg(waited)
            FROM (SELECT u.train_step, ntile(3) OVER (ORDER BY u.train_step) AS third, r.reward,
                    u.weight_version - r.weight_version_min AS lag,
                    epoch(u.consumed_at) - epoch(r.finished_at) AS waited
                  FROM uses u JOIN rollouts r USING (rollout_id) WHERE u.disposition = 'trained' AND NOT u.superseded)
            GROUP BY third ORDER BY 1""").fetchall()
        for _, first, last, reward, lag, oldest, waited in thirds:
            print(
                f"steps {first:3} to {last:3}: mean reward {reward:.3f}, lag {lag:.2f} versions (at most {oldest}), "
                f"waited {waited:.2f} s"
            )
        rest = connection.execute("""
            SELECT coalesce(u.reason, u.disposition), count(DISTINCT rollout_id) FROM uses u
            WHERE NOT superseded AND disposition != 'trained' GROUP BY ALL ORDER BY 2 DESC""").fetchall()
        for why, count in rest:
            print(f"not trained on: {count} rollouts: {why}")


if __name__ == "__main__":
    sys.exit(main())
