"""A store to show: a conversation with a tool, two segments, two weight versions, and text that attacks terminals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
from typer.testing import Result

from rollstore import Engine, Heads, Known, Numerics, Rollout, Sampler, Span

Run = Callable[..., Result]
"""Runs a command line: `run("ls", path)`."""

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
KEY = 2**64 - 1
HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold red]shout[/] \u202eabc\u202c\r"

VOCABULARY = (
    "<|system|>", "You are careful.", "<|user|>", "What is", " 17", " +", " 25", "?", "<|assistant|>", "Let me", " use",
    " the", " calculator", ":", "\n", "<|tool|>", "42", "The", " answer", " is", " é", "…", "<|end|>", " 日本", HOSTILE,
)  # fmt: skip


def ids(*words: str) -> list[int]:
    return [VOCABULARY.index(word) for word in words]


def spans(*parts: tuple[str, bool, int], **fields: object) -> tuple[Span, ...]:
    """Spans from (role, is_action, length), turns counted at each tool answer."""
    start, made = 0, []
    for n, (role, acts, length) in enumerate(parts):
        sampler = 0 if acts else None
        made.append(Span(start=start, length=length, role=role, is_action=acts, turn=n // 3, sampler=sampler, **fields))
        start += length
    return tuple(made)


def rollout(rollout_id: str, words: Sequence[int], actions: Sequence[bool], **fields: object) -> Rollout:
    pieces = tuple(VOCABULARY[word].encode() for word in words)
    return Rollout(rollout_id=rollout_id, tokens=words, action_mask=actions, token_bytes=pieces, **fields)


def conversation() -> list[Rollout]:
    """One rollout of two segments: 20 tokens and 9 actions in the first, the tool's answer in the second."""
    words = ids(
        "<|system|>", "You are careful.", "<|user|>", "What is", " 17", " +", " 25", "?", "<|assistant|>", "Let me",
        " use", " the", " calculator", ":", "\n", "<|tool|>", "42", "The", " answer", "<|end|>",
    )  # fmt: skip
    mask = [False] * 9 + [True] * 6 + [False] * 2 + [True] * 3
    logprobs = [-0.01, -0.9, -3.0, -6.0, None, -math.inf, -0.2, -0.3, -0.05]
    versions = [3, 3, 3, 3, 3, 3, 3, 4, 4]
    drawn = np.array(words)[np.array(mask)]
    heads = Heads(size=2, tokens=np.stack([drawn, (drawn + 1) % 25], 1).ravel(), logprobs=np.tile([-0.5, -1.0], 9))
    common = {
        "run_id": "math-7b", "group_id": "g7", "group_size": 4, "sample_index": 1, "step": 12, "prompt_id": "p-17",
        "environment": "arithmetic", "policy": "tiny", "reward_status": "on_final_segment", "logprob_kind": "behavior",
        "head_kind": "raw", "noise": "gumbel-philox4x32/1", "replay_key": KEY, "replay_sample": 3,
        "samplers": (Sampler(temperature=0.8, top_p=0.95, top_k=50, max_tokens=32, seed=KEY),),
        "engine": Engine(name="transformers", version="5.1", numerics=Numerics(weights="bfloat16")),
        "requested_at": START, "started_at": START + timedelta(seconds=0.25),
        "finished_at": START + timedelta(seconds=3),
    }  # fmt: skip
    first = rollout(
        "talk", words, mask, ending="continued", segment_cause="start", weight_version_source="per_token",
        spans=spans(
            ("system", False, 2), ("user", False, 6), ("template", False, 1), ("assistant", True, 6),
            ("tool", False, 2), ("assistant", True, 1), ("assistant", True, 2),
        ),
        logprobs=Known(np.array([v or 0.0 for v in logprobs], np.float32), np.array([v is not None for v in logprobs])),
        weight_versions=versions, heads=heads, **common,
    )  # fmt: skip
    last = rollout(
        "talk", ids("<|system|>", " é", "…", HOSTILE), [False, True, True, True], segment=1, segment_cause="compaction",
        ending="terminated", ending_reason="stop_token", reward=1.0, metadata={"note": HOSTILE},
        logprobs=[-0.1, -2.0, -0.7], weight_versions=[4, 4, 4],
        **{**common, "reward_status": "scored"},
    )  # fmt: skip
    return [first, last]


def others() -> list[Rollout]:
    """Short rollouts with little recorded: no bytes, no spans, no log-probs, an unscored end."""
    bare = Rollout(rollout_id="bare", tokens=[5, 6, 7], action_mask=[False, True, True])
    return [
        bare,
        Rollout(
            rollout_id="cut", tokens=[5, 6, 8, 9], action_mask=[False, True, True, True], ending="truncated",
            ending_reason="max_tokens", reward_status="unscored", run_id="math-7b", group_id="g7", sample_index=2,
            step=12, logprobs=[-0.5, -0.6, -0.7], weight_versions=[3, 3, 3],
        ),
    ]  # fmt: skip
