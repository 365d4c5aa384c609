"""`RequestOutput`s to replies and rollouts. vLLM is not imported: its objects are read by their attribute names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from rollstore.schema import Known, Rollout, Sampler
from rollstore.schema.known import known
from rollstore.writers.conversation import rollout
from rollstore.writers.effects import as_grammar, beside, unread
from rollstore.writers.finish import ending
from rollstore.writers.heads import Entries, drawn, entries, heads
from rollstore.writers.reply import (
    Ints,
    Reply,
    aligned,
    biases,
    greedy_kind,
    ids,
    nothing_drawn,
    routing,
    support,
    words,
)
from rollstore.writers.settings import readable
from rollstore.writers.uuid7 import uuid7
from rollstore.writers.vllm.configuration import Configuration
from rollstore.writers.weights import Number, Weights, by_spans, version_number

Fields = Mapping[str, Any] | Callable[[Any, Any], Mapping[str, Any]]
"""Columns of the rollouts table, for all; or a function of (RequestOutput, CompletionOutput) that gives them."""

CHAIN = ("temperature", "min_p", "top_k", "top_p")
"""The order in which vLLM's sampler applies what it has."""

WITH_COLUMNS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "min_tokens", "seed", "logit_bias", "bad_words", "stop", "stop_token_ids",
)  # fmt: skip
"""Settings that have a column of their own."""

WITHOUT_COLUMN = ("ignore_eos", "thinking_token_budget", "watermarking", "repetition_detection", "extra_args")
"""Settings that bear on what is drawn and have no column of their own."""


def sampler(params: Any, index: int = 0) -> Sampler:
    """`SamplingParams` as a record, for the `index`-th of its n outputs: with a seed, each takes the next one."""
    asked, extra = readable({name: getattr(params, name, None) for name in WITH_COLUMNS})
    seed = None if asked.get("seed") is None else asked["seed"] + index
    limits = _limits(params) | unread(extra)
    beyond, others = beside({name: getattr(params, name, None) for name in WITHOUT_COLUMN}, ())
    extra |= beyond
    if seed is not None and not 0 <= seed < 2**64:
        extra["seed"], seed = str(seed), None
    return Sampler(
        temperature=asked.get("temperature"),
        top_p=asked.get("top_p"),
        top_k=None if asked.get("top_k") is None else max(asked["top_k"], 0),
        min_p=asked.get("min_p"),
        repetition_penalty=asked.get("repetition_penalty"),
        presence_penalty=asked.get("presence_penalty"),
        frequency_penalty=asked.get("frequency_penalty"),
        max_tokens=asked.get("max_tokens"),
        min_tokens=asked.get("min_tokens"),
        seed=seed,
        logit_bias=biases(asked.get("logit_bias")),
        bad_words=words(asked.get("bad_words")),
        stop=words(asked.get("stop")),
        stop_token_ids=tuple(asked.get("stop_token_ids") or ()) or None,
        grammar=as_grammar(limits | others),
        chain=CHAIN,
        applied=True,
        extra=extra or None,
    )


def _limits(params: Any) -> dict[str, Any]:
    """What takes tokens away, as it was asked."""
    structured = getattr(params, "structured_outputs", None)
    allowed = getattr(params, "allowed_token_ids", None)
    limits: dict[str, Any] = {} if allowed is None else {"allowed_token_ids": list(allowed)}
    kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    return limits | {kind: value for kind in kinds if (value := getattr(structured, kind, None)) is not None}


def logprob_kind(mode: str | None, settings: Sampler | None, *, custom_processors: bool = False) -> str:
    """Which distribution the log-probs are of, by the engine's `logprobs_mode` and the request's settings.

    The processed ones of a greedy request are a log-softmax without temperature, and those of an engine with logits
    processors of the user's own may hold anything, noise too.
    """
    if mode == "raw_logprobs":
        return "raw"
    if mode != "processed_logprobs" or custom_processors or settings is None:
        return "unknown"
    return greedy_kind(settings) if settings.temperature == 0 else "behavior"


Rows = Mapping[tuple[str, int], Sequence[int]]
"""Token rows of the forward passes behind the tokens of a completion, by (request id, index of the completion)."""


class _How(NamedTuple):
    """How to read outputs."""

    configuration: Configuration
    number: Number
    cache_state: str
    batch_rows: Rows | None


def replies(
    outputs: Any,
    params: Any,
    *,
    configuration: Configuration,
    number: Number = version_number,
    cache_state: str = "unknown",
    batch_rows: Rows | None = None,
) -> list[Reply]:
    """`RequestOutput`s, and the `SamplingParams` that were asked for (one for all, or one each), as replies.

    `number` makes version numbers of weight labels. `cache_state` is what became of the KV cache when the weights
    changed under a request: `recomputed` after a pause that clears it (vLLM's default), `retained` after one that does
    not. Raises ValueError where ids are missing or lengths differ.
    """
    how = _How(configuration, number, cache_state, batch_rows)
    made: list[Reply] = []
    for output, asked in paired(outputs, params):
        group = uuid7()
        _require_places([completion.index for completion in output.outputs], asked)
        made += [_reply(output, [completion], asked, group, how) for completion in output.outputs]
    return made


def rollouts(
    outputs: Any,
    params: Any,
    *,
    configuration: Configuration,
    fields: Fields | None = None,
    number: Number = version_number,
    cache_state: str = "unknown",
    batch_rows: Rows | None = None,
) -> list[Rollout]:
    """The same as rollouts of one segment, one for each completion, in the order of the outputs."""
    several = [output for output, _ in paired(outputs, params)]
    pairs = [(output, completion) for output in several for completion in output.outputs]
    made = replies(
        several, params, configuration=configuration, number=number, cache_state=cache_state, batch_rows=batch_rows
    )
    return [rollout(reply, **_fields(fields, *pair)) for reply, pair in zip(made, pairs, strict=True)]


def stream_replies(
    chunks: Sequence[Any],
    params: Any,
    *,
    configuration: Configuration,
    number: Number = version_number,
    cache_state: str = "unknown",
) -> list[Reply]:
    """All `RequestOutput`s of one request, as `AsyncLLM.generate` yields them: parts (DELTA) or ever longer wholes.

    One reply for each completion, in the order of their indices. A stream that was cut before its end gives the tokens
    that came, with no finish and no weight versions.
    """
    how, group = _How(configuration, number, cache_state, None), uuid7()
    _require_places(list({completion.index for chunk in chunks for completion in chunk.outputs}), params)
    whole = next((chunk for chunk in reversed(chunks) if chunk.prompt_token_ids is not None), None)
    return [_reply(whole or chunks[-1], parts, params, group, how) for parts in _parts(chunks, params)]


def stream_rollouts(
    chunks: Sequence[Any],
    params: Any,
    *,
    configuration: Configuration,
    fields: Fields | None = None,
    number: Number = version_number,
    cache_state: str = "unknown",
) -> list[Rollout]:
    """The same as rollouts of one segment."""
    made = stream_replies(chunks, params, configuration=configuration, number=number, cache_state=cache_state)
    last = [parts[-1] for parts in _parts(chunks, params)]
    return [rollout(reply, **_fields(fields, chunks[-1], part)) for reply, part in zip(made, last, strict=True)]


def _parts(chunks: Sequence[Any], params: Any) -> list[list[Any]]:
    """What came of each completion; only the newest where that holds all before it."""
    parts: dict[int, list[Any]] = {}
    for chunk in chunks:
        for completion in chunk.outputs:
            own = parts.setdefault(completion.index, [])
            if not is_delta(params):
                own.clear()
            own.append(completion)
    return [own for _, own in sorted(parts.items())]


def is_delta(params: Any) -> bool:
    """Whether each output of a stream holds only what is new."""
    return getattr(getattr(params, "output_kind", None), "name", None) == "DELTA"


def paired(outputs: Any, params: Any) -> list[tuple[Any, Any]]:
    several: list[Any] = list(outputs) if isinstance(outputs, Iterable) else [outputs]
    asked: list[Any] = list(params) if isinstance(params, Sequence) else [params] * len(several)
    if len(asked) != len(several):
        raise ValueError(f"params: wanted one for all or {len(several)}, one for each output, got {len(asked)}")
    return list(zip(several, asked, strict=True))


def _require_places(indices: Sequence[Any], params: Any) -> None:
    """Raise ValueError unless the indices of completions are different places among those that were asked for."""
    asked = getattr(params, "n", None)
    wrong = [n for n in indices if not isinstance(n, int) or n < 0 or (asked is not None and n >= asked)]
    if wrong or len(set(indices)) < len(indices):
        last = "up" if asked is None else f"to {asked - 1}"
        raise ValueError(f"index: wanted another one from 0 {last} of each completion, got {list(indices)}")


def _fields(fields: Fields | None, output: Any, completion: Any) -> Mapping[str, Any]:
    return fields(output, completion) if callable(fields) else fields or {}


def _reply(output: Any, parts: Sequence[Any], params: Any, group: str, how: _How) -> Reply:
    """One completion of a request, in parts."""
    if getattr(params, "trace_decode_token_ids", None):
        raise ValueError("vllm: wanted sampled tokens, got those of trace_decode_token_ids, which were put in")
    known, last = how.configuration, _last(parts, "finish_reason")
    prompt = ids("prompt_token_ids", output.prompt_token_ids)
    tokens = np.concatenate([ids("token_ids", list(part.token_ids)) for part in parts])
    settings = None if params is None else sampler(params, last.index)
    finish, reason = ending(
        last.finish_reason,
        count=len(tokens),
        prompt=len(prompt),
        max_tokens=None if settings is None else settings.max_tokens,
        context=known.max_model_len,
        stop=last.stop_reason,
    )
    metrics = getattr(output, "metrics", None)
    row: dict[str, Any] = {
        "engine": known.engine,
        "policy": known.policy,
        "vocab_size": known.vocab_size,
        "tokenizer_size": known.tokenizer_size,
        **_times(metrics),
    }
    if params is not None and params.n > 1:
        row.update(group_id=group, group_size=params.n, sample_index=last.index)
    experts = next((e for part in parts if (e := getattr(part, "routed_experts", None)) is not None), None)
    return Reply(
        prompt=prompt,
        tokens=tokens,
        sampler=settings,
        batch_rows=_rows((how.batch_rows or {}).get((output.request_id, last.index)), len(tokens)),
        support=_support(parts, tokens),
        routing=None if experts is None else routing(experts, len(prompt) + len(tokens)),
        weights=_weights(_last(parts, "weight_versions"), len(tokens), output.num_cached_tokens, how),
        request_id=output.request_id,
        cached_tokens=output.num_cached_tokens,
        preemptions=getattr(metrics, "num_preemptions", None),
        engine_finish=last.finish_reason,
        ending=finish,
        ending_reason=reason,
        row=row,
        **_logprobs(parts, tokens, params, settings, known),
    )


def _last(parts: Sequence[Any], name: str) -> Any:
    """The last part that says something; the last one where none does."""
    return next((part for part in reversed(parts) if getattr(part, name, None) is not None), parts[-1])


def _rows(rows: Sequence[int] | None, count: int) -> Known | None:
    """Of the tokens that were kept: what was drawn past a stop string was cut off behind them."""
    return None if rows is None or len(rows) < count else known(np.array(rows[:count], np.int64))


def _logprobs(
    parts: Sequence[Any], tokens: Ints, params: Any, settings: Sampler | None, configuration: Configuration
) -> dict[str, Any]:
    """The columns that come out of the listed log-probs."""
    kind = logprob_kind(configuration.logprobs_mode, settings, custom_processors=configuration.custom_processors)
    if (configuration.logprobs_mode or "").endswith("_logits"):
        return {}  # logits are no log-probs, and without their sum none can be made of them
    if not len(tokens):
        return {"logprobs": nothing_drawn(), "logprob_kind": kind}
    drew = [part for part in parts if len(part.token_ids)]
    if all(part.logprobs is None for part in drew):
        return {}
    listed = _listed([[None] * len(part.token_ids) if part.logprobs is None else part.logprobs for part in drew])
    aligned("logprobs", listed.counts, tokens)
    values, ranks, flags = drawn(listed, tokens)
    asked = None if params is None else params.logprobs
    columns: dict[str, Any] = {"logprobs": values, "logprob_kind": kind, "ranks": ranks if ranks.known.any() else None}
    if asked != 0 and not getattr(params, "logprob_token_ids", None):  # those are ids of the user's choice, no top-k
        size = None if asked in (None, -1) else asked
        padded = configuration.logprobs_mode == "processed_logprobs"
        found, more = heads(listed, size=size, tokens=tokens, impossible=not padded)
        flags += more
        columns.update(heads=found, head_kind=None if found is None else kind)
    return {**columns, "flags": tuple(flags)}


def _listed(logprobs: Sequence[Any]) -> Entries:
    """Lists of {id: Logprob}, or FlatLogprobs, one after another."""
    parts = [_flat(part) if hasattr(part, "start_indices") else _dicts(part) for part in logprobs]
    return Entries(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _flat(logprobs: Any) -> Entries:
    counts = np.asarray(logprobs.end_indices, np.int64) - np.asarray(logprobs.start_indices, np.int64)
    return entries(counts, logprobs.token_ids, logprobs.logprobs, logprobs.ranks)


def _dicts(positions: Sequence[Mapping[int, Any] | None]) -> Entries:
    listed = [[] if position is None else list(position.items()) for position in positions]
    every = [pair for position in listed for pair in position]
    return entries(
        [len(position) for position in listed],
        [token for token, _ in every],
        [entry.logprob for _, entry in every],
        [entry.rank for _, entry in every],
    )


def _support(parts: Sequence[Any], tokens: Ints) -> Any:
    masks = [mask for part in parts if (mask := getattr(part, "sampling_mask", None)) is not None]
    return support([kept for mask in masks for kept in mask.token_ids], tokens) if masks else None


def _weights(completion: Any, count: int, cached: int | None, how: _How) -> Weights | None:
    spans = getattr(completion, "weight_versions", None)
    if spans is None:
        return None
    # A cache that was empty before the request is of the weights that its first span names; a hit may be of older ones.
    first = {None: None, 0: "fresh"}.get(cached, "unknown")
    triples = [(str(span.version), span.start, span.end) for span in spans]
    return by_spans(count, triples, number=how.number, first_cache=first, later_cache=how.cache_state)


def _times(metrics: Any) -> dict[str, Any]:
    """When the request came, and how long it waited; the engine's other stamps are of a clock that starts anywhere."""
    came, queued, scheduled = (getattr(metrics, name, None) for name in ("arrival_time", "queued_ts", "scheduled_ts"))
    waited = scheduled - queued if scheduled and queued and scheduled >= queued else None
    try:
        return {"requested_at": datetime.fromtimestamp(came, UTC), "queue_seconds": waited} if came else {}
    except (ValueError, OverflowError, OSError):  # a clock of another kind
        return {"queue_seconds": waited}
