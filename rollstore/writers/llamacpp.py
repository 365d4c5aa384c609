"""llama.cpp: replies of the server's `/completion`, and what a sampler of one's own over the low-level API drew.

Ask the server for `return_tokens` and `n_probs`. With `post_sampling_probs` the probability is that of the distribution
that drew; the plain `logprob` is raw. The high-level API of llama-cpp-python keeps no ids, so nothing is read from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rollstore.schema import Engine, Flag, Known, Rollout, Sampler
from rollstore.schema.known import known
from rollstore.writers import effects
from rollstore.writers.conversation import rollout
from rollstore.writers.decoding import Id, loaded, shaped_as
from rollstore.writers.effects import as_grammar, is_on, spelled, unread
from rollstore.writers.finish import ending
from rollstore.writers.heads import entries, heads
from rollstore.writers.reply import Ints, Reply, biases, ids, nothing_drawn, words
from rollstore.writers.settings import readable, whole_number

FINISHES = {"eos": "stop", "word": "stop", "limit": "length"}
"""`stop_type` in the words of the others; `none` is a reply that has not ended."""

RANDOM_SEED = 2**32 - 1
"""What the server says where it took a seed of its own."""

STEPS = ("temperature", "top_k", "top_p", "min_p")
"""Steps of `samplers` that have a column; `penalties` has several, and does nothing in the chain's order here."""

SETTINGS_OF: Mapping[str, tuple[str, ...]] = {
    **{step: (step,) for step in STEPS},
    "temperature": ("temperature", "dynatemp_range"),
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    "typ_p": ("typical_p",), "typical_p": ("typical_p",), "xtc": ("xtc_probability",), "dry": ("dry_multiplier",),
    "top_n_sigma": ("top_n_sigma",), "tfs_z": ("tfs_z",),
}  # fmt: skip
"""The settings of each step that is known here: where none of `samplers` has a setting, it does nothing."""

OWN_NAMES = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens"}
"""The server's names for two columns."""

NEUTRAL = {
    name: effects.NEUTRAL[name]
    for name in (
        "typical_p", "xtc_probability", "top_n_sigma", "dry_multiplier", "mirostat", "dynatemp_range", "tfs_z",
        "min_keep",
    )
}  # fmt: skip
"""Settings without a column, and the values at which they do nothing."""

OFF = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
"""Settings with a column, and the values at which they do nothing."""


class Probability(msgspec.Struct, frozen=True):
    """One listed token: `logprob`, or `prob` after sampling."""

    id: Id
    logprob: float | None = None
    prob: float | None = None
    top_logprobs: tuple[Probability, ...] | None = None
    top_probs: tuple[Probability, ...] | None = None

    def value(self, *, after: bool) -> float | None:
        """Its log-prob: of the distribution after sampling, or the plain one. None where it has only the other."""
        if not after or self.prob is None:
            return None if after else self.logprob
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.log(self.prob))


class Timings(msgspec.Struct, frozen=True):
    cache_n: int | None = None


class Body(msgspec.Struct, frozen=True):
    """What is read of a reply."""

    tokens: tuple[Id, ...] | None = None
    completion_probabilities: tuple[Probability, ...] | None = None
    generation_settings: dict[str, Any] | None = None
    stop_type: str | None = None
    stopping_word: str | None = None
    tokens_evaluated: int | None = None
    tokens_predicted: int | None = None
    truncated: bool = False
    model: Any = None
    timings: Timings | None = None


def sampler(settings: Mapping[str, Any]) -> Sampler:
    """`generation_settings` as a record. Whatever has no column stands in `grammar`: a trainer would have to apply it.

    A setting whose step is not among `samplers` did nothing: its column has the value at which it does nothing, and
    what was asked is in `extra`. Under mirostat no step but the temperature is applied, and the temperature of a
    dynamic range is not one number.
    """
    settings, extra = _readable(settings)
    limits = unread(extra)
    if not is_on(settings.get("mirostat"), NEUTRAL["mirostat"]):
        settings, idle = _without_idle(settings)
        extra |= idle
        limits |= _strange(settings)
    limits |= {name: settings[name] for name, off in NEUTRAL.items() if is_on(settings.get(name), off)}
    adapters = _adapters(settings.get("lora"))
    limits |= {name: value for name, value in (("grammar", settings.get("grammar")), ("lora", adapters)) if value}
    if is_on(settings.get("ignore_eos")):  # it bans the end tokens: their biases say so, where they are listed
        extra["ignore_eos"] = spelled(settings["ignore_eos"])
        limits |= {} if settings.get("logit_bias") else {"ignore_eos": True}
    seed, top_k = settings.get("seed"), settings.get("top_k")
    chain = tuple(name for name in settings.get("samplers") or () if name in STEPS)
    return Sampler(
        temperature=None if "dynatemp_range" in limits else _positive(settings.get("temperature")),
        top_p=settings.get("top_p"),
        top_k=None if top_k is None else max(top_k, 0),
        min_p=settings.get("min_p"),
        repetition_penalty=settings.get("repetition_penalty"),
        presence_penalty=settings.get("presence_penalty"),
        frequency_penalty=settings.get("frequency_penalty"),
        max_tokens=settings.get("max_tokens"),
        seed=None if seed in (RANDOM_SEED, -1) else seed,
        logit_bias=biases(settings.get("logit_bias")),
        stop=words(settings.get("stop")),
        grammar=as_grammar(limits),
        chain=chain or None,
        applied="mirostat" not in limits,
        extra=extra or None,
    )


def _readable(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings under the names of columns, and those that fit none; a bias is an entry of a list here."""
    listed = settings.get("logit_bias")
    pairs = [_pair(entry) for entry in listed] if isinstance(listed, Sequence) else [None]
    bias = dict(pair for pair in pairs if pair is not None) if None not in pairs else listed
    temperature = settings.get("temperature")
    if isinstance(temperature, int | float):
        temperature = _positive(temperature)
    named = {OWN_NAMES.get(name, name): value for name, value in settings.items()}
    most = named.get("max_tokens")
    if isinstance(most, int | float) and most < 0:  # as many as there is room for
        named["max_tokens"] = None
    kept, others = readable({**named, "logit_bias": bias, "temperature": temperature})
    steps = kept.get("samplers")
    if steps is not None and not (isinstance(steps, list | tuple) and all(isinstance(step, str) for step in steps)):
        del kept["samplers"]
        others["samplers"] = spelled(steps)
    own = {column: name for name, column in OWN_NAMES.items()}
    others = {own.get(name, name): said for name, said in others.items()}
    seed = kept.get("seed")
    if seed is not None and seed != -1 and not 0 <= seed < 2**64:
        others["seed"] = str(kept.pop("seed"))
    return kept, others


def _without_idle(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(the settings as they were applied, those that were asked for and not applied) by the steps in `samplers`."""
    steps = settings.get("samplers")
    if steps is None:
        return dict(settings), {}
    applied = {name for step in steps for name in SETTINGS_OF.get(step, ())}
    off = {**OFF, **NEUTRAL}
    idle = [name for names in SETTINGS_OF.values() for name in names if name not in applied]
    own = {column: name for name, column in OWN_NAMES.items()}
    asked = {own.get(name, name): spelled(settings[name]) for name in idle if is_on(settings.get(name), off[name])}
    return {**settings, **{name: off[name] for name in idle}}, asked


def _strange(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The steps of `samplers` that have neither a column nor a setting that is known here, under that name."""
    off = {"adaptive_p"} if (_target(settings) or 0.0) < 0 else set[str]()
    strange = [step for step in settings.get("samplers") or () if step not in {*SETTINGS_OF, *off}]
    return {"samplers": strange} if strange else {}


def _adapters(said: Any) -> Any:
    """The adapters that are not scaled to nothing."""
    if not isinstance(said, list | tuple):
        return said
    adapters: Sequence[Any] = said
    return [one for one in adapters if not (isinstance(one, Mapping) and one.get("scale") == 0)]


def _target(settings: Mapping[str, Any]) -> float | None:
    """The probability that `adaptive_p` aims at; below 0 it does nothing."""
    target = settings.get("adaptive_target")
    return float(target) if isinstance(target, int | float) else None


def _pair(entry: Any) -> tuple[Any, Any] | None:
    """(token, bias) of one entry: an object, or a list of two. The server writes -inf, a ban, as null."""
    if isinstance(entry, Mapping):
        pair = (entry.get("token"), entry.get("bias"))
    else:
        pair = tuple(entry) if isinstance(entry, list | tuple) else ()
    if len(pair) != 2 or not isinstance(pair[0], int | str):
        return None
    return (pair[0], -math.inf) if pair[1] is None or pair[1] is False else pair


def _positive(temperature: float | None) -> float | None:
    """A temperature of 0 or below is greedy."""
    return None if temperature is None else max(temperature, 0.0)


def reply(
    body: bytes | str | Mapping[str, Any],
    prompt: Any,
    *,
    context: int | None = None,
    engine: Engine | None = None,
) -> Reply:
    """A reply of `/completion` to a prompt that was given as ids [P].

    `context` is the most tokens that a slot holds. Raises ValueError without ids, where the server evaluated another
    number of prompt tokens than it was given, and where log-probs are of other tokens.
    """
    whole = shaped_as(Body, loaded(body))
    given = ids("prompt", prompt)
    if whole.tokens is None:
        raise ValueError('tokens: wanted the ids of the drawn tokens ("return_tokens": true), got none')
    if whole.tokens_evaluated not in (None, len(given)):
        raise ValueError(f"prompt: wanted the {whole.tokens_evaluated} tokens that were evaluated, got {len(given)}")
    tokens = ids("tokens", whole.tokens)
    if len(tokens) < (whole.tokens_predicted or 0) - 1:  # one may be an end token that is counted and not sent
        raise ValueError(
            f"tokens: wanted the {whole.tokens_predicted} that were predicted, got {len(tokens)}: the last event of a "
            "stream does not hold them all"
        )
    settings = None if whole.generation_settings is None else sampler(whole.generation_settings)
    finish = FINISHES.get(whole.stop_type or "")
    outcome, reason = ending(
        finish,
        count=len(tokens),
        prompt=len(given),
        max_tokens=None if settings is None else settings.max_tokens,
        context=context,
        stop=whole.stopping_word if whole.stop_type == "word" else None,
    )
    flags: list[Flag] = []
    if whole.truncated and reason == "unknown":
        reason = "context_limit"
    elif whole.truncated and reason != "context_limit":
        flags.append(Flag(kind="context_shifted", column="tokens"))  # the model no longer saw all that stands before
    asked = whole_number((whole.generation_settings or {}).get("n_probs"))
    columns, more = _logprobs(whole, tokens, asked if asked and asked > 0 else None)
    return Reply(
        prompt=given,
        tokens=tokens,
        sampler=settings,
        cached_tokens=None if whole.timings is None else whole.timings.cache_n,
        engine_finish=whole.stop_type,
        ending=outcome,
        ending_reason=reason,
        flags=(*flags, *more),
        row={
            "engine": engine or Engine(name="llama.cpp"),
            "policy": whole.model if isinstance(whole.model, str) else None,
        },
        **columns,
    )


def _logprobs(body: Body, tokens: Ints, size: int | None) -> tuple[dict[str, Any], list[Flag]]:
    listed = body.completion_probabilities
    if not len(tokens):
        return {"logprobs": nothing_drawn()}, []
    if not listed:
        return {}, []
    said = np.array([place.id for place in listed], np.int64)
    count = len(said)
    # The server leaves out the tokens of a stop word, at the end, and every token that ends inside a character.
    if count < len(tokens) and not (body.stop_type == "word" and (said == tokens[:count]).all()):
        return {}, [Flag(kind="unplaced_logprobs", column="logprobs")]
    if count > len(tokens) or (said != tokens[:count]).any():
        raise ValueError(f"completion_probabilities: wanted those of the {len(tokens)} tokens, got {count} of others")
    after = listed[0].prob is not None
    kind = "behavior" if after else "raw"
    values = known([place.value(after=after) for place in listed] + [None] * (len(tokens) - count))
    columns: dict[str, Any] = {"logprobs": values, "logprob_kind": kind}
    tops: list[Sequence[Probability]] = [place.top_probs or place.top_logprobs or () for place in listed]
    flat = [entry for top in tops for entry in top]
    said_of = [entry.value(after=after) for entry in flat]
    values_of = [float("nan") if value is None else value for value in said_of]
    counts = [len(top) for top in tops] + [0] * (len(tokens) - count)
    found, flags = heads(entries(counts, [entry.id for entry in flat], values_of), size=size, impossible=not after)
    columns.update(heads=found, head_kind=None if found is None else kind)
    return columns, flags


def drawn(
    prompt: Any,
    tokens: Any,
    *,
    logprobs: Any = None,
    kind: str | None = "behavior",
    settings: Sampler | None = None,
    finish: str | None = None,
    context: int | None = None,
    engine: Engine | None = None,
    **columns: Any,
) -> Reply:
    """What a sampler of one's own drew over the low-level API: prompt [P], tokens [A], log-probs [A] of `kind`.

    `finish` is `stop` or `length`; `columns` are further fields of a `Reply` (heads, entropies, ...).
    """
    given, own = ids("prompt", prompt), ids("tokens", tokens)
    most = None if settings is None else settings.max_tokens
    outcome, reason = ending(finish, count=len(own), prompt=len(given), max_tokens=most, context=context)
    said: Known | None = None if logprobs is None else known(logprobs)
    if said is not None and len(said) != len(own):
        raise ValueError(f"logprobs: wanted {len(own)} entries, one for each drawn token, got {len(said)}")
    return Reply(
        prompt=given,
        tokens=own,
        sampler=settings,
        logprobs=said,
        logprob_kind=None if said is None else kind,
        engine_finish=finish,
        ending=outcome,
        ending_reason=reason,
        row={"engine": engine or Engine(name="llama.cpp")},
        **columns,
    )


def rollouts(
    body: bytes | str | Mapping[str, Any],
    prompt: Any,
    *,
    context: int | None = None,
    engine: Engine | None = None,
    **fields: Any,
) -> list[Rollout]:
    """A reply of `/completion` as a rollout of one segment; `fields` are columns of the rollouts table."""
    return [rollout(reply(body, prompt, context=context, engine=engine), **fields)]
