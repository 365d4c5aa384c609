"""A store that goes away, a state in a wrong place, a stream under another name, and what only the gateway may say."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import rollstore
from rollstore.store.spool import Spool
from rollstore.writers import openai
from rollstore.writers.gateway.asking import Events, payload
from rollstore.writers.gateway.calls import Calls
from rollstore.writers.gateway.serve import missing, serve
from tests.writers.upstream import CUT, Engine, answer, chat, part, user, world

ASK = {"messages": [user("q")], "temperature": 1.0}
FIRST, LAST = part([5], "a", prompt=[1, 2]), part([6], "c", finish="stop")
BOM = b"\xef\xbb\xbf"


def test_a_store_that_is_deleted_is_told_at_the_first_write_and_what_came_since_is_kept(tmp_path: Path) -> None:
    path, state = tmp_path / "s", tmp_path / "s.gateway"
    store = rollstore.open(path, create=True)
    with contextlib.closing(Engine(lambda got: [answer(chat([1], [5]))])) as engine:
        command = [sys.executable, "-m", "rollstore", "gateway", "--upstream", engine.address, "--store", str(path)]
        pipes = subprocess.PIPE
        with subprocess.Popen([*command, "--port", "0"], stdout=pipes, stderr=pipes, text=True) as process:
            try:
                address = (process.stderr or sys.stdin).readline().split()[-1]
                with httpx.Client(base_url=address, trust_env=False, verify=False, timeout=60) as client:

                    def post(where: str, what: Any) -> int:
                        headers = {"x-rollstore-rollout": "r"}
                        return client.post(where, json=what, headers=headers).status_code

                    assert post("/v1/chat/completions", ASK) == 200
                    shutil.rmtree(path)
                    assert post("/rollstore/end", {"rollout_id": "r", "reward": 1.0}) == 503
                    assert post("/v1/chat/completions", ASK) == 200
                    assert post("/rollstore/end", {"rollout_id": "r", "reward": 1.0}) == 503
                    failing = client.get("/rollstore/status").json()["failing"]
            finally:
                process.send_signal(signal.SIGTERM)
                _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    for told in (failing, said):
        assert f"wanted store {store.store_id}" in told
        assert f"kept in {state}" in told
    log = Calls(Spool(state), store.store_id)
    assert len(log.read().events) == 2
    log.close()
    assert not path.exists()


def test_another_store_in_its_place_is_not_the_store(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    assert missing(store, tmp_path) is None
    shutil.rmtree(tmp_path / "s")
    other = rollstore.open(tmp_path / "s", create=True)
    assert f"wanted store {store.store_id}, got {other.store_id}" in str(missing(store, tmp_path))


@pytest.mark.parametrize("inside", ["", "gateway", "x/../y"])
def test_a_state_inside_the_store_is_refused(tmp_path: Path, inside: str) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    before = sorted((tmp_path / "s").rglob("*"))
    with pytest.raises(ValueError, match="state: wanted a folder outside the store"):
        serve("http://127.0.0.1:1", store, port=0, state=tmp_path / "s" / inside)
    assert sorted((tmp_path / "s").rglob("*")) == before


@pytest.mark.parametrize("begin", [b"", BOM, b": ping\n\n", b"event: x\n", b"\n"])
def test_a_stream_under_another_content_type_is_passed_on_as_it_comes(tmp_path: Path, begin: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"
    steps = [head, begin + b"da", b"ta: " + json.dumps(FIRST).encode() + b"\n\n"]
    steps += [b"data: " + json.dumps(LAST).encode() + b"\n\n", b"data: [DONE]\n\n", CUT]
    with world(tmp_path / "s", lambda got: steps) as w:
        seen = w.post({**ASK, "stream": True})
        shown = [json.loads(data) for data in openai.events(seen.text)]
        assert [one["choices"][0]["token_ids"] for one in shown] == [None, None]
        (row,) = w.rows()
        assert w.gateway.status()["cut"] == 0
    assert (row.tokens.tolist(), row.ending) == ([1, 2, 5, 6], "terminated")


@pytest.mark.parametrize("mark", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("begin", [b"", BOM])
def test_events_end_with_every_end_of_a_line_wherever_they_are_cut(mark: bytes, begin: bytes) -> None:
    whole = begin + b"".join(b"event: x%sdata: {%d}%s%s" % (mark, n, mark, mark) for n in range(3))
    for at in range(len(whole)):
        events = Events()
        cut = [event for some in (whole[:at], whole[at:]) for event in events.cut(some)]
        rest = events.rest()
        assert b"".join([*cut, rest]) == whole
        assert [payload(event) for event in [*cut, rest] if payload(event)] == [b"{0}", b"{1}", b"{2}"]
    assert openai.events(whole) == [b"{0}", b"{1}", b"{2}"]


REFUSED = [
    {"tool_seconds": -1}, {"group_id": "g", "group_size": 2, "sample_index": 5}, {"metadata": {"left_out": "mine"}},
    {"metadata": {"after": "mine", "a": "b"}}, {"metadata": {"calls_lost": "9"}},
]  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_nobody_can_mean_or_only_the_gateway_may_say_is_refused(tmp_path: Path, said: dict[str, Any]) -> None:
    with world(tmp_path / "s", lambda got: [answer(chat([1], [5]))]) as w:
        assert w.post(ASK, x_rollstore_columns=json.dumps(said)).status_code == 400
        assert w.engine.got == []
        w.post(ASK, x_rollstore_rollout="r")
        assert w.client.post("/rollstore/end", json={"rollout_id": "r", **said}).status_code == 400
        assert w.client.post("/rollstore/end", json={"rollout_id": "r", "metadata": {"a": "b"}}).status_code == 202
        (row,) = w.rows()
    assert row.metadata == {"a": "b"}


def test_a_sample_is_one_of_the_group_that_was_named_before(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: [answer(chat([1], [5]))]) as w:
        w.post(ASK, x_rollstore_rollout="r", x_rollstore_columns='{"group_id": "g", "group_size": 2}')
        assert w.client.post("/rollstore/end", json={"rollout_id": "r", "sample_index": 2}).status_code == 400
        assert w.client.post("/rollstore/end", json={"rollout_id": "r", "sample_index": 1}).status_code == 202
