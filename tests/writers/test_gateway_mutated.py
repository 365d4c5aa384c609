"""Any field of a later reply may be anything: the gateway records it or counts it, and it costs no other reply."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from rollstore.writers.gateway import Conversations
from rollstore.writers.gateway.call import Call, End
from rollstore.writers.openai import Server
from tests.writers.test_gateway_claims import FIRST, Sink
from tests.writers.upstream import chat, part, user

ASK = {"messages": [user("q")], "temperature": 1.0, "logprobs": True, "top_logprobs": 2, "max_tokens": 8}
GONE = object()
VALUES = (None, -1, 2.5, 2**70, "a", [[]], GONE)
"""What stands in the place of a field."""


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands; of a list, its first."""
    if path:
        yield path
    if isinstance(node, dict):
        for key, value in node.items():
            yield from places(value, (*path, key))
    elif isinstance(node, list) and node:
        yield from places(node[0], (*path, 0))


def mutated(whole: Any) -> Iterator[Any]:
    """The same with one field as something else, or gone."""
    for path in list(places(whole)):
        for value in VALUES:
            made = copy.deepcopy(whole)
            *way, last = path
            node = made
            for key in way:
                node = node[key]
            if value is GONE:
                del node[last]
            else:
                node[last] = value
            yield made


SECOND = {
    **chat([1, 2, 5, 6, 3], [7, 8], stop_reason=7, sampling_mask=[[7, 9], [8]], weight_versions=None),
    "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    "system_fingerprint": "vllm-0.32.0-x", "metadata": {"weight_version": "3"},
    "mm_placeholders": {"image": [{"offset": 4, "length": 1}]},
}  # fmt: skip


MARKS = [f"0199f0c0-0000-7000-8000-00000000000{n}" for n in (1, 2)]


def conversation(parts: list[Any]) -> tuple[list[Any], Conversations]:
    """What is recorded of a good call and one with these parts; the client then says a reward."""
    sink = Sink()
    conversations = Conversations(sink, server=Server(logprob_kind="behavior"))
    for index, some in enumerate(([chat(*FIRST)], parts)):
        raw = [json.dumps(one).encode() for one in some]
        request = json.dumps(ASK).encode()
        conversations.append(Call(request=request, parts=raw, rollout_id="r", mark=MARKS[index]))
    conversations.check("r", {"reward": 1.0}, end=True)
    conversations.append(End(rollout_id="r", fields={"reward": 1.0}))
    conversations.close()
    return sink.rows, conversations


def kept(parts: list[Any]) -> bool:
    """Whether the second call was recorded; the first is, in any case."""
    rows, conversations = conversation(parts)
    assert conversations.counts["refused"] == 0
    assert rows[0].tokens[:4].tolist() == [1, 2, 5, 6]
    assert rows[0].action_mask[:4].tolist() == [False, False, True, True]
    assert rows[0].logprobs.to_list()[:2] == [-0.25, -0.25]
    assert (rows[-1].reward, {row.rollout_id for row in rows}) == (1.0, {"r"})
    assert conversations.counts["calls"] + conversations.counts["not recorded"] == 2
    return conversations.counts["calls"] == 2


def test_a_later_reply_with_any_field_as_something_else_costs_its_conversation_nothing() -> None:
    found = [kept([reply]) for reply in mutated(SECOND)]
    assert 30 < sum(found) < len(found)


def test_a_stream_with_any_field_as_something_else_costs_its_conversation_nothing() -> None:
    stream = [part([7], "a", prompt=[1, 2, 5, 6, 3]), part([8], "b", finish="stop")]
    found = [kept(parts) for parts in mutated(stream) if isinstance(parts, list)]
    assert 30 < sum(found) < len(found)
