"""Rollouts made from a seed, with the statistics of real ones, as columns: a million take seconds, not hours.

Groups of 8 share a prompt, lengths are log-normal, every fourth rollout has a tool's turn, and log-probs and heads have
the distribution that SmolLM2 shows when it samples at temperature 1. Token ids come from a text, which the caller gives
as ids; `words` makes one of the standard library's sources.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollstore.errors import RollstoreError
from rollstore.schema import Rollout, from_table

GROUP = 8
STEP_GROUPS = 64
"""Groups of one trainer step; the weight version is the step."""

VOCABULARY = 49_152
MEAN_TOKENS = 331.0
MEAN_ACTIONS = 207.0
"""Tokens of a rollout, and those of them that are drawn, on average."""

ROLES = ("user", "assistant", "tool", "assistant")

# Quantiles of log10(-log-prob) of the drawn token at the shares 0, 1/16, ... 1: SmolLM2-135M-Instruct answering eight
# questions, six samples each, at temperature 1. The mean log-prob is -2.06.
_LOGPROB = (-6.9, -2.2, -1.46, -1.0, -0.71, -0.45, -0.28, -0.11, 0.03, 0.16, 0.27, 0.37, 0.48, 0.6, 0.71, 0.84, 1.23)

LONGEST = 8192
"""Tokens of an answer at most."""

Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]


def texts(characters: int) -> list[str]:
    """The standard library's sources in order of their names, until they have so many characters."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            found.append(path.read_text(encoding="utf-8", errors="replace"))
        if sum(map(len, found)) > characters:
            break
    return found


def words(sources: list[str]) -> Ids:
    """Texts as ids: the rank of each word among all, below 49,152. Raises RollstoreError where there are too few."""
    found = [word for source in sources for word in re.findall(r"\w+|\s+|[^\w\s]", source)]
    if len(found) <= 2 * LONGEST:
        raise RollstoreError(f"text: wanted over {2 * LONGEST:,} words of the standard library, got {len(found):,}")
    rank = {word: number for number, (word, _) in enumerate(Counter(found).most_common())}
    return np.array([rank[word] % VOCABULARY for word in found], np.int32)


def tables(
    text: Ids, rollouts: int, *, block: int = 2000, heads: Ids | None = None, seed: int = 0, scale: float = 1.0
) -> Iterator[pa.Table]:
    """Tables of `block` rollouts each, `rollouts` in all."""
    for first in range(0, rollouts, block):
        yield table(text, min(block, rollouts - first), first=first, heads=heads, seed=seed, scale=scale)


def table(
    text: Ids, rollouts: int, *, first: int = 0, heads: Ids | None = None, seed: int = 0, scale: float = 1.0
) -> pa.Table:
    """Rollouts `first`, `first` + 1, ... (a multiple of 8). Equal arguments give equal rows; ids go by number alone.

    text: ids that tokens are taken from, more than twice `LONGEST`. heads: as `head_pool` gives; without, no heads.
    scale: of all lengths; at 1 a rollout has 331 tokens on average.
    """
    rng = np.random.default_rng((seed, first))
    groups = -(-rollouts // GROUP)
    lengths, starts = _pieces(rng, groups, len(text), scale)
    lengths, starts = lengths[:rollouts], starts[:rollouts]
    flat = lengths.ravel()
    ends = np.cumsum(flat)
    tokens = text[np.repeat(starts.ravel() - (ends - flat), flat) + np.arange(ends[-1])]
    mask = np.repeat(np.tile([False, True, False, True], rollouts), flat)
    actions = lengths[:, 1] + lengths[:, 3]
    total = int(actions.sum())
    number = np.arange(first, first + rollouts)
    step = number // (GROUP * STEP_GROUPS)
    temperatures = pa.StructArray.from_arrays([pa.array(np.ones(rollouts))], ["temperature"])
    columns: dict[str, pa.Array] = {
        "rollout_id": ids(number, seed),
        "segment": pa.array(np.zeros(rollouts, np.int32)),
        "run_id": pa.repeat(pa.scalar("bench"), rollouts),
        "group_id": pa.array((number // GROUP).astype(str), pa.string()),
        "group_size": pa.array(np.full(rollouts, GROUP, np.int32)),
        "sample_index": pa.array((number % GROUP).astype(np.int32)),
        "step": pa.array(step),
        "tokens": _lists(lengths.sum(1), pa.array(tokens)),
        "action_mask": _lists(lengths.sum(1), pa.array(mask)),
        "logprob_kind": pa.repeat(pa.scalar("behavior"), rollouts),
        # The trainer went on while the longest answers were still drawn: their tails have the next version.
        "weight_versions": _lists(actions, pa.array(np.repeat(step, actions) + (_within(actions) >= 512))),
        "spans": _spans(lengths),
        "samplers": _lists(np.ones(rollouts, np.int64), temperatures),
        "ending": pa.array(np.where(rng.random(rollouts) < 0.9, "terminated", "truncated"), pa.string()),
        "reward": pa.array((rng.random(rollouts) < 0.4).astype(np.float64)),
    }
    if heads is not None:
        size = heads.shape[1]
        drawn, head_tokens, head_logprobs = _heads(rng, total, heads)
        columns |= {
            "head_kind": columns["logprob_kind"],
            "head_size": pa.array(np.full(rollouts, size, np.int32)),
            "head_tokens": _lists(actions * size, pa.array(head_tokens)),
            "head_logprobs": _lists(actions * size, pa.array(head_logprobs)),
        }
        place_of_drawn, logprobs = drawn
        tokens[mask] = head_tokens.reshape(total, size)[np.arange(total), place_of_drawn]
        columns["tokens"] = _lists(lengths.sum(1), pa.array(tokens))
    else:
        power = np.interp(rng.random(total), np.linspace(0, 1, len(_LOGPROB)), _LOGPROB)
        logprobs = (-(10.0**power)).astype(np.float32)
    columns["logprobs"] = _lists(actions, pa.array(logprobs))
    return pa.table(columns)


def ids(number: Ints, seed: int = 0) -> pa.Array:
    """Ids of rollouts by number: 32 hexadecimal digits without order, as request ids of engines are."""
    mixed = np.stack([_mix(number + (seed << 40)), _mix(number + (seed << 40) + (1 << 62))], axis=1).astype(">u8")
    digits = mixed.tobytes().hex()
    return pa.array([digits[at : at + 32] for at in range(0, len(digits), 32)], pa.string())


def rows(text: Ids, rollouts: int, **options: Any) -> list[Rollout]:
    """The same rollouts as records."""
    return from_table(table(text, rollouts, **options))


def count(tokens: int) -> int:
    """Rollouts that have about that many tokens, whole groups."""
    return max(1, round(tokens / MEAN_TOKENS / GROUP)) * GROUP


def of_actions(actions: int) -> int:
    """Rollouts that have about that many actions, whole groups."""
    return max(1, round(actions / MEAN_ACTIONS / GROUP)) * GROUP


def _mix(values: Ints) -> npt.NDArray[np.uint64]:
    """SplitMix64: a bijection of 64-bit integers that looks random."""
    x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _pieces(rng: np.random.Generator, groups: int, source: int, scale: float) -> tuple[Ints, Ints]:
    """Lengths and places in the text, [rollouts, 4] each: prompt, answer, and for every fourth tool output, answer."""
    count = groups * GROUP
    lengths = np.zeros((count, 4), np.int64)
    lengths[:, 0] = np.repeat(rng.lognormal(4.5, 0.5, groups), GROUP) * scale + 1
    lengths[:, 1] = np.minimum(rng.lognormal(5.0, 0.7, count) * scale + 1, LONGEST)
    with_tool = np.arange(count) % 4 == 0
    lengths[with_tool, 2] = rng.lognormal(4.3, 0.6, int(with_tool.sum())) * scale + 1
    lengths[with_tool, 3] = rng.lognormal(4.0, 0.6, int(with_tool.sum())) * scale + 1
    starts = rng.integers(0, source - lengths.max(), (count, 4))
    starts[:, 0] = np.repeat(starts[::GROUP, 0], GROUP)
    return lengths, starts


def _within(lengths: Ints) -> Ints:
    """0, 1, ... within each list."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)


def _lists(lengths: Ints, values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32()), values)


def _spans(lengths: Ints) -> pa.ListArray:
    there = lengths > 0
    action = np.broadcast_to([False, True, False, True], lengths.shape)[there]
    starts = (np.cumsum(lengths, axis=1) - lengths)[there]
    roles = np.broadcast_to(np.array(ROLES), lengths.shape)[there]
    fields = {
        "start": pa.array(starts, pa.int32()),
        "length": pa.array(lengths[there], pa.int32()),
        "role": pa.array(roles, pa.string()),
        "is_action": pa.array(action),
        "origin": pa.array(np.where(action, "sampled", "rendered"), pa.string()),
        "turn": pa.array(np.broadcast_to([0, 0, 1, 1], lengths.shape)[there], pa.int32()),
        "sampler": pa.array(np.zeros(len(action), np.int32), mask=~action),
    }
    return _lists(there.sum(1), pa.StructArray.from_arrays(list(fields.values()), list(fields)))


def head_pool(text: Ids, size: int) -> Ids:
    """A pool of heads, int32 [65536, size]: ids frequent in the text stand in many of them, and no id twice in one."""
    rng = np.random.default_rng(0)
    drawn = text[rng.integers(0, len(text), (1 << 16, 4 * size))]
    order = np.argsort(drawn, axis=1, kind="stable")
    ranked = np.take_along_axis(drawn, order, axis=1)
    repeated = np.zeros(drawn.shape, bool)
    np.put_along_axis(repeated, order[:, 1:], ranked[:, 1:] == ranked[:, :-1], axis=1)
    # What is left of frequent ids after repeats is filled with rare ones, which a row has once by construction.
    rare = (rng.integers(0, VOCABULARY, (1 << 16, 1)) + np.arange(4 * size) * 7) % VOCABULARY
    first = np.argsort(repeated, axis=1, kind="stable")[:, :size]
    picked = np.take_along_axis(drawn, first, axis=1)
    short = np.take_along_axis(repeated, first, axis=1)
    rows_short = short.any(axis=1)
    picked[rows_short] = rare[rows_short, :size]
    return picked.astype(np.int32)


def _heads(
    rng: np.random.Generator, actions: int, pool: Ids
) -> tuple[tuple[Ints, npt.NDArray[np.float32]], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """((place of the drawn id in its head, its log-prob), ids, log-probs), flat over actions; log-probs fall."""
    size = pool.shape[1]
    # In the heads of the same answers the log-prob falls with the logarithm of the rank, by about 1.1 nats a doubling
    # (gaps to the first: 1.3 at rank 2, 3.2 at 5, 6.5 at 32), more in sure heads; a few per cent lie outside.
    steepness = rng.lognormal(0.1, 0.55, (actions, 1)) * 1.55 / np.maximum(np.arange(size), 1)
    fall = np.cumsum(rng.exponential(steepness), axis=1, dtype=np.float64)
    fall -= fall[:, :1]
    outside = np.exp(-fall[:, -1:]) * rng.uniform(0.2, 1.6, (actions, 1)) * size
    logprobs = (-fall - np.log(np.exp(-fall).sum(1, keepdims=True) + outside)).astype(np.float32)
    reached = np.cumsum(np.exp(logprobs.astype(np.float64)), axis=1)
    drawn = np.minimum((reached < rng.random((actions, 1)) * reached[:, -1:]).sum(1), size - 1)
    heads = pool[rng.integers(0, len(pool), actions)]
    return (drawn, logprobs[np.arange(actions), drawn]), heads.ravel(), logprobs.ravel()
