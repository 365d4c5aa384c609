"""Stores for the queries of docs/cookbook.md about groups, rewards, lengths, endings, time and cost: see planted.py."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np

from rollstore import Heads, Known, Rollout, Span
from rollstore.store.store import Store
from tests.docs.planted import EVALUATION, USE, Rows, add, planted, put, two_segments
from tests.readers.samples import group, rollout

START = datetime(2026, 3, 29, 10, 59, tzinfo=UTC)


@planted("Zero-variance groups")
def _(store: Store) -> Rows:
    put(
        store,
        *group("solved", [1.0, 1.0, None]),
        *group("failed", [0.0, 0.0]),
        *group("half", [0.5, 0.5]),
        *group("mixed", [0.0, 1.0]),
        *group("single", [1.0, None]),
        *group("next", [0.0, 1.0], step=1),
    )
    return [(0, 4, 3, 1, 1, 0.75, 0.5), (1, 1, 0, 0, 0, 0.0, 1.0)]


@planted("Groups incomplete")
def _(store: Store) -> Rows:
    put(
        store,
        *group("whole", [1.0, 0.0]),
        *group("short", [1.0, 0.0], size=4),
        *group("unjudged", [1.0, None]),
        *two_segments("parts", {"group_id": "one", "group_size": 1}, {"group_id": "one", "reward": 1.0}),
    )
    return [("run", 0, "short", 4, 2, 2, 0, 0, 0), ("run", 0, "unjudged", 2, 2, 0, 1, 0, 0)]


@planted("Unscored or failed")
def _(store: Store) -> Rows:
    put(
        store,
        rollout("good", environment="math", reward=1.0),
        rollout("bad", environment="math", reward=0.0),
        rollout("error", environment="math", reward_status="scorer_error"),
        rollout("slow", environment="math", reward_status="timeout"),
        rollout("later", environment="math", reward_status="unscored"),
        rollout("unsaid", environment="math"),
        rollout("left", environment="math", reward_status="filtered"),
        *two_segments("long", {"environment": "math"}, {"environment": "math", "reward": 1.0}),
        rollout("code", environment="code", reward=0.5),
    )
    return [("code", 1, 1, 0, 0, 0, 0.5, 0.5), ("math", 8, 3, 2, 2, 1, 2 / 3, 0.25)]


@planted("Rewards by prompt difficulty")
def _(store: Store) -> Rows:
    def prompt(name: str, *rewards: float | None) -> list[Rollout]:
        return group(name, list(rewards), prompt_id=name)

    put(
        store,
        *prompt("hard", 0.0, 1.0, 0.0, 0.0),  # even members 0 and 0, odd ones 1 and 0
        *prompt("hard-too", 0.0, 0.0, 0.0, None),
        *prompt("easy", 1.0, 1.0, 1.0, 0.0),
        *prompt("unjudged", None, 1.0),
    )
    return [(0.0, 2, 0.25, 1.96 * np.std([0.5, 0.0], ddof=1) / np.sqrt(2)), (1.0, 1, 0.5, None)]


@planted("Reward-hacking suspects")
def _(store: Store) -> Rows:
    rewards = {"honest": 1.0, "fair": 0.0, "weak": 0.0, "cheat": 1.0, "unjudged": 1.0}
    judge = {"honest": 0.9, "fair": 0.8, "weak": 0.7, "cheat": 0.1}
    put(store, *(rollout(name, environment="math", reward=reward) for name, reward in rewards.items()))
    names = "rollout_id scorer value status segment"
    add(store, "scores", names, *((name, "judge", value, "scored", None) for name, value in judge.items()))
    add(
        store, "scores", names,
        ("cheat", "judge", 0.1, "scored", None),  # a repeat
        ("cheat", "judge", 1.0, "scored", 0),  # of one segment, not of the outcome
        ("honest", "other", 0.0, "scored", None), ("honest", "judge", None, "timeout", None),
    )  # fmt: skip
    marks = np.array([0.9, 0.8, 0.7, 0.1])
    apart = 0.5 / np.std([1, 0, 0, 1], ddof=1) - (0.1 - marks.mean()) / marks.std(ddof=1)
    return [("math", "cheat", 1.0, 0.1, apart)]


@planted("Duplicates")
def _(store: Store) -> Rows:
    common = {"run_id": "run", "step": 0, "group_id": "g"}

    def drawn(name: str, last: int, **fields: Any) -> Rollout:
        return Rollout(rollout_id=name, tokens=[1, 2, last], action_mask=[0, 0, 1], **{**common, **fields})

    put(
        store,
        drawn("a", 5), drawn("b", 6), drawn("c", 5), drawn("d", 6), drawn("e", 7),
        drawn("f", 5, group_id="other"), drawn("h", 5, step=1), drawn("i", 5, group_id=None),
        drawn("long", 8), drawn("long", 9, segment=1), drawn("wide", 8), drawn("wide", 7, segment=1),
    )  # fmt: skip
    put(store, drawn("e", 7))  # one rollout, written twice
    return [("run", 0, "g", 7, 5, [["a", "c"], ["b", "d"]])]


@planted("Truncation by environment")
def _(store: Store) -> Rows:
    cut = {"ending": "truncated", "environment": "code"}
    put(
        store,
        rollout("a", **cut, ending_reason="max_tokens", reward=0.0),
        rollout("b", **cut, ending_reason="max_tokens", reward=0.5),
        rollout("c", **cut, ending_reason="max_turns", reward_status="unscored"),
        rollout("d", environment="code", ending="terminated", reward=1.0),
        *two_segments("long", {"environment": "math", "ending": "continued"}, {"environment": "math", "reward": 1.0}),
    )
    return [("code", 4, 3, 0.75, 0.5, "max_tokens", 0.25, 1.0), ("math", 1, 0, 0.0, 1.0, None, None, 1.0)]


@planted("Endings against length reached")
def _(store: Store) -> Rows:
    ends = {"a": (3, "terminated"), "b": (2, "truncated"), "c": (4, "aborted"), "d": (7, "truncated"), "e": (0, None)}
    put(
        store,
        *(rollout(name, tokens=2 + actions, ending=ending) for name, (actions, ending) in ends.items()),
        *two_segments("long", {}, {}),  # 4 and 4 actions: it reached 8
    )
    return [(1, 1, 6, 0, 0, 1), (2, 2, 5, 1, 1, 0), (4, 2, 3, 0, 1, 1), (8, 1, 1, 1, 0, 0)]


@planted("Discards by length")
def _(store: Store) -> Rows:
    rewards = {"a": (2, 0.0), "b": (3, 1.0), "c": (2, 1.0), "d": (4, 1.0), "e": (5, 0.0), "f": (6, None)}
    put(store, *(rollout(name, tokens=2 + n, reward=reward) for name, (n, reward) in rewards.items()))
    add(
        store, "uses", USE,
        ("t", 0, 1, "a", 7, "trained"), ("t", 0, 1, "b", 7, "discarded"), ("t", 0, 2, "b", 7, "trained"),
        ("t", 0, 2, "d", 7, "discarded"), ("t", 0, 2, "e", 7, "trained"), ("t", 0, 3, "f", 7, "trained"),
        ("t", 1, 3, "f", 7, "filtered"),  # what attempt 0 did at step 3 is done over
    )  # fmt: skip
    return [(2, 3, 2, 0, 1, 2 / 3, 0.5), (4, 3, 1, 2, 0, 0.5, 0.0)]


@planted("Repeated n-grams")
def _(store: Store) -> Rows:
    def drawn(name: str, actions: list[int], **fields: Any) -> Rollout:
        return Rollout(
            rollout_id=name, tokens=[9, 9, 9, 9, *actions], action_mask=[0] * 4 + [1] * len(actions), **fields
        )

    put(
        store,
        drawn("loop", [1, 2, 3] * 6, ending="truncated", ending_reason="max_tokens", bootstrap=None),
        drawn("once", [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 7, 8]),  # 1 2 3 4 comes back once
        drawn("fresh", list(range(20))),
        drawn("short", [1] * 11),
    )
    return [("loop", 0, "max_tokens", 15, 12 / 15), ("once", 0, None, 9, 1 / 9), ("fresh", 0, None, 17, 0.0)]


@planted("Entropy collapse by step")
def _(store: Store) -> Rows:
    put(
        store,
        rollout("a", tokens=4, logprobs=[-1.0, -0.001], entropies=[1.5, 0.5]),
        rollout("b", tokens=4, logprobs=[-3.0, -float("inf")], entropies=[None, 1.0]),
        rollout("raw", tokens=4, logprobs=[-9.0, None], logprob_kind="raw"),
        rollout("late", tokens=4, logprobs=[-0.005, 0.0], entropies=[0.25, 0.0], step=1),
    )
    put(store, rollout("untold", tokens=4, logprobs=[None, -9999.0], step=2), rollout("bare", logprobs=None, step=3))
    return [
        (0, 6, 3, 1.0, 3, (1.0 + 0.001 + 3.0) / 3, 1 / 3, 3), (1, 2, 1, 0.125, 0, 0.0025, 1.0, 0),
        (2, 2, 1, None, 2, None, None, 2), (3, 4, 1, None, 4, None, None, 4),
    ]  # fmt: skip


@planted("Tool time")
def _(store: Store) -> Rows:
    def timed(name: str, tools: float | None, seconds: int, **fields: Any) -> Rollout:
        times = {"started_at": START, "finished_at": START + timedelta(seconds=seconds)}
        return rollout(name, environment="code", tool_seconds=tools, **{**times, **fields})

    end = {"segment": 1, "started_at": START + timedelta(seconds=10), "finished_at": START + timedelta(seconds=40)}
    put(
        store,
        timed("a", 2.0, 10),
        timed("long", 4.0, 10, ending="continued"),
        timed("long", 12.0, 0, **end),
        timed("unknown", None, 100),
        rollout("untimed", environment="code", tool_seconds=3.0),
        rollout("none", environment="math"),
    )
    return [("code", 3, 7.0, 3.0, 3.0 + 0.98 * 13.0, 16.0, 18.0 / 50.0)]


@planted("Longest tool turns")
def _(store: Store) -> Rows:
    def turns(name: str, *lengths: int, environment: str = "code") -> Rollout:
        """The user, then by turns the tool and the policy."""
        spans, start = [], 0
        for n, length in enumerate(lengths):
            acts = n > 0 and n % 2 == 0
            role = "assistant" if acts else ("tool" if n else "user")
            ref = f"s3://uncut/{name}/{n}" if role == "tool" else None
            spans.append(Span(start=start, length=length, role=role, is_action=acts, turn=n // 2, raw_ref=ref))
            start += length
        mask = [span.is_action for span in spans for _ in range(span.length)]
        return Rollout(
            rollout_id=name, tokens=range(start), action_mask=mask, spans=tuple(spans), environment=environment
        )

    put(store, turns("a", 2, 5, 1, 10, 2), turns("b", 1, 8, 7), turns("c", 30, 1, 1), rollout("plain"))
    return [
        ("code", "a", 0, 1, 10, 0.5, "tool", "s3://uncut/a/3"),
        ("code", "b", 0, 0, 8, 0.5, "tool", "s3://uncut/b/1"),
        ("code", "a", 0, 0, 5, 0.25, "tool", "s3://uncut/a/1"),
        ("code", "c", 0, 0, 1, 1 / 32, "tool", "s3://uncut/c/1"),
    ]


@planted("Queue wait")
def _(store: Store) -> Rows:
    def waiting(name: str, minute: int, seconds: float | None, **fields: Any) -> Rollout:
        at = START + timedelta(minutes=minute)
        started = None if seconds is None else at + timedelta(seconds=seconds)
        return rollout(name, requested_at=at, started_at=started, **fields)

    put(
        store,
        waiting("a", 0, 1.0),
        waiting("b", 0, 3.0),
        waiting("said", 0, 9.0, queue_seconds=5.0),
        waiting("unknown", 0, None),
        waiting("next", 1, 8.0),  # minute 59 and one: the next hour
    )
    hour = START.replace(minute=0)
    return [
        (hour, 3, 3.0, 3.0, 3.0 + 0.98 * 2.0, 5.0),
        (hour + timedelta(hours=1), 1, 8.0, 8.0, 8.0, 8.0),
    ]


@planted("Reuse")
def _(store: Store) -> Rows:
    add(
        store, "uses", "train_run attempt train_step rollout_id epoch segment disposition tokens_trained",
        ("t", 0, 1, "a", 0, None, "trained", 4), ("t", 0, 3, "a", 1, None, "trained", 4),
        ("t", 0, 1, "b", 0, 0, "trained", 2), ("t", 0, 1, "b", 0, 1, "trained", 3),  # two segments: one use
        ("t", 0, 2, "c", 0, None, "discarded", 0),
        ("t", 0, 9, "a", 2, None, "trained", 4),  # done over by attempt 1
        ("t", 1, 8, "d", 0, None, "trained", 1),
    )  # fmt: skip
    return [("t", 3, 4, 4 / 3, 2, 2, 14)]


@planted("Token cost per solved prompt")
def _(store: Store) -> Rows:
    def tried(name: str, prompt: str | None, actions: int, reward: float | None, **fields: Any) -> Rollout:
        return rollout(
            name, tokens=2 + actions, prompt_id=prompt, **{"environment": "math", "reward": reward, **fields}
        )

    final = {"environment": "math", "prompt_id": "two"}
    put(
        store,
        tried("a", "one", 3, 1.0), tried("b", "one", 5, 0.0),
        *two_segments("long", final, {**final, "reward": 1.0}),  # 4 and 4 actions
        tried("c", "three", 10, 0.5), tried("d", "three", 1, None), tried("e", None, 100, 1.0),
        tried("f", "four", 6, 0.0, environment="code"),
    )  # fmt: skip
    return [("math", 3, 2, 27, 13.5), ("code", 1, 0, 6, None)]


def put_odd_values(store: Store) -> None:
    """Whatever a store takes that no mean can be taken of: nothing known, infinite, minus infinity, of length 0."""
    far = math.inf
    rewards = [far, -far, 1.0, 0.0, None]
    odd: list[dict[str, Any]] = [
        {"entropies": [far, None], "tool_seconds": far, "queue_seconds": far},
        {"tool_seconds": 0.0}, {"entropies": [None, None], "tool_seconds": 0.0, "queue_seconds": 0.0},
        {"entropies": [-far, 1.0], "queue_seconds": far}, {"tool_seconds": far, "queue_seconds": 1.0},
    ]  # fmt: skip
    still = {"requested_at": START, "started_at": START, "finished_at": START}
    heads = {"heads": Heads(size=1, tokens=[5, 6], logprobs=[-far, -far]), "head_kind": "behavior"}
    for name in ("g", "h"):
        for row, (member, fields) in enumerate(zip(group(name, rewards, tokens=4, prompt_id=name), odd, strict=True)):
            ending = ("terminated", "truncated")[row % 2]
            own = {"logprobs": Known([0.0, 0.0], [False, False]), "environment": "e", "ending": ending}
            put(store, msgspec.structs.replace(member, **own, **still, **heads, **fields))
    tool = Span(start=0, length=0, is_action=False, role="tool")
    nothing = {"tokens": np.zeros(0, np.int32), "action_mask": np.zeros(0, bool)}
    put(
        store,
        Rollout(rollout_id="void", spans=(tool,), **nothing),
        rollout("bare", tokens=4, logprobs=None, weight_versions=None, step=2),
        rollout("low", tokens=4, logprobs=[-far, -9999.0], step=4, reward=far),
    )
    add(store, "uses", USE, *(("t", 0, 1, f"{name}-{n}", 9, "trained") for name in "gh" for n in range(5)))
    scores = [(f"g-{n}", "judge", value, "scored") for n, value in enumerate([far, -far, 1.0, 0.5])]
    add(store, "scores", "rollout_id scorer value status", *scores)
    of = ("trainer@7", "trainer", "low", 0, 7, "behavior")
    add(store, "evaluations", EVALUATION, (*of, [-far, -1.0]), (*of[:2], "g-0", *of[3:], [-1.0, None]))
