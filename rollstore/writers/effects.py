"""Which settings without a column leave the distribution as it is: one rule for the engines that are asked in JSON.

What is known to leave it goes to `samplers.extra`. Everything else, names that nobody here knows among it, goes to
`samplers.grammar`: a trainer would have to apply it, so a raw or tempered log-prob is no denominator beside it.
`rollstore.usable` tells by their names which of those only take tokens away, as a grammar does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

WITHOUT_EFFECT = frozenset({
    "ignore_eos", "include_stop_str_in_output", "no_stop_trim", "stop_regex", "repetition_detection",
    "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "truncate_prompt_tokens", "truncation_side",
    "lora_path", "lora_id", "length_penalty", "early_stopping", "diversity_penalty", "guided_decoding_backend",
    "guided_whitespace_pattern", "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "adaptive_decay", "repeat_last_n",
})  # fmt: skip
"""Settings that end a reply, write its text, choose among weights or beams, or say how strongly another one acts."""

INPUTS = frozenset({
    # what was asked, and of whom
    "messages", "model", "prompt", "prompt_embeds", "suffix", "text", "input_ids", "input_embeds", "token_ids",
    "token_offsets", "token_type_ids", "features", "content_parts", "image_data", "video_data", "audio_data",
    "modalities", "audio", "prediction", "tools", "functions", "parallel_tool_calls", "web_search_options", "documents",
    "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "media_io_kwargs", "mm_processor_kwargs", "mm_payload", "max_dynamic_patch", "min_dynamic_patch",
    "reasoning_effort", "verbosity", "session_params", "session_id", "sampling_params",
    # what is told of it
    "stream", "stream_options", "stream_interval", "n", "echo", "logprobs", "top_logprobs",
    "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs",
    "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs",
    "return_tokens_as_token_ids", "return_token_ids", "return_tokens", "return_token_offsets", "return_prompt_text",
    "return_prompt_token_ids", "return_mm_kwargs", "return_hidden_states", "return_routed_experts",
    "return_sampling_mask", "return_entropy", "return_bytes", "return_progress", "routed_experts_prompt_start",
    "routed_experts_start_len", "include_reasoning", "separate_reasoning", "stream_reasoning", "reasoning_format",
    "require_reasoning", "n_probs", "post_sampling_probs", "timings_per_token", "output_kind",
    "output_text_buffer_length", "skip_clone",
    # how it travels
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "rid", "priority", "cache_salt", "cache_prompt", "extra_key", "id_slot", "kv_transfer_params",
    "ec_transfer_params", "skip_reading_prefix_cache", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "bootstrap_pair_key", "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "decode_tp_size",
    "background", "conversation_id", "log_metrics", "no_logs", "custom_labels", "routing_key", "validation_time",
    "received_time", "external_trace_header", "http_worker_ipc", "rollstore",
})  # fmt: skip
"""Fields of a request that are no settings of the draw: they are recorded elsewhere, or not at all."""

NEUTRAL: Mapping[str, Any] = {
    "typical_p": 1.0, "typical": 1.0, "xtc_probability": 0.0, "top_n_sigma": -1.0, "dry_multiplier": 0.0, "mirostat": 0,
    "mirostat_mode": 0, "dynatemp_range": 0.0, "tfs": 1.0, "tfs_z": 1.0, "top_a": 0.0, "smoothing_factor": 0.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0,
    "repeat_penalty": 1.0, "guidance_scale": 1.0, "min_keep": 0, "adaptive_target": -1.0, "best_of": 1,
    "function_call": "auto",
}  # fmt: skip
"""Values beside null, false and nothing at which a setting of the draw does nothing."""

OPAQUE = ("custom_logit_processor", "logits_processors")
"""Code of the user's own, after which an engine's number may hold anything, noise too."""

UNBEARING = frozenset({
    "max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict", "n", "seed", "sampling_seed", "stop",
    "stop_token_ids",
})  # fmt: skip
"""Settings with a column that leave each token's distribution as it is."""


def beside(asked: Mapping[str, Any], read: Collection[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """(what goes to `extra`, as JSON; what goes to `grammar`) of settings without a column.

    read: names that have a column or are looked at otherwise.
    """
    extra: dict[str, str] = {}
    limits: dict[str, Any] = {}
    for name, value in asked.items():
        if name in read or name in INPUTS or not is_on(value, NEUTRAL.get(name)):
            continue
        if name in WITHOUT_EFFECT or name in UNBEARING or _is_noise_of_ours(name, value):
            extra[name] = spelled(value)
        else:
            limits[name] = value
    return extra, limits


def unread(others: Mapping[str, str]) -> dict[str, Any]:
    """Of settings whose value fits no column, those that would bear on the draw: they go to `grammar` too."""
    return {name: value for name, value in others.items() if name not in UNBEARING}


def is_opaque(asked: Mapping[str, Any]) -> bool:
    """Whether code of the user's own had a say in the draw."""
    return any(is_on(asked.get(name)) for name in OPAQUE)


def is_on(value: Any, off: Any = None) -> bool:
    """Whether a setting does something. Nulls, false and empty ones do not; a number may stand in quotation marks."""
    if value is None or value is False or (isinstance(value, str | list | tuple | Mapping) and not len(value)):  # pyright: ignore[reportUnknownArgumentType]  of any shape
        return False
    if isinstance(value, str) and isinstance(off, int | float):
        try:
            return float(value) != off
        except ValueError:
            return True
    return bool(value != off)


def spelled(value: Any) -> str:
    """A setting as text: JSON, where it is none already."""
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=repr).decode()


def as_grammar(limits: Mapping[str, Any]) -> str | None:
    """What bears on the draw and has no column, as one JSON object; None where nothing does."""
    return msgspec.json.encode(limits, enc_hook=repr).decode() if limits else None


def _is_noise_of_ours(name: str, value: Any) -> bool:
    """Whether it names keyed noise alone, which draws from the distribution that it is."""
    if name not in ("vllm_xargs", "extra_args") or not isinstance(value, Mapping):
        return False
    names: Iterable[Any] = value
    return all(str(key).startswith("replay_") for key in names)
