"""One bad reply or one wrong claim of a client costs neither the conversation nor what was drawn in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rollstore
from rollstore import Rollout, Store
from rollstore.store.spool import Spool
from rollstore.writers.gateway import Conversations
from rollstore.writers.gateway.call import Call, End
from rollstore.writers.gateway.calls import Calls
from rollstore.writers.gateway.columns import columns
from rollstore.writers.gateway.serve import has, is_stored
from rollstore.writers.openai import Server
from rollstore.writers.uuid7 import uuid7
from tests.writers.sink import Sink
from tests.writers.upstream import answer, chat, user, world

ASK = {"messages": [user("q")], "temperature": 1.0}
FIRST, SECOND = ([1, 2], [5, 6]), ([1, 2, 5, 6, 3], [7])
FORK = {"parent_rollout_id": "p", "parent_segment": 0}


def call(turn: tuple[list[int], list[int]], name: str | None = "r", said: Any = None, **choice: Any) -> Call:
    made = chat(*turn)
    for key, value in choice.items():
        (made if key in ("mm_placeholders", "usage") else made["choices"][0])[key] = value
    return Call(
        request=json.dumps(ASK).encode(), parts=[json.dumps(made).encode()], mark=uuid7(), rollout_id=name,
        fields={} if said is None else columns(json.dumps(said).encode()),
    )  # fmt: skip


def recorded(*events: Any) -> tuple[list[Rollout], Conversations]:
    sink = Sink()
    conversations = Conversations(sink, server=Server(logprob_kind="behavior"))
    for event in events:
        conversations.append(event)
    conversations.close()
    return sink.rows, conversations


def ranked(rank: int) -> Any:
    return {"content": [{"token": "token_id:7", "logprob": -0.5, "rank": rank}]}


ODD = [
    ({"logprobs": ranked(-1)}, "ranks"),
    ({"mm_placeholders": {"image": [{"offset": 3, "length": 99}]}}, "media"),
    ({"sampling_mask": [[7, 7]]}, "support"),
    ({"sampling_mask": [[7], [8]]}, "sampling_mask"),
    ({"routed_experts": "no array"}, "routed_experts"),
    ({"weight_versions": [{"version": "3", "start": 0, "end": 9}]}, "weight_versions"),
]


@pytest.mark.parametrize(("odd", "left_out"), ODD)
def test_a_field_of_a_later_reply_that_cannot_be_is_left_out_and_named_and_costs_nothing_else(
    odd: dict[str, Any], left_out: str
) -> None:
    (row,), conversations = recorded(call(FIRST), call(SECOND, **odd), End(rollout_id="r", fields={"reward": 1.0}))
    assert row.tokens.tolist() == [1, 2, 5, 6, 3, 7]
    assert row.action_mask.tolist() == [False, False, True, True, False, True]
    assert row.logprobs.to_list()[:2] == [-0.25, -0.25]
    assert (row.reward, row.metadata) == (1.0, {"left_out": left_out})
    assert conversations.counts["refused"] == 0


@pytest.mark.parametrize("token", [2**31, -1, 2**70])
def test_a_token_that_is_no_id_costs_its_reply_and_no_other(token: int) -> None:
    (row,), conversations = recorded(call(FIRST), call(([1, 2, 5, 6, 3], [token])))
    assert row.tokens.tolist() == [1, 2, 5, 6]
    assert (conversations.counts["calls"], conversations.counts["not recorded"]) == (1, 1)
    assert "token_ids" in str(conversations.last_not_recorded)


def test_of_several_samples_one_that_cannot_be_read_costs_the_others_nothing() -> None:
    reply = chat([1], [5])
    reply["choices"].append({**chat([1], [2**31])["choices"][0], "index": 1})
    reply["choices"].append({**chat([1], [6])["choices"][0], "index": 2})
    many = Call(request=json.dumps({**ASK, "n": 3}).encode(), parts=[json.dumps(reply).encode()], mark=uuid7())
    rows, conversations = recorded(many)
    assert [(row.tokens.tolist(), row.sample_index) for row in rows] == [([1, 5], 0), ([1, 6], 2)]
    assert (conversations.counts["calls"], conversations.counts["not recorded"]) == (1, 1)


CLASHES = [
    ({"reward": 1.0}, {"reward_status": "scorer_error"}),
    ({"weight_version_min": 3}, {"weight_version_max": 2}),
    ({}, {"vocab_size": 4}),
    ({"ending": "truncated", "bootstrap": True}, {"ending": "terminated"}),
    ({}, {**FORK, "fork_position": 99}),
]


@pytest.mark.parametrize(("first", "then"), CLASHES)
def test_what_clashes_only_together_is_left_out_where_nobody_could_be_told(first: Any, then: Any) -> None:
    """Two calls at once, or an end that crosses a call: then nobody is there to be answered with 400."""
    events = call(FIRST, said=first or None), call(SECOND), End(rollout_id="r", fields={**then, "step": 3})
    (row,), conversations = recorded(*events)
    assert (row.tokens.tolist(), row.step) == ([1, 2, 5, 6, 3, 7], 3)
    assert set(row.metadata["left_out"].split(", ")) <= {*first, *then}
    assert (conversations.counts["refused"], conversations.counts["left out"]) == (0, 1)


def names(**columns: Any) -> dict[str, str]:
    return {"x_rollstore_rollout": "r", "x_rollstore_columns": json.dumps(columns)}


def turns() -> Any:
    replies = iter([FIRST, SECOND, ([1, 2, 5, 6, 3, 7, 4], [8])])
    return lambda got: [answer(chat(*next(replies)))]


@pytest.mark.parametrize(("first", "then"), CLASHES)
def test_an_end_that_clashes_with_the_conversation_is_refused_and_leaves_it_as_it_was(
    tmp_path: Path, first: Any, then: Any
) -> None:
    with world(tmp_path / "s", turns()) as w:
        w.post(ASK, **names(**first))
        seen = w.client.post("/rollstore/end", json={"rollout_id": "r", **then})
        assert (seen.status_code, seen.json()["error"]["type"]) == (400, "gateway_error")
        w.post(ASK, x_rollstore_rollout="r")
        assert w.client.post("/rollstore/end", json={"rollout_id": "r", "reward": 0.5}).status_code == 202
        (row,) = w.rows()
    assert (row.tokens.tolist(), row.reward, row.reward_status) == ([1, 2, 5, 6, 3, 7], 0.5, "scored")
    assert row.metadata is None
    assert {name: getattr(row, name) for name in first} == {**first, **({"reward": 0.5} if "reward" in first else {})}


@pytest.mark.parametrize(("first", "then"), CLASHES[1:4])
def test_columns_of_a_call_that_clash_with_the_conversation_are_refused_before_the_engine_hears_of_it(
    tmp_path: Path, first: Any, then: Any
) -> None:
    with world(tmp_path / "s", turns()) as w:
        w.post(ASK, **names(**first))
        assert w.post(ASK, **names(**then)).status_code == 400
        assert len(w.engine.got) == 1
        assert w.post(ASK, **names(**first, step=4)).status_code == 200
        (row,) = w.rows()
    assert (row.tokens.tolist(), row.step, row.metadata) == ([1, 2, 5, 6, 3, 7], 4, None)


def test_what_the_engine_sent_is_not_held_against_the_client(tmp_path: Path) -> None:
    odd = chat(
        *FIRST, logprobs={"content": [{"token": f"token_id:{t}", "logprob": -0.5, "rank": -1} for t in FIRST[1]]}
    )
    with world(tmp_path / "s", lambda got: [answer(odd)]) as w:
        w.post(ASK, x_rollstore_rollout="r")
        seen = w.client.post("/rollstore/end", json={"rollout_id": "r", "reward": 1.0})
        assert (seen.status_code, w.gateway.status()["left_out"]) == (202, 0)
        (row,) = w.rows()
        assert w.gateway.status()["left_out"] == 1
    assert (row.reward, row.ranks, row.logprobs.to_list(), row.metadata) == (
        1.0,
        None,
        [-0.5, -0.5],
        {"left_out": "ranks"},
    )


@pytest.mark.parametrize(("position", "taken"), [(1, True), (4, True), (5, False)])
def test_where_a_fork_lies_is_held_against_the_conversation(tmp_path: Path, position: int, taken: bool) -> None:
    with world(tmp_path / "s", lambda got: [answer(chat(*FIRST))]) as w:
        w.post(ASK, **names(**FORK, fork_position=position))
        (row,) = w.rows()
    assert row.fork_position == (position if taken else None)
    assert row.metadata == (None if taken else {"left_out": "fork_position, parent_rollout_id, parent_segment"})


def test_a_fork_may_lie_in_the_prompt_that_is_still_to_come(tmp_path: Path) -> None:
    with world(tmp_path / "s", turns()) as w:
        w.post(ASK, x_rollstore_rollout="r")
        assert w.post(ASK, **names(**FORK, fork_position=5)).status_code == 200
        (row,) = w.rows()
    assert (row.fork_position, row.metadata) == (5, None)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate"])
@pytest.mark.parametrize("name", [None, "r"])
def test_a_request_that_is_nested_too_deeply_is_no_failure_of_the_gateway(
    tmp_path: Path, path: str, name: str | None
) -> None:
    deep = '{"messages": [], "x": ' + "[" * 30_000 + "]" * 30_000 + "}"  # 3.13 takes 3,000
    headers = {} if name is None else {"x-rollstore-rollout": name}
    with world(tmp_path / "s", lambda got: [answer(chat([1], [5]))]) as w:
        seen = w.client.post(path, content=deep, headers=headers)
        assert seen.status_code in (200, 400)
        assert [got.body for got in w.engine.got] == [deep.encode()] * (seen.status_code == 200)
        columns_ = {"x-rollstore-columns": '{"metadata":' + "[" * 9000 + "]" * 9000 + "}"}
        assert w.client.post(path, json=ASK, headers=columns_).status_code in (400, 431)
        for other in ("end", "weights"):
            assert w.client.post(f"/rollstore/{other}", content=deep).status_code == 400
        w.recording.flush()
        assert w.gateway.status()["calls"] + w.gateway.status()["not_recorded"] == (seen.status_code == 200)


def test_settings_in_the_sampling_params_of_a_chat_are_not_those_that_draw() -> None:
    asked = {**ASK, "temperature": 0.5, "sampling_params": {"temperature": 1.0, "n": 4}}
    event = Call(request=json.dumps(asked).encode(), parts=[json.dumps(chat(*FIRST)).encode()], mark=uuid7())
    (row,), _ = recorded(event)
    assert (row.samplers[0].temperature, row.group_size) == (0.5, None)


# two gateways


def gateway_on(store: Store, state: Path) -> Conversations:
    conversations = Conversations(
        store.writer(), log=Calls(Spool(state), store.store_id), taken=lambda name: has(store, name)
    )
    conversations.restore(lambda row: is_stored(store, row))
    return conversations


def take(conversations: Conversations, event: Any) -> None:
    conversations.append(conversations.log.put(event))  # type: ignore[union-attr]
    conversations.flush()


def test_two_gateways_that_are_given_one_name_record_two_rollouts(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    one, other = (gateway_on(rollstore.open(tmp_path / "s"), tmp_path / name) for name in ("one", "other"))
    take(one, call(FIRST))
    take(other, call(FIRST))
    take(other, call(([9], [10])))  # ends the segment before
    take(one, call(SECOND))
    take(one, End(rollout_id="r", fields={"reward": 1.0}))
    one.close()
    assert other.counts["names taken"] == 0  # it was the first to write
    take(other, End(rollout_id="r", fields={"reward": 0.0}))
    other.close()
    assert one.counts["names taken"] == 1
    first = store.get("r")
    assert [(row.tokens.tolist(), row.segment) for row in first] == [([1, 2, 5, 6], 0), ([9, 10], 1)]
    (name,) = set(store.scan("rollouts").read_all()["rollout_id"].to_pylist()) - {"r"}
    (second,) = store.get(name)
    assert (second.tokens.tolist(), second.reward, second.metadata) == ([1, 2, 5, 6, 3, 7], 1.0, {"after": "r"})


def test_a_name_that_was_taken_stays_apart_when_the_gateway_is_killed(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    with store.writer() as writer:
        writer.append(Rollout(rollout_id="r", tokens=FIRST[0], action_mask=[False, True]))
    for rewritten in (False, True):
        state, marked = tmp_path / str(rewritten), call(FIRST)
        killed = gateway_on(rollstore.open(tmp_path / "s"), state)
        take(killed, marked)
        take(killed, call(([9], [10])))
        if rewritten:
            killed._rewrite(killed.log)  # pyright: ignore
        killed.log.close()  # type: ignore[union-attr]
        killed._writer.close()  # pyright: ignore  what it wrote survives
        again = gateway_on(rollstore.open(tmp_path / "s"), state)
        take(again, End(rollout_id="r"))
        again.close()
        own = marked.mark
    table = store.scan("rollouts", ["rollout_id", "segment", "metadata"]).read_all().to_pylist()
    apart = [row for row in table if row["rollout_id"] != "r"]
    assert len(table) == 1 + len(apart)
    assert sorted(row["segment"] for row in apart) == [0, 0, 1, 1]
    assert {dict(row["metadata"])["after"] for row in apart} == {"r"}
    assert len({row["rollout_id"] for row in apart}) == 2, own


def test_a_row_that_is_refused_is_the_same_after_a_kill(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    killed = gateway_on(rollstore.open(tmp_path / "s"), tmp_path / "state")
    take(killed, call(FIRST))
    take(killed, call(SECOND, logprobs=ranked(-1)))
    take(killed, End(rollout_id="r"))
    killed.log.close()  # type: ignore[union-attr]
    killed._writer.close()  # pyright: ignore
    gateway_on(rollstore.open(tmp_path / "s"), tmp_path / "state").close()
    assert store.scan("rollouts", ["rollout_id"]).read_all().num_rows == 1
    (row,) = store.get("r")
    assert row.metadata == {"left_out": "ranks"}


def test_a_call_in_the_log_that_cannot_be_read_any_more_costs_no_start(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    killed = gateway_on(rollstore.open(tmp_path / "s"), tmp_path / "state")
    take(killed, call(FIRST))
    take(killed, call(SECOND))
    (conversation,) = killed._open.values()  # pyright: ignore
    conversation.calls[1] = (conversation.calls[1][0], 7)  # a reply that a later version does not find in its call
    killed._rewrite(killed.log)  # pyright: ignore
    killed.log.close()  # type: ignore[union-attr]
    gateway_on(rollstore.open(tmp_path / "s"), tmp_path / "state").close()
    (row,) = store.get("r")
    assert (row.tokens.tolist(), row.metadata) == ([1, 2, 5, 6], {"calls_lost": "1"})
