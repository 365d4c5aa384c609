"""The circumstances of two runs that can explain a difference, and what remains. Missing ones are unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollstore.schema import Engine, Known, Rollout, Sampler, Span

FRESH = ("fresh", "recomputed")
NEUTRAL: dict[str, Any] = {
    "temperature": None,  # always told
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "grammar": "",
}


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One circumstance in both runs. `status`: same, differ, or unknown (not recorded on one side at least)."""

    name: str
    a: str | None
    b: str | None
    status: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One possible cause. `status`: possible, ruled_out, or unknown where the record does not say."""

    name: str
    status: str
    why: str


def span_at(rollout: Rollout, position: int) -> Span | None:
    """The span that holds a token position; None when no spans were recorded."""
    for span in rollout.spans or ():
        if span.start <= position < span.start + span.length:
            return span
    return None


def sampler_at(rollout: Rollout, position: int) -> Sampler | None:
    """The sampler of the token at a position. A row with one sampler needs no index."""
    samplers = rollout.samplers or ()
    span = span_at(rollout, position)
    index = None if span is None else span.sampler
    if index is None:
        index = 0 if len(samplers) == 1 else None
    return None if index is None or index >= len(samplers) else samplers[index]


def noise_at(rollout: Rollout, position: int) -> tuple[int, int] | None:
    """(key, sample) of the noise at a position; None when that draw was not keyed."""
    span = span_at(rollout, position)
    key = rollout.replay_key if span is None or span.replay_key is None else span.replay_key
    sample = rollout.replay_sample if span is None or span.replay_sample is None else span.replay_sample
    return None if key is None or sample is None else (int(key), int(sample))


def conditions(a: Rollout, b: Rollout, position: int, action: int | None) -> tuple[Condition, ...]:
    """What was the same, what differed and what is unknown at one position; `action` is its index among the actions."""
    spans = span_at(a, position), span_at(b, position)
    engines = tuple(
        rollout.engine if span is None or span.engine is None else span.engine
        for rollout, span in zip((a, b), spans, strict=True)
    )
    found = [
        _condition("weight version", *(_known(rollout.weight_versions, action) for rollout in (a, b))),
        _condition("engine", *(None if engine is None else _joined(engine.name, engine.version) for engine in engines)),
        _numerics(*engines),
        _condition("batch rows", *(_known(rollout.batch_rows, action) for rollout in (a, b))),
        _condition("cache state", *(None if span is None else _said(span.cache_state) for span in spans)),
        _condition("prefix cache", *(None if span is None else span.cached_tokens for span in spans)),
        _condition("preemptions", *(None if span is None else span.preemptions for span in spans)),
        _condition("sampler", *(_settings(sampler_at(rollout, position)) for rollout in (a, b))),
        _condition("noise", *(_noise(rollout, position) for rollout in (a, b))),
        _condition("tokenizer", a.tokenizer, b.tokenizer),
    ]
    return tuple(found)


def differing(a: Rollout, b: Rollout) -> tuple[Condition, ...]:
    """What differed anywhere over the actions of two runs of the same tokens, each pair of values once.

    It can change only where a span begins and where a value of the action columns does.
    """
    positions = np.flatnonzero(a.action_mask)
    changes = np.diff(positions, prepend=-2) != 1
    starts = [span.start for run in (a, b) for span in run.spans or ()]
    changes |= np.isin(positions, starts)
    for column in (a.weight_versions, b.weight_versions, a.batch_rows, b.batch_rows):
        if column is not None:
            count = min(len(positions), len(column.values))
            for values in (column.values[:count], column.known[:count]):
                changes[1:count] |= values[1:] != values[:-1]
    found = (
        condition
        for action in np.flatnonzero(changes).tolist()
        for condition in conditions(a, b, int(positions[action]), action)
    )
    return tuple(dict.fromkeys(condition for condition in found if condition.status == "differ"))


def explanations(found: tuple[Condition, ...], verdict: str, *, contradicted: bool) -> tuple[Explanation, ...]:
    """Which causes of a first difference remain, for an action whose context is the same in both runs.

    `verdict` is near_tie, real, unknown or different_input; `contradicted`: the noise and the recorded log-probs
    together do not pick a token that was recorded, so something else drew it.
    """
    by_name = {condition.name: condition for condition in found}
    if verdict == "different_input":
        why = "the tokens that differ were not drawn here"
        names = ("weights", "arithmetic", "sampler", "KV state")
        same = "the fingerprints agree; the text or the tool differed"
        return (
            *(Explanation(name=name, status="ruled_out", why=why) for name in names),
            _by_condition("tokenizer", by_name["tokenizer"], same=same),
        )
    arithmetic = {
        "near_tie": ("possible", "the margin lies within the rounding of two runs"),
        "real": ("ruled_out", "the margin is wider than rounding"),
    }.get(verdict, ("unknown", "the margins were not recorded"))
    sampler = _by_condition("sampler", by_name["sampler"], same="the settings agree")
    doubts = ["key and log-probs do not pick a recorded token"] if contradicted else []
    if by_name["noise"].status == "differ":
        doubts.append("the noise differs: " + _pair(by_name["noise"]))
    if doubts:
        sampler = Explanation(name="sampler", status="possible", why="; ".join([*doubts, sampler.why]))
    return (
        _by_condition("weights", by_name["weight version"], same="both runs used the same version"),
        Explanation(name="arithmetic", status=arithmetic[0], why="; ".join([arithmetic[1], *_shapes(by_name)])),
        sampler,
        _kv_state(by_name["cache state"]),
        Explanation(name="tokenizer", status="ruled_out", why="the token ids before are the same"),
    )


def _by_condition(name: str, condition: Condition, *, same: str) -> Explanation:
    if condition.status == "same":
        return Explanation(name=name, status="ruled_out", why=same)
    if condition.status == "differ":
        return Explanation(name=name, status="possible", why=f"{condition.name}: {_pair(condition)}")
    return Explanation(name=name, status="unknown", why=f"{condition.name} is not recorded: {_pair(condition)}")


def _kv_state(condition: Condition) -> Explanation:
    states = (condition.a, condition.b)
    if "retained" in states:
        why = f"a cache built under other weights was kept: {_pair(condition)}"
        return Explanation(name="KV state", status="possible", why=why)
    if all(state in FRESH for state in states):
        return Explanation(name="KV state", status="ruled_out", why="the weights that sampled built both caches")
    return Explanation(name="KV state", status="unknown", why=f"cache state is not recorded: {_pair(condition)}")


def _shapes(by_name: dict[str, Condition]) -> list[str]:
    """What is known of why two runs would round differently."""
    return [
        f"{name} {_pair(by_name[name])}"
        for name in ("batch rows", "engine", "numerics", "prefix cache")
        if by_name[name].status != "same"
    ]


def _pair(condition: Condition) -> str:
    shown = ["unknown" if value is None else value for value in (condition.a, condition.b)]
    return " and ".join(shown)


def _condition(name: str, a: Any, b: Any) -> Condition:
    status = "unknown" if a is None or b is None else "same" if a == b else "differ"
    shown = tuple(None if value is None else str(value) for value in (a, b))
    return Condition(name=name, a=shown[0], b=shown[1], status=status)


def _known(column: Known | None, index: int | None) -> Any:
    if column is None or index is None or index >= len(column.values) or not column.known[index]:
        return None
    return column.values[index].item()


def _said(state: str | None) -> str | None:
    return None if state == "unknown" else state


def _joined(*parts: str | None) -> str:
    return " ".join(part for part in parts if part is not None)


def _numerics(a: Engine | None, b: Engine | None) -> Condition:
    """Compared over what both engines said: one that says less does not differ for it."""
    said = [_said_numerics(engine) for engine in (a, b)]
    both = [name for name in said[0] if name in said[1]]
    status = "unknown" if not both else "same" if all(said[0][name] == said[1][name] for name in both) else "differ"
    shown = [", ".join(f"{name}={value}" for name, value in one.items()) or None for one in said]
    return Condition(name="numerics", a=shown[0], b=shown[1], status=status)


def _said_numerics(engine: Engine | None) -> dict[str, Any]:
    numerics = None if engine is None else engine.numerics
    if numerics is None:
        return {}
    said = {name: getattr(numerics, name) for name in numerics.__struct_fields__ if name != "gate"}
    return {name: value for name, value in said.items() if value is not None}


def _settings(sampler: Sampler | None) -> str | None:
    if sampler is None or sampler.temperature is None:
        return None
    values = {name: getattr(sampler, name) for name in NEUTRAL}
    changed = {name: value for name, value in values.items() if value is not None and value != NEUTRAL[name]}
    return ", ".join(f"{name}={value:g}" if name != "grammar" else "grammar" for name, value in changed.items())


def _noise(rollout: Rollout, position: int) -> str | None:
    keyed = noise_at(rollout, position)
    if keyed is None:
        return None
    return f"{rollout.noise or 'unnamed recipe'} key {keyed[0]} sample {keyed[1]} segment {rollout.segment}"
