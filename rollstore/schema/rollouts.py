"""The rollouts table: what was generated. One row per segment, never changed. Version 1.0, never edited once released."""

from __future__ import annotations

import pyarrow as pa

from rollstore.schema.column import FINITE, STRING_MAP, TIMESTAMP, Column, Table, struct, structs

LOGPROB_KINDS = ("behavior", "tempered", "raw", "unknown")
ENDINGS = ("terminated", "truncated", "continued", "aborted", "unknown")
ENDING_REASONS = (
    "stop_token", "stop_string", "environment", "max_tokens", "max_turns", "context_limit", "prompt_too_long",
    "time_limit", "budget_exhausted", "tool_error", "engine_abort", "cancelled", "refused", "repetition", "unknown",
)  # fmt: skip
REWARD_STATUSES = ("scored", "unscored", "scorer_error", "tool_error", "timeout", "filtered", "on_final_segment")
SEGMENT_CAUSES = ("start", "context_edit", "compaction", "template_drop", "retokenised", "resumed", "fork")
VERSION_SOURCES = ("per_token", "per_span", "start_end", "read_at_completion")
ORIGINS = ("sampled", "rendered", "forced", "synthetic", "carried")
CACHE_STATES = ("fresh", "recomputed", "retained", "unknown")

string, int32, int64, float32 = pa.string(), pa.int32(), pa.int64(), pa.float32()


def numerics(id: int) -> Column:
    """How the engine computed; shared by rollouts, spans and evaluations. Children take the ids after `id`."""
    return struct(
        "numerics",
        id,
        "dtypes and kernels that decide the rounding",
        Column(name="weights", id=id + 1, type=string, meaning="dtype of the weights"),
        Column(name="activations", id=id + 2, type=string, meaning="dtype of the activations"),
        Column(name="kv", id=id + 3, type=string, meaning="dtype of the KV cache"),
        Column(name="lm_head", id=id + 4, type=string, meaning="dtype of the output layer"),
        Column(
            name="gemm",
            id=id + 5,
            type=string,
            enum=("native", "values_only"),
            meaning="whether products are taken in the narrow type, or only the values were rounded to it",
        ),
        Column(name="attention", id=id + 6, type=string, meaning="attention kernel"),
        Column(name="parallelism", id=id + 7, type=string, meaning="parallel layout, as tp=2,pp=1"),
        Column(name="batch_invariant", id=id + 8, type=pa.bool_(), meaning="results do not depend on the batch"),
        Column(name="gate", id=id + 9, type=string, meaning="id of the last numerical check this engine passed"),
    )


def engine(id: int) -> Column:
    """Which program sampled."""
    return struct(
        "engine",
        id,
        "the program that sampled",
        Column(name="name", id=id + 1, type=string, meaning="vllm, sglang, transformers, ..."),
        Column(name="version", id=id + 2, type=string, meaning="its version"),
        numerics(id + 3),
    )


SPAN_COLUMNS = (
    Column(name="start", id=201, type=int32, required=True, minimum=0, meaning="first token of the span"),
    Column(name="length", id=202, type=int32, required=True, minimum=0, meaning="tokens in the span; 0 for a call without output"),
    Column(name="role", id=203, type=string, meaning="system, user, assistant, tool, template, ..."),
    Column(name="is_action", id=204, type=pa.bool_(), required=True, meaning="every token of the span is an action; else none is"),
    Column(name="origin", id=205, type=string, enum=ORIGINS, meaning="how the tokens came here: drawn, rendered, put in without a draw, made up, or drawn earlier and now context"),
    Column(name="turn", id=206, type=int32, minimum=0, meaning="turn of the conversation"),
    Column(name="sampler", id=207, type=int32, minimum=0, meaning="index into samplers"),
    Column(name="request_id", id=208, type=string, meaning="the engine's request"),
    Column(name="weight_label", id=209, type=string, meaning="the engine's own word for the weight version, also of the weights that prefilled an observation"),
    Column(name="cache_state", id=210, type=string, enum=CACHE_STATES, meaning="whether the KV cache under the span was built by the weights that sampled it"),
    Column(name="cached_tokens", id=211, type=int32, minimum=0, meaning="prompt tokens served from the prefix cache"),
    Column(name="preemptions", id=212, type=int32, minimum=0, meaning="times the request was preempted"),
    Column(name="engine_finish", id=213, type=string, meaning="finish reason of the engine"),
    Column(name="api_finish", id=214, type=string, meaning="finish reason of the API above it"),
    Column(name="started_at", id=215, type=TIMESTAMP, meaning="start of the request"),
    Column(name="finished_at", id=216, type=TIMESTAMP, meaning="end of the request"),
    structs(
        "media", 217, "media that the span's placeholder tokens stand for",
        Column(name="kind", id=218, type=string, meaning="image, audio, video"),
        Column(name="count", id=219, type=int32, minimum=0, meaning="how many tokens of the span it takes"),
        Column(name="digest", id=220, type=string, meaning="digest of the bytes"),
        Column(name="uri", id=221, type=string, meaning="where the bytes are"),
        Column(name="view", id=222, type=string, meaning="whose ids these are: tokenizer (one placeholder) or engine (expanded)"),
    ),
    struct(
        "edit", 223, "the context edit that made this span",
        Column(name="kind", id=224, type=string, enum=("truncate", "summarise", "retrieve"), meaning="what was done"),
        Column(name="version", id=225, type=string, meaning="version of the editor"),
        Column(name="dropped_start", id=226, type=int32, minimum=0, meaning="first dropped token in the previous segment"),
        Column(name="dropped_length", id=227, type=int32, minimum=0, meaning="dropped tokens"),
    ),
    Column(name="raw_ref", id=228, type=string, meaning="where the uncut tool record is"),
    Column(name="state_ref", id=229, type=string, meaning="where the external state is"),
    engine(230),
    Column(name="logprob_kind", id=250, type=string, enum=LOGPROB_KINDS, meaning="where it differs from the row"),
    Column(name="head_kind", id=251, type=string, enum=LOGPROB_KINDS, meaning="where it differs from the row"),
    Column(name="replay_key", id=252, type=pa.uint64(), meaning="where it differs from the row"),
    Column(name="replay_sample", id=253, type=int32, minimum=0, meaning="where it differs from the row"),
)  # fmt: skip

SAMPLER_COLUMNS = (
    Column(name="temperature", id=301, type=float32, minimum=0, meaning="divides the logits; 0 is greedy"),
    Column(name="top_p", id=302, type=float32, minimum=0, maximum=1, meaning="nucleus mass; 1 keeps all"),
    Column(name="top_k", id=303, type=int32, meaning="kept tokens; 0 or -1 keeps all"),
    Column(name="min_p", id=304, type=float32, minimum=0, maximum=1, meaning="least probability relative to the most likely token"),
    Column(name="repetition_penalty", id=305, type=float32, meaning="1 is none"),
    Column(name="presence_penalty", id=306, type=float32, meaning="0 is none"),
    Column(name="frequency_penalty", id=307, type=float32, meaning="0 is none"),
    Column(name="max_tokens", id=308, type=int32, minimum=0, meaning="most new tokens"),
    Column(name="min_tokens", id=309, type=int32, minimum=0, meaning="fewest new tokens"),
    Column(name="seed", id=310, type=pa.uint64(), meaning="seed of the request"),
    structs(
        "logit_bias", 311, "added to the logits",
        Column(name="token", id=312, type=int32, minimum=0, meaning="token id"),
        Column(name="bias", id=313, type=float32, meaning="added to its logit"),
    ),
    Column(name="bad_words", id=314, type=pa.list_(string), meaning="strings that may not be drawn"),
    Column(name="stop", id=315, type=pa.list_(string), meaning="strings that end the request"),
    Column(name="stop_token_ids", id=316, type=pa.list_(int32), minimum=0, meaning="token ids that end the request"),
    Column(name="grammar", id=317, type=string, meaning="grammar or JSON schema that constrains the draw"),
    Column(name="chain", id=318, type=pa.list_(string), meaning="the order in which the transforms were applied"),
    Column(name="applied", id=319, type=pa.bool_(), meaning="false: requested but not honoured"),
    Column(name="extra", id=320, type=STRING_MAP, meaning="anything else that was asked for"),
)  # fmt: skip

ROLLOUTS = Table(
    name="rollouts",
    meaning="what was generated: one row per segment, never changed",
    key=("rollout_id", "segment"),
    columns=(
        Column(name="rollout_id", id=1, type=string, required=True, meaning="the caller's id, or a generated UUIDv7"),
        Column(name="segment", id=2, type=int32, required=True, minimum=0, meaning="0, 1, ... within the rollout"),
        Column(name="segment_cause", id=3, type=string, enum=SEGMENT_CAUSES, meaning="why this segment began"),
        Column(name="run_id", id=4, type=string, meaning="the run"),
        Column(name="prompt_id", id=5, type=string, meaning="the task"),
        Column(name="environment", id=6, type=string, meaning="where it ran"),
        Column(name="group_id", id=7, type=string, meaning="prompt group; its identity is (run_id, step, group_id)"),
        Column(name="group_size", id=8, type=int32, minimum=1, meaning="members that were asked for"),
        Column(name="sample_index", id=9, type=int32, minimum=0, meaning="which member this is"),
        Column(name="step", id=10, type=int64, meaning="the trainer step that asked for it"),
        Column(name="policy", id=11, type=string, meaning="model name"),
        Column(name="tokenizer", id=12, type=string, meaning="fingerprint over the tokenizer, its config, added tokens and BOS/EOS flags"),
        Column(name="chat_template", id=13, type=string, meaning="fingerprint of the chat template"),
        Column(name="context_policy", id=14, type=string, meaning="summariser or retriever and its version"),
        Column(name="tokenizer_size", id=15, type=int32, minimum=1, meaning="ids the tokenizer knows, added tokens included"),
        Column(name="vocab_size", id=16, type=int32, minimum=1, meaning="width of the output layer"),
        engine(17),
        Column(name="tokens", id=40, type=pa.list_(int32), required=True, align="T", minimum=0, meaning="exactly as the model saw them; never re-tokenised"),
        Column(name="action_mask", id=41, type=pa.list_(pa.bool_()), required=True, align="T", meaning="true: drawn by the policy here; position 0 cannot be an action"),
        Column(name="trainable", id=42, type=pa.list_(pa.bool_()), align="A", meaning="null: all; a drawn token that must not be trained on is false"),
        Column(name="token_bytes", id=43, type=pa.list_(pa.binary()), align="T", nullable_items=True, meaning="bytes of each token, for viewing without a tokenizer"),
        Column(name="logprobs", id=44, type=pa.list_(float32), align="A", nullable_items=True, maximum=FINITE, meaning="log-prob of the action itself, given everything before it; nats"),
        Column(name="logprob_kind", id=45, type=string, enum=LOGPROB_KINDS, meaning="behavior: renormalised over what could be drawn; tempered: after penalties and temperature, before filters; raw: before both"),
        Column(name="head_kind", id=46, type=string, enum=LOGPROB_KINDS, meaning="the same, of the heads"),
        Column(name="weight_versions", id=47, type=pa.list_(int64), align="A", nullable_items=True, meaning="which weights generated each action"),
        Column(name="weight_version_min", id=48, type=int64, meaning="oldest; staleness counts from it"),
        Column(name="weight_version_max", id=49, type=int64, meaning="newest; a version only read at completion stands here, and the oldest is null"),
        Column(name="weight_version_source", id=50, type=string, enum=VERSION_SOURCES, meaning="how the versions are known"),
        Column(name="head_size", id=51, type=int32, minimum=0, record="heads.size", meaning="k asked for; 0 when there are no heads"),
        Column(name="head_counts", id=52, type=pa.list_(int32), align="A", minimum=0, record="heads.counts", meaning="entries per action; null: every action has head_size; 0: no head here"),
        Column(name="head_tokens", id=53, type=pa.list_(int32), align="H", minimum=0, record="heads.tokens", meaning="ids, flat over actions, by falling log-prob, distinct within an action"),
        Column(name="head_logprobs", id=54, type=pa.list_(float32), align="H", maximum=FINITE, record="heads.logprobs", meaning="their log-probs; nats"),
        Column(name="support_counts", id=55, type=pa.list_(int32), align="A", minimum=0, meaning="tokens kept by the filters at each action"),
        Column(name="support_tokens", id=56, type=pa.list_(int32), align="S", minimum=0, meaning="their ids, flat over actions"),
        Column(name="ranks", id=57, type=pa.list_(int32), align="A", nullable_items=True, minimum=0, meaning="rank of the drawn token, as the engine said"),
        Column(name="entropies", id=58, type=pa.list_(float32), align="A", nullable_items=True, meaning="entropy of the behavior distribution; nats"),
        Column(name="batch_rows", id=59, type=pa.list_(int32), align="A", nullable_items=True, minimum=1, meaning="token rows in the forward pass that produced the action"),
        Column(name="routed_experts", id=60, type=pa.list_(pa.uint16()), align="R", meaning="expert ids, flat over (token, layer, choice)"),
        Column(name="routed_start", id=61, type=int32, minimum=0, meaning="first token that has routing"),
        Column(name="routed_count", id=62, type=int32, minimum=0, meaning="tokens that have routing"),
        Column(name="routed_layers", id=63, type=int32, minimum=0, meaning="routed layers"),
        Column(name="routed_k", id=64, type=int32, minimum=0, meaning="experts per token and layer"),
        structs("spans", 65, "a partition of the tokens, in order; a span ends where role, version, cache_state, sampler, request or engine changes", *SPAN_COLUMNS),
        structs("samplers", 66, "what each request asked for, defaults written out", *SAMPLER_COLUMNS),
        Column(name="ending", id=67, type=string, enum=ENDINGS, meaning="terminated: the task is over; truncated: collection stopped, the task could go on; continued: another segment follows"),
        Column(name="ending_reason", id=68, type=string, enum=ENDING_REASONS, meaning="why"),
        Column(name="bootstrap", id=69, type=pa.bool_(), meaning="whether the return goes on past the end: terminated false; truncated true, false or null; else null"),
        Column(name="replay_key", id=70, type=pa.uint64(), meaning="key of the noise; null: not keyed"),
        Column(name="replay_sample", id=71, type=int32, minimum=0, meaning="sample number of the noise"),
        Column(name="noise", id=72, type=string, meaning="recipe and its version, as gumbel-philox4x32/1"),
        Column(name="parent_rollout_id", id=73, type=string, meaning="where this one forked"),
        Column(name="parent_segment", id=74, type=int32, minimum=0, meaning="segment of the parent"),
        Column(name="fork_position", id=75, type=int32, minimum=0, meaning="length of the prefix shared with the parent"),
        Column(name="reward", id=76, type=pa.float64(), meaning="outcome; on the last segment of the rollout; null unless scored"),
        Column(name="reward_status", id=77, type=string, enum=REWARD_STATUSES, meaning="a missing score is never a zero"),
        Column(name="requested_at", id=78, type=TIMESTAMP, meaning="queued"),
        Column(name="started_at", id=79, type=TIMESTAMP, meaning="generation began"),
        Column(name="finished_at", id=80, type=TIMESTAMP, meaning="generation ended"),
        Column(name="written_at", id=81, type=TIMESTAMP, meaning="entered the writer"),
        Column(name="tool_seconds", id=82, type=float32, meaning="waiting for tools; s"),
        Column(name="queue_seconds", id=83, type=float32, meaning="waiting to start; s"),
        Column(name="messages", id=84, type=string, meaning="the chat view as JSON, for people; tokens stay the truth"),
        structs(
            "flags", 85, "warnings kept with the row",
            Column(name="kind", id=86, type=string, meaning="what"),
            Column(name="column", id=87, type=string, meaning="where"),
            Column(name="index", id=88, type=int64, meaning="which value of the list, if it is one"),
        ),
        Column(name="metadata", id=89, type=STRING_MAP, meaning="the caller's own"),
    ),
)  # fmt: skip
