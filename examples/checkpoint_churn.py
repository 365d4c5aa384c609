"""What changes between neighbouring checkpoints when the noise does not: a short GRPO run, the same questions.

python -m examples.checkpoint_churn [STORE] [--checkpoints 4] [--questions 100]

SmolLM2-135M takes a few GRPO steps. Each checkpoint answers the same questions under the same keys, so that an answer
changes only where the weights outweigh the noise. Every pair of neighbours is compared to the token from the stored
rollouts alone, and one flip is told in full. It takes minutes on a CPU.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import rollstore
from examples import smollm2
from examples.arithmetic import TASKS, Task, verify
from examples.loop import HEAD_SIZE, SAMPLER, collect, train
from rollstore.replay import Diff, by_draw, diff, last_mean, smallest_difference
from rollstore.replay.samplers.transformers import described, generate

KEY = 31_417
"""Of the noise of every question, in every checkpoint."""
AT_ONCE, NEW = 20, 12

console = Console()


def questions(count: int) -> list[Task]:
    """The same questions in every run: sums, differences and products of small numbers."""
    rng = np.random.Generator(np.random.Philox(7))
    found: list[Task] = []
    for number in range(count):
        a, b = (int(value) for value in rng.integers(2, 30, 2))
        sign, word, answer = (("+", "+", a + b), ("-", "-", a - b), ("*", "times", a * b))[number % 3]
        found.append(Task(prompt_id=f"{number}: {a}{sign}{b}", question=f"What is {a} {word} {b}?", answer=answer))
    return found


def answer(store: rollstore.Store, model: Any, tokenizer: Any, asked: list[Task], version: int) -> float:
    """Every question once under its own noise, recorded as a run of this checkpoint; returns the mean reward."""
    rewards: list[float] = []
    with store.writer(run=f"checkpoint-{version}", source="transformers") as writer:
        tops = range(0, len(asked), AT_ONCE)
        for top in track(tops, f"checkpoint {version} answers", console=Console(stderr=True), transient=True):
            piece = asked[top : top + AT_ONCE]
            prompts = [
                tokenizer.apply_chat_template(task.messages, add_generation_prompt=True, return_dict=False)
                for task in piece
            ]
            turns = generate(
                model,
                prompts,
                keys=KEY,
                samples=range(top, top + len(piece)),
                sampler=SAMPLER,
                max_new_tokens=NEW,
                head_size=HEAD_SIZE,
                stop_token_ids=[tokenizer.eos_token_id],
                rows=AT_ONCE,
            )
            for task, prompt, turn in zip(piece, prompts, turns, strict=True):
                reward = verify(tokenizer.decode(turn.tokens, skip_special_tokens=True), task.answer)
                rewards.append(reward)
                recorder = writer.rollout(
                    rollout_id=f"checkpoint-{version}/{task.prompt_id}",
                    prompt_id=task.prompt_id,
                    step=version,
                    engine=described(model),
                    replay_key=KEY,
                    replay_sample=turn.sample,
                    noise=turn.noise,
                    logprob_kind="behavior",
                    head_kind="behavior",
                )
                recorder.observe(prompt, role="user")
                recorder.act(
                    turn.tokens,
                    logprobs=turn.logprobs,
                    weight_versions=version,
                    sampler=turn.sampler,
                    heads=turn.heads,
                    batch_rows=turn.batch_rows,
                    engine_finish=turn.finish,
                    cache_state="fresh",
                )
                cut = turn.finish == "length"
                recorder.end(
                    "truncated" if cut else "terminated", reason="max_tokens" if cut else "stop_token", reward=reward
                )
    return float(np.mean(rewards))


def pairs(store: rollstore.Store, count: int) -> list[tuple[str, Diff]]:
    """Neighbours, and the first checkpoint against the last."""
    chosen = [(n, n + 1) for n in range(count - 1)] + ([(0, count - 1)] if count > 2 else [])
    return [
        (
            f"{a} to {b}",
            diff(store, store, match=by_draw, run_a=f"checkpoint-{a}", run_b=f"checkpoint-{b}"),
        )
        for a, b in chosen
    ]


def table(found: list[tuple[str, Diff]]) -> Table:
    """One row a pair."""
    shown = Table(title="Checkpoint against checkpoint, the same noise", title_justify="left")
    for name in (
        "pair", "changed", "first flips", "all flips", "earliest", "wrong to right", "right to wrong", "neither",
        "mean", "p",
    ):  # fmt: skip
        shown.add_column(name, justify="right")
    for name, one in found:
        outcomes = [flip.outcome for flip in one.flips]
        scores = one.paired
        shown.add_row(
            name,
            "" if one.share_changed is None else f"{one.changed} of {one.matched}",
            str(one.flipped_first),
            f"{one.flipped_all} of {one.decisions}",
            "" if one.earliest is None else str(one.earliest),
            *(str(outcomes.count(outcome)) for outcome in ("better", "worse", "neither")),
            "" if scores is None else f"{scores.mean_a:.2f} to {scores.mean_b:.2f}",
            "" if scores is None else f"{scores.p:.2g}",
        )
    return shown


def told(found: list[tuple[str, Diff]], tokenizer: Any) -> list[str]:
    """One flip in full: one that changed its score, if there is one."""
    flips = [(name, flip) for name, one in found for flip in one.flips]
    flips.sort(key=lambda pair: pair[1].outcome not in ("better", "worse"))
    for name, flip in flips:
        first = flip.comparison.first
        if first is None or first.token_a is None or first.token_b is None or first.margin_a is None:
            continue
        a, b = (repr(tokenizer.decode([token])) for token in (first.token_a, first.token_b))
        return [
            f"One flip in full, {name} ({flip.a}, reward {flip.reward_a} to {flip.reward_b}):",
            *flip.comparison.lines(),
            f"  a is {a}, b is {b}; both checkpoints drew under one noise, which favours a by {first.noise_gap:.3g}",
        ]
    return ["No flip whose heads hold both candidates."]


def main(arguments: list[str] | None = None) -> int:
    """Run it all and print the table."""
    parser = argparse.ArgumentParser(description="Checkpoints of a short GRPO run, compared to the token.")
    parser.add_argument("store", nargs="?", type=Path, help="kept there, begun anew; unless given, thrown away")
    parser.add_argument("--checkpoints", type=int, default=4)
    parser.add_argument("--questions", type=int, default=100)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = options.store or Path(folder) / "churn"
        shutil.rmtree(path, ignore_errors=True)
        store = rollstore.open(path, create=True)
        model, tokenizer = smollm2.load()
        asked = questions(options.questions)
        tasks = [task for task in TASKS if not task.uses_calculator]
        means: list[float] = []
        for version in range(options.checkpoints):
            if version:
                collect(store, model, tokenizer, tasks, step=version - 1, max_new_tokens=NEW)
                train(store, model, step=version - 1, learning_rate=1e-6)
            means.append(answer(store, model, tokenizer, asked, version))
        found = pairs(store, options.checkpoints)
        Console(width=max(110, console.width)).print(table(found))
        say(
            f"{len(asked)} questions resolve {smallest_difference(len(asked)):.1%} between two runs at one half; 500 "
            f"resolve {smallest_difference(500):.1%}."
        )
        k = min(3, len(means))
        final, mean = last_mean(means, k)
        say(f"The last checkpoint scores {final:.3f}, the mean of the last {k} is {mean:.3f}.\n")
        say("\n".join(told(found, tokenizer)))
        say(f"\nDone in {time.monotonic() - began:.0f} s.")
    return 0


def say(text: str) -> None:
    """Print as it is: what a model wrote is no markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
