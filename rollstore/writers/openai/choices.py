"""Choices of a reply to replies of the record and to rollouts."""

from __future__ import annotations

import base64
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollstore.schema import Engine, Media, Rollout, Sampler
from rollstore.writers.conversation import rollout
from rollstore.writers.effects import as_grammar, beside, is_opaque, unread
from rollstore.writers.finish import ending
from rollstore.writers.openai.body import (
    Body,
    Choice,
    cached_tokens,
    completion_tokens,
    decode,
    distinct,
    metadata,
    text,
)
from rollstore.writers.openai.listed import logprobs
from rollstore.writers.openai.spellings import unified
from rollstore.writers.reply import (
    Place,
    Reply,
    biases,
    greedy_kind,
    ids,
    routing,
    support,
    words,
)
from rollstore.writers.settings import NUMBERS, readable, samples, settings_of
from rollstore.writers.uuid7 import uuid7
from rollstore.writers.vllm.outputs import CHAIN
from rollstore.writers.weights import Number, Weights, at_completion, by_ends, by_spans, version_number

CONSTRAINTS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "allowed_token_ids",
    "json_schema", "regex", "ebnf", "thinking_token_budget",
)  # fmt: skip
"""Settings of requests that take tokens away and are no others' column."""

READ = frozenset({
    *NUMBERS, *CONSTRAINTS, "stop", "stop_token_ids", "bad_words", "logit_bias", "response_format", "tool_choice",
})  # fmt: skip
"""Settings that are read, each for what it is."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """What a caller knows of a server and no reply says. The defaults say nothing.

    logprob_kind: `behavior` for vLLM with `logprobs_mode=processed_logprobs`, `raw` for its default; `tempered` for
    SGLang. defaults: settings of a request that the server fills in, as {"temperature": 1.0}. context: most tokens it
    holds. before, after: its weight label, read before the request and after the reply.
    """

    logprob_kind: str = "unknown"
    engine: Engine | None = None
    context: int | None = None
    defaults: Mapping[str, Any] | None = None
    before: str | None = None
    after: str | None = None


def sampler(request: Mapping[str, Any], server: Server, *, index: int = 0, engine: str | None = None) -> Sampler:
    """What a request asked for, or the server's defaults where it did not; for the `index`-th of its n outputs.

    Each of n outputs has the next seed where the engine is vLLM; another engine's are not known. What has no column
    is in `extra`, or in `grammar` where it is not known to leave the distribution as it is.
    """
    asked, extra = readable({**(server.defaults or {}), **settings_of(request)})
    more, limits = beside(asked, READ)
    limits |= unread(extra)
    extra |= more
    seed = asked.get("seed")
    if seed is not None and ((samples(request) > 1 and engine != "vllm") or not 0 <= seed < 2**64):
        extra["seed"], seed = str(seed), None
    limits |= {name: value for name in CONSTRAINTS if (value := asked.get(name)) is not None}
    form = asked.get("response_format")
    if form is not None and form != {} and (not isinstance(form, Mapping) or form.get("type", "text") != "text"):
        limits["response_format"] = form
    if asked.get("tool_choice") not in (None, "none", "auto"):
        limits["tool_choice"] = asked["tool_choice"]
    top_k, most = asked.get("top_k"), asked.get("max_completion_tokens")
    return Sampler(
        temperature=asked.get("temperature"),
        top_p=asked.get("top_p"),
        top_k=None if top_k is None else max(top_k, 0),
        min_p=asked.get("min_p"),
        repetition_penalty=asked.get("repetition_penalty"),
        presence_penalty=asked.get("presence_penalty"),
        frequency_penalty=asked.get("frequency_penalty"),
        max_tokens=asked.get("max_tokens") if most is None else most,
        min_tokens=asked.get("min_tokens"),
        seed=None if seed is None else seed + index,
        logit_bias=biases(asked.get("logit_bias")),
        bad_words=words(asked.get("bad_words")),
        stop=words(asked.get("stop")),
        stop_token_ids=tuple(asked.get("stop_token_ids") or ()) or None,
        grammar=as_grammar(limits),
        chain=CHAIN if engine == "vllm" else None,
        extra=extra or None,
    )


def replies(
    body: Body | bytes | str | Mapping[str, Any],
    request: Mapping[str, Any],
    *,
    server: Server | None = None,
    number: Number = version_number,
) -> list[Reply]:
    """The choices of a reply to a `request` (its JSON). Raises ValueError where ids are missing or lengths differ."""
    known = server or Server()
    whole = unified(body if isinstance(body, Body) else decode(body))
    checked(whole, request, known)
    groups: defaultdict[int, str] = defaultdict(uuid7)  # a group for each prompt
    count = samples(request)
    return [
        reply_of(whole, choice, request, known, number, groups[choice.index // count]) for choice in whole.choices or ()
    ]


def checked(body: Body, request: Mapping[str, Any], server: Server) -> None:
    """Whether the choices of a reply are those that were asked for, and hold all that was drawn.

    vLLM counts in `usage.completion_tokens` exactly the ids that it sends. Another engine may leave the end token of
    each choice out of its count; what it counts has to be there. Raises ValueError where it is not.
    """
    choices = body.choices or ()
    if request.get("echo"):
        raise ValueError("openai: wanted drawn tokens, got a reply that echoes its prompt")
    distinct(choices)
    most = samples(request) * _prompts(request)
    if any(choice.index >= most for choice in choices):
        last = max(choice.index for choice in choices)
        raise ValueError(f"choices: wanted indices below the {most} outputs that were asked for, got {last}")
    if any(choice.token_ids is None for choice in choices):
        return  # it is refused for that
    drawn, said = sum(len(choice.token_ids or ()) for choice in choices), completion_tokens(body)
    engine = server.engine or _engine(body.system_fingerprint)
    uncounted = 0 if engine is not None and engine.name == "vllm" else len(choices)
    if said is not None and choices and drawn < said:
        raise ValueError(f"token_ids: wanted the {said} tokens that the usage counts, got {drawn}: parts are missing")
    if said is not None and choices and drawn > said + uncounted:
        raise ValueError(f"token_ids: wanted the {said} tokens that the usage counts, got {drawn}: parts came twice")


def _prompts(request: Mapping[str, Any]) -> int:
    """How many prompts were given."""
    given = request.get("prompt")
    if not isinstance(given, Sequence) or isinstance(given, str) or not given or isinstance(given[0], int):
        return 1
    return len(given)


def rollouts(
    body: Body | bytes | str | Mapping[str, Any],
    request: Mapping[str, Any],
    *,
    server: Server | None = None,
    number: Number = version_number,
    **fields: Any,
) -> list[Rollout]:
    """The same as rollouts of one segment; `fields` are columns of the rollouts table."""
    return [rollout(reply, **fields) for reply in replies(body, request, server=server, number=number)]


def reply_of(
    body: Body, choice: Choice, request: Mapping[str, Any], server: Server, number: Number, group: str
) -> Reply:
    """One choice of a reply that is `checked`. Raises ValueError where ids are missing or lengths differ."""
    count = samples(request)
    sample = choice.index % count
    engine = server.engine or _engine(body.system_fingerprint)
    settings = sampler(request, server, index=sample, engine=None if engine is None else engine.name)
    prompt = ids("prompt_token_ids", _prompt(body, choice, request, count))
    if not len(prompt):
        raise ValueError("prompt_token_ids: wanted at least one id, got none: nothing is drawn from nothing")
    if choice.token_ids is None:
        raise ValueError('token_ids: wanted the ids of the drawn tokens ("return_token_ids": true), got none')
    tokens = ids("token_ids", choice.token_ids)
    if not len(tokens) and choice.speaks:
        raise ValueError("token_ids: wanted the ids of the text that was drawn, got none beside it")
    finish, reason = ending(
        choice.finish_reason,
        count=len(tokens),
        prompt=len(prompt),
        max_tokens=settings.max_tokens,
        context=server.context,
        stop=choice.matched_stop if choice.stop_reason is None else choice.stop_reason,
    )
    row: dict[str, Any] = {"engine": engine, "policy": text(body.model)}
    if count > 1:
        row.update(group_id=group, group_size=count, sample_index=sample)
    total = len(prompt) + len(tokens)
    return Reply(
        prompt=prompt,
        tokens=tokens,
        sampler=settings,
        support=None if choice.sampling_mask is None else support(choice.sampling_mask, tokens),
        routing=None if choice.routed_experts is None else routing(_npy(choice.routed_experts), total),
        weights=_weights(body, choice, len(tokens), server, number),
        media=_media(body),
        request_id=text(body.id) or text(body.request_id),
        cached_tokens=cached_tokens(body),
        api_finish=choice.finish_reason,
        ending=finish,
        ending_reason=reason,
        row=row,
        **logprobs(choice.logprobs, tokens, _kind(server, settings, request), request),
    )


def _engine(fingerprint: Any) -> Engine | None:
    """vLLM writes its name and version into the fingerprint."""
    name, _, rest = (text(fingerprint) or "").partition("-")
    return Engine(name=name, version=rest.partition("-")[0]) if name == "vllm" and rest else None


def _kind(server: Server, settings: Sampler, request: Mapping[str, Any]) -> str:
    if server.logprob_kind != "raw" and is_opaque(settings_of(request)):
        return "unknown"
    greedy = settings.temperature == 0 and server.logprob_kind in ("behavior", "tempered")
    return greedy_kind(settings) if greedy else server.logprob_kind


def _prompt(body: Body, choice: Choice, request: Mapping[str, Any], count: int) -> Any:
    """Ids of the prompt: as the server says, or as it was given them."""
    said = body.prompt_token_ids if choice.prompt_token_ids is None else choice.prompt_token_ids
    if said is not None:
        return said
    given = request.get("token_ids", request.get("prompt"))
    if isinstance(given, Sequence) and given and isinstance(given[0], Sequence) and not isinstance(given, str):
        return given[choice.index // count]
    return given


def _weights(body: Body, choice: Choice, count: int, server: Server, number: Number) -> Weights | None:
    said = metadata(body)
    spans = choice.weight_versions or (None if said is None else said.weight_versions)
    if spans is not None:
        return by_spans(count, [(str(span.version), span.start, span.end) for span in spans], number=number)
    label = (None if said is None else text(said.weight_version)) or server.after
    if label is None:
        return None
    if server.before is None:
        return at_completion(count, label, number=number)
    return by_ends(count, server.before, label, number=number)


def _media(body: Body) -> tuple[Place, ...]:
    return tuple(
        Place(place.offset, place.length, Media(kind=kind, count=place.length, view="engine"))
        for kind, places in (body.mm_placeholders or {}).items()
        for place in places
    )


def _npy(text: str) -> Any:
    """The array of base64-encoded `.npy` bytes. Raises ValueError on anything else, pickled objects too."""
    data = base64.b64decode(text, validate=True)
    if not data.startswith(b"\x93NUMPY"):
        raise ValueError(f"routed_experts: wanted an array as .npy, got {data[:8]!r}")
    return np.load(io.BytesIO(data), allow_pickle=False)
