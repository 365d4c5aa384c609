"""transformers: what `generate` returns, as records.

Ask for `return_dict_in_generate` with `output_scores` (the behavior log-probs: the distribution that drew) or with
`output_logits` (the raw ones). Which positions are real comes from the attention mask and from lengths, never from the
id of the padding, which is often that of the end token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np
import torch

from rollstore.schema import Engine, Known, Rollout, Sampler
from rollstore.schema.known import known
from rollstore.writers.conversation import rollout
from rollstore.writers.finish import ending
from rollstore.writers.heads import entries, heads
from rollstore.writers.reply import Reply, greedy_kind, words
from rollstore.writers.uuid7 import uuid7

CHAIN = ("temperature", "top_k", "top_p", "min_p")
"""The order in which generate applies what it has."""

DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0, "do_sample": False}
"""What generate takes where neither the call nor the model's configuration says anything: top_k is 50."""

LIMITS = {
    "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "sequence_bias": None, "exponential_decay_length_penalty": None, "guidance_scale": 1.0,
    "watermarking_config": None, "dola_layers": None, "prefix_allowed_tokens_fn": None, "negative_prompt_ids": None,
    "min_length": 0,
}  # fmt: skip
"""Settings without a column that change what may be drawn or how likely it is, and the values at which they do not.

`min_length` counts the prompt, padding included: where that is known it is a `min_new_tokens`.
"""

FILTERS = {"top_h": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
"""The same of those that only a sampled call applies."""

OPAQUE = ("logits_processor", "custom_generate", "assistant_ensemble_weight")
"""Settings after which the scores may be of another distribution than the one that drew."""

CRITERIA = ("stop_strings", "stopping_criteria")
"""Settings that end rows without an end token: where, only `lengths` can say."""

REFUSED = {
    "num_beams": 1, "num_beam_groups": 1, "constraints": None, "force_words_ids": None, "penalty_alpha": 0.0,
    "token_healing": False,
}  # fmt: skip
"""Settings under which tokens are searched for, or the prompt drawn anew, and the values at which they do nothing."""

READ = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "max_length",
    "min_new_tokens", "eos_token_id",
)  # fmt: skip
"""Settings that are read, each for what it is."""

WITHOUT_EFFECT = (
    "attention_mask", "inputs", "input_ids", "inputs_embeds", "position_ids", "past_key_values", "tokenizer",
    "streamer", "synced_gpus", "generation_config", "trust_remote_code", "assistant_tokenizer",
    "negative_prompt_attention_mask", "early_stopping", "length_penalty", "diversity_penalty", "low_memory", "max_time",
    "use_mtp", "use_cache",
    "cache_implementation", "cache_config", "max_cache_len", "renormalize_logits", "remove_invalid_values",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "pad_token_id", "bos_token_id", "decoder_start_token_id", "is_assistant",
    "assistant_model", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "speculation_type", "compile_config", "disable_compile", "continuous_batching_config",
    "prefill_chunk_size", "_from_model_config", "transformers_version",
)  # fmt: skip
"""Settings that leave the distribution as it is: inputs, outputs, caches, speed (a draft that is checked by the model
is exact), what only a search of beams heeds, and repairs of numbers that are none."""


def settings_of(model: Any, **asked: Any) -> dict[str, Any]:
    """Settings of one call: what was asked for, else the model's `generation_config`, else generate's defaults.

    A `generation_config` among what was asked for stands before the model's own.
    """
    given = asked.pop("generation_config", None)
    levels = [model.generation_config.to_dict(), {} if given is None else given.to_dict(), asked]
    return {**DEFAULTS, **{name: value for level in levels for name, value in level.items() if value is not None}}


def sampler(settings: Mapping[str, Any]) -> Sampler:
    """Settings of a call as a record. Without `do_sample` the pick is greedy: temperature 0, and no filter.

    What has no column and bears on the draw stands in `grammar`, since a trainer would have to apply it; so does a
    plain value (number, text, list) under a name that is not known here, which may be a setting of a newer release.
    """
    sampled = bool(settings.get("do_sample"))
    limits = _limits(settings, sampled)
    penalty = settings.get("repetition_penalty")
    return Sampler(
        temperature=settings.get("temperature") if sampled else 0.0,
        top_p=settings.get("top_p") if sampled else 1.0,
        top_k=(settings.get("top_k") or 0) if sampled else 0,
        min_p=(settings.get("min_p") or 0.0) if sampled else 0.0,
        repetition_penalty=1.0 if penalty is None else penalty,
        max_tokens=settings.get("max_new_tokens"),
        min_tokens=settings.get("min_new_tokens") or 0,
        stop=words(settings.get("stop_strings")),
        grammar=msgspec.json.encode(limits, enc_hook=_told).decode() if limits else None,
        chain=CHAIN,
        applied=True,
    )


def _limits(settings: Mapping[str, Any], sampled: bool) -> dict[str, Any]:
    neutral = {**LIMITS, **(FILTERS if sampled else {}), **dict.fromkeys(OPAQUE)}
    if settings.get("min_new_tokens") is not None:  # it takes the other's place
        del neutral["min_length"]
    found = {name: _spelled(settings[name]) for name, off in neutral.items() if _is_on(settings.get(name), off)}
    here = {*LIMITS, *FILTERS, *OPAQUE, *CRITERIA, *REFUSED, *READ, *WITHOUT_EFFECT}
    plain = (bool, int, float, str, list, tuple, dict)
    others = {name: value for name, value in settings.items() if name not in here and isinstance(value, plain)}
    return {**found, **{name: value for name, value in others.items() if _is_on(value, False)}}


def _is_on(value: Any, off: Any) -> bool:
    """Whether a setting does something. An empty list of processors, words or ids does nothing."""
    if value is None or (hasattr(value, "__len__") and not len(value)):
        return False
    return isinstance(value, torch.Tensor) or bool(value != off)


def _spelled(value: Any) -> Any:
    """A setting by its own dictionary or list, where it is an object that has one."""
    own = getattr(value, "to_dict", None) or getattr(value, "tolist", None)
    return own() if callable(own) else value


def _told(value: Any) -> str:
    """What a setting is called that JSON has no word for."""
    return getattr(value, "__qualname__", type(value).__qualname__)


def replies(
    generated: Any,
    settings: Mapping[str, Any],
    *,
    attention_mask: Any,
    lengths: Sequence[int] | None = None,
    head_size: int = 0,
    custom_processors: bool = False,
    engine: Engine | None = None,
) -> list[Reply]:
    """Rows of what `generate` returned, for prompts with an attention mask [B, P], padded on the left.

    settings: see `settings_of`. lengths: new tokens of each row, where anything but an end token stopped a row (stop
    strings, a criterion of one's own); otherwise a row ends at its first drawn end token, which is kept. head_size:
    keep so many of the likeliest tokens. custom_processors: the call had logits processors of the caller's own, so
    that the scores may hold anything, noise too. Raises ValueError for beams and other searches, for healed prompts,
    for padding on the right, and where lengths do not fit.
    """
    if type(generated).__name__.startswith("GenerateEncoderDecoder"):
        raise ValueError("transformers: wanted a decoder's sequences, prompt included, got those of an encoder-decoder")
    sequences = generated if isinstance(generated, torch.Tensor) else generated.sequences
    mask = np.asarray(torch.as_tensor(attention_mask).bool().cpu())
    _require_sampled(settings)
    batch, width = mask.shape
    prompts = mask.sum(1)
    if (mask != (np.arange(width) >= width - prompts[:, None])).any():
        raise ValueError("attention_mask: wanted padding on the left only, got a row with other gaps")
    rows = np.asarray(sequences.cpu())
    samples = len(rows) // max(batch, 1)
    if samples * batch != len(rows) or rows.shape[1] < width:
        raise ValueError(f"sequences: wanted rows for {batch} prompts of width {width}, got {rows.shape}")
    new = _lengths(rows[:, width:], settings, lengths)
    if settings.get("max_new_tokens") is None and settings.get("max_length") is not None:
        settings = {**settings, "max_new_tokens": settings["max_length"] - width}
    if settings.get("min_new_tokens") is None and settings.get("min_length") is not None:
        settings = {**settings, "min_new_tokens": max(settings["min_length"] - width, 0)}
    if custom_processors and not settings.get("logits_processor"):
        settings = {**settings, "logits_processor": "of the caller's own"}
    how = sampler(settings)
    steps, kind = _steps(generated, how, any(_is_on(settings.get(name), None) for name in OPAQUE))
    if steps is not None and len(steps) != rows.shape[1] - width:
        raise ValueError(f"scores: wanted {rows.shape[1] - width} steps, one for each new token, got {len(steps)}")
    groups = [uuid7() for _ in range(batch)]
    made: list[Reply] = []
    for n, row in enumerate(rows):
        place = n // samples
        tokens = row[width : width + new[n]].astype(np.int64)
        finish, reason = _ending(tokens, settings, int(prompts[place]), how, lengths)
        columns = {} if steps is None else _logprobs(steps, n, tokens, kind, head_size)
        group = {"group_id": groups[place], "group_size": samples, "sample_index": n % samples} if samples > 1 else {}
        made.append(
            Reply(
                prompt=row[width - prompts[place] : width].astype(np.int64),
                tokens=tokens,
                sampler=how,
                ending=finish,
                ending_reason=reason,
                row={"engine": engine or Engine(name="transformers", version=version("transformers")), **group},
                **columns,
            )
        )
    return made


def rollouts(
    generated: Any,
    settings: Mapping[str, Any],
    *,
    attention_mask: Any,
    lengths: Sequence[int] | None = None,
    head_size: int = 0,
    custom_processors: bool = False,
    engine: Engine | None = None,
    **fields: Any,
) -> list[Rollout]:
    """The same as rollouts of one segment; `fields` are columns of the rollouts table."""
    made = replies(
        generated, settings, attention_mask=attention_mask, lengths=lengths, head_size=head_size,
        custom_processors=custom_processors, engine=engine,
    )  # fmt: skip
    return [rollout(reply, **fields) for reply in made]


def _require_sampled(settings: Mapping[str, Any]) -> None:
    """Raise ValueError where tokens were searched for, or the prompt is not the one that was given."""
    for name, off in REFUSED.items():
        value = settings.get(name)
        if not _is_on(value, off) or (name == "penalty_alpha" and settings.get("do_sample")):
            continue
        got = f"the best of {value} beams" if name == "num_beams" else f"those of {name}={value}"
        raise ValueError(f"transformers: wanted sampled sequences, got {got}")


def _ends(settings: Mapping[str, Any]) -> list[int]:
    end = settings.get("eos_token_id")
    return [] if end is None else [int(e) for e in np.atleast_1d(np.asarray(end))]


def _lengths(drawn: Any, settings: Mapping[str, Any], lengths: Sequence[int] | None) -> list[int]:
    """New tokens of each row."""
    if lengths is not None:
        bad = len(lengths) != len(drawn) or any(not 0 <= n <= drawn.shape[1] for n in lengths)
        if bad:
            raise ValueError(f"lengths: wanted {len(drawn)} numbers up to {drawn.shape[1]}, got {list(lengths)}")
        return [int(n) for n in lengths]
    criteria = [name for name in CRITERIA if settings.get(name)]
    if criteria:
        raise ValueError(f"lengths: wanted the new tokens of each row, as {criteria[0]} ended some, got none")
    is_end = np.isin(drawn, _ends(settings))
    return np.where(is_end.any(1), is_end.argmax(1) + 1, drawn.shape[1]).tolist()


def _ending(
    tokens: Any, settings: Mapping[str, Any], prompt: int, how: Sampler, lengths: Any
) -> tuple[str, str | None]:
    if len(tokens) and int(tokens[-1]) in _ends(settings):
        return "terminated", "stop_token"
    if lengths is not None and (how.max_tokens is None or len(tokens) < how.max_tokens):
        return "unknown", "unknown"  # something of the caller's own stopped this row
    return ending("length", count=len(tokens), prompt=prompt, max_tokens=how.max_tokens)


def _steps(generated: Any, how: Sampler, custom: bool) -> tuple[Any, str]:
    """(logits of each step [B, V], which distribution they are of); scores before raw logits."""
    scores, logits = getattr(generated, "scores", None), getattr(generated, "logits", None)
    if scores is None:
        return logits, "raw"
    if custom:
        return scores, "unknown"
    return scores, greedy_kind(how) if how.temperature == 0 else "behavior"


def _logprobs(steps: Any, row: int, tokens: Any, kind: str, head_size: int) -> dict[str, Any]:
    if not len(tokens):
        return {"logprobs": Known(np.zeros(0), np.zeros(0, bool)), "logprob_kind": kind}
    drawn = torch.as_tensor(tokens)
    logprobs = torch.log_softmax(torch.stack([step[row] for step in steps[: len(tokens)]]).cpu().float(), -1)
    own = logprobs.gather(1, drawn[:, None]).squeeze(1)
    columns: dict[str, Any] = {"logprobs": known(own.numpy()), "logprob_kind": kind}
    if kind == "behavior":
        entropy = -torch.where(logprobs == -torch.inf, 0.0, logprobs.exp() * logprobs).sum(-1)
        columns["entropies"] = known(entropy.numpy())
    if head_size:
        top = logprobs.topk(head_size, -1)
        counts = np.full(len(tokens), head_size)
        listed = entries(counts, top.indices.reshape(-1).numpy(), top.values.reshape(-1).numpy())
        found, flags = heads(listed, size=head_size, impossible=kind == "raw")
        columns.update(heads=found, head_kind=None if found is None else kind, flags=tuple(flags))
    return columns
