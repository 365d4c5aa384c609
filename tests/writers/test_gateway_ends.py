"""When a conversation is over: not while a call of it is under way, and an end that is answered was taken."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollstore import Rollout
from rollstore.store.spool import Spool
from rollstore.writers.gateway import Conversations, Gateway
from rollstore.writers.gateway.busy import Busy
from rollstore.writers.gateway.call import End
from rollstore.writers.gateway.calls import Calls
from rollstore.writers.queued import Queued
from tests.writers.test_gateway_claims import FIRST, SECOND, Sink, call
from tests.writers.upstream import World, answer, chat, user, world

ASK = {"messages": [user("q")], "temperature": 1.0}


def end(w: World, name: str = "r", **said: Any) -> tuple[int, str]:
    seen = w.client.post("/rollstore/end", json={"rollout_id": name, **said})
    return seen.status_code, seen.text


def is_over(w: World, name: str) -> None:
    """Returns when nothing of the calls of a rollout is left to do."""
    while w.gateway._busy.calls(name):  # pyright: ignore[reportPrivateUsage]
        w.client.get("/rollstore/status")
    w.recording.flush()


@pytest.mark.parametrize("name", ["r", None])
def test_a_conversation_with_a_call_under_way_is_not_idle(tmp_path: Path, name: str | None) -> None:
    drawing, drawn = threading.Event(), threading.Event()
    replies = iter([[answer(chat(*FIRST))], [lambda _: drawing.set(), drawn, answer(chat(*SECOND))]])
    named = {} if name is None else {"x_rollstore_rollout": name}
    with world(tmp_path / "s", lambda got: [answer(chat([8], [9]))] if b"other" in got.body else next(replies)) as w:
        w.post({"messages": [user("other")]}, x_rollstore_rollout="other")
        is_over(w, "other")
        w.post(ASK, **named)
        w.now[0] = 50.0
        going = threading.Thread(target=w.post, args=(ASK,), kwargs=named)
        going.start()
        assert drawing.wait(30)
        w.now[0] = 100.0  # more than the 60 seconds since the call before
        asyncio.run(w.gateway.expire())
        w.recording.flush()
        assert w.gateway.status()["open"] == (2 if name is None else 1)  # a call without a name may be of either
        drawn.set()
        going.join()
        if name is not None:
            assert end(w, reward=1.0)[0] == 202
        rows = {row.rollout_id: row for row in w.rows()}
    rows.pop("other")
    (row,) = rows.values()
    assert (row.tokens.tolist(), row.reward) == ([1, 2, 5, 6, 3, 7], None if name is None else 1.0)


def test_what_was_idle_before_a_call_without_a_name_began_is_over_all_the_same() -> None:
    now = [100.0]
    busy = Busy(lambda: now[0])
    with busy.using(None), busy.using("r"):
        now[0] = 300.0
        assert (busy.expiry(60).before, busy.expiry(60).busy) == (40.0, ("r",))
    assert (busy.expiry(60).before, busy.expiry(60).busy) == (240.0, ())


def test_an_end_of_a_rollout_that_is_not_open_is_refused_and_says_why(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: [answer(chat(*FIRST))]) as w:
        assert end(w, reward=1.0)[0] == 404
        w.post(ASK, x_rollstore_rollout="r")
        assert end(w, reward=1.0)[0] == 202
        assert end(w, reward=1.0)[0] == 202  # a client that was not answered says it again
        status, why = end(w, reward=0.5)
        assert (status, "has ended with other columns" in why) == (409, True)
        w.post(ASK, x_rollstore_rollout="left")
        is_over(w, "left")
        w.now[0] = 61.0
        asyncio.run(w.gateway.expire())
        status, why = end(w, "left", reward=1.0)
        assert (status, "nobody went on with it" in why) == (409, True)
        assert w.gateway.status()["ends_of_nothing"] == 3
        rows = {row.rollout_id: row.reward for row in w.rows()}
    assert rows == {"r": 1.0, "left": None}


def test_an_end_before_the_first_call_is_over_is_refused(tmp_path: Path) -> None:
    drawing, drawn = threading.Event(), threading.Event()
    with world(tmp_path / "s", lambda got: [lambda _: drawing.set(), drawn, answer(chat(*FIRST))]) as w:
        going = threading.Thread(target=w.post, args=(ASK,), kwargs={"x_rollstore_rollout": "r"})
        going.start()
        assert drawing.wait(30)
        status, why = end(w, reward=1.0)
        assert (status, "under way" in why) == (409, True)
        drawn.set()
        going.join()
        assert end(w, reward=1.0)[0] == 202
        (row,) = w.rows()
    assert row.reward == 1.0


def test_of_two_ends_at_once_one_is_taken_and_the_other_is_refused() -> None:
    sink = Sink()
    conversations = Conversations(sink)
    recording = Queued(conversations)
    gateway = Gateway("http://127.0.0.1:1", recording, conversations)
    rewards = (0.0, 1.0)

    async def both(name: str) -> dict[float, int]:
        transport = httpx.ASGITransport(gateway.application)  # pyright: ignore[reportArgumentType]
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            said = ({"rollout_id": name, "reward": reward} for reward in rewards)
            seen = await asyncio.gather(*(client.post("/rollstore/end", json=one) for one in said))
        return dict(zip(rewards, (one.status_code for one in seen), strict=True))

    taken: dict[str, float] = {}
    for name in "abcdefgh":
        recording.append(call(FIRST, name))
        statuses = asyncio.run(both(name))
        assert sorted(statuses.values()) == [202, 409]
        taken[name] = next(reward for reward, status in statuses.items() if status == 202)
    recording.close()
    assert {row.rollout_id: row.reward for row in sink.rows} == taken


def test_how_a_rollout_ended_is_known_to_the_next_gateway(tmp_path: Path) -> None:
    first = Conversations(Sink(), log=Calls(Spool(tmp_path), "s"))
    first.restore(lambda row: False)
    for event in (call(FIRST), End(rollout_id="r", fields={"reward": 1.0}), call(FIRST, "left")):
        first.append(first.log.put(event))  # type: ignore[union-attr]
    first.close()
    again = Conversations(Sink(), log=Calls(Spool(tmp_path), "s"))
    again.restore(lambda row: False)
    standings = [again.standing("r", {"reward": reward}) for reward in (1.0, 0.0)]
    assert [*standings, again.standing("left", {}), again.standing("new", {})] == [
        "ended so",
        "ended",
        "idle",
        "unknown",
    ]
    again.close()


KEY = {"replay_key": 1, "replay_sample": 2}
TOGETHER = [
    ({}, {"reward": 0.5, "bootstrap": True}),
    ({"bootstrap": True}, {"reward": 0.5}),
    (KEY, {"noise": "philox"}),
    ({"parent_rollout_id": "p", "parent_segment": 0, "fork_position": 1}, {"fork_position": 2}),
    ({"reward": 0.5}, {"reward_status": "scored"}),
    ({}, {"ending_reason": "context_limit"}),
]


@pytest.mark.parametrize(("first", "then"), TOGETHER)
def test_an_end_is_held_against_what_the_row_will_be(tmp_path: Path, first: Any, then: Any) -> None:
    cut = chat(*FIRST, finish="length")
    complete = {**first, **({"noise": "philox"} if first is KEY else {})}  # columns of a call are whole
    with world(tmp_path / "s", lambda got: [answer(cut)]) as w:
        asked = {"x_rollstore_columns": json.dumps(complete)} if first else {}
        assert w.post({**ASK, "max_tokens": 2}, x_rollstore_rollout="r", **asked).status_code == 200
        status, why = end(w, **then)
        assert status == 202, why
        (row,) = w.rows()
    assert isinstance(row, Rollout)
    assert {name: getattr(row, name) for name in {**first, **then}} == {**first, **then}
    assert (row.ending, row.metadata) == ("truncated", None)


def test_a_rollout_that_did_not_stop_at_a_limit_takes_no_bootstrap(tmp_path: Path) -> None:
    with world(tmp_path / "s", lambda got: [answer(chat(*FIRST))]) as w:
        w.post(ASK, x_rollstore_rollout="r")
        assert end(w, bootstrap=True)[0] == 400
        assert end(w, bootstrap=False)[0] == 202
        (row,) = w.rows()
    assert (row.ending, row.bootstrap) == ("terminated", False)
