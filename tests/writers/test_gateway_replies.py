"""Replies that an engine sends in ways nobody asked for are recorded, or counted where an operator sees it."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollstore import Rollout
from rollstore.writers.gateway import Conversations
from rollstore.writers.gateway.call import Call
from tests.writers.test_gateway_claims import Sink
from tests.writers.upstream import CUT, END, STREAM, answer, chat, event, part, user, world

ASK = {"messages": [user("q")], "temperature": 1.0}
FIRST, MIDDLE, LAST = part([5], "a", prompt=[1, 2]), part([7], "b"), part([6], "c", finish="stop")
HOLE = part(None, "HOLE")
BROKEN = b'{"id": "s", "choices": [{"index": 0, "delta": {"content": "b"}, "token_i'
WRONG = {"choices": [{"index": 0, "token_ids": "seven", "delta": {"content": "b"}}]}


def usage(count: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": count}}


def recorded(*parts: Any, **asked: Any) -> tuple[list[Rollout], Conversations]:
    sink = Sink()
    conversations = Conversations(sink)
    raw = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in parts]
    conversations.append(Call(request=json.dumps({**ASK, **asked}).encode(), parts=raw))
    conversations.close()
    return sink.rows, conversations


@pytest.mark.parametrize("hole", [HOLE, BROKEN, WRONG])
@pytest.mark.parametrize("counted", [[], [usage(3)]])
def test_a_stream_with_a_hole_in_the_middle_is_kept_up_to_it_and_counted_as_cut(hole: Any, counted: list[Any]) -> None:
    (row,), conversations = recorded(FIRST, hole, LAST, *counted)
    assert (row.tokens.tolist(), row.logprobs.to_list()) == ([1, 2, 5], [-0.5])
    assert (row.ending, row.ending_reason, row.spans[-1].api_finish) == ("aborted", "engine_abort", None)
    assert conversations.counts["cut"] == 1


@pytest.mark.parametrize("odd", [HOLE, BROKEN, b"ping", b'{"type": "ping"}'])
def test_what_stands_between_the_parts_is_no_hole_where_the_usage_counts_the_ids_that_came(odd: Any) -> None:
    (row,), conversations = recorded(FIRST, odd, MIDDLE, LAST, usage(3))
    assert (row.tokens.tolist(), row.ending) == ([1, 2, 5, 7, 6], "terminated")
    assert conversations.counts["cut"] == (odd == b"ping")  # a sign of life counts, but ends nothing


def test_a_part_that_is_missing_without_a_trace_is_told_by_the_usage() -> None:
    rows, conversations = recorded(FIRST, LAST, usage(3))
    assert (rows, conversations.counts["not recorded"]) == ([], 1)
    assert "parts are missing" in str(conversations.last_not_recorded)


def test_a_hole_before_the_first_ids_leaves_nothing_to_record() -> None:
    rows, conversations = recorded(part(None, prompt=[1, 2]), HOLE, MIDDLE, LAST)
    assert (rows, conversations.counts["not recorded"]) == ([], 1)


def test_a_hole_in_one_of_two_samples_cuts_that_one() -> None:
    other = [{**one, "choices": [{**one["choices"][0], "index": 1}]} for one in (FIRST, HOLE, LAST)]
    rows, _ = recorded(FIRST, other[0], other[1], MIDDLE, LAST, other[2], n=2)
    assert [(row.tokens.tolist(), row.ending) for row in rows] == [
        ([1, 2, 5, 7, 6], "terminated"),
        ([1, 2, 5], "aborted"),
    ]


def test_choices_of_one_index_are_no_two_samples() -> None:
    reply = chat([1], [5])
    reply["choices"] *= 2
    rows, conversations = recorded(reply, n=2)
    assert (rows, conversations.counts["not recorded"]) == ([], 1)
    assert "each index once" in str(conversations.last_not_recorded)


def packed(how: str, data: bytes) -> bytes:
    return gzip.compress(data) if how == "gzip" else zlib.compress(data)


@pytest.mark.parametrize("how", ["gzip", "deflate", "GZIP"])
def test_a_reply_that_is_encoded_though_none_was_asked_for_is_recorded(tmp_path: Path, how: str) -> None:
    body = packed(how.lower(), json.dumps(chat([1], [5])).encode())
    with world(tmp_path / "s", lambda got: [answer(body, "200 OK", f"content-encoding: {how}")]) as w:
        seen = w.post(ASK)
        assert "content-encoding" not in seen.headers
        assert seen.json()["choices"][0]["message"]["content"] == "hi"
        (row,) = w.rows()
    assert row.tokens.tolist() == [1, 5]


def test_a_stream_that_is_encoded_is_recorded(tmp_path: Path) -> None:
    text = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in (FIRST, LAST))
    data = gzip.compress(text)
    head = STREAM.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    with world(tmp_path / "s", lambda got: [head, b"%x\r\n%s\r\n" % (len(data), data), END]) as w:
        seen = w.post({**ASK, "stream": True})
        assert [json.loads(line[6:])["id"] for line in seen.text.split("\n\n") if line] == ["s", "s"]
        (row,) = w.rows()
    assert (row.tokens.tolist(), row.ending) == ([1, 2, 5, 6], "terminated")


def test_a_reply_in_an_encoding_that_cannot_be_read_passes_byte_for_byte_and_is_counted(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: [answer(b"\x0b\x01odd", "200 OK", "content-encoding: br")]) as w:
        with w.client.stream("POST", "/v1/chat/completions", json=ASK) as seen:
            assert (seen.headers["content-encoding"], b"".join(seen.iter_raw())) == ("br", b"\x0b\x01odd")
        w.recording.flush()
        status = w.client.get("/rollstore/status").json()
    assert status["not_recorded"] == 1
    assert "content-encoding br" in status["last_not_recorded"]


def test_a_reply_of_which_the_encoding_is_damaged_is_counted(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: [answer(b"no gzip", "200 OK", "content-encoding: gzip"), CUT]) as w:
        with pytest.raises(httpx.RemoteProtocolError):
            w.post(ASK)
        w.recording.flush()
        assert w.gateway.status()["not_recorded"] == 1


def test_a_stream_is_known_by_its_type_however_that_is_written(tmp_path: Path) -> None:
    head = STREAM.replace(b"text/event-stream", b"Text/Event-Stream")
    with world(tmp_path / "s", lambda got: [head, event(FIRST), event(LAST), END]) as w:
        assert '"token_ids":null' in w.post({**ASK, "stream": True}).text
        (row,) = w.rows()
    assert row.tokens.tolist() == [1, 2, 5, 6]


@pytest.mark.parametrize("status", ["201 Created", "202 Accepted"])
def test_every_status_of_success_is_one(tmp_path: Path, status: str) -> None:
    with world(tmp_path / "s", lambda got: [answer(chat([1], [5]), status)]) as w:
        assert w.post(ASK).status_code == int(status[:3])
        (row,) = w.rows()
    assert row.tokens.tolist() == [1, 5]
