"""OpenAI-compatible replies become records, or are refused; recorded ones are of a vLLM 0.32 server."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstore import Engine, Rollout
from rollstore.schema import to_table
from rollstore.usable import Transform, usable_as_behavior
from rollstore.writers import openai

DATA = Path(__file__).parent.parent / "data" / "engines"
REQUEST = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "max_tokens": 6}


def body(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text())


def one(reply: Any, request: Any = None, **options: Any) -> Rollout:
    (rollout,) = openai.rollouts(reply, REQUEST if request is None else request, **options)
    to_table([rollout])
    return rollout


def reply(
    tokens: list[int], finish: str | None = "stop", prompt: list[int] | None = None, **choice: Any
) -> dict[str, Any]:
    """A completion of a server that is told nothing more."""
    entry = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": finish, **choice}
    return {"id": "c", "model": "smol", "prompt_token_ids": [1, 2] if prompt is None else prompt, "choices": [entry]}


def content(*places: tuple[str | int, float, list[tuple[str | int, float]]]) -> dict[str, Any]:
    def entry(token: str | int, logprob: float) -> dict[str, Any]:
        return {"token_id" if isinstance(token, int) else "token": token, "logprob": logprob}

    return {"content": [{**entry(t, lp), "top_logprobs": [entry(*pair) for pair in top]} for t, lp, top in places]}


def head(rollout: Rollout) -> list[tuple[int, float]]:
    assert rollout.heads is not None
    return list(zip(rollout.heads.tokens.tolist(), rollout.heads.logprobs.tolist(), strict=True))  # type: ignore[union-attr]


# recorded replies


def test_a_recorded_chat_has_ids_log_probs_and_no_heads_since_they_are_texts() -> None:
    recorded = body("chat")
    made = one((DATA / "chat.json").read_bytes(), {**REQUEST, "logprobs": True, "top_logprobs": 2})
    choice = recorded["choices"][0]
    assert made.tokens.tolist() == recorded["prompt_token_ids"] + choice["token_ids"]
    assert made.logprobs is not None
    assert made.logprobs.to_list() == [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert (made.heads, made.ranks, made.logprob_kind) == (None, None, "unknown")
    assert (made.ending, made.ending_reason) == ("truncated", "max_tokens")
    assert (made.policy, made.engine) == ("smol", Engine(name="vllm", version="0.32.0"))
    span = (made.spans or ())[-1]
    assert (span.api_finish, span.engine_finish, span.request_id) == ("length", None, "chatcmpl-9d6d074579f5ab62")


@pytest.mark.parametrize("kind", ["unknown", "behavior"])
def test_a_recorded_completion_has_heads_by_id_and_its_padding_only_where_it_may_mean_something(kind: str) -> None:
    request = {**REQUEST, "logprobs": 2}
    made = one(body("completion"), request, server=openai.Server(logprob_kind=kind))
    assert made.heads is not None
    assert made.heads.counts is not None or kind == "unknown"
    wanted = [(504, -0.27745547890663147), (60, -2.4390079975128174), (3575, 0.0)]
    assert head(made)[:3] == wanted
    assert ((0, -9999.0) in head(made)) == (kind == "unknown")
    flags = {(flag["kind"], flag["column"]) for flag in to_table([made]).to_pylist()[0]["flags"] or ()}
    assert flags == ({("floored_logprob", "head_logprobs")} if kind == "unknown" else set())


@pytest.mark.parametrize(("name", "version"), [("generate", None), ("generate2", 9)])
def test_a_recorded_generate_reply_has_ranks_and_weights_and_its_prompt_from_the_request(
    name: str, version: int | None
) -> None:
    recorded = body(name)
    asked = {"token_ids": [1, 4093, 198], "sampling_params": {"temperature": 0.8, "max_tokens": 6, "logprobs": 2}}
    made = one(recorded, asked)
    choice = recorded["choices"][0]
    assert made.tokens.tolist() == [1, 4093, 198, *choice["token_ids"]]
    assert made.ranks is not None
    assert set(made.ranks.to_list()) == {1}
    assert made.samplers is not None
    assert made.samplers[0].temperature == 0.8
    assert (made.spans or ())[-1].weight_label == choice["weight_versions"][0]["version"]
    versions = None if made.weight_versions is None else set(made.weight_versions.to_list())
    assert versions == (None if version is None else {version})


def test_without_ids_a_reply_is_refused() -> None:
    chat = body("chat")
    chat["choices"][0]["token_ids"] = None
    with pytest.raises(ValueError, match="return_token_ids"):
        one(chat)
    completion = body("completion")
    completion["choices"][0]["prompt_token_ids"] = None
    with pytest.raises(ValueError, match="prompt_token_ids: wanted token ids, got text"):
        one(completion, {**REQUEST, "prompt": "The capital"})
    assert one(completion, {**REQUEST, "prompt": [4, 5]}).tokens.tolist()[:2] == [4, 5]


def test_what_is_no_reply_is_refused() -> None:
    with pytest.raises(ValueError, match="choices"):
        openai.decode('{"choices": 3}')


# log-probs and heads


def test_a_chat_of_ids_is_cut_at_k_with_the_drawn_one_first_so_one_less_is_sure() -> None:
    logprobs = content(
        ("token_id:7", -3.0, [("token_id:7", -3.0), ("token_id:4", -0.5)]),
        ("token_id:8", -0.2, [("token_id:8", -0.2), ("token_id:9", -2.0)]),
    )
    made = one(reply([7, 8], logprobs=logprobs), {**REQUEST, "logprobs": True, "top_logprobs": 2})
    assert made.heads is not None
    assert (made.heads.size, head(made)) == (1, [(4, -0.5), (8, -0.2)])


def test_where_the_drawn_one_is_always_the_likeliest_the_whole_list_is_the_head() -> None:
    logprobs = content(("token_id:8", -0.2, [("token_id:8", -0.2), ("token_id:9", -2.0)]))
    made = one(reply([8], logprobs=logprobs), {**REQUEST, "logprobs": True, "top_logprobs": 2})
    assert made.heads is not None
    assert (made.heads.size, head(made)) == (2, [(8, -0.2), (9, -2.0)])


def test_the_drawn_one_that_a_completion_adds_to_the_k_likeliest_is_no_part_of_the_head() -> None:
    logprobs = {
        "tokens": ["token_id:7"],
        "token_logprobs": [-3.0],
        "top_logprobs": [{"token_id:7": -3.0, "token_id:4": -0.5, "token_id:5": -1.5}],
    }
    made = one(reply([7], logprobs=logprobs), {**REQUEST, "logprobs": 2})
    assert head(made) == [(4, -0.5), (5, -1.5)]


def test_a_log_prob_of_another_token_is_refused() -> None:
    logprobs = content(("token_id:9", -3.0, []))
    with pytest.raises(ValueError, match="wanted one of token 7 at place 0, got one of token 9"):
        one(reply([7], logprobs=logprobs))


def test_log_probs_that_are_not_one_a_token_are_refused_with_both_lengths() -> None:
    logprobs = content(("a", -0.1, []), ("b", -0.2, []))
    with pytest.raises(ValueError, match="wanted 3 entries, one for each drawn token, got 2"):
        one(reply([7, 8, 9], logprobs=logprobs))


def test_a_stand_in_for_a_drawn_token_is_unknown_and_flagged() -> None:
    made = one(reply([7, 8], logprobs=content(("a", -9999.0, []), ("b", -0.2, []))))
    assert made.logprobs is not None
    assert made.logprobs.to_list() == [None, -0.2]
    assert [(flag.kind, flag.index) for flag in made.flags or ()] == [("floored_logprob", 0)]


def test_the_kind_is_what_the_caller_knows_of_the_server_except_of_a_greedy_pick() -> None:
    server = openai.Server(logprob_kind="behavior")
    logprobs = content(("a", -0.1, []))
    made = one(reply([7], logprobs=logprobs), server=server)
    assert made.logprob_kind == "behavior"
    greedy = one(reply([7], logprobs=logprobs), {"temperature": 0}, server=server)
    assert greedy.logprob_kind == "raw"
    assert not usable_as_behavior("raw", greedy.samplers[0], Transform()).usable  # type: ignore[index]


# the sampler


def test_what_a_request_leaves_out_is_null_unless_the_servers_defaults_are_known() -> None:
    made = one(reply([7]), {})
    assert made.samplers is not None
    assert (made.samplers[0].temperature, made.samplers[0].top_k, made.samplers[0].max_tokens) == (None, None, None)
    server = openai.Server(defaults={"temperature": 0.6, "top_k": -1})
    filled = one(reply([7]), {"max_completion_tokens": 5, "max_tokens": 9}, server=server)
    assert filled.samplers is not None
    assert (filled.samplers[0].temperature, filled.samplers[0].top_k, filled.samplers[0].max_tokens) == (0.6, 0, 5)


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"structured_outputs": {"regex": "a+"}},
        {"allowed_token_ids": [4]},
    ],
)
def test_whatever_takes_tokens_away_stands_as_a_grammar(asked: dict[str, Any]) -> None:
    made = openai.sampler(asked, openai.Server())
    assert made.grammar is not None
    assert json.loads(made.grammar) == asked


def test_a_text_format_and_a_free_choice_of_tools_take_nothing_away() -> None:
    asked = {"response_format": {"type": "text"}, "tool_choice": "auto"}
    assert openai.sampler(asked, openai.Server()).grammar is None


@pytest.mark.parametrize(("engine", "seeds"), [("vllm", [5, 6]), ("sglang", [None, None])])
def test_the_seeds_of_n_outputs_are_known_of_vllm_only(engine: str, seeds: list[int | None]) -> None:
    two = reply([7])
    two["choices"].append({**two["choices"][0], "index": 1})
    made = openai.rollouts(two, {"n": 2, "seed": 5}, server=openai.Server(engine=Engine(name=engine)))
    assert [rollout.samplers[0].seed for rollout in made] == seeds  # type: ignore[index]
    assert [rollout.sample_index for rollout in made] == [0, 1]
    assert len({rollout.group_id for rollout in made}) == 1
    chain = made[0].samplers[0].chain  # type: ignore[index]
    assert chain == (("temperature", "min_p", "top_k", "top_p") if engine == "vllm" else None)


def test_samples_of_one_prompt_are_a_group_and_those_of_another_prompt_another() -> None:
    four = reply([7])
    choice = four["choices"][0]
    four["choices"] = [{**choice, "index": n, "prompt_token_ids": [n // 2]} for n in range(4)]
    made = openai.rollouts(four, {"n": 2, "prompt": [[0], [1]]})
    first, second = ({rollout.group_id for rollout in half} for half in (made[:2], made[2:]))
    assert len(first) == len(second) == 1
    assert first != second
    assert {rollout.group_size for rollout in made} == {2}


# how it ended


@pytest.mark.parametrize(
    ("count", "finish", "wanted"),
    [
        (64, "tool_calls", ("truncated", "max_tokens")),
        (40, "tool_calls", ("unknown", None)),
        (64, "length", ("truncated", "max_tokens")),
        (40, "stop", ("terminated", "stop_token")),
        (40, "content_filter", ("truncated", "refused")),
        (40, "abort", ("aborted", "engine_abort")),
        (1, None, ("unknown", "unknown")),
    ],
)
def test_a_call_of_a_tool_does_not_hide_a_cut_and_does_not_end_the_task(
    count: int, finish: str | None, wanted: tuple[str, str | None]
) -> None:
    made = one(reply(list(range(3, 3 + count)), finish), {"max_tokens": 64})
    assert (made.ending, made.ending_reason) == wanted
    assert (made.spans or ())[-1].api_finish == finish
    assert made.bootstrap is None or wanted[0] == "terminated"


def test_a_prompt_that_the_server_had_no_room_for_is_kept_whole() -> None:
    made = one(reply([], "length", prompt=list(range(1, 13))), server=openai.Server(context=8))
    row = to_table([made]).to_pylist()[0]
    assert (len(made.tokens), row["logprobs"]) == (12, [])
    assert (made.ending, made.ending_reason) == ("truncated", "prompt_too_long")


def test_a_stop_string_of_either_server_is_told_from_a_stop_token() -> None:
    assert one(reply([7], stop_reason="\n")).ending_reason == "stop_string"
    assert one(reply([7], matched_stop="\n")).ending_reason == "stop_string"
    assert one(reply([7], matched_stop=2)).ending_reason == "stop_token"


def test_a_reply_that_echoes_its_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="echoes its prompt"):
        one(reply([1, 2, 7]), {"echo": True})


# weights, cache, routing


def test_a_label_read_after_the_reply_says_only_which_is_the_newest() -> None:
    made = one(reply([7, 8]), server=openai.Server(after="step-8"))
    row = to_table([made]).to_pylist()[0]
    assert (row["weight_versions"], row["weight_version_min"], row["weight_version_max"]) == (None, None, 8)
    assert row["weight_version_source"] == "read_at_completion"
    assert row["spans"][-1]["weight_label"] == "step-8"


def test_labels_read_before_and_after_give_the_oldest_and_the_newest() -> None:
    made = one(reply([7, 8]), server=openai.Server(before="7", after="8"))
    row = to_table([made]).to_pylist()[0]
    assert (row["weight_versions"], row["weight_version_min"], row["weight_version_max"]) == (None, 7, 8)
    assert (row["weight_version_source"], row["spans"][0]["weight_label"]) == ("start_end", "7")


def test_the_weights_of_an_sglang_server_are_read_where_it_puts_them() -> None:
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    made = one({**reply([7, 8]), "metadata": {"weight_version": "8", "weight_versions": spans}})
    assert made.weight_versions is not None
    assert made.weight_versions.to_list() == [7, 8]
    late = one({**reply([7, 8]), "metadata": {"weight_version": "8"}})
    assert (late.weight_version_source, late.weight_version_max) == ("read_at_completion", 8)


def npy(array: Any) -> str:
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode()


def test_routing_comes_as_an_array_and_never_as_a_pickle() -> None:
    made = one(reply([7, 8], routed_experts=npy(np.arange(6, dtype=np.uint8).reshape(3, 1, 2))))
    assert made.routed_experts is not None
    assert made.routed_experts.tolist() == [0, 1, 2, 3, 4, 5]
    assert (made.routed_start, made.routed_count) == (0, 3)
    with pytest.raises(ValueError, match="allow_pickle"):
        one(reply([7, 8], routed_experts=npy(np.array([{}], object))))


def test_cached_tokens_and_the_kept_support_are_recorded() -> None:
    usage = {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    made = one({**reply([7], sampling_mask=[[7, 9]]), "usage": usage})
    assert (made.spans or ())[-1].cached_tokens == 1
    assert made.support_tokens is not None
    assert made.support_tokens.tolist() == [7, 9]


# streams


def stream() -> list[dict[str, Any]]:
    first = {
        "id": "s",
        "model": "smol",
        "prompt_token_ids": [1, 2],
        "choices": [{"index": 0, "delta": {"role": "assistant"}}],
    }
    parts = [
        {"index": 0, "delta": {"content": "a"}, "token_ids": [7], "logprobs": content(("a", -0.1, []))},
        {
            "index": 0,
            "delta": {"content": ""},
            "token_ids": [8, 9],
            "logprobs": content(("b", -0.2, []), ("c", -0.3, [])),
        },
        {"index": 0, "delta": {}, "token_ids": [2], "logprobs": content(("", -0.4, [])), "finish_reason": "stop"},
    ]
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}}
    return [first, *({"id": "s", "choices": [part]} for part in parts), usage]


def test_the_parts_of_a_stream_are_the_whole() -> None:
    raw = b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in stream()) + b"data: [DONE]\n\n"
    made = one(openai.joined(openai.events(raw)))
    assert made.tokens.tolist() == [1, 2, 7, 8, 9, 2]
    assert made.logprobs is not None
    assert made.logprobs.to_list() == [-0.1, -0.2, -0.3, -0.4]
    assert (made.ending, (made.spans or ())[-1].cached_tokens, made.policy) == ("terminated", 1, "smol")


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_stream_that_was_cut_gives_what_came_whole_and_no_ending(newline: bytes) -> None:
    raw = b"".join(b"data: " + json.dumps(part).encode() + newline * 2 for part in stream()[:3]) + b'data: {"choi'
    made = one(openai.joined(openai.events(raw)))
    assert (made.tokens.tolist(), made.ending) == ([1, 2, 7, 8, 9], "unknown")


def test_the_samples_of_one_stream_are_kept_apart() -> None:
    parts = [{"prompt_token_ids": [1], "choices": [{"index": n, "token_ids": [5 + n]}]} for n in (1, 0, 1)]
    made = openai.rollouts(openai.joined(parts), {"n": 2})
    assert [rollout.tokens.tolist() for rollout in made] == [[1, 5], [1, 6, 6]]


def piece(tokens: list[int] | None, delta: Any = None, **more: Any) -> dict[str, Any]:
    listed = None if tokens is None else content(*((f"token_id:{t}", -0.1, []) for t in tokens))
    choice = {
        "index": 0,
        "delta": {"content": "a"} if delta is None else delta,
        "token_ids": tokens,
        "logprobs": listed,
    }
    return {"prompt_token_ids": [1, 2], "choices": [{**choice, **more}]}


BEGIN, FINAL = piece([5]), piece([6], finish_reason="stop")
TOOLS = {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}
HOLES = [
    piece(None), piece(None, TOOLS), piece(None, {"reasoning": "hm"}), piece(None, {"reasoning_content": "hm"}),
    {"choices": [{"index": 0, "text": "a"}]}, piece([]),
    piece(None, {}, logprobs=content(("token_id:9", -0.1, []))),
]  # fmt: skip


@pytest.mark.parametrize("hole", HOLES)
@pytest.mark.parametrize("usage", [None, 3])
def test_a_stream_with_a_part_that_has_text_and_no_ids_is_refused(hole: dict[str, Any], usage: int | None) -> None:
    counted = [] if usage is None else [{"choices": [], "usage": {"completion_tokens": usage}}]
    for parts in ([BEGIN, hole, FINAL], [BEGIN, FINAL, hole], [hole, BEGIN, FINAL]):
        with pytest.raises(ValueError, match=r"stream: choice 0: part \d has text and no token ids"):
            openai.joined([*parts, *counted])


@pytest.mark.parametrize("said", HOLES[:6])
def test_a_part_with_text_and_no_ids_is_no_hole_where_the_usage_counts_the_ids_that_came(said: dict[str, Any]) -> None:
    made = one(openai.joined([BEGIN, said, FINAL, {"choices": [], "usage": {"completion_tokens": 2}}]))
    assert (made.tokens.tolist(), made.ending) == ([1, 2, 5, 6], "terminated")


@pytest.mark.parametrize("said", HOLES[:6])
def test_text_that_a_parser_held_back_may_come_without_ids(said: dict[str, Any]) -> None:
    made = one(openai.joined([BEGIN, piece([7], {"content": ""}), said, FINAL]))
    assert made.tokens.tolist() == [1, 2, 5, 7, 6]


@pytest.mark.parametrize(
    "silent",
    [
        piece(None, {"role": "assistant", "content": ""}), piece(None, {}), {"choices": [{"index": 0}]},
        {"choices": [], "usage": {"prompt_tokens": 2}}, {"choices": [], "usage": None}, {"choices": None},
        piece(None, {"tool_calls": [], "content": None}),
    ],
)  # fmt: skip
def test_parts_without_text_need_no_ids(silent: dict[str, Any]) -> None:
    for parts in ([silent, BEGIN, FINAL], [BEGIN, silent, FINAL], [BEGIN, FINAL, silent]):
        assert one(openai.joined(parts)).tokens.tolist() == [1, 2, 5, 6]


def test_counts_that_come_with_each_part_are_of_one_choice_so_far() -> None:
    parts = [
        {"prompt_token_ids": [1], "choices": [{"index": n, "token_ids": [t]}], "usage": {"completion_tokens": count}}
        for n, t, count in ((0, 5, 1), (1, 7, 1), (0, 6, 2))
    ]
    for last in ([], [{"choices": [], "usage": {"completion_tokens": 3}}]):
        made = openai.rollouts(openai.joined([*parts, *last]), {"n": 2})
        assert [rollout.tokens.tolist() for rollout in made] == [[1, 5, 6], [1, 7]]
    with pytest.raises(ValueError, match="the 4 tokens that the usage counts, got 3"):
        openai.rollouts(openai.joined([*parts, {"choices": [], "usage": {"completion_tokens": 4}}]), {"n": 2})


# what the usage counts


@pytest.mark.parametrize("vllm", [False, True])
@pytest.mark.parametrize(("tokens", "counted"), [([5, 6], 3), ([5], 2), ([], 1), ([], 5)])
def test_a_reply_with_one_token_less_than_the_usage_counts_is_refused(
    tokens: list[int], counted: int, vllm: bool
) -> None:
    said = {**reply(tokens), "usage": {"completion_tokens": counted}}
    server = openai.Server(engine=Engine(name="vllm")) if vllm else None
    with pytest.raises(ValueError, match=rf"wanted the {counted} tokens that the usage counts, got {len(tokens)}"):
        one(said, server=server)


def test_vllm_counts_exactly_and_another_engine_may_leave_the_end_token_out() -> None:
    said = {**reply([5, 6]), "usage": {"completion_tokens": 1}}
    assert one(said).tokens.tolist() == [1, 2, 5, 6]
    with pytest.raises(ValueError, match="wanted the 1 tokens that the usage counts, got 2: parts came twice"):
        one({**said, "system_fingerprint": "vllm-0.32.0-x"})
    with pytest.raises(ValueError, match="parts came twice"):
        one({**reply([5, 6, 7]), "usage": {"completion_tokens": 1}})


@pytest.mark.parametrize("said", [{"text": "hello"}, {"message": {"content": "hello"}}, {"message": TOOLS}])
def test_text_without_any_ids_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="wanted the ids of the text that was drawn, got none"):
        one(reply([], **said))
    assert one(reply([])).tokens.tolist() == [1, 2]


# which output is which


@pytest.mark.parametrize(
    ("indices", "request_", "why"),
    [
        ([0, 0], {"n": 2}, "wanted each index once and none below 0, got \\[0, 0\\]"),
        ([0, -1], {"n": 2}, "none below 0"),
        ([0, 7], {"n": 2}, "wanted indices below the 2 outputs that were asked for, got 7"),
        ([1], {}, "below the 1 outputs"),
        ([4], {"n": 2, "prompt": [[1], [2]]}, "below the 4 outputs"),
        ([2], {"n": 2, "prompt": [1, 2]}, "below the 2 outputs"),
        ([2], {"prompt": ["a", "b"]}, "below the 2 outputs"),
    ],
)
def test_an_index_that_no_output_can_have_is_refused(indices: list[int], request_: Any, why: str) -> None:
    said = {**reply([5]), "choices": [{**reply([5])["choices"][0], "index": index} for index in indices]}
    with pytest.raises(ValueError, match=why):
        openai.rollouts(said, request_)


def test_two_choices_of_one_index_in_one_part_of_a_stream_are_refused() -> None:
    with pytest.raises(ValueError, match="each index once"):
        openai.joined([{"choices": [{"index": 0, "token_ids": [5]}, {"index": 0, "token_ids": [6]}]}])


def test_weights_that_were_set_back_are_older_after_the_reply_than_before() -> None:
    made = one(reply([7, 8]), server=openai.Server(before="8", after="7"))
    assert (made.weight_version_min, made.weight_version_max) == (7, 8)


@pytest.mark.parametrize("where", ["messages", "prompt"])
def test_settings_in_the_sampling_params_of_a_chat_or_completion_draw_nothing(where: str) -> None:
    how = openai.sampler({where: [], "temperature": 0.7, "sampling_params": {"temperature": 0.2}}, openai.Server())
    assert how.temperature == 0.7


@pytest.mark.parametrize("token", [-1, 2**31])
def test_a_number_that_is_no_token_id_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match=f"wanted token ids from 0 to 2147483647, got {token}"):
        one(reply([token]))
