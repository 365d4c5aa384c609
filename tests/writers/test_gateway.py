"""The gateway passes calls on as they are, and records what was drawn; over real HTTP, with a scripted engine."""

from __future__ import annotations

import gzip
import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollstore.errors import WriteError
from rollstore.testing.filesystem import Fault, MemoryFilesystem
from rollstore.writers.gateway import record
from tests.writers.upstream import CUT, END, STREAM, Got, answer, assistant, chat, event, part, user, world

ASK = {"model": "m", "messages": [user("hello")], "temperature": 1.0, "max_tokens": 8}


def hidden(reply: dict[str, Any]) -> dict[str, Any]:
    """The reply as it is where nobody asks for ids and log-probs."""
    choices = [{**choice, "token_ids": None, "logprobs": None} for choice in reply["choices"]]
    return {**reply, "prompt_token_ids": None, "choices": choices}


def test_a_call_is_passed_on_with_ids_and_log_probs_asked_for_and_the_client_sees_what_it_asked_for(
    tmp_path: Path,
) -> None:
    reply = chat([1, 2], [50, 9])
    with world(tmp_path / "s", lambda got: [answer(reply, "200 OK", "x-request-id: 7")]) as w:
        seen = w.post({**ASK, "seed": 2**60 + 1}, authorization="Bearer secret")
        assert (seen.json(), seen.headers["x-request-id"]) == (hidden(reply), "7")
        (got,) = w.engine.got
        assert got.json == {**ASK, "seed": 2**60 + 1, "return_token_ids": True, "logprobs": True}
        assert got.headers["authorization"] == "Bearer secret"
        (row,) = w.rows()
        assert row.tokens.tolist() == [1, 2, 50, 9]
        assert row.action_mask.tolist() == [False, False, True, True]
        assert (row.logprobs.to_list(), row.logprob_kind, row.ending) == ([-0.25, -0.25], "behavior", "terminated")
        assert row.samplers[0].temperature == 1.0
        assert row.samplers[0].seed == 2**60 + 1
        span = row.spans[-1]
        assert span.started_at <= span.finished_at


def test_what_the_client_asks_for_itself_goes_through_byte_for_byte_and_comes_back_so(tmp_path: Path) -> None:
    reply = answer(b'{"choices": [ {"index":0,"token_ids":[50],"logprobs":{"content":[{"token":"a","logprob":-1.0}]},'
                   b'"finish_reason":"stop"}], "prompt_token_ids":[1], "odd": 1.50}')  # fmt: skip
    asked = b'{"messages": [], "return_token_ids":true, "logprobs" : true,\n"top_logprobs":2, "temperature":0.50}'
    with world(tmp_path / "s", lambda got: [reply]) as w:
        seen = w.client.post("/v1/chat/completions", content=asked)
        assert w.engine.got[0].body == asked
        assert reply.endswith(seen.content)
        (row,) = w.rows()
        assert (row.tokens.tolist(), row.logprobs.to_list(), row.heads) == ([1, 50], [-1.0], None)


def test_heads_are_asked_for_where_the_gateway_is_told_to(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: [answer(chat([1], [5]))], heads=4) as w:
        w.post(ASK)
        w.post({"prompt": [1], "temperature": 1.0}, "/v1/completions")
        w.post({"token_ids": [1], "sampling_params": {"temperature": 1.0}}, "/inference/v1/generate")
        one, two, three = (got.json for got in w.engine.got)
    assert (one["logprobs"], one["top_logprobs"], one["return_tokens_as_token_ids"]) == (True, 4, True)
    assert (two["logprobs"], two["return_tokens_as_token_ids"]) == (4, True)
    assert three == {"token_ids": [1], "sampling_params": {"temperature": 1.0, "logprobs": 4}}


def test_the_parts_of_a_stream_come_through_as_they_come_and_are_recorded_whole(tmp_path: Path) -> None:
    seen_first = threading.Event()
    parts = [part(None, prompt=[1, 2]), part([50], "he"), part([51, 9], "llo", finish="stop")]

    def script(got: Got) -> list[Any]:
        return [STREAM, event(parts[0]), event(parts[1]), seen_first, event(parts[2]), event(b"[DONE]"), END]

    with world(tmp_path / "s", script) as w:
        with w.client.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True}) as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            first, second = json.loads(next(lines)), json.loads(next(lines))
            seen_first.set()
            third, done = json.loads(next(lines)), next(lines)
        assert (first["prompt_token_ids"], done) == (None, "[DONE]")
        assert [one["choices"][0]["delta"]["content"] for one in (first, second, third)] == ["", "he", "llo"]
        assert [one["choices"][0].get("token_ids") for one in (first, second, third)] == [None, None, None]
        assert [one["choices"][0]["logprobs"] for one in (first, second, third)] == [None, None, None]
        (row,) = w.rows()
        assert row.tokens.tolist() == [1, 2, 50, 51, 9]
        assert row.logprobs.to_list() == [-0.5, -0.5, -0.5]
        assert (row.ending, row.ending_reason) == ("terminated", "stop_token")


def test_a_stream_may_be_cut_anywhere_and_written_in_every_way_that_is_allowed(tmp_path: Path) -> None:
    one, two, last = (json.dumps(p, ensure_ascii=False).encode() for p in
                      (part([50], "é你", prompt=[1]), part([51], "\U0001f600"), part([9], finish="stop")))  # fmt: skip
    lines = json.dumps(part([52], "x"), indent=1).encode().splitlines()
    raw = (
        b": a comment\n\ndata:" + one + b"\r\n\r\nevent: chunk\ndata: " + two + b"\nid: 7\n\n"
        + b"".join(b"data: " + line + b"\n" for line in lines) + b"\ndata: " + last + b"\n\ndata: [DONE]\n\n"
    )  # fmt: skip
    for size in (1, 7, len(raw)):
        chunks = [raw[at : at + size] for at in range(0, len(raw), size)]
        steps = [STREAM, *(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks), END]
        with world(tmp_path / str(size), lambda got, steps=steps: steps) as w:
            seen = w.post({**ASK, "stream": True}).text
            assert ": a comment" in seen
            assert "token_id:" not in seen
            assert [text in seen for text in ("é你", "\U0001f600", "event: chunk", "id: 7", "[DONE]")] == [True] * 5
            (row,) = w.rows()
            assert (row.tokens.tolist(), row.ending) == ([1, 50, 51, 52, 9], "terminated")
            assert row.logprobs.to_list() == [-0.5] * 4


def test_a_stream_that_breaks_breaks_for_the_client_too_and_its_part_is_recorded(tmp_path: Path) -> None:
    steps = [STREAM, event(part([50], "he", prompt=[1, 2])), event(part([51], "l")), b'30\r\ndata: {"id"', CUT]
    with world(tmp_path / "s", lambda got: steps) as w:
        came: list[bytes] = []
        streamed = w.client.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True})
        with streamed as response, pytest.raises(httpx.RemoteProtocolError):
            came.extend(response.iter_raw())
        assert b"".join(came).count(b"\n\n") == 2
        (row,) = w.rows()
        assert (row.tokens.tolist(), row.ending, row.ending_reason) == ([1, 2, 50, 51], "aborted", "engine_abort")
        assert w.gateway.status()["cut"] == 1


def test_a_stream_that_breaks_before_its_first_token_has_drawn_none(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: [STREAM, event(part(None, prompt=[1, 2])), CUT]) as w:
        with pytest.raises(httpx.RemoteProtocolError):
            w.post({**ASK, "stream": True})
        (row,) = w.rows()
        assert (row.tokens.tolist(), row.action_mask.any(), row.ending) == ([1, 2], False, "aborted")


def test_an_error_of_the_engine_in_the_middle_of_a_stream_is_seen_and_recorded(tmp_path: Path) -> None:
    failed = {"error": {"message": "out of memory", "code": 500}}
    steps = [STREAM, event(part([50], "h", prompt=[1])), event(failed), event(b"[DONE]"), END]
    with world(tmp_path / "s", lambda got: steps) as w:
        assert json.dumps(failed) in w.post({**ASK, "stream": True}).text
        (row,) = w.rows()
        assert (row.tokens.tolist(), row.ending, row.ending_reason) == ([1, 50], "aborted", "engine_abort")


def test_a_client_that_leaves_cancels_the_engine_and_the_part_is_recorded(tmp_path: Path) -> None:
    left, gone = threading.Event(), threading.Event()

    def gone_after(connection: Any) -> None:
        """Returns when the other side has closed the connection."""
        connection.settimeout(30)
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        gone.set()

    steps = [STREAM, event(part([50], "h", prompt=[1])), left, gone_after]
    with world(tmp_path / "s", lambda got: steps) as w:
        with w.client.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True}) as response:
            next(response.iter_raw())
        left.set()
        assert gone.wait(30)
        (row,) = w.rows()
        assert (row.tokens.tolist(), row.ending, row.ending_reason) == ([1, 50], "aborted", "cancelled")


def test_a_whole_reply_that_breaks_breaks_for_the_client_too_and_is_counted(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: [answer(chat([1], [5]))[:-20], CUT]) as w:
        with pytest.raises(httpx.RemoteProtocolError):
            w.post(ASK)
        assert w.rows() == []
        assert w.gateway.status()["not_recorded"] == 1


def test_what_the_engine_refuses_the_client_sees_as_the_engine_said_it(tmp_path: Path) -> None:
    said = answer({"error": {"message": "slow down"}}, "429 Too Many Requests", "retry-after: 3")
    with world(tmp_path / "s", lambda got: [said]) as w:
        seen = w.post(ASK)
        assert (seen.status_code, seen.headers["retry-after"]) == (429, "3")
        assert seen.json() == {"error": {"message": "slow down"}}
        assert w.rows() == []
        assert w.gateway.status()["not_recorded"] == 1


def test_an_engine_that_is_not_there_is_a_bad_gateway(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: []) as w:
        w.engine.close()
        seen = w.post(ASK)
        assert seen.status_code == 502
        assert seen.json()["error"]["type"] == "gateway_error"


def test_anything_else_passes_byte_for_byte(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"data": []}')
    with world(tmp_path / "s", lambda got: [answer(packed, "200 OK", "content-encoding: gzip")]) as w:
        assert w.client.get("/v1/models?limit=1&q=%20a").json() == {"data": []}
        assert w.client.post("/tokenize", content=b"\x00raw").json() == {"data": []}
        first, second = w.engine.got
        assert first.line == "GET /v1/models?limit=1&q=%20a HTTP/1.1"
        assert second.body == b"\x00raw"
        assert w.rows() == []


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/generate"])
def test_calls_of_other_kinds_that_draw_tokens_are_passed_on_and_counted(tmp_path: Path, path: str) -> None:
    with world(tmp_path / "s", lambda got: [answer({"output": []})]) as w:
        assert w.client.post(path, content=b'{"odd": 1.50}').json() == {"output": []}
        assert w.client.get(f"{path}/1").status_code == 200
        assert w.engine.got[0].body == b'{"odd": 1.50}'
        assert w.gateway.status()["not_recorded"] == 1


@pytest.mark.parametrize("body", [b"{", b"[1]", b'{"echo": true, "prompt": "a"}', b'{"use_beam_search": true}'])
def test_what_cannot_be_recorded_is_passed_on_as_it_is_and_counted(tmp_path: Path, body: bytes) -> None:
    with world(tmp_path / "s", lambda got: [answer({"choices": []})]) as w:
        assert w.client.post("/v1/completions", content=body).status_code == 200
        assert w.engine.got[0].body == body
        assert w.gateway.status()["not_recorded"] == 1


def test_a_reply_without_ids_is_passed_on_and_counted(tmp_path: Path) -> None:
    reply = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
    with world(tmp_path / "s", lambda got: [answer(reply)]) as w:
        assert w.post(ASK).json() == reply
        assert w.rows() == []
        assert w.gateway.status()["not_recorded"] == 1


def test_no_credential_and_no_header_reaches_the_store(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: [answer(chat([1], [5]))]) as w:
        w.post(ASK, authorization="Bearer sk-hunter2", x_api_key="sk-hunter2", cookie="session=sk-hunter2")
        log = files(tmp_path / "s.gateway")
        assert any(b"hello" in data for data in log)  # before the end, what was asked stands in the log of calls
        assert len(w.rows()) == 1
    assert not any(b"hunter2" in data for data in (*log, *files(tmp_path)))


def files(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


# conversations


def conversation(tmp_path: Path, *turns: tuple[list[dict[str, str]], list[int], list[int], str], name: str = "") -> Any:
    """The rows of calls that are made one after another: (messages, prompt, drawn, what was said)."""
    replies = iter(turns)

    def script(got: Got) -> list[Any]:
        _, prompt, tokens, text = next(replies)
        return [answer(chat(prompt, tokens, text))]

    headers = {"x_rollstore_rollout": name} if name else {}
    with world(tmp_path / "s", script) as w:
        for messages, *_ in turns:
            assert w.post({**ASK, "messages": messages}, **headers).status_code == 200
        return w.rows()


TURN = ([user("q")], [1, 2], [50, 51, 9], "<think>a</think> b")


def test_a_turn_whose_prompt_extends_the_tokens_goes_on_in_the_segment(tmp_path: Path) -> None:
    (row,) = conversation(tmp_path, TURN, ([user("other words")], [1, 2, 50, 51, 9, 198, 3], [60, 9], "c"))
    assert row.tokens.tolist() == [1, 2, 50, 51, 9, 198, 3, 60, 9]
    assert [span.turn for span in row.spans] == [0, 0, 1, 1]
    assert row.segment_cause is None


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [([1, 2, 51, 9, 3, 4], "template_drop"), ([1, 2, 77, 9, 3, 4], "retokenised"), ([1, 8, 51, 9, 3], "context_edit")],
)
def test_a_turn_that_does_not_extend_the_tokens_begins_a_segment_that_says_why(
    tmp_path: Path, prompt: list[int], cause: str
) -> None:
    again = [user("q"), assistant("b"), user("more")]  # the client left the reasoning out
    first, second = conversation(tmp_path, TURN, (again, prompt, [60, 9], "c"))
    assert first.rollout_id == second.rollout_id
    assert (first.tokens.tolist(), first.ending) == ([1, 2, 50, 51, 9], "continued")
    assert (second.tokens.tolist(), second.segment, second.segment_cause) == ([*prompt, 60, 9], 1, cause)
    assert int(first.action_mask.sum()) + int(second.action_mask.sum()) == 5


def test_a_history_that_was_edited_is_of_the_rollout_that_its_client_names(tmp_path: Path) -> None:
    first, second = conversation(tmp_path, TURN, ([user("a summary")], [1, 7, 7], [60], "c"), name="mine")
    assert [(row.rollout_id, row.segment, row.segment_cause) for row in (first, second)] == [
        ("mine", 0, None),
        ("mine", 1, "context_edit"),
    ]


def test_without_a_name_other_messages_are_another_conversation(tmp_path: Path) -> None:
    first, second = conversation(tmp_path, TURN, ([user("a summary")], [1, 7, 7], [60], "c"))
    assert first.rollout_id != second.rollout_id
    assert (first.segment, second.segment) == (0, 0)


def test_samples_of_one_prompt_are_apart_and_each_goes_on_with_its_own_turn(tmp_path: Path) -> None:
    rows = conversation(
        tmp_path,
        ([user("q")], [1, 2], [50, 9], "one"),
        ([user("q")], [1, 2], [60, 9], "two"),
        ([user("q"), assistant("two"), user("r")], [1, 2, 61, 9, 3], [70], "x"),
        ([user("q"), assistant("one"), user("r")], [1, 2, 50, 9, 3], [71], "y"),
    )
    assert [row.tokens.tolist() for row in rows] == [
        [1, 2, 50, 9, 3, 71],
        [1, 2, 60, 9],
        [1, 2, 61, 9, 3, 70],
    ]
    assert [row.segment for row in rows] == [0, 0, 1]


def test_samples_that_said_the_same_are_told_apart_by_nothing_but_their_tokens(tmp_path: Path) -> None:
    rows = conversation(
        tmp_path,
        ([user("q")], [1, 2], [50, 9], "same"),
        ([user("q")], [1, 2], [60, 9], "same"),
        ([user("q"), assistant("same"), user("r")], [1, 2, 61, 9, 3], [70], "x"),
    )
    assert [row.segment for row in rows] == [0, 0, 0]  # which of the two goes on is not known, so neither does


def test_prompts_of_token_ids_go_on_too(tmp_path: Path) -> None:
    def script(got: Got) -> list[Any]:
        asked = got.json["prompt"]
        choice = {"index": 0, "text": "", "token_ids": [9], "finish_reason": "stop", "prompt_token_ids": asked}
        return [answer({"id": "c", "choices": [choice]})]

    with world(tmp_path / "s", script) as w:
        for prompt in ([1, 2], [1, 2, 9, 3], [5]):
            w.post({"prompt": prompt, "temperature": 1.0}, "/v1/completions")
        rows = w.rows()
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 9, 3, 9], [5, 9]]


def test_several_samples_of_one_call_are_a_group_and_stay_one_when_one_goes_on(tmp_path: Path) -> None:
    two = chat([1, 2], [50, 9])
    two["choices"].append({**chat([1, 2], [60, 9])["choices"][0], "index": 1})
    replies = iter([two, chat([1, 2, 60, 9, 3], [70])])
    with world(tmp_path / "s", lambda got: [answer(next(replies))]) as w:
        w.post({**ASK, "n": 2})
        w.post({**ASK, "messages": [user("next")]})
        rows = w.rows()
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 50, 9], [1, 2, 60, 9, 3, 70]]
    assert len({row.group_id for row in rows}) == 1
    assert [(row.group_size, row.sample_index) for row in rows] == [(2, 0), (2, 1)]


# what a client says


def test_a_client_names_its_rollout_its_columns_and_its_end(tmp_path: Path) -> None:
    columns = json.dumps({"group_id": "g", "group_size": 4, "step": 3, "metadata": {"task": "7"}})
    with world(tmp_path / "s", lambda got: [answer(chat([1], [5]))]) as w:
        w.post(ASK, x_rollstore_rollout="r", x_rollstore_columns=columns)
        assert "x-rollstore-rollout" not in w.engine.got[0].headers
        ended = w.client.post("/rollstore/end", json={"rollout_id": "r", "reward": 0.5, "ending": "terminated"})
        assert ended.status_code == 202
        w.recording.flush()
        assert w.client.get("/rollstore/status").json() == {
            "calls": 1, "cut": 0, "segments": 1, "refused": 0, "left_out": 0, "names_taken": 0,
            "not_recorded": 0, "last_not_recorded": None, "ends_of_nothing": 0, "recovered": 0, "damaged": 0,
            "weights": [], "open": 0, "waiting": 0, "failing": None,
        }  # fmt: skip
        (row,) = w.rows()
    assert (row.rollout_id, row.group_id, row.step, row.metadata) == ("r", "g", 3, {"task": "7"})
    assert (row.reward, row.reward_status, row.ending) == (0.5, "scored", "terminated")


@pytest.mark.parametrize(
    "columns", ['{"reward": "much"}', '{"tokens": [1]}', "{", '{"group_size": 0}', '{"ending": "continued"}']
)
def test_columns_that_a_client_cannot_mean_are_refused_before_the_engine_hears_of_it(
    tmp_path: Path, columns: str
) -> None:
    with world(tmp_path / "s", lambda got: []) as w:
        assert w.post(ASK, x_rollstore_columns=columns).status_code == 400
        assert w.engine.got == []


def test_an_end_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: []) as w:
        said = {"rollout_id": "r", "ending": "terminated", "bootstrap": True}
        seen = w.client.post("/rollstore/end", json=said)
        assert (seen.status_code, "bootstrap" in seen.text) == (400, True)


def test_one_named_rollout_has_one_sample(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: []) as w:
        assert w.post({**ASK, "n": 2}, x_rollstore_rollout="r").status_code == 400


def test_a_call_after_the_end_is_a_rollout_of_its_own(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: [answer(chat([1], [5]))]) as w:
        w.post(ASK, x_rollstore_rollout="r")
        w.client.post("/rollstore/end", json={"rollout_id": "r"})
        w.post(ASK, x_rollstore_rollout="r")
        ended, late = w.rows()
    assert (ended.rollout_id, ended.metadata) == ("r", None)
    assert late.rollout_id != "r"
    assert late.metadata == {"after": "r"}


def test_a_conversation_that_nobody_goes_on_with_is_over(tmp_path: Path) -> None:
    from rollstore.writers.gateway.call import Expire

    with world(tmp_path / "s", lambda got: [answer(chat([1], [5]))]) as w:
        w.post(ASK, x_rollstore_rollout="old")
        w.recording.flush()
        w.now[0] = 59
        w.post(ASK, x_rollstore_rollout="new")
        w.recording.append(Expire())
        w.recording.flush()
        assert w.gateway.status()["open"] == 2
        w.now[0] = 61
        w.recording.append(Expire())
        w.recording.flush()
        assert (w.gateway.status()["open"], w.gateway.status()["segments"]) == (1, 1)


# a disk that is behind


class Held:
    """A writer whose disk is full until it is let go."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.full, self.tried = True, threading.Event()

    def append(self, data: Any) -> None:
        self.kept += data

    def flush(self, *, sync: bool = False) -> None:
        self.tried.set()
        if self.full:
            raise WriteError("s: no space left on device")

    def close(self) -> None:
        pass


def test_calls_that_the_disk_has_no_room_for_are_answered_with_503_where_that_is_asked_for(tmp_path: Path) -> None:
    held = Held()
    with world(tmp_path, lambda got: [answer(chat([1], [5]))], sink=held, limit=1, when_full="fail") as w:
        assert w.post(ASK).status_code == 200
        assert held.tried.wait(30)
        seen = w.post(ASK)
        assert (seen.status_code, "no space left" in seen.text, len(w.engine.got)) == (503, True, 1)
        held.full = False
        w.recording.flush()
        assert w.post(ASK).status_code == 200
        w.recording.close()
    assert len(held.kept) == 2


def test_calls_wait_for_the_disk_before_the_engine_draws(tmp_path: Path) -> None:
    held = Held()
    with world(tmp_path, lambda got: [answer(chat([1], [5]))], sink=held, limit=1) as w:
        assert w.post(ASK).status_code == 200
        assert held.tried.wait(30)
        seen: list[int] = []
        waiting = threading.Thread(target=lambda: seen.append(w.post(ASK).status_code))
        waiting.start()
        assert w.client.get("/rollstore/status").json()["waiting"] == 1
        assert len(w.engine.got) == 1
        held.full = False
        w.recording.flush()
        waiting.join(30)
        assert seen == [200]
        w.recording.close()
    assert len(held.kept) == 2


@pytest.mark.parametrize("when_full", ["fail", "block"])
def test_an_end_is_held_against_all_that_came_before_and_so_waits_for_the_disk_too(
    tmp_path: Path, when_full: str
) -> None:
    held = Held()
    with world(tmp_path, lambda got: [answer(chat([1], [5]))], sink=held, limit=4, when_full=when_full) as w:
        assert w.post(ASK, x_rollstore_rollout="r").status_code == 200
        assert held.tried.wait(30)
        seen: list[int] = []

        def end() -> None:
            seen.append(w.client.post("/rollstore/end", json={"rollout_id": "r", "reward": 1.0}).status_code)

        if when_full == "fail":
            end()
            assert (seen, w.gateway.status()["open"]) == ([503], 1)  # nothing was taken
            held.full = False
            w.recording.flush()
            end()
        else:
            waiting = threading.Thread(target=end)
            waiting.start()
            assert w.client.get("/rollstore/status").json()["open"] == 1
            held.full = False
            waiting.join(30)
        assert seen[-1] == 202
        w.recording.close()
    (segment,) = held.kept
    assert (segment.rollout_id, segment.reward) == ("r", 1.0)


class FullDisk(MemoryFilesystem):
    """A disk for the log of calls that can be full, and says when it was tried."""

    def __init__(self) -> None:
        super().__init__()
        self.tried = threading.Event()

    def fault_at(self, verb: str) -> BaseException | None:
        error = super().fault_at(verb)
        if error is not None:
            self.tried.set()
        return error


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_a_reply_waits_until_the_call_is_in_the_log(
    tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "PATIENCE_SECONDS", 0.01)
    disk = FullDisk()
    steps = [STREAM, event(part([5], prompt=[1], finish="stop")), END] if stream else [answer(chat([1], [5]))]
    with world(tmp_path / "s", lambda got: steps, log=disk, limit=1, when_full="fail") as w:
        disk.fault = Fault(at=1, lasting=True, verbs=frozenset({"write"}))
        seen: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: seen.append(w.post({**ASK, "stream": stream})))
        waiting.start()
        assert disk.tried.wait(30)
        assert w.post(ASK).status_code == 503  # its place is still taken
        assert seen == []
        disk.fault = None
        waiting.join(30)
        assert seen[0].status_code == 200
        (row,) = w.rows()
        assert (row.tokens.tolist(), row.ending) == ([1, 5], "terminated")


def test_a_client_that_leaves_while_its_reply_waits_for_the_log_is_recorded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "PATIENCE_SECONDS", 0.01)
    disk = FullDisk()
    with world(tmp_path / "s", lambda got: [answer(chat([1], [5]))], log=disk) as w:
        disk.fault = Fault(at=1, lasting=True, verbs=frozenset({"write"}))
        with w.client.stream("POST", "/v1/chat/completions", json=ASK):
            assert disk.tried.wait(30)
        disk.fault = None
        while w.client.get("/rollstore/status").json()["waiting"]:
            pass  # the gateway has yet to see that its client is gone
        (row,) = w.rows()
        assert (row.tokens.tolist(), row.ending) == ([1, 5], "terminated")


# the weights


def versions(row: Any) -> tuple[Any, ...]:
    each = None if row.weight_versions is None else row.weight_versions.to_list()
    return each, row.weight_version_min, row.weight_version_max, row.weight_version_source


def test_the_trainer_says_which_weights_the_engine_has(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: [answer(chat([1], [5, 9]))]) as w:
        w.post(ASK, x_rollstore_rollout="before")
        assert w.client.post("/rollstore/weights", json={"version": 7}).json() == {"weights": ["7"]}
        w.post(ASK, x_rollstore_rollout="seven")
        assert w.client.post("/rollstore/weights", json={"version": "step-8"}).json() == {"weights": ["step-8"]}
        w.post(ASK, x_rollstore_rollout="eight")
        assert w.client.get("/rollstore/status").json()["weights"] == ["step-8"]
        found = {row.rollout_id: row for row in w.rows()}
    assert versions(found["before"]) == (None, None, None, None)
    assert versions(found["seven"]) == ([7, 7], 7, 7, "start_end")
    assert versions(found["eight"]) == ([8, 8], 8, 8, "start_end")
    assert found["eight"].spans[-1].weight_label == "step-8"


@pytest.mark.parametrize("there_and_back", [False, True])
def test_a_call_during_which_the_weights_change_has_a_range_and_no_version_of_a_token(
    tmp_path: Path, there_and_back: bool
) -> None:
    told = threading.Event()
    steps = [STREAM, event(part([50], "h", prompt=[1])), told, event(part([9], finish="stop")), END]
    with world(tmp_path / "s", lambda got: steps) as w:
        w.client.post("/rollstore/weights", json={"version": 7})
        with w.client.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            for version in (9, 7) if there_and_back else (9,):
                w.client.post("/rollstore/weights", json={"version": version})
            told.set()
            assert list(lines)
        (row,) = w.rows()
    assert versions(row) == (None, 7, 9, "start_end")
    assert row.spans[-1].weight_label is None


def test_while_the_weights_are_on_their_way_a_call_may_be_of_either(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: [answer(chat([1], [5, 9]))]) as w:
        w.client.post("/rollstore/weights", json={"version": 7})
        w.client.post("/rollstore/weights", json={"version": 8, "changing": True})
        w.post(ASK, x_rollstore_rollout="meanwhile")
        w.client.post("/rollstore/weights", json={"version": 8})
        w.post(ASK, x_rollstore_rollout="then")
        meanwhile, then = w.rows()
    assert versions(meanwhile) == (None, 7, 8, "start_end")
    assert versions(then) == ([8, 8], 8, 8, "start_end")


def test_weights_that_were_not_known_when_a_call_began_leave_its_versions_unknown(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: [answer(chat([1], [5]))]) as w:
        w.client.post("/rollstore/weights", json={"version": 8, "changing": True})
        w.post(ASK)
        (row,) = w.rows()
    assert versions(row) == (None, None, None, "start_end")


def test_what_the_engine_and_the_client_say_of_the_weights_goes_before_what_the_trainer_said(tmp_path: Path) -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    replies = iter(
        [
            chat([1], [5, 9], weight_versions=spans),
            {**chat([1], [5, 9]), "metadata": {"weight_version": "6"}},
            {**chat([1], [5, 9]), "metadata": {"weight_version": "7"}},
            chat([1], [5, 9]),
        ]
    )
    own = json.dumps({"weight_version_min": 1, "weight_version_max": 2, "weight_version_source": "start_end"})
    with world(tmp_path / "s", lambda got: [answer(next(replies))]) as w:
        w.client.post("/rollstore/weights", json={"version": 7})
        w.post(ASK, x_rollstore_rollout="spans")
        w.post(ASK, x_rollstore_rollout="other")
        w.post(ASK, x_rollstore_rollout="same")
        w.post(ASK, x_rollstore_rollout="client", x_rollstore_columns=own)
        found = {row.rollout_id: row for row in w.rows()}
    assert versions(found["spans"]) == ([3, 4], 3, 4, "per_span")
    assert versions(found["other"]) == (None, None, 6, "read_at_completion")
    assert versions(found["same"]) == ([7, 7], 7, 7, "start_end")
    assert versions(found["client"]) == (None, 1, 2, "start_end")


@pytest.mark.parametrize(
    "body", ["{", "{}", '{"version": -1}', '{"version": true}', '{"version": 1.5}', '{"version": ""}']
)
def test_weights_that_are_none_are_refused(tmp_path: Path, body: str) -> None:
    with world(tmp_path / "s", lambda got: []) as w:
        assert w.client.post("/rollstore/weights", content=body).status_code == 400
        assert w.client.get("/rollstore/status").json()["weights"] == []
