"""What the losses cost: from hidden states against the whole matrix of logits, and against a model's forward pass.

python -m benchmarks.losses                    # everything; about six minutes on two quiet cores
python -m benchmarks.losses --actions 256      # the first two tables at a smaller size
python -m benchmarks.losses --only objectives  # the third table

Memory is the high-water mark of the resident set above what the inputs took, each run in a process of its own
(Linux). It holds the gradients. That of the output matrix, dW, is as large for everyone and larger than all else that
`selected_logprobs` takes, so each case is also run with that matrix frozen. Filters sort all logits, which takes the
plain way ten times their memory: that case has an eighth of the actions. On a machine that others use look at the
seconds of CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from examples import smollm2
from rollstore import Heads, Rollout, Sampler
from rollstore.batch import TokenBatch, collate
from rollstore.losses import (
    Recorded,
    cispo,
    dapo,
    dr_grpo,
    group_mean,
    gspo,
    logprobs_of_logits,
    mis,
    ppo_clip,
    reference_kl,
    reinforce,
    reinforce_zero,
    sampler_kl,
    sao,
    score_centering,
    selected_logprobs,
    tis,
)
from rollstore.schema import to_table

WIDTH, VOCABULARY, HEAD = 896, 151_936, 8
PROMPT, ANSWER, GROUP = 64, 192, 4
MIB = 1 << 20

console = Console()


def batch_of(actions: int, vocabulary: int, seed: int = 0) -> TokenBatch:
    """Rollouts of 64 prompt tokens and at most 192 actions in groups of four, with heads of eight; `actions` in all."""
    rng = np.random.default_rng(seed)
    rows: list[Rollout] = []
    while left := actions - sum(int(row.action_mask.sum()) for row in rows):
        count = min(left, ANSWER)
        drawn = rng.integers(0, vocabulary, (count, HEAD))
        drawn[:, 1:] = (drawn[:, :1] + np.arange(1, HEAD)) % vocabulary
        shares = np.sort(rng.dirichlet(np.full(HEAD + 1, 0.3), count)[:, :HEAD])[:, ::-1].clip(1e-6)
        rows.append(
            Rollout(
                rollout_id=str(len(rows)),
                group_id=str(len(rows) // GROUP),
                tokens=np.concatenate([rng.integers(0, vocabulary, PROMPT), drawn[:, 0]]).astype(np.int32),
                action_mask=np.arange(PROMPT + count) >= PROMPT,
                logprobs=np.log(shares[:, 0]).astype(np.float32),
                logprob_kind="behavior",
                head_kind="behavior",
                heads=Heads(
                    size=HEAD,
                    tokens=drawn.astype(np.int32).ravel(),
                    logprobs=np.log(shares).astype(np.float32).ravel(),
                ),
                samplers=[Sampler(temperature=1.0)],
                reward=float(rng.random() < 0.5),
                reward_status="scored",
                ending="terminated",
            )
        )
    return group_mean(collate(to_table(rows)))[0]


# ---- from hidden states


def filters(actions: int) -> dict[str, Tensor]:
    return {"top_k": torch.full((actions,), 50), "top_p": torch.full((actions,), 0.95)}


def chunked(batch: TokenBatch, hidden: Tensor, weight: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    drawn = batch.tokens[batch.action_index]
    if kind == "filters":
        return selected_logprobs(hidden, weight, drawn, **filters(len(hidden)))
    if kind != "heads" or batch.heads is None:
        return selected_logprobs(hidden, weight, drawn)
    return selected_logprobs(hidden, weight, drawn, batch.heads.tokens, batch.heads.counts)


def whole(batch: TokenBatch, hidden: Tensor, weight: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """The plain computation: all logits, their log-softmax, and a look at the entries that are wanted."""
    if kind == "filters":
        drawn = batch.tokens[batch.action_index]
        return logprobs_of_logits(hidden @ weight.T, drawn, how=Recorded(**filters(len(hidden))))
    log_p = torch.log_softmax(hidden @ weight.T, -1)
    own = log_p.gather(-1, batch.tokens[batch.action_index][:, None]).squeeze(-1)
    if kind != "heads" or batch.heads is None:
        return own, None
    return own, log_p.gather(-1, batch.heads.tokens.reshape(len(hidden), -1)).reshape(-1)


WAYS = {"rollstore": chunked, "plain [A, V]": whole}


def ppo(batch: TokenBatch, own: Tensor, _: Tensor | None) -> Tensor:
    # one that a filter took away has no anchor to divide by, and is left out
    return ppo_clip(replace(batch, anchor_logprobs=own.detach()), own, correction=tis(2.0))[0]


def centred(batch: TokenBatch, own: Tensor, at_head: Tensor | None) -> Tensor:
    if at_head is None:
        raise ValueError("score centering: wanted log-probs at the heads, got None")
    return score_centering(batch, own, at_head)[0]


OBJECTIVES: dict[str, tuple[Callable[[TokenBatch, Tensor, Tensor | None], Tensor], str]] = {
    "score centering": (centred, "heads"),
    "PPO": (ppo, "plain"),
    "PPO, top-k and top-p": (ppo, "filters"),
}


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(way: str, objective: str, actions: int, runs: int, frozen: bool) -> dict[str, Any]:
    """Peak bytes above the inputs; seconds, and those of all cores, of each run, after the first if there are more."""
    call, kind = OBJECTIVES[objective]
    batch = batch_of(actions, VOCABULARY)
    generator = torch.Generator().manual_seed(0)
    weight = torch.empty(VOCABULARY, WIDTH).normal_(0, 0.02, generator=generator).requires_grad_(not frozen)
    hidden = torch.empty(actions, WIDTH).normal_(generator=generator).requires_grad_()

    def step() -> tuple[float, float]:
        hidden.grad = weight.grad = None
        began, spent = time.perf_counter(), time.process_time()
        call(batch, *WAYS[way](batch, hidden, weight, kind)).backward()
        return time.perf_counter() - began, time.process_time() - spent

    # torch's threads and kernels take their memory at first use, which is no part of this
    small, few = torch.zeros(8, 8, requires_grad=True), batch_of(8, 8)
    call(few, *WAYS[way](few, small, torch.zeros(8, 8, requires_grad=True), kind)).backward()
    before = resident()
    times = [step() for _ in range(runs)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    seconds, cpu = zip(*(times[1:] or times), strict=True)
    return {"peak": peak, "seconds": seconds, "cpu": cpu}


def from_hidden_states(objectives: list[str], actions: int, runs: int) -> dict[str, Any]:
    """Each objective, way, and whether the output matrix learns, in a process of its own, one after the other."""
    found: dict[str, Any] = {}
    table = Table("objective", "output matrix", "way", "peak MiB", "x plain", "seconds", "x plain", "CPU", "x plain")
    gradient = WIDTH * VOCABULARY * 4 // MIB
    table.title = f"{actions:,} actions, width {WIDTH}, vocabulary {VOCABULARY:,}, float32; dW is {gradient} MiB"
    for objective in objectives:
        for matrix in ("learns", "frozen"):
            for way in reversed(WAYS):
                console.print(f"[dim]{objective}, {matrix}, {way} ...[/dim]")
                command = [sys.executable, "-m", "benchmarks.losses", "--measure", way, objective, matrix]
                command += ["--actions", str(actions), "--runs", str(runs)]
                done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ})
                figures = found[f"{objective} / {matrix} / {way}"] = json.loads(done.stdout)
                plain = found[f"{objective} / {matrix} / plain [A, V]"]
                cells = [f"{figures['peak'] / MIB:,.0f}", f"{figures['peak'] / plain['peak']:.3f}"]
                for column in ("seconds", "cpu"):
                    middle, base = statistics.median(figures[column]), statistics.median(plain[column])
                    cells += [f"{middle:.2f}", f"{middle / base:.2f}"]
                table.add_row(objective, matrix, way, *cells)
    console.print(table)
    return found


# ---- the objectives themselves

CALLS: dict[str, Callable[[TokenBatch, Tensor, Tensor], tuple[Tensor, Any]]] = {
    "reinforce": lambda b, x, h: reinforce(b, x),
    "ppo_clip, tis": lambda b, x, h: ppo_clip(b, x, correction=tis(2.0)),
    "ppo_clip, mis sequence": lambda b, x, h: ppo_clip(b, x, correction=mis(0.5, 2.0, level="sequence")),
    "gspo": lambda b, x, h: gspo(b, x),
    "cispo": lambda b, x, h: cispo(b, x),
    "dapo": lambda b, x, h: dapo(b, x),
    "dr_grpo": lambda b, x, h: dr_grpo(b, x, length=float(ANSWER)),
    "sao": lambda b, x, h: sao(b, x),
    "reinforce_zero": lambda b, x, h: reinforce_zero(b, x),
    "score_centering": lambda b, x, h: score_centering(b, x, h),
    "score_centering, tis, kl": lambda b, x, h: score_centering(b, x, h, weight=tis(2.0), sampler_kl=0.1),
    "sampler_kl": lambda b, x, h: sampler_kl(b, h, beta=0.1),
    "reference_kl": lambda b, x, h: reference_kl(b, x, beta=0.1),
}


def against_the_forward(runs: int) -> dict[str, list[float]]:
    """Value and gradient of each loss, from log-probs, and the layers of the 135M model forward, without its head."""
    model, _ = smollm2.load()
    batch = batch_of(4 * ANSWER, model.config.vocab_size)
    rows = batch.tokens.reshape(batch.rows, -1)
    own = batch.behavior_logprobs + 0.05 * torch.randn(batch.actions, generator=torch.Generator().manual_seed(1))
    batch = replace(batch, anchor_logprobs=own.clone(), reference_logprobs=own - 0.01)
    if batch.heads is None:
        raise ValueError("heads: wanted a head an action, got none")
    at_head = batch.heads.logprobs - 0.01

    def forward() -> None:
        with torch.no_grad():
            model.model(input_ids=rows, use_cache=False)

    def loss(name: str) -> None:
        x, h = own.clone().requires_grad_(), at_head.clone().requires_grad_()
        # the answer about samplers is kept with a batch; a fresh copy asks anew
        CALLS[name](replace(batch), x, h)[0].backward()

    contestants: dict[str, Callable[[], None]] = {"forward": forward, **{n: partial(loss, n) for n in CALLS}}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(runs + 1):
        for name, call in contestants.items():
            began = time.perf_counter()
            call()
            if number:
                times[name].append(time.perf_counter() - began)
    longest = statistics.median(times["forward"])
    table = Table("loss, value and gradient", "median ms", "max", "of the forward")
    shape = f"{batch.rows} rows of {PROMPT} + {ANSWER} tokens, {batch.actions} actions, heads of {HEAD}, float32, "
    table.title = (
        shape + f"{torch.get_num_threads()} threads; forward without the output matrix {longest * 1e3:,.0f} ms"
    )
    for name in CALLS:
        middle = statistics.median(times[name])
        table.add_row(name, f"{middle * 1e3:.2f}", f"{max(times[name]) * 1e3:.2f}", f"{middle / longest:.2%}")
    console.print(table)
    return times


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"wanted a number of at least 1, got {text}")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actions", type=at_least_one, default=2048)
    parser.add_argument("--runs", type=at_least_one, default=3, help="the first does not count where there are more")
    parser.add_argument("--only", choices=["hidden", "filters", "objectives"])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--measure", nargs=3, metavar=("WAY", "OBJECTIVE", "MATRIX"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        way, objective, matrix = options.measure
        print(json.dumps(measure(way, objective, options.actions, options.runs, matrix == "frozen")))
        return 0
    figures: dict[str, Any] = {}
    *plain, filtered = OBJECTIVES
    if options.only in (None, "hidden"):
        figures["hidden"] = from_hidden_states(plain, options.actions, options.runs)
    if options.only in (None, "filters"):
        figures["filters"] = from_hidden_states([filtered], max(1, options.actions // 8), options.runs)
    if options.only in (None, "objectives"):
        figures["objectives"] = against_the_forward(options.runs)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
