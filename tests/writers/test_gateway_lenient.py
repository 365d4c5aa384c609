"""A field of the wrong type beside the tokens costs that field: the rest of the reply is recorded, and it is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollstore import Rollout
from rollstore.schema import Flag
from rollstore.writers.gateway import Conversations
from rollstore.writers.gateway.call import Call
from tests.writers.test_gateway_claims import Sink
from tests.writers.upstream import assistant, chat, part, user

ASK = {"messages": [user("q")], "temperature": 1.0}
UNPLACED = (Flag(kind="unplaced_logprobs", column="logprobs"),)


def recorded(*calls: tuple[Any, list[Any]]) -> tuple[list[Rollout], Conversations]:
    """What a gateway records of (request, parts of the reply)."""
    sink = Sink()
    conversations = Conversations(sink)
    for request, parts in calls:
        raw = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in parts]
        conversations.append(Call(request=json.dumps(request).encode(), parts=raw))
    conversations.close()
    return sink.rows, conversations


def listed(*entries: dict[str, Any]) -> Any:
    return {"content": [{"token": f"token_id:{3 + n}", "logprob": -0.25, **entry} for n, entry in enumerate(entries)]}


BESIDE = [
    ({"finish_reason": {"type": "stop"}}, "finish_reason"), ({"finish_reason": 5}, "finish_reason"),
    ({"finish_reason": ["stop"]}, "finish_reason"), ({"sampling_mask": "x"}, "sampling_mask"),
    ({"sampling_mask": [3, 4]}, "sampling_mask"), ({"routed_experts": [[1]]}, "routed_experts"),
    ({"weight_versions": "7"}, "weight_versions"), ({"weight_versions": [7, 7]}, "weight_versions"),
    ({"logprobs": listed({"rank": "1"}, {"rank": 2})}, "ranks"),
    ({"logprobs": listed({}, {"top_logprobs": "x"})}, "heads"),
]  # fmt: skip


@pytest.mark.parametrize(("odd", "left_out"), BESIDE)
def test_a_field_of_the_wrong_type_is_left_out_by_name(odd: dict[str, Any], left_out: str) -> None:
    (row,), conversations = recorded((ASK, [chat([1, 2], [3, 4], **odd)]))
    assert (row.tokens.tolist(), row.logprobs.to_list()) == ([1, 2, 3, 4], [-0.25, -0.25])
    assert (row.metadata, row.flags) == ({"left_out": left_out}, None)
    assert row.ending == ("unknown" if left_out == "finish_reason" else "terminated")
    assert (conversations.counts["calls"], conversations.counts["not recorded"]) == (1, 0)


@pytest.mark.parametrize("odd", [[1], {"image": [{"offset": "0", "length": 1}]}])
def test_places_of_media_that_are_none_are_left_out_of_each_sample(odd: Any) -> None:
    reply = {**chat([1, 2], [3, 4]), "mm_placeholders": odd}
    reply["choices"].append({**chat([1, 2], [3, 5])["choices"][0], "index": 1})
    rows, _ = recorded(({**ASK, "n": 2}, [reply]))
    assert [(row.tokens.tolist(), row.metadata) for row in rows] == [
        ([1, 2, 3, 4], {"left_out": "mm_placeholders"}),
        ([1, 2, 3, 5], {"left_out": "mm_placeholders"}),
    ]


UNREADABLE = ["x", [-0.1, -0.2], {"content": ["a", "b"]}, listed({"logprob": "-0.5"}, {}), listed({}, {"logprob": [1]})]


@pytest.mark.parametrize("logprobs", UNREADABLE)
def test_log_probs_of_which_one_cannot_be_read_are_unknown_as_a_whole(logprobs: Any) -> None:
    (row,), _ = recorded((ASK, [chat([1, 2], [3, 4], logprobs=logprobs)]))
    assert (row.tokens.tolist(), row.logprobs, row.flags) == ([1, 2, 3, 4], None, UNPLACED)


def completion(**said: Any) -> Any:
    logprobs = {"tokens": ["token_id:3", "token_id:4"], "token_logprobs": [-0.25, -0.25], "top_logprobs": None, **said}
    return {"choices": [{"text": "hi", "token_ids": [3, 4], "prompt_token_ids": [1, 2], "logprobs": logprobs}]}


@pytest.mark.parametrize(
    ("said", "known", "left_out"),
    [
        ({"tokens": 5}, True, None), ({"top_logprobs": "x"}, True, {"left_out": "heads"}),
        ({"token_logprobs": [-0.25, "x"]}, False, None),
    ],
)  # fmt: skip
def test_completions_alike(said: Any, known: bool, left_out: Any) -> None:
    (row,), _ = recorded(({"prompt": [1, 2]}, [completion(**said)]))
    assert (row.tokens.tolist(), row.metadata) == ([1, 2, 3, 4], left_out)
    assert (row.logprobs is not None and row.logprobs.to_list() == [-0.25, -0.25], row.flags == UNPLACED) == (
        known,
        not known,
    )


def swapped(reply: Any, old: str, new: bytes) -> bytes:
    data = json.dumps(reply).encode()
    assert old.encode() in data
    return data.replace(old.encode(), new, 1)


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("-0.25", b"NaN", None), ("-0.25", b"Infinity", None), ("-0.25", b"-Infinity", [None, -0.25]),
        ("-0.25", b"-1e999", [None, -0.25]), ('"hi"', b'"\\ud800 hi"', [-0.25, -0.25]),
        ('"hi"', b'"\xff hi"', [-0.25, -0.25]),
        ('{"id"', b'\xef\xbb\xbf{"id"', [-0.25, -0.25]), ('"c"', b"-1e999", [-0.25, -0.25]),
    ],
)  # fmt: skip
def test_a_text_that_is_not_quite_json_is_read(old: str, new: bytes, wanted: Any) -> None:
    (row,), _ = recorded((ASK, [swapped(chat([1, 2], [3, 4]), old, new)]))
    assert row.tokens.tolist() == [1, 2, 3, 4]
    assert (row.logprobs and row.logprobs.to_list()) == wanted
    floored = (Flag(kind="floored_logprob", column="logprobs", index=0),)
    assert row.flags == (UNPLACED if wanted is None else floored if None in wanted else None)


def test_a_reply_with_half_a_character_still_links_the_next_call() -> None:
    again = {**ASK, "messages": [user("q"), assistant("hi"), user("more")]}
    odd = swapped(chat([1, 2], [3, 4]), '"hi"', b'"\xff hi"')
    rows, _ = recorded((ASK, [odd]), (again, [chat([1, 2, 7, 5], [6])]))
    assert [(row.segment, row.segment_cause) for row in rows] == [(0, None), (1, "retokenised")]


PARTS = [part(None, "", [1, 2]), part([3], "a"), part([4], "b"), part([5], "c", None, "stop")]
COUNTED = [{"choices": [], "usage": {"completion_tokens": 3}}]


def stream(at: int, old: str, new: bytes) -> list[Any]:
    return [*PARTS[:at], swapped(PARTS[at], old, new), *PARTS[at + 1 :]]


@pytest.mark.parametrize("counted", [[], COUNTED])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("new", [b"NaN", b'"-0.5"', b"[]"])
def test_a_log_prob_in_a_stream_that_cannot_be_read_costs_the_log_probs_and_no_token(
    at: int, new: bytes, counted: Any
) -> None:
    (row,), conversations = recorded((ASK, [*stream(at, "-0.5", new), *counted]))
    assert (row.tokens.tolist(), row.logprobs, row.flags, row.ending) == ([1, 2, 3, 4, 5], None, UNPLACED, "terminated")
    assert conversations.counts["cut"] == 0


def test_other_fields_of_a_stream_alike() -> None:
    (row,), _ = recorded((ASK, stream(3, '"stop"', b'{"type": "stop"}')))
    assert (row.tokens.tolist(), row.logprobs.to_list()) == ([1, 2, 3, 4, 5], [-0.5] * 3)
    assert (row.ending, row.metadata) == ("unknown", {"left_out": "finish_reason"})
    (row,), _ = recorded((ASK, stream(2, '"logprob": -0.5', b'"logprob": -0.5, "rank": "1"')))
    assert (row.logprobs.to_list(), row.ranks, row.metadata) == ([-0.5] * 3, None, {"left_out": "ranks"})


def test_a_stream_that_is_damaged_before_its_first_ids_is_no_rollout_without_any() -> None:
    rows, conversations = recorded((ASK, [PARTS[0], b'{"choices": [{"token_ids": [3', *PARTS[2:]]))
    assert (rows, conversations.counts["not recorded"]) == ([], 1)
    assert "damaged before the first of them" in str(conversations.last_not_recorded)


def test_a_part_that_has_log_probs_nobody_can_read_and_no_ids_is_a_hole() -> None:
    odd = part(None, "")
    odd["choices"][0]["logprobs"] = "x"
    (row,), conversations = recorded((ASK, [*PARTS[:2], odd, *PARTS[2:]]))
    assert (row.tokens.tolist(), row.ending, conversations.counts["cut"]) == ([1, 2, 3], "aborted", 1)


@pytest.mark.parametrize(
    "content", [[{"type": "text", "text": "b"}], [{"type": "text", "text": ""}, {"type": "text", "text": "b"}]]
)
def test_an_answer_that_comes_back_in_parts_of_text_is_of_the_same_conversation(content: Any) -> None:
    again = {**ASK, "messages": [user("q"), {"role": "assistant", "content": content}, user("more")]}
    rows, _ = recorded((ASK, [chat([1, 2], [3, 4], "<think>a</think> b")]), (again, [chat([1, 2, 7, 5], [6])]))
    assert [(row.segment, row.segment_cause) for row in rows] == [(0, None), (1, "retokenised")]
    assert len({row.rollout_id for row in rows}) == 1


@pytest.mark.parametrize(
    "content", [[], ["b"], [{"type": "image_url", "text": "b"}], [{"type": "text", "text": 5}], {"text": "b"}]
)
def test_an_answer_that_holds_anything_else_is_not(content: Any) -> None:
    again = {**ASK, "messages": [user("q"), {"role": "assistant", "content": content}, user("more")]}
    rows, _ = recorded((ASK, [chat([1, 2], [3, 4], "b")]), (again, [chat([1, 2, 7, 5], [6])]))
    assert len({row.rollout_id for row in rows}) == 2


NO_IDS = [
    (["3", "4"], r"token_ids[0]: wanted a token id, got '3'"), ([3, 4.5], "token_ids[1]: wanted a token id, got 4.5"),
    ([True, 4], "token_ids[0]: wanted a token id, got True"), ([3, None], "token_ids[1]: wanted a token id, got None"),
    ([[3, 4]], "token_ids[0]: wanted a token id, got [3, 4]"), ("34", "token_ids: wanted token ids, got text"),
    ({"0": 3}, "token_ids: wanted a list of token ids, got dict"),
    (3, "token_ids: wanted a list of token ids, got int"),
    ([-1, 4], "token_ids: wanted token ids from 0 to 2147483647, got -1"),
    ([3, 1 << 40], f"token_ids: wanted token ids from 0 to 2147483647, got {1 << 40}"),
]  # fmt: skip


@pytest.mark.parametrize(("odd", "why"), NO_IDS)
def test_a_reply_whose_ids_are_none_is_counted_and_told_with_what_stands_there(
    odd: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows, conversations = recorded((ASK, [chat([1, 2], [3, 4], token_ids=odd)]))
    assert (rows, conversations.counts["not recorded"]) == ([], 1)
    assert conversations.last_not_recorded == f"a call was not recorded: choice 0: {why}"
    assert conversations.last_not_recorded in caplog.messages


@pytest.mark.parametrize(("odd", "why"), NO_IDS)
def test_a_sample_whose_ids_are_none_costs_no_other(odd: Any, why: str) -> None:
    reply = chat([1, 2], [3, 4], token_ids=odd)
    reply["choices"].append({**chat([1, 2], [3, 4])["choices"][0], "index": 1})
    (row,), conversations = recorded(({**ASK, "n": 2}, [reply]))
    assert (row.tokens.tolist(), row.sample_index, row.ending) == ([1, 2, 3, 4], 1, "terminated")
    assert conversations.last_not_recorded == f"one reply of a call was not recorded: choice 0: {why}"


@pytest.mark.parametrize("counted", [[], COUNTED])
@pytest.mark.parametrize(("odd", "why"), NO_IDS)
def test_a_stream_is_recorded_up_to_ids_that_are_none(
    odd: Any, why: str, counted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    held_back = {"choices": [{"index": 0, "delta": {}, "token_ids": odd}]}
    (row,), conversations = recorded((ASK, [*PARTS[:2], held_back, *PARTS[2:3], *counted]))
    assert (row.tokens.tolist(), row.ending, row.ending_reason) == ([1, 2, 3], "aborted", "engine_abort")
    assert conversations.counts["cut"] == 1
    assert f"a stream is recorded up to a hole: choice 0: {why}" in caplog.messages


def test_ids_that_are_none_end_no_other_sample_of_a_stream() -> None:
    def of(index: int, *parts: Any) -> list[Any]:
        return [{**one, "choices": [{**one["choices"][0], "index": index}]} for one in parts]

    odd = part(["4"], "b")
    rows, conversations = recorded(
        ({**ASK, "n": 2}, [*of(0, *PARTS[:2]), *of(1, *PARTS[:2]), *of(0, odd), *of(1, *PARTS[2:]), *of(0, *PARTS[2:])])
    )
    assert [(row.tokens.tolist(), row.ending) for row in rows] == [
        ([1, 2, 3], "aborted"),
        ([1, 2, 3, 4, 5], "terminated"),
    ]
    assert conversations.counts["cut"] == 1


def test_a_stream_of_which_all_ids_are_none_is_no_rollout_that_drew_nothing() -> None:
    parts = [PARTS[0], {"choices": [{"index": 0, "delta": {}, "token_ids": ["3"]}]}]
    rows, conversations = recorded((ASK, parts))
    assert (rows, conversations.counts["not recorded"]) == ([], 1)
    assert "token_ids[0]: wanted a token id, got '3'" in str(conversations.last_not_recorded)


def test_whole_numbers_with_a_point_are_the_ids_that_they_are() -> None:
    reply = {**chat([1, 2], [3, 4], token_ids=[3.0, 4]), "prompt_token_ids": [1.0, 2.0]}
    (row,), _ = recorded((ASK, [reply]))
    assert (row.tokens.tolist(), row.logprobs.to_list(), row.metadata) == ([1, 2, 3, 4], [-0.25, -0.25], None)
    (row,), _ = recorded((ASK, [*PARTS[:2], part([4.0], "b"), PARTS[3]]))
    assert (row.tokens.tolist(), row.logprobs.to_list()) == ([1, 2, 3, 4, 5], [-0.5] * 3)


@pytest.mark.parametrize("odd", [["1", "2"], [1.5], [True], "12", {"a": 1}])
def test_a_prompt_whose_ids_are_none_is_told_with_what_stands_there(odd: Any) -> None:
    rows, conversations = recorded((ASK, [{**chat([1, 2], [3, 4]), "prompt_token_ids": odd}]))
    assert (rows, conversations.counts["not recorded"]) == ([], 1)
    assert "prompt_token_ids" in str(conversations.last_not_recorded)
    assert "wanted" in str(conversations.last_not_recorded)
