"""The record classes. Written by `python -m rollstore.schema.render` from the declarations: do not edit."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from rollstore.schema.known import Array, Known, settle


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """Numerics: dtypes and kernels that decide the rounding."""

    weights: str | None = None
    """dtype of the weights"""
    activations: str | None = None
    """dtype of the activations"""
    kv: str | None = None
    """dtype of the KV cache"""
    lm_head: str | None = None
    """dtype of the output layer"""
    gemm: str | None = None
    """whether products are taken in the narrow type, or only the values were rounded to it"""
    attention: str | None = None
    """attention kernel"""
    parallelism: str | None = None
    """parallel layout, as tp=2,pp=1"""
    batch_invariant: bool | None = None
    """results do not depend on the batch"""
    gate: str | None = None
    """id of the last numerical check this engine passed"""

    def __post_init__(self) -> None:
        settle(self)


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """Engine: the program that sampled."""

    name: str | None = None
    """vllm, sglang, transformers, ..."""
    version: str | None = None
    """its version"""
    numerics: Numerics | None = None
    """dtypes and kernels that decide the rounding"""

    def __post_init__(self) -> None:
        settle(self)


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """Media: media that the span's placeholder tokens stand for."""

    kind: str | None = None
    """image, audio, video"""
    count: int | None = None
    """how many tokens of the span it takes"""
    digest: str | None = None
    """digest of the bytes"""
    uri: str | None = None
    """where the bytes are"""
    view: str | None = None
    """whose ids these are: tokenizer (one placeholder) or engine (expanded)"""

    def __post_init__(self) -> None:
        settle(self)


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """Edit: the context edit that made this span."""

    kind: str | None = None
    """what was done"""
    version: str | None = None
    """version of the editor"""
    dropped_start: int | None = None
    """first dropped token in the previous segment"""
    dropped_length: int | None = None
    """dropped tokens"""

    def __post_init__(self) -> None:
        settle(self)


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Spans: a partition of the tokens, in order; a span ends where role, version, cache_state, sampler, request or engine changes."""

    start: int
    """first token of the span"""
    length: int
    """tokens in the span; 0 for a call without output"""
    role: str | None = None
    """system, user, assistant, tool, template, ..."""
    is_action: bool
    """every token of the span is an action; else none is"""
    origin: str | None = None
    """how the tokens came here: drawn, rendered, put in without a draw, made up, or drawn earlier and now context"""
    turn: int | None = None
    """turn of the conversation"""
    sampler: int | None = None
    """index into samplers"""
    request_id: str | None = None
    """the engine's request"""
    weight_label: str | None = None
    """the engine's own word for the weight version, also of the weights that prefilled an observation"""
    cache_state: str | None = None
    """whether the KV cache under the span was built by the weights that sampled it"""
    cached_tokens: int | None = None
    """prompt tokens served from the prefix cache"""
    preemptions: int | None = None
    """times the request was preempted"""
    engine_finish: str | None = None
    """finish reason of the engine"""
    api_finish: str | None = None
    """finish reason of the API above it"""
    started_at: datetime | None = None
    """start of the request"""
    finished_at: datetime | None = None
    """end of the request"""
    media: tuple[Media, ...] | None = None
    """media that the span's placeholder tokens stand for"""
    edit: Edit | None = None
    """the context edit that made this span"""
    raw_ref: str | None = None
    """where the uncut tool record is"""
    state_ref: str | None = None
    """where the external state is"""
    engine: Engine | None = None
    """the program that sampled"""
    logprob_kind: str | None = None
    """where it differs from the row"""
    head_kind: str | None = None
    """where it differs from the row"""
    replay_key: int | None = None
    """where it differs from the row"""
    replay_sample: int | None = None
    """where it differs from the row"""

    def __post_init__(self) -> None:
        settle(self)


class LogitBias(msgspec.Struct, frozen=True, kw_only=True):
    """Logit_bias: added to the logits."""

    token: int | None = None
    """token id"""
    bias: float | None = None
    """added to its logit"""

    def __post_init__(self) -> None:
        settle(self)


class Sampler(msgspec.Struct, frozen=True, kw_only=True):
    """Samplers: what each request asked for, defaults written out."""

    temperature: float | None = None
    """divides the logits; 0 is greedy"""
    top_p: float | None = None
    """nucleus mass; 1 keeps all"""
    top_k: int | None = None
    """kept tokens; 0 or -1 keeps all"""
    min_p: float | None = None
    """least probability relative to the most likely token"""
    repetition_penalty: float | None = None
    """1 is none"""
    presence_penalty: float | None = None
    """0 is none"""
    frequency_penalty: float | None = None
    """0 is none"""
    max_tokens: int | None = None
    """most new tokens"""
    min_tokens: int | None = None
    """fewest new tokens"""
    seed: int | None = None
    """seed of the request"""
    logit_bias: tuple[LogitBias, ...] | None = None
    """added to the logits"""
    bad_words: tuple[str, ...] | None = None
    """strings that may not be drawn"""
    stop: tuple[str, ...] | None = None
    """strings that end the request"""
    stop_token_ids: tuple[int, ...] | None = None
    """token ids that end the request"""
    grammar: str | None = None
    """grammar or JSON schema that constrains the draw"""
    chain: tuple[str, ...] | None = None
    """the order in which the transforms were applied"""
    applied: bool | None = None
    """false: requested but not honoured"""
    extra: Mapping[str, Any] | None = None
    """anything else that was asked for"""

    def __post_init__(self) -> None:
        settle(self)


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """Flags: warnings kept with the row."""

    kind: str | None = None
    """what"""
    column: str | None = None
    """where"""
    index: int | None = None
    """which value of the list, if it is one"""

    def __post_init__(self) -> None:
        settle(self)


class Heads(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The top-k (token, log-prob) pairs of the behavior distribution at each action."""

    size: int | None = None
    """k asked for; 0 when there are no heads"""
    counts: Array | None = None
    """entries per action; null: every action has head_size; 0: no head here"""
    tokens: Array | None = None
    """ids, flat over actions, by falling log-prob, distinct within an action"""
    logprobs: Array | None = None
    """their log-probs; nats"""

    def __post_init__(self) -> None:
        settle(self)


class Rollout(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What was generated: one row per segment, never changed."""

    rollout_id: str
    """the caller's id, or a generated UUIDv7"""
    segment: int = 0
    """0, 1, ... within the rollout"""
    segment_cause: str | None = None
    """why this segment began"""
    run_id: str | None = None
    """the run"""
    prompt_id: str | None = None
    """the task"""
    environment: str | None = None
    """where it ran"""
    group_id: str | None = None
    """prompt group; its identity is (run_id, step, group_id)"""
    group_size: int | None = None
    """members that were asked for"""
    sample_index: int | None = None
    """which member this is"""
    step: int | None = None
    """the trainer step that asked for it"""
    policy: str | None = None
    """model name"""
    tokenizer: str | None = None
    """fingerprint over the tokenizer, its config, added tokens and BOS/EOS flags"""
    chat_template: str | None = None
    """fingerprint of the chat template"""
    context_policy: str | None = None
    """summariser or retriever and its version"""
    tokenizer_size: int | None = None
    """ids the tokenizer knows, added tokens included"""
    vocab_size: int | None = None
    """width of the output layer"""
    engine: Engine | None = None
    """the program that sampled"""
    tokens: Array
    """exactly as the model saw them; never re-tokenised"""
    action_mask: Array
    """true: drawn by the policy here; position 0 cannot be an action"""
    trainable: Array | None = None
    """null: all; a drawn token that must not be trained on is false"""
    token_bytes: tuple[bytes | None, ...] | None = None
    """bytes of each token, for viewing without a tokenizer"""
    logprobs: Known | None = None
    """log-prob of the action itself, given everything before it; nats"""
    logprob_kind: str | None = None
    """behavior: renormalised over what could be drawn; tempered: after penalties and temperature, before filters; raw: before both"""
    head_kind: str | None = None
    """the same, of the heads"""
    weight_versions: Known | None = None
    """which weights generated each action"""
    weight_version_min: int | None = None
    """oldest; staleness counts from it"""
    weight_version_max: int | None = None
    """newest; a version only read at completion stands here, and the oldest is null"""
    weight_version_source: str | None = None
    """how the versions are known"""
    heads: Heads | None = None
    """top-k heads, one per action; null: not recorded"""
    support_counts: Array | None = None
    """tokens kept by the filters at each action"""
    support_tokens: Array | None = None
    """their ids, flat over actions"""
    ranks: Known | None = None
    """rank of the drawn token, as the engine said"""
    entropies: Known | None = None
    """entropy of the behavior distribution; nats"""
    batch_rows: Known | None = None
    """token rows in the forward pass that produced the action"""
    routed_experts: Array | None = None
    """expert ids, flat over (token, layer, choice)"""
    routed_start: int | None = None
    """first token that has routing"""
    routed_count: int | None = None
    """tokens that have routing"""
    routed_layers: int | None = None
    """routed layers"""
    routed_k: int | None = None
    """experts per token and layer"""
    spans: tuple[Span, ...] | None = None
    """a partition of the tokens, in order; a span ends where role, version, cache_state, sampler, request or engine changes"""
    samplers: tuple[Sampler, ...] | None = None
    """what each request asked for, defaults written out"""
    ending: str | None = None
    """terminated: the task is over; truncated: collection stopped, the task could go on; continued: another segment follows"""
    ending_reason: str | None = None
    """why"""
    bootstrap: bool | None = None
    """whether the return goes on past the end: terminated false; truncated true, false or null; else null"""
    replay_key: int | None = None
    """key of the noise; null: not keyed"""
    replay_sample: int | None = None
    """sample number of the noise"""
    noise: str | None = None
    """recipe and its version, as gumbel-philox4x32/1"""
    parent_rollout_id: str | None = None
    """where this one forked"""
    parent_segment: int | None = None
    """segment of the parent"""
    fork_position: int | None = None
    """length of the prefix shared with the parent"""
    reward: float | None = None
    """outcome; on the last segment of the rollout; null unless scored"""
    reward_status: str | None = None
    """a missing score is never a zero"""
    requested_at: datetime | None = None
    """queued"""
    started_at: datetime | None = None
    """generation began"""
    finished_at: datetime | None = None
    """generation ended"""
    written_at: datetime | None = None
    """entered the writer"""
    tool_seconds: float | None = None
    """waiting for tools; s"""
    queue_seconds: float | None = None
    """waiting to start; s"""
    messages: str | None = None
    """the chat view as JSON, for people; tokens stay the truth"""
    flags: tuple[Flag, ...] | None = None
    """warnings kept with the row"""
    metadata: Mapping[str, Any] | None = None
    """the caller's own"""
    extra: Mapping[str, Any] | None = None
    """the caller's own typed columns, by their x_ names"""

    def __post_init__(self) -> None:
        settle(self)
