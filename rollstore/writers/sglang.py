"""SGLang: replies of `/generate` and of `Engine.generate`, as records.

`output_token_logprobs` are `tempered`: after penalties and temperature, before top-k, top-p and min-p. A server with
SGLANG_RETURN_ORIGINAL_LOGPROB=1 sends those before the temperature. Only `return_sampling_mask` brings the behavior
log-prob, with the support that was kept. A seed is heeded only by a server with `--enable-deterministic-inference`.
"""

from __future__ import annotations

import base64
import binascii
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from rollstore.schema import Engine, Flag, Known, Rollout, Sampler
from rollstore.schema.known import known
from rollstore.writers.conversation import rollout
from rollstore.writers.decoding import Id, loaded, shaped_as
from rollstore.writers.effects import as_grammar, beside, is_opaque, unread
from rollstore.writers.finish import ending
from rollstore.writers.heads import entries, heads
from rollstore.writers.reply import (
    Ints,
    Reply,
    Routing,
    aligned,
    biases,
    greedy_kind,
    ids,
    nothing_drawn,
    routing,
    shaped,
    support,
    words,
)
from rollstore.writers.settings import readable
from rollstore.writers.uuid7 import uuid7
from rollstore.writers.weights import Number, Weights, at_completion, by_spans, version_number

UNSET_SEED = 42
"""What a deterministic server takes where a request names no seed."""

CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag", "custom_params")
"""Settings that take tokens away, or let code of the user's own do so."""

READ = frozenset({
    *CONSTRAINTS, "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "max_new_tokens", "min_new_tokens", "sampling_seed", "logit_bias", "stop", "stop_token_ids",
})  # fmt: skip
"""Settings that are read, each for what it is."""

OF_EACH = ("custom_logit_processor", "lora_path", "lora_id")
"""Settings beside `sampling_params`, of which a request may have one for each prompt."""


class Finish(msgspec.Struct, frozen=True):
    """`finish_reason`: stop (matched), length, abort."""

    type: str | None = None
    matched: int | str | list[int] | None = None


class Span(msgspec.Struct, frozen=True):
    """Output tokens start, ..., end - 1 under one weight label."""

    version: str | int
    start: int
    end: int


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """What is listed of a token: (log-prob, id, text)."""

    logprob: float | None
    id: Id


class Meta(msgspec.Struct, frozen=True):
    """`meta_info`."""

    id: Any = None
    finish_reason: Finish | str | None = None
    output_token_logprobs: tuple[Listed, ...] | None = None
    output_top_logprobs: tuple[tuple[Listed, ...] | None, ...] | None = None
    output_token_sampling_logprobs: tuple[float | None, ...] | None = None
    output_token_sampling_mask: tuple[tuple[Id, ...] | None, ...] | None = None
    weight_version: str | int | None = None
    weight_versions: tuple[Span, ...] | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    num_retractions: int | None = None
    routed_experts: str | None = None


class Body(msgspec.Struct, frozen=True):
    """One output."""

    meta_info: Meta
    index: int | None = None
    """Its place among the outputs of the request, where the server says it."""
    output_ids: tuple[Id, ...] | None = None
    prompt_token_ids: tuple[Id, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Server:
    """What a caller knows of a server and no reply says.

    original_logprobs: SGLANG_RETURN_ORIGINAL_LOGPROB is set. deterministic: --enable-deterministic-inference; None
    where it is not known. defaults: sampling parameters that the server fills in. context: most tokens it holds.
    routed: (layers, k) of its experts, which the reply leaves out.
    """

    original_logprobs: bool = False
    deterministic: bool | None = None
    engine: Engine = Engine(name="sglang")  # noqa: RUF009  frozen, so one may serve all
    policy: str | None = None
    defaults: Mapping[str, Any] | None = None
    context: int | None = None
    routed: tuple[int, int] | None = None


def sampler(params: Mapping[str, Any], server: Server, beside_params: Mapping[str, Any] | None = None) -> Sampler:
    """`sampling_params`, or the server's defaults where they are silent; what neither says is null.

    A seed that is not heeded, or perhaps not, stands in `extra` as `sampling_seed`, and not as the seed. What has no
    column is in `extra`, or in `grammar` where it is not known to leave the distribution as it is; `beside_params`: the
    fields of the request that stand beside them.
    """
    asked, extra = readable({**(server.defaults or {}), **params})
    more, limits = beside({**(beside_params or {}), **asked}, READ)
    limits |= unread(extra)
    extra |= more
    seed = asked.get("sampling_seed")
    if server.deterministic:
        seed = UNSET_SEED if seed is None else seed
    if seed is not None and (not server.deterministic or (asked.get("n") or 1) > 1 or not 0 <= seed < 2**64):
        extra["sampling_seed"], seed = str(seed), None
        extra["sampling_seed_heeded"] = {None: "unknown", False: "false", True: "true"}[server.deterministic]
    limits |= {name: value for name in CONSTRAINTS if (value := asked.get(name)) is not None}
    top_k = asked.get("top_k")
    return Sampler(
        temperature=asked.get("temperature"),
        top_p=asked.get("top_p"),
        top_k=None if top_k is None else max(top_k, 0),
        min_p=asked.get("min_p"),
        repetition_penalty=asked.get("repetition_penalty"),
        presence_penalty=asked.get("presence_penalty"),
        frequency_penalty=asked.get("frequency_penalty"),
        max_tokens=asked.get("max_new_tokens"),
        min_tokens=asked.get("min_new_tokens"),
        seed=seed,
        logit_bias=biases(asked.get("logit_bias")),
        stop=words(asked.get("stop")),
        stop_token_ids=tuple(asked.get("stop_token_ids") or ()) or None,
        grammar=as_grammar(limits),
        extra=extra or None,
    )


def replies(
    reply: bytes | str | Mapping[str, Any] | Sequence[Mapping[str, Any]],
    request: Mapping[str, Any],
    *,
    server: Server | None = None,
    number: Number = version_number,
    cache_state: str = "unknown",
) -> list[Reply]:
    """The outputs of a reply to a `request` (its JSON). Of a stream, the last event is the reply.

    The prompt is the request's `input_ids`, or what the server says of it. `cache_state` is what became of the KV
    cache when the weights changed under a request: `recomputed` after a pause in mode retract, `retained` after one in
    mode in_place. Raises ValueError where ids are missing, lengths differ, or the outputs are not those asked for.
    """
    known_server = server or Server()
    whole = loaded(reply)
    if not isinstance(whole, Mapping | list | tuple):
        raise ValueError(f"reply: wanted an output or a list of them, got {type(whole).__name__}")  # noqa: TRY004  as said
    several = [whole] if isinstance(whole, Mapping) else list(whole)
    bodies = [shaped_as(Body, one, f"output {n}") for n, one in enumerate(several)]
    params = _params(request)
    samples = max(readable({"n": params[0].get("n")})[0].get("n") or 1, 1)
    prompts = _prompts(request, params)
    groups: defaultdict[int, str] = defaultdict(uuid7)  # one for each prompt
    made: list[Reply] = []
    for body, place in zip(bodies, _places(bodies, prompts, samples), strict=True):
        own = params[place // samples] if len(params) > 1 else params[0]
        reply_ = _reply(body, place // samples, own, request, known_server, number, cache_state)
        if samples > 1:
            group = {"group_id": groups[place // samples], "group_size": samples, "sample_index": place % samples}
            reply_ = replace(reply_, row={**reply_.row, **group})
        made.append(reply_)
    return made


def rollouts(
    reply: bytes | str | Mapping[str, Any] | Sequence[Mapping[str, Any]],
    request: Mapping[str, Any],
    *,
    server: Server | None = None,
    number: Number = version_number,
    cache_state: str = "unknown",
    **fields: Any,
) -> list[Rollout]:
    """The same as rollouts of one segment; `fields` are columns of the rollouts table."""
    made = replies(reply, request, server=server, number=number, cache_state=cache_state)
    return [rollout(one, **fields) for one in made]


def _params(request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """`sampling_params`: one for all prompts, or one for each."""
    given: Any = request.get("sampling_params") or {}
    several: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    strange = [type(one).__name__ for one in several if not isinstance(one, Mapping)]
    if strange or not several:
        raise ValueError(f"sampling_params: wanted an object, or one for each prompt, got {strange or 'none'}")
    return several


def _prompts(request: Mapping[str, Any], params: Sequence[Any]) -> int | None:
    """How many prompts were asked about; None where the request does not say it in a way that is known here."""
    given, text = request.get("input_ids"), request.get("text")
    said = None
    if given is not None:
        if isinstance(given, str | Mapping) or not hasattr(given, "__len__"):
            raise ValueError(f"input_ids: wanted token ids, or those of each prompt, got {type(given).__name__}")
        said = len(given) if len(given) and isinstance(given[0], list | tuple) else 1
    elif isinstance(text, str | list | tuple):
        said = 1 if isinstance(text, str) else len(text)
    if len(params) > 1 and said not in (None, len(params)):
        raise ValueError(f"sampling_params: wanted one for all or {said}, one for each prompt, got {len(params)}")
    return len(params) if said is None and len(params) > 1 else said


def _places(bodies: Sequence[Body], prompts: int | None, samples: int) -> list[int]:
    """The place of each output among those of the request: by its index where the server says one, else by order."""
    asked = None if prompts is None else prompts * samples
    said = [body.index for body in bodies]
    if all(index is None for index in said):
        if len(bodies) != asked and (asked is not None or len(bodies) % samples):
            wanted = f"a multiple of {samples}" if asked is None else str(asked)
            raise ValueError(f"outputs: wanted {wanted}, {samples} of each prompt, got {len(bodies)}")
        return list(range(len(bodies)))
    places = [index for index in said if index is not None and 0 <= index < (index + 1 if asked is None else asked)]
    if len(places) < len(said) or len(set(places)) < len(places):
        raise ValueError(f"index: wanted another one from 0 to {(asked or 0) - 1} of each output, got {said}")
    return places


def _reply(
    body: Body,
    prompt_place: int,
    params: Mapping[str, Any],
    request: Mapping[str, Any],
    server: Server,
    number: Number,
    cache_state: str,
) -> Reply:
    asked = _beside(request, prompt_place)
    meta, settings = body.meta_info, sampler(params, server, asked)
    opaque = is_opaque({**asked, **params})
    prompt = ids("input_ids", body.prompt_token_ids or _prompt(request, prompt_place))
    listed = meta.output_token_logprobs
    drawn = body.output_ids if body.output_ids is not None or listed is None else [entry.id for entry in listed]
    tokens = ids("output_ids", drawn)
    if len(tokens) < (meta.completion_tokens or 0) - 1:  # a matched stop token may be counted and cut off
        raise ValueError(
            f"output_ids: wanted the {meta.completion_tokens} that were drawn, got {len(tokens)}: the last event of an "
            "incremental stream does not hold them all"
        )
    said = meta.finish_reason
    finish = Finish(type=said) if isinstance(said, str) else said or Finish()
    outcome, reason = ending(
        finish.type,
        count=len(tokens),
        prompt=len(prompt),
        max_tokens=settings.max_tokens,
        context=server.context,
        stop=finish.matched,
    )
    return Reply(
        prompt=prompt,
        tokens=tokens,
        sampler=settings,
        support=None if meta.output_token_sampling_mask is None else support(meta.output_token_sampling_mask, tokens),
        routing=_routing(meta.routed_experts, server.routed, len(prompt) + len(tokens)),
        weights=_weights(meta, len(tokens), number, cache_state),
        request_id=None if meta.id is None else str(meta.id),
        cached_tokens=meta.cached_tokens,
        preemptions=meta.num_retractions,
        engine_finish=finish.type,
        ending=outcome,
        ending_reason=reason,
        row={"engine": server.engine, "policy": server.policy},
        **_logprobs(meta, tokens, settings, server, request.get("top_logprobs_num"), opaque=opaque),
    )


def _beside(request: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The fields of a request beside `sampling_params`, of one prompt."""
    several = {name: value for name in OF_EACH if isinstance(value := request.get(name), list | tuple)}
    return {**request, **{name: value[place] if place < len(value) else None for name, value in several.items()}}


def _prompt(request: Mapping[str, Any], place: int) -> Any:
    given = request.get("input_ids")
    return given[place] if given is not None and len(given) and isinstance(given[0], list | tuple) else given


def _listed_kind(settings: Sampler, server: Server) -> str:
    """Of `output_token_logprobs`. The original ones come after penalties, bias and grammar: raw only without those."""
    if settings.temperature == 0:
        return greedy_kind(settings)
    if not server.original_logprobs:
        return "tempered"
    return "unknown" if shaped(settings) else "raw"


def _logprobs(
    meta: Meta, tokens: Ints, settings: Sampler, server: Server, asked: Any, *, opaque: bool
) -> dict[str, Any]:
    """The columns that come out of the listed log-probs. opaque: code of the user's own may have changed them."""
    kind = "unknown" if opaque else _listed_kind(settings, server)
    if not len(tokens):
        return {"logprobs": nothing_drawn(), "logprob_kind": kind}
    columns: dict[str, Any] = {}
    flags: list[Flag] = []
    if meta.output_token_sampling_logprobs is not None:
        own = aligned("output_token_sampling_logprobs", meta.output_token_sampling_logprobs, tokens)
        columns = {"logprobs": _known(own), "logprob_kind": "unknown" if opaque else "behavior"}
    elif meta.output_token_logprobs is not None:
        own = aligned("output_token_logprobs", meta.output_token_logprobs, tokens)
        said = [entry.id for entry in own]
        if said != tokens.tolist():
            wrong = next(n for n, token in enumerate(tokens.tolist()) if said[n] != token)
            where = f"wanted one of token {tokens[wrong]} at place {wrong}, got one of token {said[wrong]}"
            raise ValueError(f"output_token_logprobs: {where}")
        columns = {"logprobs": _known([entry.logprob for entry in own]), "logprob_kind": kind}
    if meta.output_top_logprobs is not None:
        places = [place or () for place in aligned("output_top_logprobs", meta.output_top_logprobs, tokens)]
        flat = [entry for place in places for entry in place]
        values = [float("nan") if entry.logprob is None else entry.logprob for entry in flat]
        top = entries([len(place) for place in places], [entry.id for entry in flat], values)
        found, flags = heads(top, size=asked if isinstance(asked, int) and asked > 0 else None)
        columns.update(heads=found, head_kind=None if found is None else kind)
    return {**columns, "flags": tuple(flags)}


def _known(values: Sequence[float | None]) -> Known:
    return known(list(values))


def _weights(meta: Meta, count: int, number: Number, cache_state: str) -> Weights | None:
    if meta.weight_versions:
        triples = [(str(span.version), span.start, span.end) for span in meta.weight_versions]
        first = {None: None, 0: "fresh"}.get(meta.cached_tokens, "unknown")
        return by_spans(count, triples, number=number, first_cache=first, later_cache=cache_state)
    # Alone, this is the server's version when the reply was made, and not that of the tokens.
    return None if meta.weight_version is None else at_completion(count, str(meta.weight_version), number=number)


def _routing(text: str | None, shape: tuple[int, int] | None, tokens: int) -> Routing | None:
    """Base64 of int32 ids without their shape, which is the caller's to know."""
    if text is None or shape is None:
        return None
    if min(shape) < 1:
        raise ValueError(f"routed: wanted at least one layer and one expert, got {shape}")
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
    except (binascii.Error, ValueError):
        raise ValueError(f"routed_experts: wanted base64 of int32 ids, got {len(text)} other characters") from None
    if flat.size % (shape[0] * shape[1]):
        raise ValueError(f"routed_experts: wanted rows of {shape[0]} layers x {shape[1]} experts, got {flat.size} ids")
    return routing(flat.reshape(-1, *shape), tokens)
