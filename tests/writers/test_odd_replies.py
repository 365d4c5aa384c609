"""Replies and requests written in odd ways: what was drawn is recorded, what does not fit is null or kept as it was
asked for, and a reply that does not hold all that was drawn is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rollstore import Rollout
from rollstore.schema import to_table
from rollstore.writers import llamacpp, openai, sglang, vllm
from rollstore.writers.gateway import Conversations
from rollstore.writers.gateway.call import Call
from tests.writers.sink import Sink
from tests.writers.upstream import chat, part, user
from tests.writers.vllm_objects import completion, dicts, output, params, spans

ASK = {"messages": [user("q")], "temperature": 1.0}


def recorded(request: dict[str, Any], *parts: Any) -> tuple[list[Rollout], Conversations]:
    """What a gateway records of one call."""
    sink = Sink()
    conversations = Conversations(sink)
    raw = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in parts]
    conversations.append(Call(request=json.dumps(request).encode(), parts=raw))
    conversations.close()
    return sink.rows, conversations


def reply(**choice: Any) -> Any:
    made = chat([1, 2], [50, 9])
    made["choices"][0].update(choice)
    return made


BESIDE = [
    {**reply(), "id": 5}, {**reply(), "usage": {"prompt_tokens_details": []}}, {**reply(), "metadata": "x"},
    {**reply(), "usage": 3}, {**reply(), "model": ["m"]}, {**reply(), "system_fingerprint": 7},
    reply(matched_stop=[1, 2]), reply(stop_reason=[1]), reply(message="text"),
    reply(message={"role": "assistant", "content": None, "tool_calls": {"id": 1}}),
    reply(message={"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}),
    reply(logprobs={"content": [{"token": "a", "logprob": -0.25, "top_logprobs": None}] * 2}),
]  # fmt: skip


@pytest.mark.parametrize("odd", BESIDE, ids=range(len(BESIDE)))
def test_what_stands_beside_the_tokens_may_be_anything(odd: Any) -> None:
    ((row,), _) = recorded(ASK, odd)
    assert (row.tokens.tolist(), row.logprobs.to_list()) == ([1, 2, 50, 9], [-0.25, -0.25])


LOOSE = [
    ("temperature", "0.5", 0.5), ("top_p", "0.5", 0.5), ("max_tokens", 16.0, 16), ("top_k", "5", 5), ("seed", "5", 5),
    ("seed", 5.0, 5), ("min_tokens", 1.0, 1), ("presence_penalty", 1, 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "asked", "column"), LOOSE)
def test_numbers_are_read_as_servers_read_them(name: str, asked: Any, column: Any) -> None:
    ((row,), _) = recorded({**ASK, name: asked}, reply())
    assert getattr(row.samplers[0], name) == column
    assert row.samplers[0].extra is None


UNFIT = [
    ("temperature", True), ("temperature", -1), ("top_p", 2), ("top_k", 2**40), ("max_tokens", 2**40), ("top_k", 2.5),
    ("presence_penalty", 1e300), ("max_tokens", "many"), ("stop", [1]), ("stop_token_ids", "5"),
    ("stop_token_ids", [-1]), ("logit_bias", {"a": 1}), ("logit_bias", {"1": "x"}), ("bad_words", {"a": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "asked"), UNFIT)
def test_a_setting_that_fits_no_column_is_kept_as_it_was_asked_for(name: str, asked: Any) -> None:
    ((row,), _) = recorded({**ASK, name: asked}, reply())
    assert row.tokens.tolist() == [1, 2, 50, 9]
    assert getattr(row.samplers[0], name) is None
    assert row.samplers[0].extra == {name: asked if isinstance(asked, str) else msgspec.json.encode(asked).decode()}


@pytest.mark.parametrize(
    "more", [{"response_format": "json"}, {"sampling_params": 3}, {"n": "1"}, {"n": [2]}, {"n": 1.0}]
)
def test_requests_of_odd_shapes_are_recorded(more: dict[str, Any]) -> None:
    ((row,), _) = recorded({**ASK, **more}, reply())
    assert row.samplers[0].temperature == 1.0


@pytest.mark.parametrize("content", [[], [{"token": "token_id:50", "logprob": -1.0}]])
def test_log_probs_that_do_not_fit_the_tokens_are_left_out_with_a_flag_and_the_tokens_stay(content: Any) -> None:
    ((row,), conversations) = recorded(ASK, reply(logprobs={"content": content}))
    assert (row.tokens.tolist(), row.logprobs) == ([1, 2, 50, 9], None)
    assert [flag.kind for flag in row.flags] == ["unplaced_logprobs"]
    assert conversations.counts["calls"] == 1
    with pytest.raises(ValueError, match="wanted 2 entries"):  # who reads one reply decides for himself
        openai.rollouts(reply(logprobs={"content": content}), ASK)


def test_a_log_prob_that_is_null_was_not_floored() -> None:
    listed = [{"token": "a", "logprob": None}, {"token": "b", "logprob": -9999.0}]
    ((row,), _) = recorded(ASK, reply(logprobs={"content": listed}))
    assert row.logprobs.to_list() == [None, None]
    assert [(flag.kind, flag.index) for flag in row.flags] == [("floored_logprob", 1)]


FIRST, LAST = part([50], "h", prompt=[1]), part([9], finish="stop")
BETWEEN = [b"ping", b"[]", b"1", {"id": "s", "choices": None, "usage": {"prompt_tokens": 1}}, {"choices": []}]


@pytest.mark.parametrize("between", BETWEEN)
def test_a_part_of_a_stream_that_says_nothing_changes_nothing(between: Any) -> None:
    ((row,), _) = recorded(ASK, FIRST, between, LAST)
    assert (row.tokens.tolist(), row.logprobs.to_list(), row.ending) == ([1, 50, 9], [-0.5, -0.5], "terminated")


def test_a_stream_that_breaks_inside_a_part_has_the_parts_before() -> None:
    ((row,), _) = recorded(ASK, FIRST, json.dumps(LAST).encode()[:-9])
    assert (row.tokens.tolist(), row.ending, row.ending_reason) == ([1, 50], "aborted", "engine_abort")


def test_the_events_of_a_stream_may_have_comments_names_and_data_over_several_lines() -> None:
    lines = json.dumps(FIRST, indent=1).splitlines()
    raw = ": hello\n\nevent: chunk\n" + "".join(f"data: {line}\r\n" for line in lines) + "\r\n"
    raw += f"data:{json.dumps(LAST)}\n\ndata: [DONE]\n\ndata: {{"
    assert [json.loads(one) for one in openai.events(raw)] == [FIRST, LAST]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_part_without_log_probs_has_unknown_ones(kind: str) -> None:
    parts = [FIRST, {"choices": [{"index": 0, "token_ids": [7, 8]}]}, LAST]
    if kind == "completion":
        for one in (FIRST, LAST):
            names = [entry["token"] for entry in one["choices"][0]["logprobs"]["content"]]
            said = {"tokens": names, "token_logprobs": [-0.5], "top_logprobs": [{names[0]: -0.5}]}
            parts = [{**p, "choices": [{**p["choices"][0], "logprobs": said}]} if p is one else p for p in parts]
    row = openai.rollouts(openai.joined(parts), ASK)[0]
    to_table([row])
    assert (row.tokens.tolist(), row.logprobs.to_list()) == ([1, 50, 7, 8, 9], [-0.5, None, None, -0.5])
    assert row.flags is None or not row.flags


SPOKEN = [
    {"delta": {"content": "h"}}, {"delta": {"reasoning": "h"}}, {"delta": {"reasoning_content": "h"}}, {"text": "h"},
    {"delta": {"tool_calls": [{"id": "1"}]}},
]  # fmt: skip


@pytest.mark.parametrize("said", SPOKEN)
def test_a_stream_that_was_cut_after_texts_without_ids_is_not_taken_for_one_that_drew_nothing(said: Any) -> None:
    start = part(None, prompt=[1])
    cut = {"error": {"message": "gone"}}
    ((row,), _) = recorded(ASK, start, cut)
    assert (row.tokens.tolist(), row.ending) == ([1], "aborted")
    rows, conversations = recorded(ASK, start, {"choices": [{"index": 0, **said}]}, cut)
    assert (rows, conversations.counts["not recorded"]) == ([], 1)


def test_replies_that_do_not_hold_all_that_was_drawn_are_refused() -> None:
    counted = {**reply(), "usage": {"completion_tokens": 5}}
    with pytest.raises(ValueError, match="wanted the 5 tokens that the usage counts, got 2"):
        openai.rollouts(counted, ASK)
    last = {"output_ids": [9], "meta_info": {"completion_tokens": 3, "finish_reason": {"type": "stop"}}}
    with pytest.raises(ValueError, match="wanted the 3 that were drawn, got 1"):
        sglang.rollouts(last, {"input_ids": [1]})
    final = {"tokens": [], "tokens_predicted": 3, "stop_type": "eos"}
    with pytest.raises(ValueError, match="wanted the 3 that were predicted, got 0"):
        llamacpp.rollouts(final, [1])


@pytest.mark.parametrize(
    ("meta", "ending", "version"),
    [({"finish_reason": "stop", "weight_version": 7}, "terminated", 7), ({"finish_reason": None}, "unknown", None)],
)
def test_sglang_may_say_its_finish_and_versions_in_other_types(meta: Any, ending: str, version: int | None) -> None:
    sampling = {"temperature": "0.5", "max_new_tokens": 8.0, "n": "1", "top_k": 2**40}
    (row,) = sglang.rollouts({"output_ids": [9], "meta_info": meta}, {"input_ids": [1], "sampling_params": sampling})
    to_table([row])
    how = row.samplers[0]
    assert (row.ending, row.weight_version_max, how.temperature, how.max_tokens) == (ending, version, 0.5, 8)
    assert how.extra == {"top_k": str(2**40)}


def test_a_setting_of_vllm_that_fits_no_column_does_not_cost_the_rollout() -> None:
    asked = params(temperature=1.0, top_k=2**40, max_tokens=2**40)
    (row,) = vllm.rollouts(output([1], completion([9])), asked, configuration=vllm.Configuration())
    to_table([row])
    assert (row.samplers[0].top_k, row.samplers[0].max_tokens) == (None, None)
    assert row.samplers[0].extra == {"top_k": str(2**40), "max_tokens": str(2**40)}


STREAMED = params(temperature=1.0, logprobs=1, output_kind=SimpleNamespace(name="DELTA"))


def streamed(*chunks: Any) -> Rollout:
    how = vllm.Configuration(logprobs_mode="processed_logprobs")
    (row,) = vllm.stream_rollouts(chunks, STREAMED, configuration=how)
    to_table([row])
    return row


def test_a_part_of_a_vllm_stream_without_log_probs_costs_no_other() -> None:
    listed = dicts([[(5, -1.0, 1)]])
    row = streamed(
        output([1], completion([5], logprobs=listed, finish_reason=None)), output([1], completion([6], logprobs=None))
    )
    assert (row.tokens.tolist(), row.logprobs.to_list()) == ([1, 5, 6], [-1.0, None])
    assert [(flag.kind, flag.index) for flag in row.flags] == [("sampled_id_missing", 1)]


def test_what_a_vllm_stream_said_once_holds() -> None:
    last = completion([6], finish_reason="stop", weight_versions=spans(("7", 0, 2)))
    row = streamed(
        output([1], completion([5], finish_reason=None)), output(None, last),
        output(None, completion([], finish_reason=None)),
    )  # fmt: skip
    assert (row.ending, row.ending_reason) == ("terminated", "stop_token")
    assert row.weight_versions.to_list() == [7, 7]


METRICS = [
    {"arrival_time": 1e9, "scheduled_ts": 1.0, "queued_ts": 2.0}, {"arrival_time": 1e18},
    {"arrival_time": float("nan")}, {},
]  # fmt: skip


@pytest.mark.parametrize("metrics", METRICS)
def test_counts_and_clocks_that_say_nothing_are_null(metrics: dict[str, float]) -> None:
    said = output([1], completion([5]), metrics=SimpleNamespace(**metrics), num_cached_tokens=-1)
    (row,) = vllm.rollouts(said, params(), configuration=vllm.Configuration())
    to_table([row])
    assert (row.queue_seconds, row.spans[-1].cached_tokens, row.spans[-1].preemptions) == (None, None, None)


def test_llamacpp_numbers_of_two_distributions_are_not_mixed() -> None:
    listed = [{"id": 5, "prob": 0.5, "top_probs": []}, {"id": 6, "logprob": -0.5, "top_logprobs": []}]
    for places, kind in ((listed, "behavior"), (listed[::-1], "raw")):
        tokens = [place["id"] for place in places]
        (row,) = llamacpp.rollouts({"tokens": tokens, "completion_probabilities": places}, [1])
        assert (row.logprob_kind, row.logprobs.known.tolist()) == (kind, [True, False])


def test_llamacpp_settings_may_be_written_in_other_ways() -> None:
    said = {
        "temperature": -1,
        "min_p": 2,
        "seed": -1,
        "logit_bias": [[5, 1.0], {"token": 6, "bias": -1}],
        "samplers": None,
    }
    (row,) = llamacpp.rollouts({"tokens": [5], "generation_settings": said, "model": 3}, [1])
    to_table([row])
    how = row.samplers[0]
    assert (how.temperature, how.min_p, how.seed, how.extra) == (0.0, None, None, {"min_p": "2"})
    assert [(bias.token, bias.bias) for bias in how.logit_bias] == [(5, 1.0), (6, -1.0)]


def test_an_encoder_decoders_sequences_are_no_prompt_and_reply() -> None:
    from rollstore.writers import transformers

    kind = type("GenerateEncoderDecoderOutput", (SimpleNamespace,), {})
    with pytest.raises(ValueError, match="encoder-decoder"):
        transformers.replies(kind(sequences=None), {}, attention_mask=[[1]])


NO_IDS = [([True, 4], r"\[0\]: wanted a token id, got True"), ([3, 0.5], r"\[1\]: wanted a token id, got 0.5")]


@pytest.mark.parametrize(("odd", "shown"), NO_IDS)
def test_a_value_that_counts_as_a_number_is_no_id_of_a_prompt(odd: Any, shown: str) -> None:
    said = {"output_ids": [9], "meta_info": {}}
    with pytest.raises(ValueError, match=f"input_ids{shown}"):
        sglang.rollouts(said, {"input_ids": odd})
    with pytest.raises(ValueError, match=f"prompt{shown}"):
        llamacpp.rollouts({"tokens": [9], "stop_type": "eos"}, odd)
