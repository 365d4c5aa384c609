"""Rollouts made from a seed, with the statistics of real ones: text tokens, groups of 8, log-normal lengths, heads."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rollstore import Heads, Rollout, Sampler, Span

GROUP = 8
VOCABULARY = 49_152


@cache
def text_tokens(size: int = 4_000_000) -> npt.NDArray[np.int32]:
    """Ids [at most size] of the standard library's sources, cut into words and marks; the id is the word's rank."""
    words: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        words.extend(re.findall(r"\w+|\s+|[^\w\s]", path.read_text(encoding="utf-8", errors="replace")))
        if len(words) >= size:
            break
    rank = {word: n for n, (word, _) in enumerate(Counter(words).most_common())}
    return np.array([rank[word] % VOCABULARY for word in words[:size]], np.int32)


def rollouts(tokens: int, *, head_size: int = 0, seed: int = 0) -> list[Rollout]:
    """Rollouts of about `tokens` tokens in all: groups of 8 sharing a prompt, every fourth with a tool's turn."""
    rng = np.random.default_rng(seed)
    source = text_tokens()
    made: list[Rollout] = []
    total = 0
    while total < tokens:
        group = len(made) // GROUP
        prompt = _piece(source, rng, int(rng.lognormal(4.5, 0.5)) + 1)
        for member in range(GROUP):
            made.append(_rollout(source, rng, prompt, group, member, head_size))
            total += len(made[-1].tokens)
    return made


def _piece(source: npt.NDArray[np.int32], rng: np.random.Generator, length: int) -> npt.NDArray[np.int32]:
    start = int(rng.integers(0, len(source) - length))
    return source[start : start + length]


def _rollout(
    source: npt.NDArray[np.int32],
    rng: np.random.Generator,
    prompt: npt.NDArray[np.int32],
    group: int,
    member: int,
    head_size: int,
) -> Rollout:
    first = min(int(rng.lognormal(5.0, 0.7)) + 1, 8192)
    parts = [(prompt, "user", False), (_piece(source, rng, first), "assistant", True)]
    if member % 4 == 0:
        parts += [(_piece(source, rng, 64), "tool", False), (_piece(source, rng, 48), "assistant", True)]
    tokens = np.concatenate([ids for ids, _, _ in parts])
    mask = np.concatenate([np.full(len(ids), action) for ids, _, action in parts])
    starts = np.cumsum([0, *(len(ids) for ids, _, _ in parts)])
    spans = [
        Span(
            start=int(start),
            length=len(ids),
            role=role,
            is_action=action,
            origin="sampled" if action else "rendered",
            sampler=0 if action else None,
        )
        for start, (ids, role, action) in zip(starts, parts, strict=False)
    ]
    actions = int(mask.sum())
    logprobs = -rng.exponential(0.35, actions).astype(np.float32) * (rng.random(actions) < 0.6)
    return Rollout(
        rollout_id=f"{group:08d}-{member}",
        run_id="bench",
        group_id=str(group),
        group_size=GROUP,
        sample_index=member,
        step=group // 64,
        tokens=tokens,
        action_mask=mask,
        logprobs=logprobs,
        logprob_kind="behavior",
        weight_versions=np.full(actions, group // 64),
        heads=_heads(rng, actions, head_size) if head_size else None,
        head_kind="tempered" if head_size else None,
        spans=spans,
        samplers=[Sampler(temperature=1.0)],
        ending="terminated",
        reward=float(rng.random() < 0.4),
    )


def _heads(rng: np.random.Generator, actions: int, size: int) -> Heads:
    """Falling log-probs with the mass of a peaked distribution, distinct ids."""
    weights = rng.exponential(1.0, (actions, size)) * np.exp(-0.6 * np.arange(size))
    shares = -np.sort(-weights / (weights.sum(1, keepdims=True) * 1.02), axis=1)
    ids = (rng.integers(0, VOCABULARY, (actions, 1)) + np.arange(size) * 7) % VOCABULARY
    return Heads(size=size, tokens=ids.ravel().astype(np.int32), logprobs=np.log(shares).ravel().astype(np.float32))
