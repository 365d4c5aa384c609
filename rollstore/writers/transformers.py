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
from rollstore.writers.reply import Reply, greedy_kind
from rollstore.writers.uuid7 import uuid7

CHAIN = ("temperature", "top_k", "top_p", "min_p")
"""The order in which generate applies what it has."""

DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0, "do_sample": False}
"""What generate takes where neither the call nor the model's configuration says anything: top_k is 50."""

LIMITS = {
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0, "top_h": None,
    "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "sequence_bias": None, "exponential_decay_length_penalty": None,
    "guidance_scale": None,
}  # fmt: skip
"""Settings without a column, and the values at which they do nothing."""


def settings_of(model: Any, **asked: Any) -> dict[str, Any]:
    """Settings of one call: what was asked for, else the model's `generation_config`, else generate's defaults."""
    own = {name: value for name, value in model.generation_config.to_dict().items() if value is not None}
    return {**DEFAULTS, **own, **{name: value for name, value in asked.items() if value is not None}}


def sampler(settings: Mapping[str, Any]) -> Sampler:
    """Settings of a call as a record. Without `do_sample` the pick is greedy: temperature 0, and no filter."""
    sampled = bool(settings.get("do_sample"))
    limits = {name: value for name, off in LIMITS.items() if (value := settings.get(name, off)) not in (off, None)}
    penalty = settings.get("repetition_penalty")
    return Sampler(
        temperature=settings.get("temperature") if sampled else 0.0,
        top_p=settings.get("top_p") if sampled else 1.0,
        top_k=(settings.get("top_k") or 0) if sampled else 0,
        min_p=(settings.get("min_p") or 0.0) if sampled else 0.0,
        repetition_penalty=1.0 if penalty is None else penalty,
        max_tokens=settings.get("max_new_tokens"),
        min_tokens=settings.get("min_new_tokens") or 0,
        grammar=msgspec.json.encode(limits, enc_hook=repr).decode() if limits else None,
        chain=CHAIN,
        applied=True,
    )


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
    that the scores may hold anything, noise too. Raises ValueError for beams, for padding on the right, and where
    lengths do not fit.
    """
    if type(generated).__name__.startswith("GenerateEncoderDecoder"):
        raise ValueError("transformers: wanted a decoder's sequences, prompt included, got those of an encoder-decoder")
    sequences = generated if isinstance(generated, torch.Tensor) else generated.sequences
    mask = np.asarray(torch.as_tensor(attention_mask).bool().cpu())
    if (settings.get("num_beams") or 1) > 1:
        raise ValueError(f"transformers: wanted sampled sequences, got the best of {settings['num_beams']} beams")
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
    how = sampler(settings)
    steps, kind = _steps(generated, how, custom_processors)
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
    if settings.get("stop_strings"):
        raise ValueError("lengths: wanted the new tokens of each row, as stop_strings ended some, got none")
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
