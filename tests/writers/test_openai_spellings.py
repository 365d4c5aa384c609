"""The places where SGLang's OpenAI-compatible API (0.5.23) puts ids: what is there is read, and nothing is guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollstore import Rollout
from rollstore.writers import openai
from tests.writers.test_gateway_lenient import recorded
from tests.writers.upstream import END, STREAM, Got, answer, event, user, world

ASK = {"messages": [user("q")], "temperature": 1.0, "logprobs": True}
LISTED = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]}


def sglang_chat(*choices: dict[str, Any], **beside: Any) -> dict[str, Any]:
    """A whole chat; each choice beside what all have."""
    made = [
        {
            "index": n, "message": {"role": "assistant", "content": "ab"}, "logprobs": LISTED, "finish_reason": "stop",
            "matched_stop": None, **choice,
        }
        for n, choice in enumerate(choices)
    ]  # fmt: skip
    return {"id": "s", "model": "m", "choices": made, "usage": {"completion_tokens": 2 * len(choices)}, **beside}


NATIVE = {"output_token_logprobs": [[-0.5, 3, None], [-0.25, 4, None]]}
SPELLINGS = [
    sglang_chat({"prompt_token_ids": [1, 2], "response_token_ids": [3, 4]}),
    sglang_chat({}, sglext={"input_ids": [1, 2], "output_ids": [[3, 4]]}),
    sglang_chat({"prompt_token_ids": [1, 2], "meta_info": NATIVE}),
    sglang_chat({"prompt_token_ids": [1, 2], "response_token_ids": [3, 4], "token_ids": [3, 4]}),
]


def drawn(rows: list[Rollout]) -> list[Any]:
    return [(row.tokens.tolist(), row.logprobs.to_list(), row.ending) for row in rows]


@pytest.mark.parametrize("reply", SPELLINGS)
def test_ids_are_read_from_each_place_where_they_are_put(reply: dict[str, Any]) -> None:
    wanted = [([1, 2, 3, 4], [-0.5, -0.25], "terminated")]
    assert drawn(openai.rollouts(reply, ASK)) == wanted
    assert drawn(recorded((ASK, [reply]))[0]) == wanted


def test_the_samples_of_a_chat_are_told_apart_by_their_indices() -> None:
    reply = sglang_chat({"index": 1}, {"index": 0}, sglext={"input_ids": [1], "output_ids": [[3, 4], [5, 6]]})
    rows = openai.rollouts(reply, {**ASK, "n": 2})
    assert [(row.sample_index, row.tokens.tolist()) for row in rows] == [(1, [1, 5, 6]), (0, [1, 3, 4])]


def test_a_stream_has_its_ids_in_the_last_part() -> None:
    def said(text: str, number: float, **more: Any) -> dict[str, Any]:
        listed = {"content": [{"token": text, "logprob": number}]}
        return {"choices": [{"index": 0, "delta": {"content": text}, "logprobs": listed, **more}]}

    parts = [
        said("a", -0.5), said("b", -0.25, finish_reason="stop"),
        {"choices": [], "sglext": {"cached_tokens_details": {}}},
        {"choices": [], "sglext": {"input_ids": [1, 2], "output_ids": [[3, 4]]}},
    ]  # fmt: skip
    wanted = [([1, 2, 3, 4], [-0.5, -0.25], "terminated")]
    assert drawn(openai.rollouts(openai.joined(parts), ASK)) == wanted
    assert drawn(recorded((ASK, parts))[0]) == wanted
    rows, conversations = recorded((ASK, parts[:2]))  # broken before them
    assert (rows, conversations.counts["not recorded"]) == ([], 1)


REFUSED = [
    (sglang_chat({"token_ids": [3, 4], "response_token_ids": [3, 5]}), "wanted the same ids of both"),
    (sglang_chat({}, sglext={"output_ids": [["3"]]}), r"sglext.output_ids\[0\]\[0\]: wanted a token id, got '3'"),
    (sglang_chat({}, sglext={"input_ids": [0.5], "output_ids": [[3, 4]]}), r"sglext.input_ids\[0\]: wanted a token id"),
    (sglang_chat({"meta_info": {"output_token_logprobs": [-0.5, -0.25]}}), "meta_info.output_token_logprobs: wanted"),
    (sglang_chat({}, sglext={"output_ids": []}), "token_ids: wanted the ids of the drawn tokens"),
    (sglang_chat({"meta_info": {"id": "s"}}), "token_ids: wanted the ids of the drawn tokens"),
    (sglang_chat({}, sglext=[1]), "token_ids: wanted the ids of the drawn tokens"),
]


@pytest.mark.parametrize(("reply", "why"), REFUSED)
def test_what_is_said_twice_in_two_ways_or_is_no_list_of_ids_is_refused(reply: dict[str, Any], why: str) -> None:
    reply = {"prompt_token_ids": None if "input_ids" in str(reply) else [1, 2], **reply}
    with pytest.raises(ValueError, match=why):
        openai.rollouts(reply, ASK)
    rows, conversations = recorded((ASK, [reply]))
    assert (rows, conversations.counts["not recorded"]) == ([], 1)


def test_ids_of_the_wrong_type_are_told_under_the_name_that_they_stand_under() -> None:
    rows, conversations = recorded((ASK, [sglang_chat({"prompt_token_ids": [1], "response_token_ids": ["3"]})]))
    assert rows == []
    assert "response_token_ids[0]: wanted a token id, got '3'" in str(conversations.last_not_recorded)


REFUSAL = {"message": "return_token_ids is not supported with streaming on /v1/chat/completions.", "code": 400}
BESIDE = {"x-sglext-return-input-ids": "1", "x-sglext-return-output-ids": "1", "x-sglext-ids-framed": "1"}


def streamed(got: Got) -> list[bytes]:
    """An engine that refuses `return_token_ids` in streams, and lists ids at the end where headers ask for them."""
    if got.json.get("return_token_ids"):
        return [answer(REFUSAL, "400 Bad Request")]
    said = {"choices": [{"index": 0, "delta": {"content": "ab"}, "logprobs": LISTED, "finish_reason": "stop"}]}
    data = b'{"choices": [], "sglext": {"input_ids": [1, 2], "output_ids": [[3, 4]]}}'
    framed = b"event: sglext_ids\ndata: " + data + b"\n\n"
    asked = all(got.headers.get(name) == value for name, value in BESIDE.items())
    chunk = b"%x\r\n%s\r\n" % (len(framed), framed) if asked else b""
    return [STREAM, event(said), chunk, event(b"[DONE]"), END]


def test_an_engine_that_refuses_ids_in_a_stream_is_asked_for_them_at_its_end_and_its_client_sees_neither(
    tmp_path: Path,
) -> None:
    asked = {"messages": [user("q")], "temperature": 1.0, "stream": True}
    with world(tmp_path / "s", streamed) as w:
        seen = [w.post(asked) for _ in range(2)]
        assert [(one.status_code, b"sglext" in one.content, b'"ab"' in one.content) for one in seen] == [
            (200, False, True)
        ] * 2
        assert [got.json.get("return_token_ids") for got in w.engine.got] == [True, None, None]
        assert all("return_token_ids" not in got.json for got in w.engine.got[1:])
        assert [row.tokens.tolist() for row in w.rows()] == [[1, 2, 3, 4]] * 2


def test_a_client_that_asks_for_ids_in_a_stream_itself_sees_that_they_are_refused(tmp_path: Path) -> None:
    asked = {"messages": [user("q")], "stream": True, "return_token_ids": True}
    with world(tmp_path / "s", streamed) as w:
        seen = w.post(asked)
        assert (seen.status_code, seen.json(), len(w.engine.got)) == (400, REFUSAL, 1)


def test_a_stream_that_is_refused_for_something_else_is_refused_once(tmp_path: Path) -> None:
    other = {"message": "temperature is too high", "code": 400}
    with world(tmp_path / "s", lambda got: [answer(other, "400 Bad Request", "x-request-id: 7")]) as w:
        seen = w.post({"messages": [user("q")], "stream": True})
        assert (seen.status_code, seen.json(), seen.headers["x-request-id"], len(w.engine.got)) == (400, other, "7", 1)
        w.recording.close()
        assert "status 400" in str(w.gateway.status()["last_not_recorded"])


def test_a_client_that_asks_for_the_ids_at_the_end_sees_them(tmp_path: Path) -> None:
    asked = {"messages": [user("q")], "stream": True, "return_output_ids_in_sglext": True}

    def unframed(got: Got) -> list[bytes]:
        assert "x-sglext-ids-framed" not in got.headers
        return streamed(Got(got.line, {**got.headers, **BESIDE}, got.body))

    with world(tmp_path / "s", unframed) as w:
        assert b'"output_ids": [[3, 4]]' in w.post(asked).content
        assert [row.tokens.tolist() for row in w.rows()] == [[1, 2, 3, 4]]
