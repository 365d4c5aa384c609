"""`record` keeps everything an engine generates and changes nothing of what it returns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rollstore
from rollstore import Rollout
from rollstore.errors import SchemaError
from rollstore.writers import vllm
from tests.writers.vllm_objects import completion, engine, output, params, spans


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[Rollout] = []

    def append(self, data: list[Rollout]) -> None:
        self.rows += data


class Scheduler:
    """Counts nothing itself; each step schedules some rows and gives the requests their tokens."""

    def update_from_output(self, scheduled: Any, drawn: dict[str, list[int]]) -> dict[int, Any]:
        outputs = [SimpleNamespace(request_id=name, new_token_ids=tokens) for name, tokens in drawn.items()]
        return {0: SimpleNamespace(outputs=outputs)}


class LLM:
    """The methods of vLLM's LLM that generate, and an engine in this process."""

    def __init__(self) -> None:
        self.vllm_config = engine().vllm_config
        self.get_tokenizer = lambda: range(100)
        self.scheduler = Scheduler()
        states = {"0-0123abcd": SimpleNamespace(external_req_id="0", request_index=0)}
        self.llm_engine = SimpleNamespace(
            vllm_config=self.vllm_config,
            engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler)),
            output_processor=SimpleNamespace(request_states=states),
        )
        self.outputs = [output([1, 2], completion([7, 8]))]

    def get_default_sampling_params(self) -> Any:
        return params(temperature=0.25)

    def generate(self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True) -> list[Any]:
        for rows, tokens in ((2, [7]), (1, [8])):
            self.scheduler.update_from_output(SimpleNamespace(total_num_scheduled_tokens=rows), {"0-0123abcd": tokens})
        return self.outputs

    def chat(self, messages: Any, sampling_params: Any = None) -> list[Any]:
        return self.outputs

    def enqueue(self, prompts: Any, sampling_params: Any = None) -> list[str]:
        return ["0-0123abcd"]

    def wait_for_completion(self) -> list[Any]:
        return [*self.outputs, SimpleNamespace(request_id="1", outputs=SimpleNamespace(data=None))]


class AsyncLLM:
    """The stream of one request: as many chunks of one token as there are tokens."""

    def __init__(self, *tokens: int, fails: bool = False) -> None:
        self.vllm_config = engine().vllm_config
        self.get_tokenizer = lambda: range(100)
        self.tokens, self.fails = tokens, fails
        self.closed = False

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        try:
            for n, token in enumerate(self.tokens):
                last = n == len(self.tokens) - 1 and not self.fails
                versions = spans(("1", 0, 1), ("2", 1, len(self.tokens))) if last else None
                finish = "stop" if last else None
                yield output([1], completion([token], finish_reason=finish, weight_versions=versions))
                await asyncio.sleep(0)
            if self.fails:
                raise RuntimeError("engine died")
        finally:
            self.closed = True

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        pass


DELTA = params(output_kind=SimpleNamespace(name="DELTA"))


def test_what_generate_returns_is_appended_and_returned_as_it_was(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    llm = LLM()
    with store.writer() as writer, vllm.record(llm, writer, fields={"rollout_id": "a"}):
        assert llm.generate(["hi"], params(temperature=0.5)) is llm.outputs
    (row,) = store.get("a")
    assert row.tokens.tolist() == [1, 2, 7, 8]
    assert row.samplers is not None
    assert row.samplers[0].temperature == 0.5


def test_rows_of_the_forward_passes_are_seen_where_the_engine_runs_in_this_process() -> None:
    llm, kept = LLM(), Kept()
    with vllm.record(llm, kept):
        llm.generate(["hi"], params())
        llm.generate(["hi"], params())
    assert [row.batch_rows.to_list() for row in kept.rows if row.batch_rows is not None] == [[2, 1], [2, 1]]


def test_chat_and_queued_requests_are_kept_too_with_what_was_asked_for() -> None:
    llm, kept = LLM(), Kept()
    with vllm.record(llm, kept):
        llm.chat([{"role": "user", "content": "hi"}])
        llm.enqueue(["hi"], params(temperature=0.75))
        assert len(llm.wait_for_completion()) == 2
    assert [row.samplers[0].temperature for row in kept.rows if row.samplers] == [0.25, 0.75]


def test_after_the_block_the_engine_is_as_it_was() -> None:
    llm, outer, inner = LLM(), Kept(), Kept()
    recording = vllm.record(llm, outer)
    with vllm.record(llm, inner):
        llm.generate(["hi"])
    llm.generate(["hi"])
    recording.stop()
    recording.stop()
    llm.generate(["hi"])
    assert (len(outer.rows), len(inner.rows)) == (2, 1)
    assert "generate" not in vars(llm)
    assert "update_from_output" not in vars(llm.scheduler)


def test_one_output_that_cannot_be_recorded_does_not_cost_the_others(tmp_path: Path) -> None:
    llm = LLM()
    missing, odd = output(None, completion([5])), output([], completion([5]))
    for wrong, error in ((missing, ValueError), (odd, SchemaError)):
        llm.outputs = [output([1], completion([7])), wrong, output([2], completion([8]))]
        store = rollstore.open(tmp_path / error.__name__, create=True)
        with store.writer() as writer, vllm.record(llm, writer), pytest.raises(error):
            llm.generate("a")
        assert store.scan("rollouts").read_all()["tokens"].to_pylist() == [[1, 7], [2, 8]]


def test_what_cannot_be_recorded_raises_out_of_the_call() -> None:
    llm = LLM()
    llm.outputs = [output(None, completion([7]))]
    with vllm.record(llm, Kept()), pytest.raises(ValueError, match="prompt_token_ids"):
        llm.generate(["hi"])


async def drain(llm: AsyncLLM, asked: Any, most: int | None = None) -> list[Any]:
    seen: list[Any] = []
    stream = llm.generate("hi", asked, "r")
    async for chunk in stream:
        seen.append(chunk)
        if len(seen) == most:
            await stream.aclose()  # type: ignore[attr-defined]
            assert llm.closed  # at once, and not when the garbage is collected
            break
    return seen


def test_a_stream_is_kept_when_it_ends() -> None:
    llm, kept = AsyncLLM(7, 8, 9), Kept()
    with vllm.record(llm, kept):
        seen = asyncio.run(drain(llm, DELTA))
    assert [chunk.outputs[0].token_ids for chunk in seen] == [(7,), (8,), (9,)]
    (row,) = kept.rows
    assert row.weight_versions is not None
    assert (row.tokens.tolist(), row.weight_versions.to_list()) == ([1, 7, 8, 9], [1, 2, 2])
    assert row.ending == "terminated"


def test_a_stream_that_the_caller_left_is_kept_as_cancelled_and_the_request_is_let_go() -> None:
    llm, kept = AsyncLLM(7, 8, 9), Kept()
    with vllm.record(llm, kept):
        asyncio.run(drain(llm, DELTA, most=2))
    (row,) = kept.rows
    assert (row.tokens.tolist(), row.ending, row.ending_reason) == ([1, 7, 8], "aborted", "cancelled")


def test_a_stream_that_broke_is_kept_as_aborted_and_the_error_goes_on() -> None:
    llm, kept = AsyncLLM(7, 8, fails=True), Kept()
    with vllm.record(llm, kept), pytest.raises(RuntimeError, match="engine died"):
        asyncio.run(drain(llm, DELTA))
    (row,) = kept.rows
    assert (row.tokens.tolist(), row.ending, row.ending_reason) == ([1, 7, 8], "aborted", "engine_abort")


@pytest.mark.parametrize(("clear", "state"), [(True, "recomputed"), (False, "retained")])
def test_a_pause_says_what_became_of_the_cache(clear: bool, state: str) -> None:
    llm, kept = AsyncLLM(7, 8), Kept()

    async def paused_midway() -> None:
        async for _ in llm.generate("hi", DELTA, "r"):
            await llm.pause_generation(mode="keep", clear_cache=clear)

    with vllm.record(llm, kept):
        asyncio.run(paused_midway())
    assert [span.cache_state for span in kept.rows[0].spans or ()] == [None, "fresh", state]


def test_pauses_of_both_kinds_leave_the_state_unknown() -> None:
    llm, kept = AsyncLLM(7, 8), Kept()

    async def paused_twice() -> None:
        async for _ in llm.generate("hi", DELTA, "r"):
            await llm.pause_generation(mode="keep")
            await llm.pause_generation(mode="keep", clear_cache=False)

    with vllm.record(llm, kept):
        asyncio.run(paused_twice())
    assert [span.cache_state for span in kept.rows[0].spans or ()] == [None, "fresh", "unknown"]


def test_of_ever_longer_wholes_only_the_newest_of_each_sample_is_held() -> None:
    llm, kept = AsyncLLM(7, 8, 9), Kept()
    with vllm.record(llm, kept):
        asyncio.run(drain(llm, params(output_kind=SimpleNamespace(name="CUMULATIVE")), most=2))
    assert kept.rows[0].tokens.tolist() == [1, 8]  # the second chunk alone: it claims to be the whole
