"""The example of an agent: an ordinary OpenAI client before the gateway, a scripted engine behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rollstore
from examples import agent
from tests.writers.upstream import END, STREAM, Engine, Got, answer, chat, event, part


def script(got: Got) -> Iterator[bytes]:
    """A prompt of one id a message and text; what it asks of a calculator, then a number. Streams in two parts."""
    asked = got.json["messages"]
    prompt = [100 + len(str(message["content"])) for message in asked]
    if got.json.get("stream"):
        yield STREAM
        yield event(part([7], "1", prompt))
        yield event(part([8], "2", finish="stop"))
        yield event(b"[DONE]") + END
        return
    wants = "calculator" in str(asked[0]["content"]) and "says" not in str(asked[-1]["content"])
    yield answer(chat(prompt, [50, 51], "<<17 * 23>>" if wants else "it is 12"))


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine(lambda got: list(script(got)))
    yield found
    found.close()


def test_what_an_openai_client_was_answered_is_in_the_store_with_ids_log_probs_and_rewards(
    engine: Engine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert agent.main([engine.address, str(tmp_path / "store")]) == 0
    store = rollstore.open(tmp_path / "store")
    assert store.verify() == []
    streamed, whole = (store.get(f"7+5/{sample}")[0] for sample in range(2))
    assert (streamed.tokens[streamed.action_mask].tolist(), streamed.logprobs.to_list()) == ([7, 8], [-0.5, -0.5])
    assert (whole.tokens[whole.action_mask].tolist(), whole.logprobs.to_list()) == ([50, 51], [-0.25, -0.25])
    assert [one.reward for one in (streamed, whole, store.get("10-4/0")[0])] == [1.0, 1.0, 0.0]
    for one in (streamed, whole):
        assert (one.run_id, one.group_id, one.group_size, one.step) == ("agent", "7+5", 2, 0)
        assert (one.ending, one.ending_reason, one.logprob_kind) == ("terminated", "stop_token", "behavior")
        assert (one.samplers[0].temperature, one.samplers[0].max_tokens) == (1.0, agent.MOST)
    used = store.get("17*23/1")
    assert sum(int(segment.action_mask.sum()) for segment in used) == 4
    turns = [got.json for got in engine.got if len(got.json["messages"]) > 7]
    assert [turn["messages"][-1]["content"] for turn in turns] == ["The calculator says 391."] * 2
    assert "17*23/1: 2 turns, 4 tokens drawn, 0.25 nats a token, terminated" in capfd.readouterr().out


def test_a_gateway_that_does_not_start_is_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"gateway: wanted an address, got 'rollstore: .*wanted an http or https"):
        agent.main(["ftp://nowhere", str(tmp_path / "store")])
