"""What the shape of a batch does to a replay: a hundred samples in one batch, against the same in ten batches of ten.

python -m examples.batch_shape [--samples 100] [--new 4] [--dtype bfloat16]

Keys, weights and sampler are the same, so that every difference is arithmetic: matrices of another shape are added up
in another order. Prints the share of samples that come out equal, and the margin of each first difference.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

from examples import smollm2
from rollstore.replay import Comparison, compare
from rollstore.replay.samplers.transformers import Turn, described, generate
from rollstore.schema import Known, Rollout, Sampler, Span

SAMPLER = Sampler(temperature=1.0, top_k=50)
KEY = 7


def drawn(model: Any, prompts: list[list[int]], batch: int, new: int) -> list[Rollout]:
    """All prompts in batches of so many, a record each."""
    turns: list[Turn] = []
    for top in range(0, len(prompts), batch):
        piece = prompts[top : top + batch]
        turns += generate(
            model,
            piece,
            keys=KEY,
            samples=range(top, top + len(piece)),
            sampler=SAMPLER,
            max_new_tokens=new,
            head_size=8,
        )
    return [
        record(str(number), prompt, turn, model)
        for number, (prompt, turn) in enumerate(zip(prompts, turns, strict=True))
    ]


def record(rollout_id: str, prompt: list[int], turn: Turn, model: Any) -> Rollout:
    """What would be stored."""
    rows = None if turn.batch_rows is None else Known(turn.batch_rows, np.ones(len(turn.tokens), dtype=bool))
    return Rollout(
        rollout_id=rollout_id,
        tokens=np.array([*prompt, *turn.tokens], dtype=np.int32),
        action_mask=np.arange(len(prompt) + len(turn.tokens)) >= len(prompt),
        logprobs=Known(turn.logprobs, np.ones(len(turn.tokens), dtype=bool)),
        logprob_kind="behavior",
        head_kind="behavior",
        weight_versions=[0] * len(turn.tokens),
        heads=turn.heads,
        batch_rows=rows,
        engine=described(model),
        spans=[
            Span(start=0, length=len(prompt), is_action=False),
            Span(start=len(prompt), length=len(turn.tokens), is_action=True, sampler=0, cache_state="fresh"),
        ],
        samplers=[turn.sampler],
        replay_key=turn.key,
        replay_sample=turn.sample,
        noise=turn.noise,
    )


def main(arguments: list[str] | None = None) -> int:
    """Draw both ways and print what differs."""
    parser = argparse.ArgumentParser(description="One large batch against small ones, the same keys.")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--new", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args(arguments)
    model, tokenizer = smollm2.load(options.dtype)
    prompts = [tokenizer.encode(f"Story {number}: once upon a time there was") for number in range(options.samples)]
    one = drawn(model, prompts, options.samples, options.new)
    many = drawn(model, prompts, options.batch, options.new)
    again = drawn(model, prompts, options.samples, options.new)
    found = [compare(a, b) for a, b in zip(one, many, strict=True)]
    at_same_shape = sum(a.tokens.tolist() == b.tokens.tolist() for a, b in zip(one, again, strict=True))
    print(f"the same shape again: {at_same_shape} of {options.samples} identical")
    report(found, options)
    return 0


def report(found: list[Comparison], options: Any) -> None:
    """The share that is equal, and the margin at each first difference."""
    equal = sum(one.first is None for one in found)
    moved = max((one.max_logprob_difference or 0.0 for one in found), default=0.0)
    print(
        f"one batch of {options.samples} against batches of {options.batch}, {options.dtype}: {equal} of "
        f"{options.samples} identical; before any difference log-probs move by at most {moved:.2g}"
    )
    for one in found:
        if one.first is not None:
            first = one.first
            margins = ", ".join(
                "unknown" if margin is None else f"{margin:+.2g}"
                for margin in (first.noised_margin_a, first.noised_margin_b)
            )
            arithmetic = next(cause for cause in one.explanations if cause.name == "arithmetic")
            print(
                f"  sample {one.rollout_id}: token {first.position}: {one.verdict.replace('_', ' ')}: margins with "
                f"noise {margins}; arithmetic {arithmetic.status.replace('_', ' ')} ({arithmetic.why})"
            )


if __name__ == "__main__":
    sys.exit(main())
