"""prime-rl's and verifiers' traces, `traces.jsonl`: an episode or a trace a line (verifiers v1).

Taken: the nodes' token_ids, mask as what was drawn, logprobs (which verifiers 0.4 rounds to four decimals), messages;
each path from a root to a leaf is a segment, in which what an earlier one drew is carried. Log-probs of a reference and
of the trainer become evaluations. Rewards with their weights are the reward, and each a score; the task's key, the
environment, group, run, step and policy span of an episode; sampling, finish reason and times of each call. Into
metadata: metrics, info, errors, the agent's name. Not in the files: the kind of the log-probs, routed experts, media. A
trace without ids (of an evaluation) is text and needs a tokenizer.
"""

from __future__ import annotations

from typing import Any, Unpack

from rollstore.exchange.intake import Intake, Options, Paths, Progress, Report
from rollstore.exchange.pieces import Texts
from rollstore.exchange.prime_rl_tokens import is_token_export, token_export
from rollstore.exchange.prime_rl_traces import rows_of_trace
from rollstore.exchange.records import Made, Place, refuse
from rollstore.exchange.verifiers import is_result, result
from rollstore.store.store import Store

MISSING = "the kind of the log-probs, routed experts, media"


def import_prime_rl(
    store: Store, paths: Paths, *, tokenizer: Any = None, progress: Progress | None = None, **options: Unpack[Options]
) -> Report:
    """Take `traces.jsonl` of prime-rl or of a verifiers run, token exports, and verifiers' older `results.jsonl`.

    What a line is, is seen from its fields.

    `tokenizer` makes ids of traces that hold none, and of whose tokens then nothing is an action; without it they are
    refused. Raises as every import StoreError, OSError, WriteError.
    """
    texts = None if tokenizer is None else Texts(tokenizer, "prime-rl")
    with Intake(store, "prime-rl", missing=MISSING, **options) as intake:
        intake.lines(paths, lambda record, place: _record(record, place, texts), progress)
    return intake.report


def _record(record: dict[str, Any], place: Place, texts: Texts | None) -> Made:
    if is_token_export(record):
        return token_export(record, place)
    if is_result(record):
        return result(record, place, texts)
    if "nodes" in record:
        return rows_of_trace(record, {}, place, texts)
    traces = record.get("traces")
    if not isinstance(traces, list) or not traces:
        raise refuse("traces", "an episode with traces, or a trace with nodes", traces)
    run, group, env = (record.get(name) or {} for name in ("run", "group", "env"))
    work = run.get("work") or {}
    policy = work.get("policy") or {}
    columns = {
        "environment": env.get("name") or env.get("id") or None,
        "group_id": group.get("id"),
        "run_id": run.get("id"),
        "step": work.get("step"),
        "weight_version_min": policy.get("start"),
        "weight_version_max": policy.get("end"),
        "weight_version_source": "start_end" if policy else None,
    }
    each = [rows_of_trace(trace, columns, place, texts) for trace in traces]
    evaluations = [row for one in each for row in one.others.get("evaluations", ())]
    rollouts, scores = ([row for one in each for row in getattr(one, name)] for name in ("rollouts", "scores"))
    return Made(rollouts=rollouts, scores=scores, others={"evaluations": evaluations})
