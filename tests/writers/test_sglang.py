"""SGLang's `/generate` replies, in the shape of its source, become records that say what they are."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from rollstore import Rollout
from rollstore.schema import to_table
from rollstore.usable import Transform, usable_as_behavior
from rollstore.writers import sglang

SAMPLING = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 4}


def reply(tokens: list[int] | None, finish: Any = None, **meta: Any) -> dict[str, Any]:
    said = {"id": "r", "finish_reason": finish or {"type": "stop", "matched": 2}, "prompt_tokens": 2, **meta}
    return {"text": "", "output_ids": tokens, "meta_info": said}


def one(body: Any, sampling: dict[str, Any] | None = None, **options: Any) -> Rollout:
    request = {
        "input_ids": [1, 3],
        "sampling_params": SAMPLING if sampling is None else sampling,
        "top_logprobs_num": 2,
    }
    (rollout,) = sglang.rollouts(body, request, **options)
    to_table([rollout])
    return rollout


def listed(*pairs: tuple[int, float]) -> list[list[Any]]:
    return [[logprob, token, None] for token, logprob in pairs]


def test_the_usual_log_probs_are_tempered_and_no_denominator_under_a_filter() -> None:
    made = one(reply([7, 2], output_token_logprobs=listed((7, -0.5), (2, -1.0))))
    assert made.logprobs is not None
    assert (made.logprobs.to_list(), made.logprob_kind) == ([-0.5, -1.0], "tempered")
    everything = Transform(temperature=True, filters=True, penalties=True)
    assert made.samplers is not None
    verdict = usable_as_behavior(made.logprob_kind, made.samplers[0], everything)
    assert not verdict.usable
    assert "top_p=0.9" in verdict.reason


def test_the_sampling_log_probs_are_behavior_and_come_with_the_support() -> None:
    made = one(
        reply(
            [7, 2],
            output_token_logprobs=listed((7, -0.5), (2, -1.0)),
            output_token_sampling_logprobs=[-0.4, 0.0],
            output_token_sampling_mask=[[7, 9], None],
            output_top_logprobs=[listed((7, -0.5), (9, -2.0)), listed((2, -1.0), (4, -1.5))],
        )
    )
    assert made.logprobs is not None
    assert (made.logprobs.to_list(), made.logprob_kind, made.head_kind) == ([-0.4, 0.0], "behavior", "tempered")
    assert made.support_counts is not None
    assert made.support_tokens is not None
    assert (made.support_counts.tolist(), made.support_tokens.tolist()) == ([2, 0], [7, 9])
    assert made.heads is not None
    assert made.heads.tokens is not None
    assert (made.heads.size, made.heads.tokens.tolist()) == (2, [7, 9, 2, 4])


@pytest.mark.parametrize(
    ("more", "kind"), [({}, "raw"), ({"frequency_penalty": 0.5}, "unknown"), ({"regex": "a"}, "unknown")]
)
def test_the_original_log_probs_are_raw_where_nothing_else_moved_the_logits(more: dict[str, Any], kind: str) -> None:
    server = sglang.Server(original_logprobs=True)
    made = one(reply([7], output_token_logprobs=listed((7, -0.5))), {**SAMPLING, **more}, server=server)
    assert made.logprob_kind == kind


def test_a_greedy_pick_is_no_tempered_draw() -> None:
    made = one(reply([7], output_token_logprobs=listed((7, -0.5))), {"temperature": 0.0})
    assert made.logprob_kind == "raw"


@pytest.mark.parametrize(
    ("deterministic", "given", "seed", "extra"),
    [
        (None, 7, None, {"sampling_seed": "7", "sampling_seed_heeded": "unknown"}),
        (False, 7, None, {"sampling_seed": "7", "sampling_seed_heeded": "false"}),
        (True, 7, 7, None),
        (True, None, 42, None),
        (False, None, None, None),
    ],
)
def test_a_seed_counts_only_where_the_server_heeds_it(
    deterministic: bool | None, given: int | None, seed: int | None, extra: Any
) -> None:
    made = sglang.sampler({"sampling_seed": given}, sglang.Server(deterministic=deterministic))
    assert (made.seed, made.extra) == (seed, extra)


def test_what_neither_the_request_nor_the_servers_defaults_say_is_null() -> None:
    made = sglang.sampler({"top_k": -1, "max_new_tokens": 3}, sglang.Server(defaults={"temperature": 0.6}))
    assert (made.temperature, made.top_k, made.top_p, made.max_tokens) == (0.6, 0, None, 3)


@pytest.mark.parametrize(
    ("finish", "count", "wanted"),
    [
        ({"type": "stop", "matched": 2}, 2, ("terminated", "stop_token")),
        ({"type": "stop", "matched": [2, 5]}, 2, ("terminated", "stop_token")),
        ({"type": "stop", "matched": "\n"}, 2, ("terminated", "stop_string")),
        ({"type": "length", "length": 4}, 4, ("truncated", "max_tokens")),
        ({"type": "length", "length": 3}, 3, ("truncated", "context_limit")),
        ({"type": "abort", "message": "Abort in waiting queue"}, 0, ("aborted", "engine_abort")),
    ],
)
def test_the_finish_says_how_it_ended(finish: Any, count: int, wanted: tuple[str, str]) -> None:
    made = one(reply(list(range(5, 5 + count)), finish), server=sglang.Server(context=5))
    assert (made.ending, made.ending_reason) == wanted
    assert (made.spans or ())[-1].engine_finish == finish["type"]
    assert (made.logprobs is not None) == (count == 0)  # an empty list is not one that was left out


def test_an_output_that_has_not_ended_is_unknown() -> None:
    body = reply([7])
    body["meta_info"]["finish_reason"] = None
    assert (one(body).ending, one(body).ending_reason) == ("unknown", "unknown")


def test_spans_of_versions_become_versions_of_tokens() -> None:
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    made = one(reply([7, 2], weight_version="8", weight_versions=spans, cached_tokens=0), cache_state="retained")
    assert made.weight_versions is not None
    assert made.weight_versions.to_list() == [7, 8]
    assert [span.cache_state for span in made.spans or ()] == [None, "fresh", "retained"]


def test_the_version_alone_is_that_of_the_server_when_it_replied() -> None:
    row = to_table([one(reply([7, 2], weight_version="step-8"))]).to_pylist()[0]
    assert (row["weight_versions"], row["weight_version_min"], row["weight_version_max"]) == (None, None, 8)
    assert row["weight_version_source"] == "read_at_completion"


def test_an_empty_list_of_versions_hides_no_label() -> None:
    row = to_table([one(reply([7, 2], weight_version="step-8", weight_versions=[]))]).to_pylist()[0]
    assert (row["weight_version_max"], row["weight_version_source"]) == (8, "read_at_completion")
    assert row["spans"][-1]["weight_label"] == "step-8"


def test_retractions_cached_tokens_and_the_request_are_recorded() -> None:
    span = (one(reply([7], num_retractions=1, cached_tokens=2)).spans or ())[-1]
    assert (span.preemptions, span.cached_tokens, span.request_id) == (1, 2, "r")


def test_routing_needs_the_shape_that_the_reply_leaves_out() -> None:
    text = base64.b64encode(np.arange(12, dtype=np.int32).tobytes()).decode()
    assert one(reply([7, 2], routed_experts=text)).routed_experts is None
    made = one(reply([7, 2], routed_experts=text), server=sglang.Server(routed=(2, 2)))
    assert made.routed_experts is not None
    assert made.routed_experts.tolist() == list(range(12))
    assert (made.routed_start, made.routed_count, made.routed_layers, made.routed_k) == (0, 3, 2, 2)
    with pytest.raises(ValueError, match="wanted rows of 5 layers x 1 experts, got 12 ids"):
        one(reply([7, 2], routed_experts=text), server=sglang.Server(routed=(5, 1)))


def test_ids_come_with_the_log_probs_too_but_never_from_text() -> None:
    assert one(reply(None, output_token_logprobs=listed((7, -0.5)))).tokens.tolist() == [1, 3, 7]
    with pytest.raises(ValueError, match="output_ids: wanted token ids, got none"):
        one(reply(None))
    with pytest.raises(ValueError, match="input_ids: wanted token ids, got none"):
        sglang.rollouts(reply([7]), {"text": "hi"})
    assert sglang.rollouts({**reply([7]), "prompt_token_ids": [4]}, {"text": "hi"})[0].tokens.tolist() == [4, 7]


@pytest.mark.parametrize("name", ["output_token_logprobs", "output_token_sampling_logprobs", "output_top_logprobs"])
def test_columns_that_are_not_one_a_token_are_refused_with_both_lengths(name: str) -> None:
    value = {"output_token_logprobs": listed((7, -0.5)), "output_token_sampling_logprobs": [-0.5]}.get(name, [[]])
    with pytest.raises(ValueError, match=f"{name}: wanted 2 entries, one for each drawn token, got 1"):
        one(reply([7, 2], **{name: value}))


def test_log_probs_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted one of token 2 at place 1, got one of token 9"):
        one(reply([7, 2], output_token_logprobs=listed((7, -0.5), (9, -1.0))))


def placed(indices: list[Any], asked: int = 2, **request: Any) -> list[Rollout]:
    """Outputs that drew the token 10 more than their index, of a request for so many samples of one prompt."""
    outputs = [{**reply([10 + n if index is None else 10 + index]), "index": index} for n, index in enumerate(indices)]
    return sglang.rollouts(outputs, {"input_ids": [1], "sampling_params": {"n": asked}, **request})


@pytest.mark.parametrize("indices", [[None, None], [0, 1], [1, 0], [1]])
def test_samples_are_placed_by_the_index_that_the_server_says(indices: list[Any]) -> None:
    for made in placed(indices):
        assert made.tokens.tolist() == [1, 10 + made.sample_index]


@pytest.mark.parametrize("indices", [[0, 0], [-1, 0], [0, 2], [None, 1], [5, 6]])
def test_outputs_with_indices_that_cannot_be_are_refused(indices: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"index: wanted another one from 0 to 1 of each output, got \["):
        placed(indices)


@pytest.mark.parametrize(
    ("outputs", "asked", "request_"),
    [
        (1, 2, {}), (3, 2, {}), (2, 1, {}), (2, 1, {"input_ids": [[1]]}), (3, 2, {"input_ids": None, "text": "hi"}),
        (0, 1, {}),
    ],
)  # fmt: skip
def test_another_number_of_outputs_than_was_asked_for_is_refused(outputs: int, asked: int, request_: Any) -> None:
    with pytest.raises(ValueError, match=f"outputs: wanted .*{asked} of each prompt, got {outputs}"):
        placed([None] * outputs, asked, **request_)


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({"output_top_logprobs": [[[-0.5]], []]}, r"output 0: meta_info.output_top_logprobs\[0\]\[0\]: wanted"),
        ({"output_token_logprobs": [["a", 7, None], [-0.5, 2, None]]}, r"wanted float \| null, got str"),
        ({"output_token_sampling_mask": [[2**70], None]}, "output_token_sampling_mask.*wanted"),
        ({"routed_experts": "x"}, "routed_experts: wanted base64 of int32 ids, got 1 other characters"),
        ({"routed_experts": "AAA="}, "routed_experts: wanted base64 of int32 ids, got 4 other characters"),
    ],
)
def test_what_an_output_says_in_another_shape_is_named(meta: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        one(reply([7, 2], **meta), server=sglang.Server(routed=(1, 1)))


def test_settings_and_prompts_of_another_number_are_refused() -> None:
    request: dict[str, Any] = {"input_ids": [[1], [2]], "sampling_params": [{}, {}, {}]}
    with pytest.raises(ValueError, match="sampling_params: wanted one for all or 2, one for each prompt, got 3"):
        sglang.rollouts([reply([7]), reply([8])], request)


def test_a_batch_has_a_prompt_and_samples_for_each_place() -> None:
    body = json.dumps([reply([7]), reply([8]), reply([9]), reply([10])])
    request = {"input_ids": [[1], [2]], "sampling_params": {"n": 2, "temperature": 1.0}}
    made = sglang.rollouts(body, request)
    assert [rollout.tokens.tolist() for rollout in made] == [[1, 7], [1, 8], [2, 9], [2, 10]]
    assert [rollout.sample_index for rollout in made] == [0, 1, 0, 1]
    first, second = ({rollout.group_id for rollout in half} for half in (made[:2], made[2:]))
    assert len(first) == len(second) == 1
    assert first != second
