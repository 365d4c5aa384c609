"""The whole loop once: sample under keyed noise, record while sampling, train one GRPO step from the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow.compute as pc
import torch
import transformers

import rollstore
from examples.arithmetic import Task, calculate, verify
from rollstore.batch import Transform
from rollstore.losses import group_zscore, ppo_clip, tis, token_mean, with_counts
from rollstore.readers.torch import RolloutLoader
from rollstore.replay.samplers.transformers import Turn, generate
from rollstore.replay.score import score
from rollstore.schema import Engine, Numerics, Sampler

SAMPLER = Sampler(temperature=0.8, top_k=50, top_p=0.95)
HEAD_SIZE = 8
MAX_TURNS = 2

Progress = Callable[[str, int, int], None]
"""Called with (what, done, of)."""


def quiet(what: str, done: int, of: int) -> None:
    """No progress shown."""


def collect(
    store: rollstore.Store,
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    *,
    step: int,
    run: str = "arithmetic",
    group_size: int = 4,
    max_new_tokens: int = 32,
    verifier: Callable[[str, int], float] = verify,
    progress: Progress = quiet,
) -> list[str]:
    """Sample a group for each task under weight version `step`, append each rollout when it is over; return the ids.

    All rollouts of a turn are drawn in one batch. A task with a calculator goes on for another turn when the policy has
    asked it something.
    """
    ids: list[str] = []
    members = [(task, member) for task in tasks for member in range(group_size)]
    with store.writer(run=run, source="transformers") as writer:
        recorders = [
            writer.rollout(
                rollout_id=f"{run}/{step}/{task.prompt_id}/{member}",
                prompt_id=task.prompt_id,
                group_id=task.prompt_id,
                group_size=group_size,
                sample_index=member,
                step=step,
                environment="calculator" if task.uses_calculator else "arithmetic",
                policy=model.config.name_or_path.rstrip("/").rsplit("/", 1)[-1] or None,
                tokenizer_size=len(tokenizer),
                vocab_size=model.config.vocab_size,
                engine=Engine(
                    name="transformers",
                    version=transformers.__version__,
                    numerics=Numerics(weights=str(model.dtype).removeprefix("torch.")),
                ),
                weight_version_source="per_span",
                replay_key=2026 + step,
                replay_sample=number,
                noise="gumbel-philox4x32/1",
                logprob_kind="behavior",
                head_kind="behavior",
            )
            for number, (task, member) in enumerate(members)
        ]
        for recorder, (task, _) in zip(recorders, members, strict=True):
            _observe_messages(recorder, tokenizer, task.messages)
        open_rows = list(range(len(members)))
        finished = 0
        for number_of_turns in range(1, MAX_TURNS + 1):
            turns = generate(
                model,
                [recorders[row].tokens for row in open_rows],
                keys=2026 + step,
                samples=open_rows,
                sampler=SAMPLER,
                max_new_tokens=max_new_tokens,
                head_size=HEAD_SIZE,
                stop_token_ids=[tokenizer.eos_token_id],
            )
            going_on: list[int] = []
            for row, turn in zip(open_rows, turns, strict=True):
                task, recorder = members[row][0], recorders[row]
                _act(recorder, turn, version=step)
                text = tokenizer.decode(turn.tokens, skip_special_tokens=True)
                reply = calculate(text) if task.uses_calculator and number_of_turns < MAX_TURNS else None
                if turn.finish == "stop" and reply is not None:
                    _observe_reply(recorder, tokenizer, reply)
                    going_on.append(row)
                    continue
                cut = turn.finish == "length"
                recorder.end(
                    "truncated" if cut else "terminated",
                    reason="max_tokens" if cut else "stop_token",
                    reward=verifier(text, task.answer),
                )
                ids.append(recorder.rollout_id)
                finished += 1
                progress("rollouts", finished, len(members))
            writer.flush()
            open_rows = going_on
            if not open_rows:
                break
    return ids


def _observe_messages(recorder: Any, tokenizer: Any, messages: list[dict[str, str]]) -> None:
    """The prompt, one span per message; the last one takes the generation prompt with it."""
    before: list[int] = []
    for number, message in enumerate(messages, 1):
        last = number == len(messages)
        ids = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=last, return_dict=False)
        recorder.observe(ids[len(before) :], role=message["role"], turn=0)
        before = ids


def _observe_reply(recorder: Any, tokenizer: Any, reply: str) -> None:
    """The calculator's answer in the template's own words, up to where the policy speaks again."""
    text = f"\n<|im_start|>tool\n{reply}<|im_end|>\n<|im_start|>assistant\n"
    recorder.observe(tokenizer.encode(text, add_special_tokens=False), role="tool")


def _act(recorder: Any, turn: Turn, *, version: int) -> None:
    recorder.act(
        turn.tokens,
        logprobs=turn.logprobs,
        weight_versions=version,
        sampler=turn.sampler,
        heads=turn.heads,
        entropies=turn.entropies,
        batch_rows=turn.batch_rows,
        engine_finish=turn.finish,
        cache_state="fresh",
    )


def train(
    store: rollstore.Store,
    model: Any,
    *,
    step: int,
    learning_rate: float = 1e-5,
    tokens_per_batch: int = 2048,
    progress: Progress = quiet,
) -> dict[str, float]:
    """One GRPO step over the rollouts of one step, read from the store.

    Returns the loss, the norm of its gradient, and the furthest log-ratio of trainer to behavior before the update
    (0 on policy, up to rounding).

    Advantages are z-scores within a group, the objective is PPO's clip with truncated importance sampling, the mean is
    over the actions of the whole step whatever the packing. The trainer scores each action under its recorded
    temperature and filters, and says so to the loss, which would refuse otherwise.
    """
    loader = RolloutLoader(
        store, tokens_per_batch=tokens_per_batch, whole_groups=True, where=pc.field("step") == step, heads=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    batches = with_counts([group_zscore(batch)[0] for batch in loader])
    loss_of_step, furthest = 0.0, 0.0
    for number, loaded in enumerate(batches, 1):
        batch = replace(loaded, trainer_transform=Transform(temperature=True, filters=True))
        logprobs = score(model, batch).logprobs
        batch = replace(batch, anchor_logprobs=logprobs.detach())
        loss, _ = ppo_clip(batch, logprobs, clip=(0.2, 0.2), correction=tis(high=2.0), reduce=token_mean)
        loss.backward()
        loss_of_step += float(loss.detach())
        furthest = max(furthest, float((logprobs.detach() - batch.behavior_logprobs).abs().max()))
        progress("training batches", number, len(batches))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"loss": loss_of_step, "gradient_norm": float(norm), "furthest_log_ratio": furthest}
