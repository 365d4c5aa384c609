"""May a recorded log-prob be the denominator of a ratio? One function decides, for losses and for replay."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

OTHER_SETTINGS = "other_settings"
"""The word for what stands in `samplers.grammar` and may do more than take tokens away."""

FILTERS_FIRST = "filters_before_temperature"
"""The word for a top-p or min-p that chose its tokens before the temperature divided the logits."""

_TAKES_AWAY = frozenset({
    # grammars and masks, under the names that engines ask for them by
    "grammar", "json", "json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag", "structured_outputs",
    "response_format", "guided_json", "guided_json_object", "guided_regex", "guided_choice", "guided_grammar",
    "tool_choice", "function_call", "allowed_token_ids", "prefix_allowed_tokens_fn", "thinking_token_budget",
    "suppress_tokens", "begin_suppress_tokens", "bad_words", "bad_words_ids", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "forced_bos_token_id", "forced_eos_token_id", "min_tokens",
    "min_new_tokens", "min_length", "ignore_eos",
    # filters, which keep some tokens as they are. Not xtc: what it drops is itself drawn, so it draws from a mixture
    "top_k", "top_p", "min_p", "min_keep", "typical_p", "typical", "top_n_sigma", "top_a", "top_h", "tfs", "tfs_z",
    "epsilon_cutoff", "eta_cutoff",
})  # fmt: skip
_JSON_SCHEMA = frozenset({
    "$schema", "$id", "$anchor", "$ref", "$dynamicRef", "$dynamicAnchor", "$comment", "$defs", "definitions", "type",
    "enum", "const", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format",
    "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "properties", "patternProperties", "additionalProperties",
    "propertyNames", "unevaluatedProperties", "required", "dependentRequired", "dependentSchemas", "dependencies",
    "minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains",
    "minContains", "maxContains", "minItems", "maxItems", "uniqueItems", "pattern", "minLength", "maxLength",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "contentEncoding", "contentMediaType",
    "contentSchema",
})  # fmt: skip
"""Words of a JSON schema, which may be a grammar as it stands. No engine has a setting of such a name."""


@dataclass(frozen=True, kw_only=True)
class Transform:
    """What the trainer did to its own logits before it took log-probs. The caller declares it; nothing infers it.

    temperature: divided the logits by the temperature recorded for each action.
    filters: applied the recorded top-k, top-p and min-p to its own tempered distribution and renormalised. Does not
        cover those that the recorded `chain` has before the temperature.
    support: renormalised over the recorded support of each action. Covers whatever only removes tokens.
    penalties: applied the recorded penalties, logit bias, bad words, min_tokens and all that `grammar` holds.

    Raises `TypeError` for what is no bool: a temperature in place of True would declare whatever was recorded.
    """

    temperature: bool = False
    filters: bool = False
    support: bool = False
    penalties: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            got: Any = getattr(self, field.name)
            if not isinstance(got, bool):
                raise TypeError(f"Transform: {field.name}: wanted True or False, got {got!r}")


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What of a sampler's settings decides the distribution that was drawn from.

    temperature: None when it was not recorded. top_k: 0 keeps all. reshaped: names of the settings that move logits
    (penalties, logit bias, and `other_settings` where `reshapes` says so). removed: names of those that take tokens
    away (bad words, min_tokens, grammar). What may do both stands in both. honoured: False when the engine said that it
    did not do what was asked. filters_first: a top-p or min-p came before a temperature other than 1, as in llama.cpp's
    usual order, so that it kept other tokens than of the tempered distribution.
    """

    temperature: float | None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    reshaped: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    honoured: bool = True
    filters_first: bool = False

    @property
    def filters(self) -> tuple[str, ...]:
        """The active filters, as `top_p=0.9`."""
        active = {"top_k": self.top_k > 0, "top_p": self.top_p < 1.0, "min_p": self.min_p > 0.0}
        return tuple(f"{name}={getattr(self, name):g}" for name, on in active.items() if on)


class Verdict(NamedTuple):
    """Whether the log-prob may be a denominator, and why not."""

    usable: bool
    reason: str


def draw(sampler: Any) -> Draw:
    """The `Draw` of a recorded sampler: a `Draw` itself, or any object with the attributes of
    `rollstore.schema.Sampler`.

    A filter or penalty that is null was not asked for; a temperature that is null is unknown. Raises `TypeError` for
    what has no temperature.
    """
    if isinstance(sampler, Draw):
        return sampler
    if not hasattr(sampler, "temperature"):
        raise TypeError(f"sampler: wanted a Sampler, as Sampler(temperature=1.0), got {sampler!r}")
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    reshaped = [name for name, value in neutral.items() if getattr(sampler, name, None) not in (None, value)]
    if getattr(sampler, "logit_bias", None):
        reshaped.append("logit_bias")
    grammar = getattr(sampler, "grammar", None)
    if grammar and reshapes(grammar):
        reshaped.append(OTHER_SETTINGS)
    removing = ("bad_words", "min_tokens", "grammar")
    removed = [name for name in removing if getattr(sampler, name, None)]
    top_k, top_p, min_p = (getattr(sampler, name, None) for name in ("top_k", "top_p", "min_p"))
    return Draw(
        temperature=sampler.temperature,
        top_k=max(0, top_k or 0),
        top_p=1.0 if top_p is None else top_p,
        min_p=min_p or 0.0,
        reshaped=tuple(reshaped),
        removed=tuple(removed),
        honoured=getattr(sampler, "applied", None) is not False,
        filters_first=_filters_first(sampler),
    )


def _filters_first(sampler: Any) -> bool:
    """Whether the recorded `chain` says so: nothing without a temperature in it. Top-k is the same in any order."""
    chain, temperature = getattr(sampler, "chain", None) or (), sampler.temperature
    if temperature in (None, 1.0) or "temperature" not in chain:
        return False
    before = chain[: tuple(chain).index("temperature")]
    top_p, min_p = getattr(sampler, "top_p", None), getattr(sampler, "min_p", None)
    return ("top_p" in before and top_p is not None and top_p < 1.0) or ("min_p" in before and (min_p or 0.0) > 0.0)


def reshapes(grammar: str) -> bool:
    """Whether what a sampler's `grammar` holds may do more than take tokens away, so that no support covers it.

    Writers put every setting there that has no column and may bear on the draw, as one JSON object by name: each name
    counts but those that are known to take tokens away, so names that nobody knows do. Any other text is a grammar.
    """
    try:
        found: Any = json.loads(grammar)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and not (_TAKES_AWAY | _JSON_SCHEMA).issuperset(found)


def usable_as_behavior(kind: str | None, sampler: Any, trainer_transform: Transform) -> Verdict:
    """Decide whether a recorded log-prob may stand below a ratio whose numerator is the trainer's log-prob.

    Two things must hold: the number is of the distribution that really drew the token, and the trainer's number is of
    the same transform of its own logits, so that equal weights give a ratio of 1.

    kind: `behavior`, `tempered`, `raw`, `unknown` or None (not recorded). sampler: a recorded sampler, a `Draw`, or
    None (not recorded). Pure and total: it never raises on a record. Raises `TypeError` when trainer_transform is no
    `Transform`, or sampler is neither.
    """
    declared(trainer_transform)
    if kind is None or kind == "unknown":
        return Verdict(False, "the kind of the log-prob was not recorded, so it is of no known distribution")
    if kind not in ("behavior", "tempered", "raw"):
        return Verdict(False, f"kind {kind!r} is not one that this version knows")
    if sampler is None:
        return Verdict(False, "no sampler was recorded for it, so what the trainer would have to apply is unknown")
    drawn = draw(sampler)
    if not drawn.honoured:
        return Verdict(False, "the engine did not honour its sampler, so what was drawn from is unknown")
    if drawn.temperature is None:
        return Verdict(False, "its temperature was not recorded")
    if drawn.temperature == 0.0:
        return Verdict(False, "temperature 0 draws from no distribution")
    lost = _lost(kind, drawn)
    if lost:
        return Verdict(False, f"a {kind} log-prob was recorded, which leaves out {', '.join(lost)}")
    missing = _missing(drawn, trainer_transform)
    if missing:
        return Verdict(False, f"the trainer did not declare that it applied {', '.join(missing)}")
    return Verdict(True, "")


def declared(trainer_transform: Any) -> None:
    """Raise `TypeError` unless it is a `Transform`."""
    if not isinstance(trainer_transform, Transform):
        wanted = "wanted a Transform, as Transform(temperature=True)"
        raise TypeError(f"trainer_transform: {wanted}, got {trainer_transform!r}")


def _lost(kind: str, drawn: Draw) -> list[str]:
    """Transforms between the distribution the number is of and the one that drew."""
    if kind == "behavior":
        return []
    lost = [*drawn.filters, *drawn.removed]
    if kind == "raw":
        tempered = [] if drawn.temperature == 1.0 else [f"temperature={drawn.temperature:g}"]
        lost = [*tempered, *lost, *drawn.reshaped]
    return _once(lost)


def _missing(drawn: Draw, done: Transform) -> list[str]:
    """Transforms that drew and that the trainer did not declare."""
    missing = [] if done.temperature or drawn.temperature == 1.0 else [f"temperature={drawn.temperature:g}"]
    if not (done.filters or done.support):
        missing += drawn.filters
    if drawn.filters_first and not done.support:
        missing.append(f"the recorded support: filters came before temperature={drawn.temperature:g}")
    if not (done.penalties or done.support):
        missing += drawn.removed
    if not done.penalties:
        missing += drawn.reshaped
    return _once(missing)


def _once(names: list[str]) -> list[str]:
    """Without the second word for one column."""
    return [name for name in names if name != OTHER_SETTINGS or "grammar" not in names]
