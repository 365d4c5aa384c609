"""ATIF trajectories (Agent Trajectory Interchange Format, v1.3 to v1.8), both ways: a document a file, or a line.

Taken where an agent's step has them in its metrics: prompt_token_ids, completion_token_ids, logprobs, cached_tokens;
steps whose prompt extends the tokens so far go on in one segment, any other begins the next. trajectory_id as the id
(session_id may be that of several), model_name, the steps as messages. A trajectory without ids is text and needs a
tokenizer. Into metadata: session_id, agent, final_metrics, notes, extra. Subagents are rollouts of their own. Not in
the format: which kind of log-probs these are, weights, samplers, endings, rewards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, Unpack

import msgspec

from rollstore.exchange.folder import STAGED, Exported, Written, about, new_file, new_folder
from rollstore.exchange.intake import LINES, Intake, Options, Paths, Progress, Report
from rollstore.exchange.pieces import Texts, known, metadata
from rollstore.exchange.records import Made, Place, Record, decoded, ids, made, refuse, text
from rollstore.exchange.segments import Decoder, log_probs, rollouts, stretches
from rollstore.exchange.source import BOM, LINE_BYTES, expand, fingerprint, opened
from rollstore.schema import Rollout
from rollstore.store.snapshot import Snapshot
from rollstore.store.store import Store
from rollstore.writers.conversation import conversation
from rollstore.writers.reply import Reply
from rollstore.writers.reply import ids as id_array

MISSING = "the kind of the log-probs, weight versions, samplers, endings, rewards"

_TAKEN = ("steps", "subagent_trajectories", "trajectory_id")
_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


def import_atif(
    store: Store, paths: Paths, *, tokenizer: Any = None, progress: Progress | None = None, **options: Unpack[Options]
) -> Report:
    """Take ATIF documents: `.json` files of one each, `.jsonl` files of one a line.

    `tokenizer` makes ids of trajectories that hold none, and of whose tokens then nothing is an action; without it they
    are refused. Raises as every import StoreError, OSError, WriteError.
    """
    texts = None if tokenizer is None else Texts(tokenizer, "atif")

    def make(record: dict[str, Any], place: Place) -> Made:
        return Made(rollouts=[*_rollouts(record, place, place.id(), texts)])

    with Intake(store, "atif", missing=MISSING, **options) as intake:
        for path in expand(paths, (".json", *LINES)):
            if path.endswith(".json"):
                intake.take(path, _document(path, make, progress))
            else:
                intake.lines([path], make, progress)
    return intake.report


def export_atif(
    store: Store,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    snapshot: Snapshot | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write each rollout as an ATIF v1.8 trajectory, a line of FOLDER/trajectories.jsonl each.

    Each stretch of actions is an agent's step with its prompt's and its own ids, and with log-probs where all of the
    stretch are known and finite. What stands between is a step of the user. Texts are the tokenizer's, or empty without
    one. The reward, its status and the ending are in final_metrics.extra; heads, weights, samplers and all else are
    lost. The folder as for every export. Raises StoreError where it is taken, CorruptionError, WriteError.
    """
    decoder = Decoder(tokenizer)
    with new_folder(store, folder, snapshot, ".jsonl") as (staging, held, exported):
        rows, path = 0, staging / f"trajectories{STAGED}"
        with new_file(path) as file:
            for segments in rollouts(store, held, progress):
                file.write(msgspec.json.encode(_trajectory(segments, decoder)) + b"\n")
                rows += len(segments)
        exported.tables["rollouts"] = Written(rows, 1, path.stat().st_size)
        about(store, held, exported, staging)
    return exported


def _trajectory(segments: list[Rollout], decoder: Decoder) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for row in segments:
        logprobs, at = log_probs(row), 0
        for drawn, start, end in stretches(row):
            step = {"step_id": len(steps) + 1, "source": "user", "message": decoder.text(row.tokens[start:end])}
            if drawn:
                ids_ = {
                    "prompt_token_ids": row.tokens[:start].tolist(),
                    "completion_token_ids": row.tokens[start:end].tolist(),
                }
                own = {} if logprobs is None else {"logprobs": logprobs[at : at + end - start]}
                step |= {"source": "agent", "metrics": ids_ | own}
                at += end - start
            steps.append(step)
    last = segments[-1]
    said = {"reward": last.reward, "reward_status": last.reward_status, "ending": last.ending}
    said = {name: value for name, value in said.items() if value is not None}
    agent = {"name": "unknown", "version": "unknown"} | ({} if last.policy is None else {"model_name": last.policy})
    return {
        "schema_version": "ATIF-v1.8",
        "trajectory_id": last.rollout_id,
        "agent": agent,
        "steps": steps,
        "final_metrics": {"total_steps": len(steps)} | ({"extra": said} if said else {}),
    }


def _document(path: str, make: Any, progress: Progress | None) -> Iterator[Record]:
    with opened(path, None if progress is None else lambda size: progress(path, size)) as file:
        mark, data = fingerprint(file), file.read(LINE_BYTES).removeprefix(BOM)
    place = Place(format="atif", file=path, fingerprint=mark, row=1)
    yield made(1, data, lambda: make(decoded(data), place))


def _rollouts(record: dict[str, Any], place: Place, made_id: str, texts: Texts | None) -> Iterator[Rollout]:
    """The segments of a trajectory, and those of the agents it called."""
    if not str(record.get("schema_version", "")).startswith("ATIF-v1."):
        raise refuse("schema_version", "ATIF-v1.x", record.get("schema_version"))
    steps = record.get("steps")
    if not isinstance(steps, list):
        raise refuse("steps", "a list", steps)
    name = record.get("trajectory_id") or made_id
    agent = record.get("agent") or {}
    models = {step.get("model_name") or agent.get("model_name") for step in steps if step.get("source") == "agent"}
    columns: dict[str, Any] = {
        "rollout_id": text(name, "trajectory_id"),
        "policy": next(iter(models)) if len(models) == 1 else None,
        "metadata": metadata(record, _TAKEN),
    }
    replies = [_reply(step) for step in steps if _has_ids(step)]
    said = [message for step in steps for message in _messages(step)]
    if replies:
        yield from conversation(replies, turn_role="tool", messages=json.dumps(said), **columns)
    elif texts is None:
        raise refuse("steps", "token ids in metrics, or a tokenizer (--tokenizer PATH) for their text", "neither")
    else:
        yield texts.chat(place, said, **columns)
    for n, other in enumerate(record.get("subagent_trajectories") or ()):
        yield from _rollouts(other, place, f"{made_id}-{n}", texts)


def _has_ids(step: dict[str, Any]) -> bool:
    if step.get("is_copied_context"):  # drawn in another trajectory, and an action there
        return False
    metrics = step.get("metrics") or {}
    return metrics.get("prompt_token_ids") is not None and metrics.get("completion_token_ids") is not None


def _reply(step: dict[str, Any]) -> Reply:
    metrics = step["metrics"]
    drawn, logprobs = ids(metrics["completion_token_ids"], "completion_token_ids"), metrics.get("logprobs")
    if logprobs is not None and len(logprobs) != len(drawn):
        raise refuse("logprobs", f"{len(drawn)} values, one a token of the completion", len(logprobs))
    return Reply(
        prompt=id_array("prompt_token_ids", ids(metrics["prompt_token_ids"], "prompt_token_ids")),
        tokens=id_array("completion_token_ids", drawn),
        logprobs=None if logprobs is None else known(logprobs),
        logprob_kind=None if logprobs is None else "unknown",
        cached_tokens=metrics.get("cached_tokens"),
    )


def _messages(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A step as chat messages: what was said, and what the environment answered."""
    message: dict[str, Any] = {"role": _ROLES.get(str(step.get("source")), "user"), "content": _words(step["message"])}
    for name in ("reasoning_content", "tool_calls"):
        if step.get(name) is not None:
            message[name] = step[name]
    yield message
    for result in (step.get("observation") or {}).get("results", ()):
        answer: dict[str, Any] = {"role": "tool", "content": _words(result.get("content"))}
        if result.get("source_call_id") is not None:
            answer["tool_call_id"] = result["source_call_id"]
        yield answer


def _words(content: Any) -> Any:
    """Text, or the text of parts; media are named by their kind."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)
    return content or ""
