"""TRL: what `GRPOTrainer` generates, as records. Version of the weights is the optimizer step.

TRL's own generation reports no log-probs. `Sampling`, handed to the trainer as its `rollout_func`, draws as the trainer
would and keeps those of the distribution that drew; without it they are null. The hook stands on two methods of the
trainer that TRL does not publish (1.16): where they are gone, `record` refuses.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from types import TracebackType
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from trl.models.utils import unwrap_model_for_generation

from rollstore.schema import Engine, Known, Rollout, Sampler
from rollstore.schema.known import known
from rollstore.writers.conversation import conversation
from rollstore.writers.reply import Reply, ids
from rollstore.writers.transformers import replies, sampler, settings_of
from rollstore.writers.weights import by_spans

HOOKED = ("_generate", "_calculate_rewards")
"""The methods of the trainer that are wrapped."""


class Appends(Protocol):
    """What a recording needs of a writer."""

    def append(self, data: list[Rollout]) -> None: ...


class Sampling:
    """A `rollout_func` for `GRPOTrainer`: draws with transformers under the trainer's settings, and keeps what drew.

    head_size: keep so many of the likeliest tokens of each action. Prompts with images, tools and vLLM are the
    trainer's own business: with them leave `rollout_func` out.
    """

    def __init__(self, *, head_size: int = 0) -> None:
        self.head_size = head_size
        self.replies: list[Reply] = []
        """Of the last call, one for each prompt."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """One completion for each prompt: `prompt_ids`, `completion_ids` and `logprobs`, as TRL wants them."""
        prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
        if images is not None or fields:
            raise ValueError("trl: wanted prompts of text, got some with media; leave rollout_func out")
        device = trainer.accelerator.device
        width = max(map(len, prompt_ids))
        padded = torch.full((len(prompt_ids), width), trainer._tokenizer.pad_token_id)
        mask = torch.zeros_like(padded)
        for row, tokens in enumerate(prompt_ids):
            padded[row, width - len(tokens) :] = torch.tensor(tokens)
            mask[row, width - len(tokens) :] = 1
        unwrapped = unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            generation_kwargs=trainer.generation_kwargs,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        )
        asked = copy.deepcopy(trainer.generation_config)
        asked.return_dict_in_generate = asked.output_scores = True
        with unwrapped as model, torch.no_grad():
            generated = model.generate(
                input_ids=padded.to(device), attention_mask=mask.to(device), generation_config=asked
            )
            settings = _settings(trainer, model)
        self.replies = replies(generated, settings, attention_mask=mask, head_size=self.head_size)
        return {
            "prompt_ids": [reply.prompt.tolist() for reply in self.replies],
            "completion_ids": [reply.tokens.tolist() for reply in self.replies],
            "logprobs": [[] if reply.logprobs is None else reply.logprobs.to_list() for reply in self.replies],
        }


class Recording:
    """What `record` put around a trainer. `stop`, or the end of the `with` block, takes it off again."""

    def __init__(self, trainer: Any, writer: Appends, fields: Mapping[str, Any], logprob_kind: str) -> None:
        missing = [name for name in HOOKED if not callable(getattr(trainer, name, None))]
        if missing:
            raise TypeError(f"trl: wanted a GRPOTrainer as of 1.16, got {type(trainer).__name__} without {missing[0]}")
        self._trainer, self._writer, self._fields, self._kind = trainer, writer, fields, logprob_kind
        self._pending: list[Rollout] = []
        self._calls = 0
        self._generate, self._calculate_rewards = (getattr(trainer, name) for name in HOOKED)
        trainer._generate, trainer._calculate_rewards = self._generated, self._scored

    def stop(self) -> None:
        """Leave the trainer as it was, and append what was drawn and not scored. Stopping twice is no error."""
        for name in HOOKED:
            vars(self._trainer).pop(name, None)
        self._append(None)

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _generated(self, prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        self._append(None)
        step = int(self._trainer.state.global_step)
        output = self._generate(prompts, *args, **kwargs)
        prompt_ids, completion_ids, masks, _, logprobs, *_ = output
        own = self._trainer.rollout_func
        kept = own.replies if isinstance(own, Sampling) and masks is None else None
        self._calls += 1
        for n, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
            if kept is not None:
                turns = [_same(kept[n], prompt, completion)]
            else:
                said = None if logprobs is None else logprobs[n]
                turns = _turns(prompt, completion, None if masks is None else masks[n], said, self._trainer, self._kind)
            turns = [
                replace(turn, weights=by_spans(len(turn.tokens), [(str(step), 0, len(turn.tokens))])) for turn in turns
            ]
            columns = self._columns(n, len(prompt_ids), step)
            self._pending += conversation(turns, turn_role="tool", **columns)
        return output

    def _scored(self, *args: Any, **kwargs: Any) -> Any:
        rewards = self._calculate_rewards(*args, **kwargs)
        self._append(rewards)
        return rewards

    def _append(self, rewards: Any) -> None:
        """Append what was drawn, with the rewards [all processes' samples, functions] as the trainer adds them up."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        if rewards is not None:
            weights = self._trainer.reward_weights.to(rewards.device)
            first = self._trainer.accelerator.process_index * len(pending)
            own = rewards[first : first + len(pending)]
            sums = (own * weights).nansum(1).double().tolist()
            unscored = torch.isnan(own).all(1).tolist()
            pending = [
                msgspec.structs.replace(
                    row, reward=None if none else reward, reward_status="unscored" if none else "scored"
                )
                for row, reward, none in zip(pending, sums, unscored, strict=True)
            ]
        self._writer.append(pending)

    def _columns(self, n: int, count: int, step: int) -> dict[str, Any]:
        """Group, step and mode: a group is `num_generations` prompts that follow one another over all processes."""
        trainer = self._trainer
        training = bool(trainer.model.training)
        size = trainer.num_generations if training else trainer.num_generations_eval
        place = trainer.accelerator.process_index * count + n
        return {
            "step": step,
            "group_id": f"{step}.{self._calls}.{place // size}",
            "group_size": size,
            "sample_index": place % size,
            "policy": getattr(trainer.model.config, "_name_or_path", None) or None,
            "metadata": {"mode": "train" if training else "eval"},
            **self._fields,
        }


def record(
    trainer: Any, writer: Appends, *, fields: Mapping[str, Any] | None = None, logprob_kind: str = "unknown"
) -> Recording:
    """From now on, append what a `GRPOTrainer` generates to the writer, with its reward; training does not change.

    With `Sampling` as the trainer's `rollout_func` the log-probs are behavior. Otherwise they are null, or those that
    vLLM gave the trainer, which are of `logprob_kind`. `fields` are columns of the rollouts table. Raises TypeError for
    a trainer without the methods that are wrapped. What the store refuses raises out of the training step.
    """
    return Recording(trainer, writer, fields or {}, logprob_kind)


def _settings(trainer: Any, model: Any) -> Mapping[str, Any]:
    return settings_of(model, **trainer.generation_kwargs)


def _sampler(trainer: Any) -> Sampler:
    """What the trainer asks its engine for."""
    if not trainer.use_vllm:
        return sampler(_settings(trainer, trainer.accelerator.unwrap_model(trainer.model)))
    return Sampler(
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=max(trainer.top_k or 0, 0),
        min_p=trainer.min_p or 0.0,
        repetition_penalty=trainer.repetition_penalty,
        max_tokens=trainer.max_completion_length,
    )


def _same(reply: Reply, prompt: Sequence[int], completion: Sequence[int]) -> Reply:
    """The reply, where it is still what the trainer trains on."""
    if reply.prompt.tolist() != list(prompt) or reply.tokens.tolist() != list(completion):
        raise ValueError("trl: wanted the tokens that were drawn, got others from the trainer")
    return reply


def _turns(
    prompt: Sequence[int],
    completion: Sequence[int],
    mask: Sequence[int] | None,
    logprobs: Sequence[float | None] | None,
    trainer: Any,
    kind: str,
) -> list[Reply]:
    """A completion as its turns: each run of drawn tokens, behind everything before it.

    mask: 0 where a tool wrote. The end is told by what was drawn and by lengths: an end token, or all that was allowed.
    """
    tokens = np.concatenate([ids("prompt_ids", prompt), ids("completion_ids", completion)])
    drawn = np.ones(len(completion), bool) if mask is None else np.asarray(mask, bool)
    said = None if logprobs is None else known([None if x is None or x != x else x for x in logprobs])
    settings = _sampler(trainer)
    engine = Engine(name="vllm") if trainer.use_vllm else Engine(name="transformers", version=version("transformers"))
    edges = [0, *(np.flatnonzero(drawn[1:] != drawn[:-1]) + 1).tolist(), len(drawn)]
    runs = [(first, last) for first, last in pairwise(edges) if last > first and drawn[first]]
    if not runs or runs[-1][1] < len(drawn):
        runs.append((len(drawn), len(drawn)))  # what a tool wrote last, and nothing was drawn behind it
    made = [
        Reply(
            prompt=tokens[: len(prompt) + first],
            tokens=tokens[len(prompt) + first : len(prompt) + last],
            sampler=settings,
            logprobs=None if said is None else Known(said.values[first:last], said.known[first:last]),
            logprob_kind=None if said is None else kind,
            ending="unknown",
            row={"engine": engine},
        )
        for first, last in runs
    ]
    outcome, reason = _end(completion, bool(len(drawn)) and bool(drawn[-1]), trainer)
    return [*made[:-1], replace(made[-1], ending=outcome, ending_reason=reason)]


def _end(completion: Sequence[int], drawn: bool, trainer: Any) -> tuple[str, str | None]:
    if drawn and int(completion[-1]) in trainer.eos_token_ids:
        return "terminated", "stop_token"
    if len(completion) >= trainer.max_completion_length:
        return "truncated", "max_tokens"
    return "unknown", "unknown"
