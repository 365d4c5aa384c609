"""One trace of verifiers as rows: its paths as segments, its rewards as scores; `prime_rl.py` says what is taken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import numpy as np

from rollstore.exchange.pieces import Texts, flags_of, known, metadata
from rollstore.exchange.records import Made, Place, ids, number, refuse, text
from rollstore.schema import Rollout, Sampler, Span

LIMITS = {
    "max_turns": "max_turns", "max_input_tokens": "budget_exhausted", "max_output_tokens": "budget_exhausted",
    "max_total_tokens": "budget_exhausted", "context_length": "context_limit",
}  # fmt: skip
"""What stopped a trace -> why it was truncated."""

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "min_tokens", "seed",
)  # fmt: skip
_ROLES = {
    "reference": {"logprobs": "reference_logprobs"},
    "trainer": {"logprobs": "trainer_logprobs", "entropies": "entropies"},
}  # fmt: skip
_KEPT = ("metrics", "info", "errors", "stop_condition", "verifiers")


def rows_of_trace(trace: dict[str, Any], columns: Mapping[str, Any], place: Place, texts: Texts | None) -> Made:
    """The rows of a trace; `columns` are those of its episode. Raises UnsupportedRecordError."""
    name = text(trace.get("id"), "id")
    nodes, calls, agent = trace.get("nodes") or [], trace.get("calls") or [], trace.get("agent") or {}
    by_node = {call["node"]: call for call in calls if call.get("node") is not None}
    models = {call.get("model") for call in calls} - {None}
    task, timing = trace.get("task") or {}, trace.get("timing") or {}
    shared: dict[str, Any] = {
        **columns,
        "rollout_id": name,
        "prompt_id": task.get("key") or task.get("hash"),
        "policy": next(iter(models)) if len(models) == 1 else None,
        "started_at": _time(timing.get("start")),
        "metadata": metadata({kept: trace.get(kept) for kept in _KEPT} | {"agent": agent.get("name")}, ()),
    }
    rewards = trace.get("rewards") or {}
    last = {**_ending(trace, calls), **_reward(rewards)}
    leaves = _leaves(nodes)
    drawn: set[int] = set()
    rollouts: list[Rollout] = []
    evaluations: list[dict[str, Any]] = []
    for segment, leaf in enumerate(leaves):
        path = _path(nodes, leaf)
        said = [nodes[n]["message"] for n in path]
        own = {**shared, "segment": segment}
        if segment == len(leaves) - 1:
            own |= last
        elif last.get("reward") is not None:
            own["reward_status"] = "on_final_segment"
        if not any(nodes[n].get("token_ids") for n in path):
            if texts is None:
                raise refuse("nodes", "token ids, or a tokenizer (--tokenizer PATH) for their text", "neither")
            rollouts.append(texts.chat(place, said, **own))
            continue
        own["messages"] = json.dumps(said)
        rollouts.append(_branch(nodes, path, by_node, drawn, trainable=agent.get("trainable") is not False, **own))
        evaluations += _evaluations([nodes[n] for n in path if n not in drawn], name, segment)
        drawn.update(path)
    scores = [_score(name, scorer, reward) for scorer, reward in rewards.items()]
    return Made(rollouts=rollouts, scores=scores, others={"evaluations": evaluations})


def _leaves(nodes: list[Any]) -> list[int]:
    parents = {node.get("parent") for node in nodes}
    leaves = [n for n in range(len(nodes)) if n not in parents]
    if not leaves:
        raise refuse("nodes", "a path that ends", f"{len(nodes)} nodes")
    return leaves


def _path(nodes: list[Any], leaf: int) -> list[int]:
    path, at = [leaf], nodes[leaf].get("parent")
    while at is not None:
        if type(at) is not int or not 0 <= at < path[-1]:  # a parent is made before its child: no circles
            raise refuse("parent", f"a node before {path[-1]}", at)
        path.append(at)
        at = nodes[at].get("parent")
    return path[::-1]


def _branch(
    nodes: list[Any], path: list[int], calls: Mapping[int, Any], before: set[int], *, trainable: bool, **columns: Any
) -> Rollout:
    """One path as a segment. What a segment before has drawn is no action here."""
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[Any] = []
    spans: list[Span] = []
    samplers: list[Sampler] = []
    for turn, n in enumerate(path):
        node, call, carried = nodes[n], calls.get(n) or {}, n in before
        own, sampled, values = _node(node)
        sampler = None if carried else _index(samplers, call.get("sampling"))
        times = [_time((call.get("time") or {}).get(name)) for name in ("start", "end")]
        start = len(tokens)
        for drawn, stretch in groupby(sampled):
            length, is_action = len(list(stretch)), drawn and not carried
            span = Span(
                start=start,
                length=length,
                role=str(node["message"].get("role")),
                is_action=is_action,
                origin="sampled" if is_action else "carried" if drawn else None,
                turn=turn,
                sampler=sampler if is_action else None,
                api_finish=call.get("finish_reason") if is_action else None,
                started_at=times[0] if is_action else None,
                finished_at=times[1] if is_action else None,
            )
            spans.append(span)
            start += length
        tokens += own
        mask += [drawn and not carried for drawn in sampled]
        logprobs += [] if carried else values
    said = known(logprobs)
    return Rollout(
        tokens=np.array(tokens, np.int64),
        action_mask=np.array(mask, bool),
        logprobs=said if said.known.any() else None,
        logprob_kind="unknown" if said.known.any() else None,
        trainable=None if trainable else np.zeros(len(logprobs), bool),
        spans=tuple(spans),
        samplers=tuple(samplers) or None,
        **columns,
    )


def _node(node: dict[str, Any]) -> tuple[list[int], list[bool], list[Any]]:
    """(ids [n], drawn [n], log-probs of those that were drawn; None where there are none)."""
    own = ids(node.get("token_ids") or [], "token_ids")
    sampled = flags_of(node.get("mask") or [False] * len(own), "mask").tolist()
    values = node.get("logprobs") or [None] * sum(sampled)
    for name, given, wanted in (("mask", sampled, len(own)), ("logprobs", values, sum(sampled))):
        if len(given) != wanted:
            raise refuse(name, f"{wanted} values", len(given))
    return own, sampled, values


def _evaluations(nodes: list[Any], rollout_id: str, segment: int) -> list[dict[str, Any]]:
    """What a reference and the trainer made of the drawn tokens of some nodes, where they did."""
    made: list[dict[str, Any]] = []
    for role, fields in _ROLES.items():
        row: dict[str, Any] = {}
        for column, field in fields.items():
            if any(node.get(field) is not None for node in nodes):
                counts = [sum(flags_of(node.get("mask") or [], "mask").tolist()) for node in nodes]
                each = [node.get(field) or [None] * count for node, count in zip(nodes, counts, strict=True)]
                if [len(values) for values in each] != counts:
                    raise refuse(field, f"{sum(counts)} values, one a token that was drawn", sum(map(len, each)))
                row[column] = [number(value, field) for values in each for value in values]
        if row:
            key = {"evaluation_id": f"prime-rl {role}", "rollout_id": rollout_id, "segment": segment, "role": role}
            made.append(key | row)
    return made


def _index(samplers: list[Sampler], given: Mapping[str, Any] | None) -> int | None:
    """The place of a call's settings among the row's samplers."""
    if not given:
        return None
    other = {name: value for name, value in given.items() if name not in _SAMPLING and value is not None}
    sampler = Sampler(**{name: given.get(name) for name in _SAMPLING}, extra=other or None)
    if sampler not in samplers:
        samplers.append(sampler)
    return samplers.index(sampler)


def _ending(trace: dict[str, Any], calls: list[Any]) -> dict[str, Any]:
    """How a trace ended, by what stopped it; a length of the last reply goes before success."""
    stopped = trace.get("stop_condition")
    finish = next((call.get("finish_reason") for call in reversed(calls) if call.get("error") is None), None)
    if stopped in LIMITS:
        return {"ending": "truncated", "ending_reason": LIMITS[stopped]}
    if stopped == "error":
        return {"ending": "aborted", "ending_reason": "unknown"}
    if finish == "length":
        return {"ending": "truncated", "ending_reason": "unknown"}
    return {"ending": "terminated" if trace.get("ok") is True else "unknown"}


def _reward(rewards: Mapping[str, Any]) -> dict[str, Any]:
    """The weighted sum; none where there are no rewards, or one of them was not computed."""
    if not rewards:
        return {}
    if any(reward is None for reward in rewards.values()):
        return {"reward_status": "unscored"}
    return {"reward": sum(float(reward["score"]) * float(reward.get("weight", 1.0)) for reward in rewards.values())}


def _score(rollout_id: str, name: str, reward: Mapping[str, Any] | None) -> dict[str, Any]:
    value = None if reward is None else number(reward.get("score"), f"rewards.{name}")
    row = {"rollout_id": rollout_id, "scorer": name, "value": value}
    row["status"] = "unscored" if value is None else "scored"
    return row | ({} if reward is None else {"metadata": {"weight": json.dumps(reward.get("weight", 1.0))}})


def _time(seconds: Any) -> datetime | None:
    """A time in seconds since 1970; 0 is none."""
    return datetime.fromtimestamp(seconds, UTC) if isinstance(seconds, int | float) and seconds > 0 else None
