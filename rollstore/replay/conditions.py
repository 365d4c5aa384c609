"""The circumstances of two runs that can explain a difference, and what remains. Missing ones are unknown."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollstore.schema import Engine, Known, Rollout, Sampler, Span

FRESH = ("fresh", "recomputed")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_k": (None, 0, -1),
    "top_p": (None, 1.0),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "min_tokens": (None, 0),
    "logit_bias": (None, ()),
    "bad_words": (None, ()),
    "grammar": (None, ""),
}
"""The settings that change a distribution beside the temperature, with the values that change nothing."""
LONGEST = 60
"""Characters of one setting that are shown whole."""


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


def honoured(sampler: Sampler) -> bool:
    """Whether the draw was made with these settings as far as is known: not where they were requested alone."""
    return sampler.applied is not False


def conditions(
    a: Rollout, b: Rollout, position: int, action: int | None, action_b: int | None = None, *, ended: bool = False
) -> tuple[Condition, ...]:
    """What was the same, what differed and what is unknown at one position.

    `action` is its index among the actions of a, `action_b` among those of b (unless given, the same). `ended`: one of
    the runs ended there, so that the limits of a request are settings that matter.
    """
    actions = ((a, action), (b, action if action_b is None else action_b))
    # A run that ended did so under the sampler of its last token.
    at = [min(position, max(0, len(run.tokens) - 1)) if ended else position for run in (a, b)]
    samplers = tuple(sampler_at(run, here) for run, here in zip((a, b), at, strict=True))
    keyed = all(noise_at(run, here) is not None for run, here in zip((a, b), at, strict=True))
    spans = span_at(a, position), span_at(b, position)
    engines = tuple(
        rollout.engine if span is None or span.engine is None else span.engine
        for rollout, span in zip((a, b), spans, strict=True)
    )
    found = [
        _condition("policy", a.policy, b.policy),
        _run(a, b),
        _condition("weight version", *(_known(run.weight_versions, index) for run, index in actions)),
        _condition("engine", *(None if engine is None else _joined(engine.name, engine.version) for engine in engines)),
        _numerics(*engines),
        _condition("batch rows", *(_known(run.batch_rows, index) for run, index in actions)),
        _condition("cache state", *(None if span is None else _said(span.cache_state) for span in spans)),
        _condition("prefix cache", *(None if span is None else span.cached_tokens for span in spans)),
        _condition("preemptions", *(None if span is None else span.preemptions for span in spans)),
        _sampler(*samplers, keyed=keyed, ended=ended),
        _limits(*samplers),
        _condition("noise", *(_noise(run, here, own) for run, here, own in zip((a, b), at, samplers, strict=True))),
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


def explanations(
    found: tuple[Condition, ...], verdict: str, *, contradicted: bool, ended: bool = False
) -> tuple[Explanation, ...]:
    """Which causes of a first difference remain, for an action whose context is the same in both runs.

    `ended`: one of the runs ended there, which its limits and stops may have done.
    `verdict` is near_tie, real, unknown or different_input; `contradicted`: the noise and the recorded log-probs
    together do not pick a token that was recorded, so something else drew it.
    """
    by_name = {condition.name: condition for condition in found}
    limits = Explanation(name="limits", status="ruled_out", why="neither run ended here")
    if ended:
        limits = _by_condition("limits", by_name["limits"], same="limits and stops agree")
    if verdict == "different_input":
        why = "the tokens that differ were not drawn here"
        names = ("weights", "arithmetic", "sampler", "noise", "KV state")
        same = "the fingerprints agree; the text or the tool differed"
        return (
            *(Explanation(name=name, status="ruled_out", why=why) for name in names),
            limits,
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
        _weights(by_name),
        Explanation(name="arithmetic", status=arithmetic[0], why="; ".join([arithmetic[1], *_shapes(by_name)])),
        sampler,
        _by_condition("noise", by_name["noise"], same="the same noise drew in both runs"),
        limits,
        _kv_state(by_name["cache state"]),
        Explanation(name="tokenizer", status="ruled_out", why="the token ids before are the same"),
    )


def _by_condition(name: str, condition: Condition, *, same: str) -> Explanation:
    if condition.status == "same":
        return Explanation(name=name, status="ruled_out", why=same)
    if condition.status == "differ":
        return Explanation(name=name, status="possible", why=f"{condition.name}: {_pair(condition)}")
    # Both sides may have said something that settles nothing, such as settings that were not honoured.
    missing = "is not recorded" if None in (condition.a, condition.b) else "cannot be compared"
    return Explanation(name=name, status="unknown", why=f"{condition.name} {missing}: {_pair(condition)}")


def _weights(by_name: dict[str, Condition]) -> Explanation:
    """A version numbers the weights of one policy: equal numbers of two policies, or of two runs, tell nothing."""
    policy, run = by_name["policy"], by_name["run"]
    if policy.status == "differ":
        return _by_condition("weights", policy, same="")
    told = _by_condition("weights", by_name["weight version"], same="both runs used the same version")
    if told.status == "ruled_out" and policy.status != "same" and run.status != "same":
        why = f"the same version, but policy is not recorded: {_pair(policy)}; run {_pair(run)}"
        return Explanation(name="weights", status="unknown", why=why)
    return told


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


def _run(a: Rollout, b: Rollout) -> Condition:
    """One rollout without a run's name, held against itself, is of one run."""
    found = _condition("run", a.run_id, b.run_id)
    if a.run_id is b.run_id is None and a.rollout_id == b.rollout_id:
        return Condition(name="run", a=None, b=None, status="same")
    return found


def _sampler(a: Sampler | None, b: Sampler | None, *, keyed: bool, ended: bool) -> Condition:
    """Unknown where a side has no temperature, asked for what was not honoured, or does not say in which order."""
    told = [_settings(one, keyed=keyed, ended=ended) for one in (a, b)]
    shown = [
        None if one is None else ", ".join(f"{name}={_short(value)}" for name, value in one.items()) for one in told
    ]
    status = "unknown" if None in told else "same" if told[0] == told[1] else "differ"
    if a is None or b is None or not (honoured(a) and honoured(b)):
        status = "unknown"
    elif status == "same" and (chains := _chains(a, b)) != "same":
        status = chains
    if a is not None and b is not None and _chains(a, b) != "same":
        orders = ["unknown" if one.chain is None else " ".join(one.chain) for one in (a, b)]
        shown = [text and f"{text}, chain={order}" for text, order in zip(shown, orders, strict=True)]
    sides = [
        text if one is None or text is None or honoured(one) else f"{text}, not honoured"
        for one, text in zip((a, b), shown, strict=True)
    ]
    return Condition(name="sampler", a=sides[0], b=sides[1], status=status)


def _chains(a: Sampler, b: Sampler) -> str:
    if a.chain == b.chain:
        return "same"
    return "unknown" if a.chain is None or b.chain is None else "differ"


def _settings(sampler: Sampler | None, *, keyed: bool, ended: bool) -> dict[str, Any] | None:
    """What the settings change, by name. A seed plays no part where keyed noise drew."""
    if sampler is None or sampler.temperature is None:
        return None
    names = [*NEUTRAL, "extra", *([] if keyed else ["seed"]), *(["max_tokens", "stop", "stop_token_ids"] * ended)]
    values = {name: getattr(sampler, name) for name in names}
    values = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
    changed = {
        name: value
        for name, value in values.items()
        if value not in NEUTRAL.get(name, ()) and value is not None and value not in ((), [], {})
    }
    return {"temperature": sampler.temperature, **changed}


def _limits(a: Sampler | None, b: Sampler | None) -> Condition:
    """Where a request had to end. No stop is one way to ask for none; no recorded limit is none that is known."""
    told = [None if one is None else _ends(one) for one in (a, b)]
    shown = [
        None if one is None else ", ".join(f"{name}={_short(v)}" for name, v in one.items()) or None for one in told
    ]
    if told[0] is None or told[1] is None:
        status = "unknown"
    elif any(told[0].get(name, []) != told[1].get(name, []) for name in ("stop", "stop_token_ids")):
        status = "differ"
    elif "max_tokens" not in told[0] or "max_tokens" not in told[1]:
        status = "unknown"
    else:
        status = "same" if told[0] == told[1] else "differ"
    return Condition(name="limits", a=shown[0], b=shown[1], status=status)


def _ends(sampler: Sampler) -> dict[str, Any]:
    ends = {
        "stop": list(sampler.stop or ()),
        "stop_token_ids": [] if sampler.stop_token_ids is None else [int(one) for one in sampler.stop_token_ids],
    }
    limit = {} if sampler.max_tokens is None else {"max_tokens": sampler.max_tokens}
    return limit | {name: values for name, values in ends.items() if values}


def _short(value: Any) -> str:
    """A setting in few words; a long one by its beginning and a sum over the whole, so that two stay apart."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... ({len(text)} characters, sum {zlib.crc32(text.encode()):08x})"


def _noise(rollout: Rollout, position: int, sampler: Sampler | None) -> str | None:
    keyed = noise_at(rollout, position)
    if keyed is None:
        return "none at temperature 0" if sampler is not None and sampler.temperature == 0 else None
    return f"{rollout.noise or 'unnamed recipe'} key {keyed[0]} sample {keyed[1]} segment {rollout.segment}"
