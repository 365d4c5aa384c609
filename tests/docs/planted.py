"""Stores in which the answers of docs/cookbook.md are known: what is looked for, and what must not count.

Here those of staleness and of engine against trainer; `outcomes.py` has the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from rollstore import Engine, Heads, Rollout, Span
from rollstore.store.store import Store
from tests.readers.samples import group, rollout

Rows = list[tuple[Any, ...]]
Plant = Callable[[Store], Rows]

PLANTED: dict[str, Plant] = {}
"""Heading of the query -> fills an empty store, and says what the query finds in it."""


def planted(heading: str) -> Callable[[Plant], Plant]:
    def keep(plant: Plant) -> Plant:
        PLANTED[heading] = plant
        return plant

    return keep


def put(store: Store, *rollouts: Rollout) -> None:
    with store.writer(source="cookbook") as writer:
        writer.append(list(rollouts))


def add(store: Store, table: str, names: str, *rows: tuple[Any, ...]) -> None:
    """Rows of another table: the names of the columns, then a tuple a row."""
    with store.writer(table=table) as writer:
        writer.append(pa.Table.from_pylist([dict(zip(names.split(), row, strict=True)) for row in rows]))


def versioned(name: str, *versions: int | None, **fields: Any) -> Rollout:
    return rollout(name, tokens=2 + len(versions), weight_versions=list(versions), **fields)


def two_segments(name: str, first: dict[str, Any], last: dict[str, Any]) -> list[Rollout]:
    status = {"reward_status": "on_final_segment"} if last.get("reward") is not None else {}
    return [
        rollout(name, **{"segment": 0, "ending": "continued", **status, **first}),
        rollout(name, **{"segment": 1, "ending": "terminated", **last}),
    ]


USE = "train_run attempt train_step rollout_id weight_version disposition"


@planted("Staleness by step")
def _(store: Store) -> Rows:
    put(
        store,
        versioned("fresh", 5, 5),
        versioned("old", 3, 5),
        versioned("unknown", None, 5),
        *two_segments("long", {"weight_versions": [2] * 4}, {"weight_versions": [5] * 4}),
        *two_segments("partly", {"weight_versions": None}, {"weight_versions": [5] * 4}),
    )
    add(
        store, "uses", USE,
        ("t", 0, 1, "fresh", 5, "trained"), ("t", 0, 1, "old", 5, "trained"), ("t", 0, 1, "unknown", 5, "trained"),
        ("t", 0, 1, "partly", 5, "trained"),
        ("t", 0, 2, "old", 100, "trained"),  # done over by the next attempt
        ("t", 1, 2, "long", 6, "trained"), ("t", 1, 2, "fresh", 6, "discarded"),
    )  # fmt: skip
    return [("t", 1, 4, 1.0, 2, 2), ("t", 2, 1, 4.0, 4, 0)]


@planted("Lag against reward")
def _(store: Store) -> Rows:
    easy = group("easy", [1.0, 1.0, 0.0, 0.0])  # weight version 7
    put(store, *easy, *group("hard", [0.0, 0.0]), *group("late", [1.0, None]))
    uses = [("t", 0, 1, r, 7, "trained") for r in ("easy-0", "easy-1", "easy-2", "easy-3", "hard-0", "hard-1")]
    add(store, "uses", USE, *uses, ("t", 0, 2, "late-0", 10, "trained"), ("t", 0, 2, "late-1", 10, "trained"))
    return [(0, 6, 2, 0.25, 1.96 * np.std([0.5, 0.0], ddof=1) / np.sqrt(2)), (3, 1, 1, 1.0, None)]


@planted("Weight versions mixed within a rollout")
def _(store: Store) -> Rows:
    put(
        store,
        versioned("one", 4, 4, 4),
        versioned("mixed", 4, 5, 6),
        versioned("perhaps", 4, None),
        *two_segments("across", {"weight_versions": [4] * 4}, {"weight_versions": [5] * 4}),
        versioned("later", 8, 9, step=1),
    )
    return [(0, 4, 2, 3, 1), (1, 1, 1, 2, 0)]


EVALUATION = "evaluation_id role rollout_id segment weight_version kind logprobs"


@planted("Drift by engine version")
def _(store: Store) -> Rows:
    kernels = {"old": Engine(name="vllm", version="0.9"), "new": Engine(name="vllm", version="0.10")}
    put(
        store,
        rollout("a", tokens=4, logprobs=[-1.0, -2.0], weight_versions=[7, 7], engine=kernels["old"]),
        rollout("b", tokens=4, logprobs=[-1.0, None], weight_versions=[7, 7], engine=kernels["new"]),
        rollout("c", tokens=4, logprobs=[-1.0, -1.0], weight_versions=[7, 6], engine=kernels["new"]),
        rollout("raw", tokens=4, logprobs=[-9.0, -9.0], logprob_kind="raw", engine=kernels["new"]),
    )
    add(
        store, "evaluations", EVALUATION,
        ("t@7", "trainer", "a", 0, 7, "behavior", [-0.5, -2.5]),
        ("t@7", "trainer", "b", 0, 7, "behavior", [-1.0, -5.0]),
        ("t@7", "trainer", "c", 0, 7, "behavior", [-0.75, -8.0]),  # its second action is of other weights
        ("t@7", "trainer", "raw", 0, 7, "behavior", [-1.0, -1.0]),
        ("ref", "reference", "a", 0, 7, "behavior", [-8.0, -8.0]),
    )  # fmt: skip
    k3 = [np.expm1(gap) - gap for gap in (0.5, -0.5, 0.0, 0.25)]
    return [
        ("vllm", "0.9", 2, 0.0, 0.5, (k3[0] + k3[1]) / 2, 0.5),
        ("vllm", "0.10", 2, 0.125, 0.125, k3[3] / 2, 0.25),
    ]


@planted("Worst ratios with their tokens")
def _(store: Store) -> Rows:
    spans = (
        Span(start=0, length=1, role="user", is_action=False),
        Span(start=1, length=3, role="assistant", is_action=True, sampler=0),
    )
    put(
        store,
        rollout(
            "a", tokens=4, prompt=1, logprobs=[-1.0, -2.0, None], weight_versions=[7, 7, 8], spans=spans,
            token_bytes=[b"Hi", b"so", b"\xff", b"."],
        ),
        rollout("other", tokens=4),
    )  # fmt: skip
    add(
        store, "evaluations", EVALUATION,
        ("trainer@7", "trainer", "a", 0, 7, "behavior", [-1.25, -0.5, -1.0]),
        ("trainer@6", "trainer", "a", 0, 6, "behavior", [-9.0, -9.0, -9.0]),
    )  # fmt: skip
    return [
        ("a", 0, 2, 99, "\\xFF", "assistant", 7, -2.0, -0.5, np.exp(1.5)),
        ("a", 0, 1, 98, "so", "assistant", 7, -1.0, -1.25, np.exp(-0.25)),
    ]


@planted("Log-prob kinds mixed in a run")
def _(store: Store) -> Rows:
    put(
        store,
        rollout("a", tokens=8, prompt=2),
        rollout("b", tokens=4, prompt=2, logprob_kind="raw"),
        rollout("c", tokens=4, prompt=2, logprob_kind=None, run_id="other", samplers=None, spans=None),
        rollout("none", tokens=4, prompt=2, logprobs=None),
    )
    return [
        ("other", "not said", None, None, None, 2, 1.0),
        ("run", "behavior", np.float32(0.8), 0, 1.0, 6, 0.75),
        ("run", "raw", np.float32(0.8), 0, 1.0, 2, 0.25),
    ]


@planted("First divergence between two runs")
def _(store: Store) -> Rows:
    def drawn(run: str, sample: int, tokens: list[int], **fields: Any) -> Rollout:
        keyed = {"replay_key": 2**64 - 1, "replay_sample": sample, "noise": "gumbel-philox4x32/1"}
        return Rollout(
            rollout_id=f"{run}-{sample}", run_id=run, step=3, tokens=tokens,
            action_mask=[False] * 2 + [True] * (len(tokens) - 2), **{**keyed, **fields},
        )  # fmt: skip

    texts = {
        1: ([1, 2, 3, 4], [1, 2, 3, 9]),
        2: ([1, 2, 3], [1, 2, 3]),
        3: ([1, 2, 3], [1, 2, 3, 4]),
        4: ([1, 2], [5, 2]),
    }
    for sample, (left, right) in texts.items():
        put(store, drawn("base", sample, left), drawn("quantised", sample, right))
    # Three segments: the first is equal, the others are not.
    for run, token in (("base", 6), ("quantised", 7)):
        put(
            store, *(drawn(run, 5, text, segment=n) for n, text in enumerate([[1, 2, 3], [1, 2, token], [token, 2, 3]]))
        )
    put(store, drawn("base", 6, [8, 8, 8]), drawn("quantised", 6, [9, 9, 9], replay_key=1))  # another key
    return [
        ("base-4", "quantised-4", 0, 0, 1, 5),
        ("base-5", "quantised-5", 1, 2, 6, 7),
        ("base-1", "quantised-1", 0, 3, 4, 9),
        ("base-3", "quantised-3", 0, 3, None, 4),
        ("base-2", "quantised-2", 0, None, None, None),
    ]


@planted("Head mass outside the top k")
def _(store: Store) -> Rows:
    def logs(*masses: float) -> list[float]:
        return np.log(masses).tolist()

    uneven = Heads(counts=[2, 0, 1, 0], tokens=[5, 6, 5], logprobs=logs(0.75, 0.125, 0.5))
    even = Heads(size=2, tokens=[5, 6] * 2, logprobs=logs(0.5, 0.25, 0.5, 0.5))
    put(
        store,
        rollout("uneven", heads=uneven, head_kind="behavior", logprob_kind="raw"),
        rollout("even", tokens=4, heads=even, head_kind="raw"),
        rollout("none"),
    )
    return [
        ("run", "behavior", 2, 1.5, 0.3125, 0.125 + 0.99 * 0.375, 0.5),
        ("run", "raw", 2, 2.0, 0.125, 0.99 * 0.25, 0.25),
    ]


@planted("Actions outside the support")
def _(store: Store) -> Rows:
    tokens, mask = [1, 2, 50, 90, 51, 52], [False, False, True, False, True, True]
    found = {"support_counts": [2, 0, 3], "support_tokens": [50, 7, 8, 9, 10]}
    fine = {"support_counts": [1, 2, 2], "support_tokens": [50, 51, 7, 52, 7]}
    put(
        store,
        Rollout(rollout_id="found", run_id="run", tokens=tokens, action_mask=mask, **found),
        Rollout(rollout_id="fine", run_id="run", tokens=tokens, action_mask=mask, **fine),
        Rollout(rollout_id="unknown", run_id="run", tokens=tokens, action_mask=mask),
    )
    return [("run", "found", 0, 2, 52, [8, 9, 10])]
