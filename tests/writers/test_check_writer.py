"""Every writer of ours passes the check that others run on theirs, and a writer with a fault does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstore import Engine, Flag, Heads, Rollout, Sampler
from rollstore.schema import Edit, Known, LogitBias, Media
from rollstore.schema.known import known
from rollstore.testing import CASES, Case, Output, WriterFailure, check_writer
from rollstore.testing.invented import CHECKED, ITS_OWN, NAMES, WITH_VERSIONS
from rollstore.testing.strategies import cases
from rollstore.testing.writer import ENDINGS
from rollstore.writers import llamacpp, openai, sglang, transformers, vllm
from rollstore.writers.conversation import rollout
from rollstore.writers.reply import Reply
from rollstore.writers.weights import by_spans
from tests.strategies import FEW
from tests.writers import vllm_objects as objects

FINISHES = {"stop_token": "stop", "stop_string": "stop", "max_tokens": "length", "context_limit": "length",
            "prompt_too_long": "length", "abort": "abort"}  # fmt: skip


def top(output: Output, n: int) -> list[tuple[int, float]]:
    """The likeliest tokens at an action, the likeliest first."""
    return sorted(output.heads[n].items(), key=lambda pair: -pair[1]) if output.heads else []


def spans(output: Output) -> list[tuple[str, int, int]]:
    """(label, start, end) of each run of one version."""
    edges = [n for n in range(len(output.versions) + 1) if n in (0, len(output.versions))
             or output.versions[n] != output.versions[n - 1]]  # fmt: skip
    return [(str(output.versions[start]), start, end) for start, end in pairwise(edges)]


# each engine's own words


def by_vllm(case: Case) -> list[Rollout]:
    mode = "raw_logprobs" if case.kind == "raw" and case.temperature else "processed_logprobs"
    made = []
    for index, output in enumerate(case.outputs):
        positions = []
        for n, (token, value) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
            drawn = [] if value is None else [(token, value, None)]
            positions.append([*drawn, *((id, lp, None) for id, lp in top(output, n) if id != token)])
        stop = "end" if output.finish == "stop_string" else None
        made.append(
            objects.completion(
                output.tokens, index=index, logprobs=objects.dicts(positions) if output.tokens else None,
                finish_reason=FINISHES[output.finish], stop_reason=stop,
                weight_versions=objects.spans(*spans(output)) if output.versions else None,
            )
        )  # fmt: skip
    asked = objects.params(
        n=len(case.outputs), temperature=case.temperature, top_p=case.top_p, top_k=case.top_k, seed=case.seed,
        max_tokens=case.max_tokens, logprobs=case.head_size if any(output.heads for output in case.outputs) else 0,
    )  # fmt: skip
    engine = objects.engine(mode, max_model_len=case.context)
    return vllm.rollouts([objects.output(case.prompt, *made)], asked, configuration=vllm.configuration(engine))


def by_flat_vllm(case: Case) -> list[Rollout]:
    """The same with FlatLogprobs, where the drawn token stands first and again among the likeliest."""
    (output,) = case.outputs
    pairs = zip(output.tokens, output.logprobs, strict=True)
    positions = [
        [*([] if value is None else [(token, value, None)]), *((id, lp, None) for id, lp in top(output, n))]
        for n, (token, value) in enumerate(pairs)
    ]
    drawn = objects.completion(
        output.tokens, logprobs=objects.flat(positions), finish_reason=FINISHES[output.finish],
        stop_reason="end" if output.finish == "stop_string" else None,
    )  # fmt: skip
    asked = objects.params(
        temperature=case.temperature, top_p=case.top_p, top_k=case.top_k, seed=case.seed, max_tokens=case.max_tokens,
        logprobs=case.head_size if output.heads else 0,
    )  # fmt: skip
    engine = objects.engine(max_model_len=case.context)
    return vllm.rollouts([objects.output(case.prompt, drawn)], asked, configuration=vllm.configuration(engine))


def request_of(case: Case) -> dict[str, Any]:
    return {
        "n": len(case.outputs), "temperature": case.temperature, "top_p": case.top_p, "top_k": case.top_k,
        "seed": case.seed, "max_tokens": case.max_tokens,
    }  # fmt: skip


def server_of(case: Case) -> openai.Server:
    return openai.Server(logprob_kind="behavior" if case.temperature == 0 else case.kind, context=case.context)


def reply_of(case: Case, logprobs: Callable[[Output], Any]) -> dict[str, Any]:
    choices = [
        {
            "index": index, "token_ids": output.tokens, "prompt_token_ids": case.prompt,
            "finish_reason": FINISHES[output.finish],
            "stop_reason": "end" if output.finish == "stop_string" else None, "logprobs": logprobs(output),
            "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans(output)] or None,
        }
        for index, output in enumerate(case.outputs)
    ]  # fmt: skip
    return {"id": "r", "model": "m", "system_fingerprint": "vllm-0.32.0-x", "choices": choices}


def chat_logprobs(output: Output) -> Any:
    content = []
    for n, (token, value) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
        others = [pair for pair in top(output, n) if pair[0] != token]
        listed = [(token, value), *others][: len(top(output, n))]  # the drawn one first, cut at k
        names = [{"token": f"token_id:{id}", "logprob": lp} for id, lp in listed]
        content.append(
            {"token": f"token_id:{token}", "logprob": -9999.0 if value is None else value, "top_logprobs": names}
        )
    return {"content": content}


def by_chat(case: Case) -> list[Rollout]:
    request = {**request_of(case), "messages": [], "logprobs": True, "top_logprobs": case.head_size}
    return openai.rollouts(msgspec.json.encode(reply_of(case, chat_logprobs)), request, server=server_of(case))


def by_stream(case: Case) -> list[Rollout]:
    """A chat in parts of one token each, the end alone."""
    whole = reply_of(case, chat_logprobs)
    parts = []
    for choice in whole["choices"]:
        last = {"finish_reason", "stop_reason", "weight_versions"}
        for n, token in enumerate(choice["token_ids"]):
            said = {**choice, "token_ids": [token], "logprobs": {"content": choice["logprobs"]["content"][n : n + 1]}}
            parts.append({**whole, "choices": [{k: v for k, v in said.items() if k not in last}]})
        parts.append({**whole, "choices": [{**choice, "token_ids": [], "logprobs": None}]})
    raw = b"".join(b"data: " + msgspec.json.encode(part) + b"\n\n" for part in parts) + b"data: [DONE]\n\n"
    request = {**request_of(case), "messages": [], "logprobs": True, "top_logprobs": case.head_size}
    return openai.rollouts(openai.joined(openai.events(raw)), request, server=server_of(case))


def by_completion(case: Case) -> list[Rollout]:
    def logprobs(output: Output) -> Any:
        tops = []
        for n, (token, value) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
            tops.append({f"token_id:{id}": lp for id, lp in [*top(output, n), (token, value)] if lp is not None})
        names = [f"token_id:{token}" for token in output.tokens]
        return {"tokens": names, "token_logprobs": output.logprobs, "top_logprobs": tops if output.heads else None}

    request = {**request_of(case), "prompt": case.prompt, "logprobs": case.head_size}
    return openai.rollouts(msgspec.json.encode(reply_of(case, logprobs)), request, server=server_of(case))


def by_sglang(case: Case) -> list[Rollout]:
    """With the sampling mask for behavior; with the original log-probs, and heads, for raw."""
    replies = []
    for output in case.outputs:
        listed = [(value, token, None) for token, value in zip(output.tokens, output.logprobs, strict=True)]
        matched = {"stop_token": case.end_token, "stop_string": "end"}.get(output.finish)
        meta: dict[str, Any] = {
            "id": "r", "finish_reason": {"type": FINISHES[output.finish], "matched": matched},
            "output_token_logprobs": listed, "cached_tokens": 0,
            "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans(output)] or None,
        }  # fmt: skip
        if case.kind == "behavior":
            meta["output_token_sampling_logprobs"] = output.logprobs
        elif output.heads:
            meta["output_top_logprobs"] = [
                [(lp, id, None) for id, lp in top(output, n)] for n in range(len(output.tokens))
            ]
        replies.append({"output_ids": output.tokens, "meta_info": meta})
    request = {
        "input_ids": case.prompt, "return_logprob": True, "top_logprobs_num": case.head_size,
        "sampling_params": {
            "n": len(case.outputs), "temperature": case.temperature, "top_p": case.top_p, "top_k": case.top_k,
            "max_new_tokens": case.max_tokens, "sampling_seed": case.seed,
        },
    }  # fmt: skip
    server = sglang.Server(original_logprobs=case.kind == "raw", deterministic=True, context=case.context)
    return sglang.rollouts(msgspec.json.encode(replies), request, server=server)


def by_llamacpp(case: Case) -> list[Rollout]:
    (output,) = case.outputs
    after = case.kind == "behavior"

    def entry(id: int, logprob: float) -> dict[str, Any]:
        return {"id": id, "prob": math.exp(logprob)} if after else {"id": id, "logprob": logprob}

    name = "top_probs" if after else "top_logprobs"
    places = [
        {**entry(token, value or 0.0), name: [entry(*pair) for pair in top(output, n)]}
        for n, (token, value) in enumerate(zip(output.tokens, output.logprobs, strict=True))
    ]
    kind = {"stop_token": "eos", "stop_string": "word"}.get(output.finish, "limit")
    body = {
        "tokens": output.tokens, "stop_type": kind, "stopping_word": "end" if kind == "word" else "",
        "tokens_evaluated": len(case.prompt), "completion_probabilities": places,
        "generation_settings": {
            "temperature": case.temperature, "top_k": case.top_k, "top_p": case.top_p, "n_predict": case.max_tokens,
            "seed": case.seed, "n_probs": case.head_size,
        },
    }  # fmt: skip
    return llamacpp.rollouts(msgspec.json.encode(body), case.prompt, context=case.context)


def by_own_sampler(case: Case) -> list[Rollout]:
    (output,) = case.outputs
    settings = Sampler(
        temperature=case.temperature, top_p=case.top_p, top_k=case.top_k, max_tokens=case.max_tokens, seed=case.seed
    )
    finish = "stop" if output.finish == "stop_token" else "length"
    drawn = llamacpp.drawn(
        case.prompt, output.tokens, logprobs=list(output.logprobs), kind=case.kind, settings=settings, finish=finish,
        context=case.context,
    )  # fmt: skip
    return [rollout(drawn)]


def by_transformers(case: Case) -> list[Rollout]:
    """Rows padded on the left of the prompt and behind the end, with the id of the end token."""
    longest = max(len(output.tokens) for output in case.outputs)
    rows = [[case.end_token, *case.prompt, *output.tokens] + [case.end_token] * (longest - len(output.tokens))
            for output in case.outputs]  # fmt: skip
    steps = []
    for n in range(longest):
        logits = torch.full((len(rows), case.vocabulary), 0.0, dtype=torch.float64)
        for row, output in enumerate(case.outputs):
            if n < len(output.tokens):
                said = {**dict(top(output, n)), output.tokens[n]: output.logprobs[n] or 0.0}
                rest = (1 - sum(map(math.exp, said.values()))) / (case.vocabulary - len(said))
                logits[row] = math.log(rest)
                for id, value in said.items():
                    logits[row, id] = value
        steps.append(logits)
    settings = {
        "do_sample": case.temperature > 0, "temperature": case.temperature, "top_k": case.top_k, "top_p": case.top_p,
        "max_new_tokens": case.max_tokens, "eos_token_id": case.end_token,
    }  # fmt: skip
    raw = case.kind == "raw" and case.temperature > 0
    generated = SimpleNamespace(
        sequences=torch.tensor(rows), scores=None if raw else tuple(steps), logits=tuple(steps) if raw else None
    )
    mask = torch.tensor([[0] + [1] * len(case.prompt)])
    return transformers.rollouts(generated, settings, attention_mask=mask, head_size=case.head_size)


def by_trl(case: Case) -> list[Rollout]:
    from rollstore.writers import trl

    outputs = case.outputs
    generated = (
        [list(case.prompt)] * len(outputs), [list(output.tokens) for output in outputs], None, None,
        [list(output.logprobs) for output in outputs], {}, None, [],
    )  # fmt: skip
    trainer = SimpleNamespace(
        _generate=lambda prompts: generated, _calculate_rewards=lambda: None, rollout_func=None, use_vllm=True,
        temperature=case.temperature, top_p=case.top_p, top_k=case.top_k, min_p=None, repetition_penalty=1.0,
        max_completion_length=case.max_tokens, eos_token_ids=[case.end_token], num_generations=len(outputs),
        state=SimpleNamespace(global_step=5), accelerator=SimpleNamespace(process_index=0),
        model=SimpleNamespace(training=True, config=SimpleNamespace()),
    )  # fmt: skip
    kept: list[Rollout] = []
    with trl.record(trainer, SimpleNamespace(append=kept.extend), logprob_kind=case.kind):
        trainer._generate([""])
    return kept


LIMITS = ("context_limit", "prompt_too_long", "abort", "empty", "stop_string")
NO_VERSIONS = ("versions", "version_change")
OF_VLLM = ("vocab_size", "tokenizer_size", "samplers.chain", "spans.cached_tokens", "spans.cache_state")
OF_TRL = ("step", "metadata", "group_id", "group_size", "sample_index", *sorted(WITH_VERSIONS))
Words = tuple[str, ...]
WRITERS: dict[Callable[[Case], list[Rollout]], tuple[Words, Words]] = {
    by_vllm: ((), OF_VLLM),
    by_flat_vllm: (("samples", "version_change", "raw", "greedy"), OF_VLLM),
    by_chat: ((), ("samplers.chain",)),
    by_stream: ((), ("samplers.chain",)),
    by_completion: ((), ("samplers.chain",)),
    by_sglang: (("heads", "raw", "greedy"), ("spans.cached_tokens", "spans.cache_state", "samplers.extra")),
    by_llamacpp: (("samples", "abort", "empty", "prompt_too_long", "unknown_logprob", *NO_VERSIONS), ()),
    by_own_sampler: (("heads", "samples", "abort", "empty", "prompt_too_long", "stop_string", *NO_VERSIONS), ()),
    by_transformers: (("unknown_logprob", "seed", *LIMITS, *NO_VERSIONS), ("samplers.chain", "entropies")),
    by_trl: (("heads", "seed", "greedy", "version_change", *LIMITS), OF_TRL),
}
"""What renders a case in each engine's words; what that engine cannot say or do, and what it says beyond the cases."""


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_our_writers_pass(write: Callable[[Case], list[Rollout]]) -> None:
    lacks, says = WRITERS[write]
    left_out = check_writer(write, lacks=lacks, says=says)
    assert len(left_out) < len(CASES) - 6


def test_sglang_with_its_original_log_probs_passes_with_heads() -> None:
    says = WRITERS[by_sglang][1]
    check_writer(by_sglang, says=says, cases=[replace(case, kind="raw") for case in CASES])


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_our_writers_pass_on_requests_drawn_at_random(write: Callable[[Case], list[Rollout]]) -> None:
    lacks, says = WRITERS[write]

    @settings(FEW, max_examples=10)
    @given(st.lists(cases(), min_size=1, max_size=3))
    def run(drawn: list[Case]) -> None:
        check_writer(write, lacks=lacks, says=says, cases=drawn)

    run()


# a writer with a fault


def broken(**changes: Callable[[Rollout], Any]) -> Callable[[Case], list[Rollout]]:
    """Our writer for vLLM, with columns of its rows replaced."""

    def write(case: Case) -> list[Rollout]:
        return [
            msgspec.structs.replace(row, **{name: change(row) for name, change in changes.items()})
            for row in by_vllm(case)
        ]

    return write


def first_listed(case: Case) -> list[Rollout]:
    """Takes the likeliest token's log-prob for that of the drawn one."""
    made = []
    for row, output in zip(by_vllm(case), case.outputs, strict=True):
        values = [max(head.values()) for head in output.heads] or [value or 0.0 for value in output.logprobs]
        wrong = Known(np.array(values, np.float32), np.ones(len(values), bool))
        made.append(msgspec.structs.replace(row, logprobs=wrong, heads=None, ranks=None))
    return made


def without_end(case: Case) -> list[Rollout]:
    """Cuts the end token off, as some engines' texts do."""
    cut = [
        Output(
            tokens=o.tokens[:-1],
            finish=o.finish,
            logprobs=o.logprobs[:-1],
            heads=o.heads[:-1],
            versions=o.versions[:-1],
        )
        for o in case.outputs
    ]
    return by_vllm(replace(case, outputs=tuple(cut)))


FAULTS: dict[str, tuple[Callable[[Case], list[Rollout]], str]] = {
    "a log-prob that nobody said is made up": (
        broken(logprobs=lambda row: Known(row.logprobs.values, np.ones(len(row.logprobs.values), bool))),
        "one log-prob that the engine did not say: logprobs",
    ),
    "the kind is taken for granted": (broken(logprob_kind=lambda row: "behavior"), "raw distribution: logprob_kind"),
    "the first listed is taken for the drawn": (first_listed, "not the likeliest: logprobs"),
    "the end token is lost": (without_end, "end token, which is kept: tokens"),
    "an abort is an end": (broken(ending=lambda row: "terminated"), "an abort in the middle: ending"),
    "one version for all": (
        broken(weight_versions=lambda row: None), "weights that change after the second token: weight_versions",
    ),
    "samples are strangers": (broken(group_id=lambda row: row.rollout_id), "two samples of one prompt: group_id"),
    "no sampler": (broken(samplers=lambda row: None, spans=lambda row: None), "samplers: wanted what was asked for"),
    "a reply is dropped": (lambda case: by_vllm(case)[1:], "rollouts: wanted 1, got 0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_writer_with_a_fault_is_found_out(fault: str) -> None:
    write, said = FAULTS[fault]
    with pytest.raises(WriterFailure) as failed:
        check_writer(write, says=OF_VLLM)
    assert any(said in failure for failure in failed.value.failures), str(failed.value)


# a writer that makes something up


def every(row: Rollout, value: Any) -> Known:
    """The same at each action."""
    count = int(row.action_mask.sum())
    return Known(np.full(count, value), np.ones(count, bool))


def first(row: Rollout, value: Any) -> Any:
    """An array [A] of which each action has the same."""
    return np.full(int(row.action_mask.sum()), value)


INVENTED: dict[str, Any] = {
    "segment": 1, "segment_cause": "resumed", "run_id": "r", "prompt_id": "p", "environment": "e", "step": 0,
    "group_id": "g", "group_size": 1, "sample_index": 0, "tokenizer": "t", "chat_template": "t", "context_policy": "c",
    "tokenizer_size": 100, "vocab_size": 100, "trainable": lambda row: first(row, True),
    "token_bytes": lambda row: (b"",) * len(row.tokens), "weight_versions": lambda row: every(row, 0),
    "weight_version_min": 0, "weight_version_max": 0, "weight_version_source": "start_end",
    "support_counts": lambda row: first(row, 1), "support_tokens": lambda row: row.tokens[row.action_mask],
    "ranks": lambda row: every(row, 1), "entropies": lambda row: every(row, 0.0),
    "batch_rows": lambda row: every(row, 1), "routed_experts": lambda row: np.zeros(1, np.uint16), "routed_start": 0,
    "routed_count": 1, "routed_layers": 1, "routed_k": 1, "bootstrap": lambda row: row.ending == "truncated" or None,
    "replay_key": 1, "replay_sample": 0, "noise": "gumbel-philox4x32/1", "parent_rollout_id": "p", "parent_segment": 0,
    "fork_position": 1, "reward": 0.0, "reward_status": "timeout", "tool_seconds": 0.0, "queue_seconds": 0.0,
    "messages": "[]", "flags": (Flag(kind="odd"),), "metadata": {"a": "b"}, "extra": {"x_a": 1},
}  # fmt: skip
"""A value for each nullable column of a row that neither a case gives nor every engine has."""

OF_SPANS: dict[str, Any] = {
    "role": lambda span: "user" if span.is_action else "assistant", "origin": lambda span: "forced", "turn": 3,
    "weight_label": "7", "cache_state": "fresh", "cached_tokens": 0, "preemptions": 0,
    "media": (Media(kind="image"),), "edit": Edit(kind="truncate"), "raw_ref": "r", "state_ref": "s",
    "engine": Engine(name="other"), "logprob_kind": "raw", "head_kind": "raw", "replay_key": 1, "replay_sample": 0,
}  # fmt: skip

OF_SAMPLERS: dict[str, Any] = {
    "min_p": 0.25, "repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_tokens": 4,
    "logit_bias": (LogitBias(token=1, bias=1.0),), "bad_words": ("x",), "stop": ("x",), "stop_token_ids": (9,),
    "grammar": "{}", "chain": ("top_k",), "applied": False, "extra": {"a": "b"},
}  # fmt: skip

TOGETHER = (
    {"weight_version_min", "weight_version_max"}, {"support_counts", "support_tokens"},
    {"routed_experts", "routed_start", "routed_count", "routed_layers", "routed_k"},
    {"replay_key", "replay_sample", "noise"}, {"parent_rollout_id", "fork_position", "parent_segment"},
    {"reward", "reward_status"},
)  # fmt: skip
"""Columns of which a store takes none alone."""


def reference(case: Case) -> list[Rollout]:
    """What a writer that is right makes of a case, without an engine between."""
    group = "g" if len(case.outputs) > 1 else None
    made = []
    for n, output in enumerate(case.outputs):
        ranked = [top(output, at) for at in range(len(output.heads))]
        ids, values = ([pair[which] for pairs in ranked for pair in pairs] for which in (0, 1))
        heads = Heads(size=2, tokens=np.array(ids), logprobs=np.array(values)) if ranked else None
        weights = by_spans(len(output.tokens), spans(output)) if output.versions else None
        ending, reason = ENDINGS[output.finish]
        said = known(list(output.logprobs)) if output.tokens else Known(np.zeros(0), np.zeros(0, bool))
        reply = Reply(
            prompt=np.array(case.prompt), tokens=np.array(output.tokens, np.int64), logprobs=said,
            logprob_kind=case.kind, heads=heads, head_kind=case.kind if heads else None, weights=weights,
            ending=ending, ending_reason=reason,
            sampler=Sampler(
                temperature=case.temperature, top_k=case.top_k, top_p=case.top_p, max_tokens=case.max_tokens,
                seed=None if case.seed is None else case.seed + n,
            ),
            row={"group_id": group, "group_size": len(case.outputs), "sample_index": n} if group else {},
        )  # fmt: skip
        made.append(rollout(reply))
    return made


def test_a_writer_that_makes_nothing_up_passes_without_a_word_for_it() -> None:
    assert check_writer(reference) == ()


def inventing(change: Callable[[Rollout], Rollout]) -> Callable[[Case], list[Rollout]]:
    return lambda case: [change(row) for row in reference(case)]


def failures_of(write: Callable[[Case], Any], **options: Any) -> list[str]:
    with pytest.raises(WriterFailure) as failed:
        check_writer(write, **options)
    return failed.value.failures


def value_for(value: Any, record: Any) -> Any:
    return value(record) if callable(value) else value


@pytest.mark.parametrize("column", INVENTED)
def test_a_column_that_is_made_up_is_found_by_case_and_name(column: str) -> None:
    names = next((group for group in TOGETHER if column in group), {column})

    def change(row: Rollout) -> Rollout:
        new = {name: value_for(INVENTED[name], row) for name in sorted(names)}
        if "reward" in names:
            new["reward_status"] = "scored"
        return msgspec.structs.replace(row, **new)

    if column == "reward_status":
        names, change = {column}, lambda row: msgspec.structs.replace(row, reward_status="timeout")
    found = failures_of(inventing(change), cases=CASES[:5])  # the last of them is cut, the others end
    assert any(f"{case.name}: {column}: " in failure for case in CASES for failure in found), found[:3]


@pytest.mark.parametrize("column", OF_SPANS)
def test_what_is_made_up_of_a_span_is_found_by_case_and_name(column: str) -> None:
    def change(row: Rollout) -> Rollout:
        made = [
            msgspec.structs.replace(span, **{column: value_for(OF_SPANS[column], span)}) for span in row.spans or ()
        ]
        return msgspec.structs.replace(row, spans=tuple(made))

    found = failures_of(inventing(change), cases=CASES[:1])
    wanted = "replay_key" if column.startswith("replay_") else f"spans.{column}"  # a part of a key is refused as such
    assert any(f"{CASES[0].name}: " in failure and f"{wanted}: " in failure for failure in found), found[:3]


@pytest.mark.parametrize("column", OF_SAMPLERS)
def test_what_is_made_up_of_a_sampler_is_found_by_case_and_name(column: str) -> None:
    def change(row: Rollout) -> Rollout:
        made = [msgspec.structs.replace(one, **{column: OF_SAMPLERS[column]}) for one in row.samplers or ()]
        return msgspec.structs.replace(row, samplers=tuple(made))

    found = failures_of(inventing(change), cases=CASES[:1])
    assert any(f"{CASES[0].name}: samplers.{column}: wanted null" in failure for failure in found), found[:3]


def test_every_column_is_either_held_against_the_case_or_must_not_be_made_up() -> None:
    tested = {*INVENTED, *(f"spans.{name}" for name in OF_SPANS), *(f"samplers.{name}" for name in OF_SAMPLERS)}
    assert NAMES - tested == CHECKED | ITS_OWN


def test_heads_that_are_made_up_are_found() -> None:
    def change(row: Rollout) -> Rollout:
        count = int(row.action_mask.sum())
        if row.heads is not None or not count:
            return row
        made = Heads(size=1, tokens=np.zeros(count, np.int64), logprobs=np.full(count, -0.5))
        return msgspec.structs.replace(row, heads=made, head_kind="behavior")

    found = failures_of(inventing(change))
    assert (
        "one log-prob that the engine did not say: heads: wanted none, as the case gives none, got 3 entries" in found
    )


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("seed", None, "seed: wanted 7, got None"),
        ("stop_token_ids", (2,), "samplers.stop_token_ids: wanted null, as the case does not say it, got (2,)"),
    ],
)
def test_a_seed_that_is_dropped_and_an_end_token_nobody_asked_for_are_found(name: str, change: Any, said: str) -> None:
    def changed(row: Rollout) -> Rollout:
        made = [msgspec.structs.replace(one, **{name: change}) for one in row.samplers or ()]
        return msgspec.structs.replace(row, samplers=tuple(made))

    assert f"{CASES[0].name}: {said}" in failures_of(inventing(changed), cases=CASES[:1])
    check_writer(inventing(changed), lacks=("seed",) if name == "seed" else (), says=(f"samplers.{name}",))


def test_seeds_of_several_samples_may_be_unknown_and_none_may_be_another() -> None:
    def changed(seed: int | None) -> Callable[[Rollout], Rollout]:
        def change(row: Rollout) -> Rollout:
            made = [msgspec.structs.replace(one, seed=seed) for one in row.samplers or ()]
            return msgspec.structs.replace(row, samplers=tuple(made))

        return change

    cases = [case for case in CASES if len(case.outputs) > 1]
    check_writer(inventing(changed(None)), cases=cases)
    assert any("seed: wanted 8, got 7" in failure for failure in failures_of(inventing(changed(7)), cases=cases))


def test_versions_said_of_each_token_that_are_recorded_as_read_at_the_ends_are_found() -> None:
    def change(row: Rollout) -> Rollout:
        return row if row.weight_versions is None else msgspec.structs.replace(row, weight_version_source="start_end")

    assert failures_of(inventing(change)) == [
        "weights that change after the second token: weight_version_source: wanted per_token or per_span, got start_end"
    ]


def test_a_nan_where_the_engine_said_nothing_is_found() -> None:
    def change(row: Rollout) -> Rollout:
        if row.logprobs is None:
            return row
        values = [math.nan if value is None else value for value in row.logprobs.to_list()]
        return msgspec.structs.replace(row, logprobs=known(values))

    assert failures_of(inventing(change)) == [
        "one log-prob that the engine did not say: logprobs: wanted null where the engine said nothing, got NaN at [1]"
    ]


def test_one_id_for_all_samples_is_found() -> None:
    found = failures_of(inventing(lambda row: msgspec.structs.replace(row, rollout_id="same")))
    assert any("two samples of one prompt: " in failure and "rollout_id: " in failure for failure in found)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda case: None, "rollouts: wanted 1 of them, got NoneType"), (lambda case: [5], "got int"),
        (lambda case: 1 / 0, "the writer raises ZeroDivisionError: division by zero"),
        (lambda case: 5, "the writer raises TypeError: "), (lambda case: "text", "rollouts: wanted 1 of them, got str"),
    ],
)  # fmt: skip
def test_a_writer_that_breaks_is_told_with_each_case_that_broke_it(write: Any, said: str) -> None:
    found = failures_of(write)
    assert len(found) == len(CASES)
    assert all(failure.startswith(f"{case.name}: ") for failure, case in zip(found, CASES, strict=True))
    assert said in found[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lacks": ("seeds",)}, "lacks: wanted some of .*seed, .*got seeds"),
        ({"lacks": "abrot"}, "lacks: .*got abrot"),
        ({"says": ("entropy",)}, "says: wanted some of .*entropies.*got entropy"),
        ({"lacks": ("speech",), "cases": ()}, "lacks: .*got speech"),
    ],
)  # fmt: skip
def test_a_word_that_is_misspelt_is_refused(options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_writer(reference, **options)


def test_a_need_of_ones_own_case_is_a_word_for_what_is_lacking() -> None:
    own = replace(CASES[0], name="a call of a tool", needs=frozenset({"tools"}))
    assert check_writer(reference, lacks=("tools",), cases=[own]) == ("a call of a tool",)


def test_what_an_engine_cannot_say_must_be_null() -> None:
    with pytest.raises(WriterFailure, match="heads: wanted None"):
        check_writer(by_vllm, lacks=("heads",))
    with pytest.raises(WriterFailure, match="logprobs: wanted None"):
        check_writer(by_vllm, lacks=("logprobs",))


def test_cases_are_left_out_only_where_a_lack_is_named() -> None:
    assert check_writer(by_vllm, says=OF_VLLM) == ()
    assert set(check_writer(by_vllm, says=OF_VLLM, lacks=("abort", "raw"))) == {
        case.name for case in CASES if case.needs & {"abort", "raw"}
    }
